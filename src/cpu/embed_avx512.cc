#include "cpu/embed_kernels.h"

#if defined(__AVX512F__)
#include "cpu/embed_loops.h"
#endif

namespace blocksparse {
namespace cpu {

const EmbedKernels* EmbedKernelsAvx512() {
#if defined(__AVX512F__)
  static const EmbedKernels kernels = {"avx512", SumRows<16>};
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace cpu
}  // namespace blocksparse
