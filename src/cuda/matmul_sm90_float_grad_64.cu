#include "cuda/matmul_sm90_float_grad.cuh"

namespace blocksparse::cuda::sm90 {
template cudaError_t LaunchFloatGrad<64, false>(const FloatGradParams&, int, cudaStream_t);
template cudaError_t LaunchFloatGrad<64, true>(const FloatGradParams&, int, cudaStream_t);
}  // namespace blocksparse::cuda::sm90
