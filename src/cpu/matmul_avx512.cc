#include "cpu/matmul_kernels.h"

#if defined(__AVX512F__)
#include "cpu/matmul_grad.h"
#include "cpu/matmul_product.h"
#endif

namespace blocksparse {
namespace cpu {

const MatmulKernels* MatmulKernelsAvx512() {
#if defined(__AVX512F__)
  static const MatmulKernels kernels = {
      "avx512",           16,      PackPanel<16>,  UnpackPanel<16>, RunColumn<16>, RunColumnInPlace<16>,
      RunColumnOfOne<16>, nullptr, PackPieces<16>, GradPiece<16>,   Finish<16>,    Dot<16>};
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace cpu
}  // namespace blocksparse
