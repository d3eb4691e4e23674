#include "cpu/embed_kernels.h"

#if defined(__AVX2__)
#include "cpu/embed_loops.h"
#endif

namespace blocksparse {
namespace cpu {

const EmbedKernels* EmbedKernelsAvx2() {
#if defined(__AVX2__)
  static const EmbedKernels kernels = {"avx2", SumRows<8>};
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace cpu
}  // namespace blocksparse
