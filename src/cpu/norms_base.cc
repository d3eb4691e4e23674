// For every CPU: vectors of four floats, which the compiler maps to what the architecture has.
#include "cpu/norms_kernels.h"
#include "cpu/norms_loops.h"

namespace blocksparse {
namespace cpu {

const NormsKernels* NormsKernelsBase() {
  static const NormsKernels kernels = MakeNormsKernels<4>("base");
  return &kernels;
}

}  // namespace cpu
}  // namespace blocksparse
