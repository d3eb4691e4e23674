#include "cpu/lstm_kernels.h"

#if defined(__AVX2__)
#include "cpu/lstm_loops.h"
#endif

namespace blocksparse {
namespace cpu {

const LstmKernels* LstmKernelsAvx2() {
#if defined(__AVX2__)
  static const LstmKernels kernels = {"avx2", Gates<8>};
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace cpu
}  // namespace blocksparse
