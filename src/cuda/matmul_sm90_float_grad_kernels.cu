#include "cuda/matmul_sm90_float_grad.cuh"

namespace blocksparse::cuda::sm90 {
template cudaError_t LaunchFloatGrad<32, false>(const FloatGradParams&, int, cudaStream_t);
template cudaError_t LaunchFloatGrad<32, true>(const FloatGradParams&, int, cudaStream_t);
template cudaError_t LaunchFloatGrad<64, false>(const FloatGradParams&, int, cudaStream_t);
template cudaError_t LaunchFloatGrad<64, true>(const FloatGradParams&, int, cudaStream_t);
template cudaError_t LaunchFloatGrad<128, false>(const FloatGradParams&, int, cudaStream_t);
template cudaError_t LaunchFloatGrad<128, true>(const FloatGradParams&, int, cudaStream_t);
}  // namespace blocksparse::cuda::sm90
