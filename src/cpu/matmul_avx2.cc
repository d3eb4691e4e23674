#include "cpu/matmul_kernels.h"

#if defined(__AVX2__)
#include "cpu/matmul_grad.h"
#include "cpu/matmul_product.h"
#endif

namespace blocksparse {
namespace cpu {

const MatmulKernels* MatmulKernelsAvx2() {
#if defined(__AVX2__)
  static const MatmulKernels kernels = {"avx2",
                                        8,
                                        PackPanel<8>,
                                        UnpackPanel<8>,
                                        RunColumn<8>,
                                        nullptr,
                                        RunColumnOfOne<8>,
                                        nullptr,
                                        PackPieces<8>,
                                        GradPiece<8>,
                                        Finish<8>,
                                        Dot<8>};
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace cpu
}  // namespace blocksparse
