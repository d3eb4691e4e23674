// Embedding lookup: the contract between the ops (or any other caller) and the kernels of both backends.
//
// Any pointer is fine: 16-byte alignment buys speed alone. The same inputs give the same bits, whatever the number of
// threads.
#pragma once

#include <cstdint>

#include "kernels/common.h"

namespace blocksparse {

// forward    y[n, :] = x[index[n], :], or zeros where index[n] is not in [0, rows)
// gradient   y[r, :] = the sum of x[n, :] over all n with index[n] = r: x is dy [count, width], y is dx [rows, width].
//            Terms are added in float32, in an order that depends on the indices alone, and the sum is rounded once.
struct EmbeddingProblem {
  static constexpr int64_t kMaxGradient = 0xffffffff;  // count and rows of a gradient are less
  bool gradient = false;
  DType dtype = DType::kFloat32;
  int index_bytes = 4;  // 1, 2, 4 or 8
  bool index_signed = true;
  int64_t count = 0, rows = 1, width = 1;
  const void* index = nullptr;  // [count]
  const void* x = nullptr;
  void* y = nullptr;
};

namespace cpu {

int64_t WorkspaceBytes(const EmbeddingProblem& problem);
Status Run(const EmbeddingProblem& problem, void* workspace, ThreadPool* pool);

}  // namespace cpu

namespace cuda {

int64_t WorkspaceBytes(const EmbeddingProblem& problem);
Status Run(const EmbeddingProblem& problem, void* workspace, Stream stream);

}  // namespace cuda
}  // namespace blocksparse
