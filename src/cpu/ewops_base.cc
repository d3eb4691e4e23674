// For every CPU: vectors of four floats, which the compiler maps to what the architecture has.
#include "cpu/ewops_kernels.h"
#include "cpu/ewops_random.h"

namespace blocksparse {
namespace cpu {

const EwopsKernels* EwopsKernelsBase() {
  static const EwopsKernels kernels = {"base",          Map<4>,     Cast<4>,    AddN<4>,
                                       ConcreteGate<4>, Dropout<4>, Channel<4>, ReduceMax<4>};
  return &kernels;
}

}  // namespace cpu
}  // namespace blocksparse
