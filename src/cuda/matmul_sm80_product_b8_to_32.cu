#include "cuda/matmul_sm80_product.cuh"

namespace blocksparse::cuda::sm80 {
template Status LaunchProduct<8>(DType, int, int64_t, ProductArgs, const Chip&, Stream);
template Status LaunchProduct<16>(DType, int, int64_t, ProductArgs, const Chip&, Stream);
template Status LaunchProduct<32>(DType, int, int64_t, ProductArgs, const Chip&, Stream);
}  // namespace blocksparse::cuda::sm80
