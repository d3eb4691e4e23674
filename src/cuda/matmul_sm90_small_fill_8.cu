#include "cuda/matmul_sm90_small_fill.cuh"

namespace blocksparse::cuda::sm90 {
template cudaError_t LaunchFill<8, false>(bool, bool, const SmallParams&, cudaStream_t);
template cudaError_t LaunchFill<8, true>(bool, bool, const SmallParams&, cudaStream_t);
}  // namespace blocksparse::cuda::sm90
