#include "cpu/norms_kernels.h"

#if defined(__AVX2__)
#include "cpu/norms_loops.h"
#endif

namespace blocksparse {
namespace cpu {

const NormsKernels* NormsKernelsAvx2() {
#if defined(__AVX2__)
  static const NormsKernels kernels = MakeNormsKernels<8>("avx2");
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace cpu
}  // namespace blocksparse
