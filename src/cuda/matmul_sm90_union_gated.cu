#include "cuda/matmul_sm90_union.cuh"

namespace blocksparse::cuda::sm90 {
template cudaError_t LaunchUnion<32, false, true>(bool, bool, const UnionParams&, int, cudaStream_t);
template cudaError_t LaunchUnion<32, true, true>(bool, bool, const UnionParams&, int, cudaStream_t);
template cudaError_t LaunchUnion<64, false, true>(bool, bool, const UnionParams&, int, cudaStream_t);
template cudaError_t LaunchUnion<64, true, true>(bool, bool, const UnionParams&, int, cudaStream_t);
template cudaError_t LaunchUnion<128, false, true>(bool, bool, const UnionParams&, int, cudaStream_t);
template cudaError_t LaunchUnion<128, true, true>(bool, bool, const UnionParams&, int, cudaStream_t);
}  // namespace blocksparse::cuda::sm90
