// The gates of an LSTM cell: the contract between the ops (or any other caller) and the kernels of both backends.
//
// All arithmetic is in float32 with one rounding (to nearest even) at the end. The bias and its gradient are float32
// whatever the dtype of activations. An output may be the very buffer of an input that it has the shape of; otherwise
// buffers must not overlap. Any pointer is fine: 16-byte alignment buys speed alone. The same inputs give the same
// bits, whatever the number of threads.
#pragma once

#include <cstdint>

#include "kernels/common.h"

namespace blocksparse {

// forward    c_next = sigmoid(f + forget_bias) c + sigmoid(i) tanh(u),  h_next = sigmoid(o) tanh(c_next)
// gradient   of both outputs with respect to c and the gates; what the forward pass computed is computed again
//
// Gates are in the order i, u, f, o; bias has the gates' parts in this order and is added to them first.
struct LstmGatesProblem {
  bool gradient = false;
  DType dtype = DType::kFloat32;
  int64_t rows = 1, width = 1;
  int64_t stride = 1;  // from a row of a gate to the next; width, or 4 width where the gates are parts of one tensor
  float forget_bias = 1.f;
  const float* bias = nullptr;                        // [4 width], or null
  const void* c = nullptr;                            // [rows, width]
  const void* gate[4] = {};                           // [rows, width], rows `stride` apart
  void *c_next = nullptr, *h_next = nullptr;          // [rows, width]
  const void *dc_next = nullptr, *dh_next = nullptr;  // [rows, width], or null: 0
  void* dc = nullptr;                                 // [rows, width]
  void* dgate[4] = {};                                // [rows, width], rows `stride` apart
  float* dbias = nullptr;                             // [4 width], or null: not computed
};

namespace cpu {

int64_t WorkspaceBytes(const LstmGatesProblem& problem);
Status Run(const LstmGatesProblem& problem, void* workspace, ThreadPool* pool);

}  // namespace cpu

namespace cuda {

int64_t WorkspaceBytes(const LstmGatesProblem& problem);
Status Run(const LstmGatesProblem& problem, void* workspace, Stream stream);

}  // namespace cuda
}  // namespace blocksparse
