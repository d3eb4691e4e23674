#include "cuda/matmul_sm90_union.cuh"

namespace blocksparse::cuda::sm90 {
template cudaError_t LaunchUnion<32, false, false>(bool, bool, const UnionParams&, int, cudaStream_t);
template cudaError_t LaunchUnion<32, true, false>(bool, bool, const UnionParams&, int, cudaStream_t);
template cudaError_t LaunchUnion<64, false, false>(bool, bool, const UnionParams&, int, cudaStream_t);
template cudaError_t LaunchUnion<64, true, false>(bool, bool, const UnionParams&, int, cudaStream_t);
template cudaError_t LaunchUnion<128, false, false>(bool, bool, const UnionParams&, int, cudaStream_t);
template cudaError_t LaunchUnion<128, true, false>(bool, bool, const UnionParams&, int, cudaStream_t);
}  // namespace blocksparse::cuda::sm90
