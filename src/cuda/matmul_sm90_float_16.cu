#include "cuda/matmul_sm90_float.cuh"

namespace blocksparse::cuda::sm90 {
template cudaError_t LaunchFloat<16, false>(const FloatParams&, int, cudaStream_t);
}
