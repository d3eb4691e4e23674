#include "cuda/matmul_sm80_weight_grad.cuh"

namespace blocksparse::cuda::sm80 {
template Status LaunchWeightGrad<8>(DType, int, int, int, const WeightGradArgs&, const Chip&, Stream);
template Status LaunchWeightGrad<16>(DType, int, int, int, const WeightGradArgs&, const Chip&, Stream);
template Status LaunchWeightGrad<32>(DType, int, int, int, const WeightGradArgs&, const Chip&, Stream);
}  // namespace blocksparse::cuda::sm80
