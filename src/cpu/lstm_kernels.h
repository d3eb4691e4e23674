// The inner loops of the LSTM gates, compiled once per instruction set; lstm.cc cuts problems into parts for threads.
#pragma once

#include <cstdint>

#include "kernels/lstm.h"

namespace blocksparse {
namespace cpu {

struct LstmKernels {
  const char* name;
  // Columns [k0, k1) of rows [r0, r1). A gradient's sums over these rows go to dbias, [4 width], unless that is null.
  void (*gates)(const LstmGatesProblem& problem, int64_t r0, int64_t r1, int64_t k0, int64_t k1, float* dbias);
};

// Null where this build has no such kernels.
const LstmKernels* LstmKernelsBase();
const LstmKernels* LstmKernelsAvx2();
const LstmKernels* LstmKernelsAvx512();

}  // namespace cpu
}  // namespace blocksparse
