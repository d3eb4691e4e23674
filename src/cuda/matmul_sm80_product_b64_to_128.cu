#include "cuda/matmul_sm80_product.cuh"

namespace blocksparse::cuda::sm80 {
template Status LaunchProduct<64>(DType, int, int64_t, ProductArgs, const Chip&, Stream);
template Status LaunchProduct<128>(DType, int, int64_t, ProductArgs, const Chip&, Stream);
}  // namespace blocksparse::cuda::sm80
