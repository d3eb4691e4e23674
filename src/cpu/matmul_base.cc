// For every CPU: vectors of four floats, which the compiler maps to what the architecture has.
#include "cpu/matmul_grad.h"
#include "cpu/matmul_product.h"

namespace blocksparse {
namespace cpu {

const MatmulKernels* MatmulKernelsBase() {
  static const MatmulKernels kernels = {"base",
                                        4,
                                        PackPanel<4>,
                                        UnpackPanel<4>,
                                        RunColumn<4>,
                                        nullptr,
                                        RunColumnOfOne<4>,
                                        nullptr,
                                        PackPieces<4>,
                                        GradPiece<4>,
                                        Finish<4>,
                                        Dot<4>};
  return &kernels;
}

}  // namespace cpu
}  // namespace blocksparse
