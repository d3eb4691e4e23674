#include "cuda/matmul_sm90_weight_grad.cuh"

namespace blocksparse::cuda::sm90 {
namespace {

// One thread block a block of W (`blocks` to an item); two elements a thread at a time.
__global__ void Finish(int bsize, int blocks, const __grid_constant__ WeightGradParams p) {
#ifdef BLOCKSPARSE_SM90_CODE
  const int halves = bsize == 32 ? 2 : 1;  // blocks a slot
  const int rest = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const int32_t* words = p.item + int64_t(p.whole + rest) * WeightGradPlan::kItemWords;
  const int id = words[WeightGradPlan::kSlots + block / halves * 4 + 2 + block % halves];
  if (id < 0) return;
  const int64_t size = int64_t(bsize) * bsize, stride = blocks * size;
  const float* partial = p.partial + int64_t(rest) * p.split * stride + block * size;
  for (int e = threadIdx.x * 2; e < size; e += blockDim.x * 2) {
    float2 sum = *reinterpret_cast<const float2*>(partial + e);
    for (int part = 1; part < p.split; ++part) {
      const float2 more = *reinterpret_cast<const float2*>(partial + part * stride + e);
      sum.x += more.x, sum.y += more.y;
    }
    StoreWeightGrad(p, id * size + e, sum.x, sum.y);
  }
#endif
}

}  // namespace

cudaError_t FinishWeightGrad(int bsize, const WeightGradParams& p, cudaStream_t stream) {
  const int blocks = WeightGradPlan::Slots(bsize) * (bsize == 32 ? 2 : 1);
  Finish<<<(p.items - p.whole) * blocks, 256, 0, stream>>>(bsize, blocks, p);
  return cudaGetLastError();
}

}  // namespace blocksparse::cuda::sm90
