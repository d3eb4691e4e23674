#include "cuda/matmul_sm90_rounds.cuh"

namespace blocksparse::cuda::sm90 {
template cudaError_t LaunchRounds<false>(bool, bool, const RoundsParams&, int, cudaStream_t);
template cudaError_t LaunchRounds<true>(bool, bool, const RoundsParams&, int, cudaStream_t);
}  // namespace blocksparse::cuda::sm90
