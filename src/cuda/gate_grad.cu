// The gradient of gates, from the ungated weight gradient in float32.
#include "cuda/check.h"
#include "cuda/convert.cuh"
#include "kernels/matmul.h"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 128;

// One thread block per block of the weight. The sum's order is fixed: each thread's stride, then a tree.
template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads)
    GateGrad(const float* dw, const T* w, const float* gates, bool gated, int area, Out* dw_out, float* dgate) {
  const int64_t first = int64_t(blockIdx.x) * area;
  const float gate = gates[blockIdx.x];
  const bool dead = gated && gate == 0.f;
  float sum = 0.f;
  for (int i = threadIdx.x; i < area; i += kThreads) {
    const float d = dw[first + i];
    if (!dead) sum += d * ToFloat(w[first + i]);
    dw_out[first + i] = FromFloat<Out>(gate * d);
  }
  __shared__ float sums[kThreads];
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) dgate[blockIdx.x] = sums[0];
}

}  // namespace

Status RunGateGrad(const GateGradProblem& p, Stream stream) {
  if (p.blocks == 0) return {};
  WithType(p.dtype, [&](auto type) {
    WithType(p.out_dtype, [&](auto out) {
      GateGrad<<<p.blocks, kThreads, 0, stream>>>(p.dw, static_cast<const decltype(type)*>(p.w), p.gate, p.gated,
                                                  p.bsize * p.bsize, static_cast<decltype(out)*>(p.dw_out), p.dgate);
    });
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace cuda
}  // namespace blocksparse
