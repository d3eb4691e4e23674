#include "cuda/matmul_sm90_strips.cuh"

namespace blocksparse::cuda::sm90 {
template cudaError_t LaunchStrips<8, false>(bool, bool, const StripParams&, cudaStream_t);
template cudaError_t LaunchStrips<8, true>(bool, bool, const StripParams&, cudaStream_t);
template cudaError_t LaunchStrips<16, false>(bool, bool, const StripParams&, cudaStream_t);
template cudaError_t LaunchStrips<16, true>(bool, bool, const StripParams&, cudaStream_t);
template cudaError_t LaunchStrips<32, false>(bool, bool, const StripParams&, cudaStream_t);
template cudaError_t LaunchStrips<32, true>(bool, bool, const StripParams&, cudaStream_t);
template cudaError_t LaunchStrips<64, false>(bool, bool, const StripParams&, cudaStream_t);
template cudaError_t LaunchStrips<64, true>(bool, bool, const StripParams&, cudaStream_t);
}  // namespace blocksparse::cuda::sm90
