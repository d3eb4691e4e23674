#include "cpu/norms_kernels.h"

#if defined(__AVX512F__)
#include "cpu/norms_loops.h"
#endif

namespace blocksparse {
namespace cpu {

const NormsKernels* NormsKernelsAvx512() {
#if defined(__AVX512F__)
  static const NormsKernels kernels = MakeNormsKernels<16>("avx512");
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace cpu
}  // namespace blocksparse
