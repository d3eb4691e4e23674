#include "cpu/ewops_kernels.h"

#if defined(__AVX512F__)
#include "cpu/ewops_random.h"
#endif

namespace blocksparse {
namespace cpu {

const EwopsKernels* EwopsKernelsAvx512() {
#if defined(__AVX512F__)
  static const EwopsKernels kernels = {"avx512",         Map<16>,     Cast<16>,    AddN<16>,
                                       ConcreteGate<16>, Dropout<16>, Channel<16>, ReduceMax<16>};
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace cpu
}  // namespace blocksparse
