#include "cuda/matmul_sm90_small.cuh"

namespace blocksparse::cuda::sm90 {
template cudaError_t LaunchSmall<32, false>(bool, bool, const SmallParams&, cudaStream_t);
template cudaError_t LaunchSmall<32, true>(bool, bool, const SmallParams&, cudaStream_t);
template cudaError_t LaunchSmall<64, false>(bool, bool, const SmallParams&, cudaStream_t);
template cudaError_t LaunchSmall<64, true>(bool, bool, const SmallParams&, cudaStream_t);
template cudaError_t LaunchSmall<128, false>(bool, bool, const SmallParams&, cudaStream_t);
template cudaError_t LaunchSmall<128, true>(bool, bool, const SmallParams&, cudaStream_t);
}  // namespace blocksparse::cuda::sm90
