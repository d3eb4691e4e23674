// For every CPU: vectors of four floats, which the compiler maps to what the architecture has.
#include "cpu/embed_kernels.h"
#include "cpu/embed_loops.h"

namespace blocksparse {
namespace cpu {

const EmbedKernels* EmbedKernelsBase() {
  static const EmbedKernels kernels = {"base", SumRows<4>};
  return &kernels;
}

}  // namespace cpu
}  // namespace blocksparse
