#include "cuda/matmul_sm90_float.cuh"

namespace blocksparse::cuda::sm90 {
template cudaError_t LaunchFloat<16, false>(const FloatParams&, int, cudaStream_t);
template cudaError_t LaunchFloat<32, false>(const FloatParams&, int, cudaStream_t);
template cudaError_t LaunchFloat<32, true>(const FloatParams&, int, cudaStream_t);
template cudaError_t LaunchFloat<64, false>(const FloatParams&, int, cudaStream_t);
template cudaError_t LaunchFloat<64, true>(const FloatParams&, int, cudaStream_t);
template cudaError_t LaunchFloat<128, false>(const FloatParams&, int, cudaStream_t);
template cudaError_t LaunchFloat<128, true>(const FloatParams&, int, cudaStream_t);
}  // namespace blocksparse::cuda::sm90
