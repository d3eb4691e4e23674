#include "cpu/ewops_kernels.h"

#if defined(__AVX2__)
#include "cpu/ewops_random.h"
#endif

namespace blocksparse {
namespace cpu {

const EwopsKernels* EwopsKernelsAvx2() {
#if defined(__AVX2__)
  static const EwopsKernels kernels = {"avx2",          Map<8>,     Cast<8>,    AddN<8>,
                                       ConcreteGate<8>, Dropout<8>, Channel<8>, ReduceMax<8>};
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace cpu
}  // namespace blocksparse
