#include "cuda/matmul_sm90_weight_grad.cuh"

namespace blocksparse::cuda::sm90 {
template cudaError_t LaunchWeightGrad<32, false>(bool, const WeightGradParams&, int, cudaStream_t);
template cudaError_t LaunchWeightGrad<32, true>(bool, const WeightGradParams&, int, cudaStream_t);
template cudaError_t LaunchWeightGrad<64, false>(bool, const WeightGradParams&, int, cudaStream_t);
template cudaError_t LaunchWeightGrad<64, true>(bool, const WeightGradParams&, int, cudaStream_t);
template cudaError_t LaunchWeightGrad<128, false>(bool, const WeightGradParams&, int, cudaStream_t);
template cudaError_t LaunchWeightGrad<128, true>(bool, const WeightGradParams&, int, cudaStream_t);
}  // namespace blocksparse::cuda::sm90
