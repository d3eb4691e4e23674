#include "cuda/matmul_sm90_weight_grad.cuh"

namespace blocksparse::cuda::sm90 {
namespace {

// Two elements a thread; blockIdx.x names one of the `blocks` blocks of an item, blockIdx.y 512 of its elements.
__global__ void Finish(int bsize, int blocks, const __grid_constant__ WeightGradParams p) {
#ifdef BLOCKSPARSE_SM90_CODE
  const int halves = bsize == 32 ? 2 : 1;  // blocks a slot
  const int rest = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const int32_t* words = p.item + int64_t(p.whole + rest) * WeightGradPlan::kItemWords;
  const int id = words[WeightGradPlan::kSlots + block / halves * 4 + 2 + block % halves];
  if (id < 0) return;
  const int64_t size = int64_t(bsize) * bsize, stride = blocks * size, e = (blockIdx.y * 256 + threadIdx.x) * 2;
  const float* partial = p.partial + int64_t(rest) * p.split * stride + block * size + e;
  float2 sum = *reinterpret_cast<const float2*>(partial);
#pragma unroll 8
  for (int part = 1; part < p.split; ++part) {
    const float2 more = *reinterpret_cast<const float2*>(partial + part * stride);
    sum.x += more.x, sum.y += more.y;
  }
  StoreWeightGrad(p, id * size + e, sum.x, sum.y);
#endif
}

}  // namespace

cudaError_t FinishWeightGrad(int bsize, const WeightGradParams& p, cudaStream_t stream) {
  const int blocks = WeightGradPlan::Slots(bsize) * (bsize == 32 ? 2 : 1);
  Finish<<<dim3((p.items - p.whole) * blocks, bsize * bsize / 512), 256, 0, stream>>>(bsize, blocks, p);
  return cudaGetLastError();
}

}  // namespace blocksparse::cuda::sm90
