#include "cpu/lstm_kernels.h"

#if defined(__AVX512F__)
#include "cpu/lstm_loops.h"
#endif

namespace blocksparse {
namespace cpu {

const LstmKernels* LstmKernelsAvx512() {
#if defined(__AVX512F__)
  static const LstmKernels kernels = {"avx512", Gates<16>};
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace cpu
}  // namespace blocksparse
