// Normalization: the contract between the ops (or any other caller) and the kernels of both backends.
//
// With x^ = (x - m) r, where m and v are the mean and the (biased) variance of what is normalized together and
// r = (v + epsilon)^(-1/2):
//
//   forward    y = x^ * gain + bias, then max(y, 0) with relu
//   gradient   t = dy, or 0 where relu and x^ * gain + bias <= 0;  d = t * gain
//              dbias = sum of t,  dgain = sum of t * x^,  dx = r (d - mean(d) - x^ mean(d x^))
//
// Arithmetic is in float32 with one rounding (to nearest even) at the end; gains, biases, statistics and their gradients
// are float32 whatever the dtype of activations. Statistics do not cancel: they are sums over x - shift, with a shift
// near the mean. Since float32 cannot hold a mean of 1e4 to what a spread of 1 needs, means come in two parts, `mean` and
// the much smaller `residual`, and x - m is (x - mean) - residual.
//
// Any pointer is fine: 16-byte alignment buys speed alone. On the host y may be x's buffer, and dx that of dy or x;
// otherwise no buffer overlaps another. The same inputs give the same
// bits, whatever the number of threads. Empty tensors give gradients, means and variances of 0.
#pragma once

#include <cstdint>

#include "kernels/common.h"

namespace blocksparse {

// x is [outer, segments * features, inner]; the features of each segment, of each outer and inner index, are normalized
// together. gain, bias and their gradients are [segments * features].
struct LayerNormProblem {
  bool gradient = false;
  bool relu = false;
  DType dtype = DType::kFloat32;  // of x, y, dy, dx
  int64_t outer = 1, segments = 1, features = 1, inner = 1;
  float epsilon = 1e-6f;
  const void *x = nullptr, *dy = nullptr;
  const float *gain = nullptr, *bias = nullptr;
  float *mean = nullptr, *residual = nullptr, *rstd = nullptr;  // [segments, outer, inner]; a gradient reads them
  void *y = nullptr, *dx = nullptr;
  float *dgain = nullptr, *dbias = nullptr;

  int64_t channels() const { return segments * features; }
  int64_t rows() const { return segments * outer * inner; }
};

// x is [outer, channels, inner]; each channel is normalized by itself. gain, bias and their gradients are [channels].
struct BatchNormProblem {
  bool gradient = false;
  // Statistics are given, and are constants: the gradient lacks the terms with mean(d) and mean(d x^).
  bool inference = false;
  DType dtype = DType::kFloat32;  // of x, y, dy, dx
  int64_t outer = 1, channels = 1, inner = 1;
  float epsilon = 1e-6f;
  const void *x = nullptr, *dy = nullptr;
  const float *gain = nullptr, *bias = nullptr;
  // [channels]; written by a forward pass that is not inference, else read. residual may be null where it is read.
  float *mean = nullptr, *residual = nullptr, *variance = nullptr;
  void *y = nullptr, *dx = nullptr;
  float *dgain = nullptr, *dbias = nullptr;
};

// Checks the sizes that a caller can get wrong, before anything runs.
Status CheckNorm(const LayerNormProblem& problem);
Status CheckNorm(const BatchNormProblem& problem);

namespace cpu {

int64_t WorkspaceBytes(const LayerNormProblem& problem, int threads);
int64_t WorkspaceBytes(const BatchNormProblem& problem, int threads);
Status Run(const LayerNormProblem& problem, void* workspace, ThreadPool* pool);
Status Run(const BatchNormProblem& problem, void* workspace, ThreadPool* pool);

}  // namespace cpu

namespace cuda {

int64_t WorkspaceBytes(const LayerNormProblem& problem, const Chip& chip);
int64_t WorkspaceBytes(const BatchNormProblem& problem, const Chip& chip);
Status Run(const LayerNormProblem& problem, void* workspace, const Chip& chip, Stream stream);
Status Run(const BatchNormProblem& problem, void* workspace, const Chip& chip, Stream stream);

}  // namespace cuda
}  // namespace blocksparse
