// For every CPU: vectors of four floats, which the compiler maps to what the architecture has.
#include "cpu/lstm_kernels.h"
#include "cpu/lstm_loops.h"

namespace blocksparse {
namespace cpu {

const LstmKernels* LstmKernelsBase() {
  static const LstmKernels kernels = {"base", Gates<4>};
  return &kernels;
}

}  // namespace cpu
}  // namespace blocksparse
