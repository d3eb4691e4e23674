#include "cuda/check.h"
#include "cuda/sum_parts.h"
#include "cuda/vector.cuh"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kColumns = 32, kRows = 16;  // of a thread block

// blockIdx.y picks the array.
__global__ void __launch_bounds__(kColumns* kRows)
    Sum(const float* partial0, float* sum0, const float* partial1, float* sum1, int64_t parts, int64_t channels) {
  const float* partial = blockIdx.y == 0 ? partial0 : partial1;
  float* sum = blockIdx.y == 0 ? sum0 : sum1;
  __shared__ float shared[kRows][kColumns];
  const int64_t c = int64_t(blockIdx.x) * kColumns + threadIdx.x;
  WaitForKernelBefore();
  float mine = 0.f;
  if (sum && c < channels) {
#pragma unroll 8
    for (int64_t part = threadIdx.y; part < parts; part += kRows) mine += partial[part * channels + c];
  }
  shared[threadIdx.y][threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.y != 0 || !sum || c >= channels) return;
#pragma unroll
  for (int r = 1; r < kRows; ++r) mine += shared[r][threadIdx.x];
  sum[c] = mine;
}

}  // namespace

Status SumParts(const float* partial0, float* sum0, const float* partial1, float* sum1, int64_t parts, int64_t channels,
                Stream stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(CeilDiv(channels, kColumns)), sum1 ? 2 : 1);
  config.blockDim = dim3(kColumns, kRows);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  static const bool waits = CompiledForHopper(Sum);
  config.numAttrs = waits ? 1 : 0;
  BLOCKSPARSE_CUDA_CHECK(cudaLaunchKernelEx(&config, Sum, partial0, sum0, partial1, sum1, parts, channels));
  return {};
}

}  // namespace cuda
}  // namespace blocksparse
