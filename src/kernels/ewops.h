// Elementwise operators: the contract between the ops (or any other caller) and the kernels of both backends.
//
// All arithmetic is in float32 with one rounding (to nearest even) at the end. Gains, biases and gates are float32
// whatever the dtype of activations. An output may be the very buffer of an input of the same element size where a
// comment says "in place"; otherwise buffers must not overlap. Any pointer is fine: 16-byte alignment buys speed alone.
// The same inputs give the same bits, whatever the number of threads.
#pragma once

#include <cstdint>

#include "kernels/common.h"

namespace blocksparse {

// ---------------------------------------------------------------------------------------------- element by element

// 0 to 19 are the codes of the Python API (ewops.ADD_OP and so on).
enum class EwOp : int32_t {
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMaximum,
  kMinimum,  // z = f(x, y)
  kNeg,
  kRcp,
  kSqr,
  kSqrt,
  kExp,
  kLog,
  kSigmoid,
  kTanh,
  kRelu,
  kElu,
  kGelu,
  kSwish,  // z = f(x)
  kBiasAdd,
  kGainMul,        // ChannelProblem
  kFilter,         // z = f(x)
  kConcrete,       // gradient alone: f(dgate, s)
  kConcreteInfer,  // z = f(x)
};

struct EwProblem {
  EwOp op = EwOp::kAdd;
  // The gradient of a unary op takes (dz, x) to dx, for sigmoid, tanh and relu (dz, z) to dx; the gradient of
  // multiply, divide, maximum and minimum takes (dz, x, y) to (dx, dy).
  bool gradient = false;
  DType dtype = DType::kFloat32;
  int64_t n = 0;
  // elu, gelu, swish: alpha. Filter: alpha the scale, low and high the bounds (-infinity and infinity for none).
  // Concrete: alpha 1/T. Concrete, ConcreteInfer: low and high are the limits of the stretched interval.
  float alpha = 1.f, low = 0.f, high = 0.f;
  bool zero_infs = false, zero_nans = false;  // filter
  const void* in[3] = {};                     // [n] each
  void* out[2] = {};                          // [n] each; in place
};

// y[i] = x[i], in another dtype.
struct CastProblem {
  DType from = DType::kFloat32, to = DType::kFloat32;
  int64_t n = 0;
  const void* x = nullptr;
  void* y = nullptr;
};

// y[i] = ((x_0[i] + x_1[i]) + x_2[i]) + ...
struct AddNProblem {
  static constexpr int kMaxCount = 4000;  // pointers that fit in a kernel's arguments
  DType dtype = DType::kFloat32;
  int64_t n = 0;
  int count = 1;
  const void* const* x = nullptr;  // [count], on the host
  void* y = nullptr;               // in place of any input
};

// ------------------------------------------------------------------------------------------------ channel by channel

enum class Activation : int32_t { kNone = 0, kRelu = 1, kFastGelu = 2 };  // x, max(x, 0), x sigmoid(1.702 x)

// Tensors are [outer, channels, inner], gain, bias and their gradients [channels].
//
//   forward    y = act(v),  v = gain * x + bias
//   gradient   t = dy * act'(v),  dx = gain * t,  dbias = sum of t,  dgain = sum of t * x
//
// gain and bias may be null (1 and 0). A gradient reads x or y, the other is null: relu goes by the sign of v or of y,
// fast_gelu and dgain need x, no activation without dgain neither. dx, dgain, dbias: those that are null are not computed.
struct ChannelProblem {
  bool gradient = false;
  Activation act = Activation::kNone;
  DType dtype = DType::kFloat32;
  int64_t outer = 1, channels = 1, inner = 1;
  const float *gain = nullptr, *bias = nullptr;
  const void *x = nullptr, *dy = nullptr;
  void *y = nullptr, *dx = nullptr;  // y in place of x, dx in place of dy, x or y
  float *dgain = nullptr, *dbias = nullptr;
};

// ------------------------------------------------------------------------------------------------------ random bits

// Element e is kept where u(seed, e) 2^-32 < keep_prob; u is the random word of kernels/philox.h. `mask` is bit-packed:
// element e is bit e & 31 of word e >> 5; the bits past n are 0. y = x / keep_prob where kept and 0 elsewhere.
struct DropoutProblem {
  bool generate = false;  // write the mask; else read it
  DType dtype = DType::kFloat32;
  float keep_prob = 1.f;
  uint32_t seed[2] = {};
  int64_t n = 0;             // elements of x, and of the mask unless it is broadcast
  uint32_t* mask = nullptr;  // [ceil(n / 32)]
  const void* x = nullptr;   // or null: the mask alone
  void* y = nullptr;         // in place
  // The mask broadcast over x, where rank > 0: x has these dimensions, and the element of index i_0, i_1, ... the bit
  // sum of i_d * stride[d]. Reading only.
  static constexpr int kMaxRank = 32;
  int rank = 0;
  int64_t dims[kMaxRank] = {}, stride[kMaxRank] = {};
};

// Hard concrete gates (C. Louizos, M. Welling, D. P. Kingma, 2018), float32:
// u = r (1 - 2 epsilon) + epsilon with r(seed, e) uniform in [0, 1), concrete = sigmoid((ln u - ln(1 - u) + x) / T),
// gate = concrete * (high - low) + low, between 0 and 1.
struct ConcreteGateProblem {
  uint32_t seed[2] = {};
  float inverse_temperature = 1.5f, low = -0.1f, high = 1.1f, epsilon = 1e-6f;
  int64_t n = 0;
  const float* x = nullptr;
  float *gate = nullptr, *concrete = nullptr;
};

// --------------------------------------------------------------------------------------------------------- indices

// forward    y[o, i] = x[o, index[o], i]
// gradient   dx[o, d, i] = dy[o, i] where d = index[o], else 0: x is dy, and y is dx
// A negative index counts as 0; one of dim or more gives 0, and no gradient.
struct FancyGatherProblem {
  bool gradient = false;
  int element_bytes = 4;  // 2 or 4
  int64_t outer = 1, dim = 1, inner = 1;
  const int32_t* index = nullptr;  // [outer]
  const void* x = nullptr;
  void* y = nullptr;
};

// forward    y[o, i] = the largest of x[o, :, i], argmax[o, i] its first place
// gradient   dx[o, d, i] = dy[o, i] where d = argmax[o, i], else 0: x is dy, and y is dx
// The search starts from (-FLT_MAX, place 0) and takes what is greater, so NaN never wins. dim >= 1.
struct ReduceMaxProblem {
  bool gradient = false;
  DType dtype = DType::kFloat32;
  int64_t outer = 1, dim = 1, inner = 1;
  const void* x = nullptr;
  void* y = nullptr;
  int64_t* argmax = nullptr;  // [outer, inner]; on the host null where only y is wanted
};

// -------------------------------------------------------------------------------------------------------- backends

namespace cpu {

Status Run(const EwProblem& problem, ThreadPool* pool);
Status Run(const CastProblem& problem, ThreadPool* pool);
Status Run(const AddNProblem& problem, ThreadPool* pool);
int64_t WorkspaceBytes(const ChannelProblem& problem);
Status Run(const ChannelProblem& problem, void* workspace, ThreadPool* pool);
Status Run(const DropoutProblem& problem, ThreadPool* pool);
Status Run(const ConcreteGateProblem& problem, ThreadPool* pool);
Status Run(const FancyGatherProblem& problem, ThreadPool* pool);
Status Run(const ReduceMaxProblem& problem, ThreadPool* pool);

}  // namespace cpu

namespace cuda {

Status Run(const EwProblem& problem, Stream stream);
Status Run(const CastProblem& problem, Stream stream);
Status Run(const AddNProblem& problem, Stream stream);
int64_t WorkspaceBytes(const ChannelProblem& problem);
Status Run(const ChannelProblem& problem, void* workspace, Stream stream);
Status Run(const DropoutProblem& problem, Stream stream);
Status Run(const ConcreteGateProblem& problem, Stream stream);
Status Run(const FancyGatherProblem& problem, Stream stream);
Status Run(const ReduceMaxProblem& problem, Stream stream);

}  // namespace cuda
}  // namespace blocksparse
