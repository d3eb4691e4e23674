#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/arch/sm90.h"
#include "cuda/matmul_sm90_small.h"
#include "kernels/plan_sm90.h"

namespace blocksparse::cuda::sm90 {
namespace {

template <bool kHalf>
__device__ __forceinline__ float Value(const void* p, int64_t i) {
  if constexpr (kHalf)
    return __half2float(static_cast<const __half*>(p)[i]);
  else
    return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}

// Eight elements of y from the blocks that are there, one by one: for x with infinities, which zeros would turn to NaN.
template <int kB, bool kAxis0, bool kTransposed, bool kHalf>
__device__ void BlockByBlock(const SmallParams& p, const int32_t* info, int n, int f, float (&sum)[8]) {
  constexpr int kWide = FillPlan::kFeatures / kB, kUnits = 64 / kB;
  const int32_t* ids = p.stage + 4 * p.stages;
#pragma unroll
  for (int e = 0; e < 8; ++e) sum[e] = 0.f;
  for (int s = info[0]; s < info[0] + info[1]; ++s)
    for (int u = 0; u < kUnits; ++u) {
      const int id = ids[(int64_t(s) * kUnits + u) * kWide + f / kB];
      if (id < 0) continue;
      for (int r = 0; r < kB; ++r) {
        const int64_t c = p.stage[4 * s] + u * kB + r;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int j = f % kB + (kAxis0 ? 0 : e);
          const int64_t x = kAxis0 ? c * p.batch + n + e : int64_t(n) * p.inputs + c;
          const int64_t w = int64_t(id) * kB * kB + (kTransposed ? j * kB + r : r * kB + j);
          sum[e] = fmaf(Value<kHalf>(p.x_values, x), Value<kHalf>(p.weights, w), sum[e]);
        }
      }
    }
}

// Eight elements of y at a time: one entry's features on axis 1, one feature's batch entries on axis 0. A grid small
// enough to start while the first kernel still runs.
template <int kB, bool kAxis0, bool kTransposed, bool kHalf>
__global__ void __launch_bounds__(256) Finish(const __grid_constant__ SmallParams p) {
#ifdef BLOCKSPARSE_SM90_CODE
  constexpr int tile_features = FillPlan::kFeatures;
  const int tile_size = p.rows * tile_features, along = kAxis0 ? p.rows : tile_features;
  const int64_t octets = int64_t(p.row_tiles) * p.groups * (tile_size / 8);
  bool exact = false;
  bool waited = false;
  for (int64_t o = blockIdx.x * 256 + threadIdx.x; o < octets || !waited; o += gridDim.x * 256) {
    const int tile = o < octets ? int(o / (tile_size / 8)) : 0, e = int(o % (tile_size / 8)) * 8;
    const int group = tile % p.groups, row = tile / p.groups * p.rows;
    const int n = row + (kAxis0 ? e % along : e / along), f = kAxis0 ? e / along : e % along;
    const int32_t* info = p.group + group * UnionPlan::kGroupWords;
    const int start = info[2 + f / 64], feature = start + f % 64;
    const bool inside = o < octets && start >= 0 && feature < p.features && n < p.batch;
    const int first = tile / p.groups * p.stages + info[0], end = first + info[1];
    int i = int(int64_t(first) * p.blocks / (int64_t(p.row_tiles) * p.stages));
    while (SmallFirst(p, i + 1) <= first) ++i;
    if (!waited) {
      waited = true;
      WaitForPrerequisites();
      bool found = false;
      for (int q = threadIdx.x; q < p.blocks * 8; q += 256) found |= __ldcg(p.flags + q) != 0;
      exact = __syncthreads_or(found);
    }
    if (!inside) continue;
    float sum[8] = {};
    if (first < end) {
      const float* from = p.partial + int64_t(i + tile) * tile_size + e;
      for (; i < p.blocks && SmallFirst(p, i) < end; ++i, from += tile_size) {
        const float4 a = __ldcg(reinterpret_cast<const float4*>(from));
        const float4 b = __ldcg(reinterpret_cast<const float4*>(from) + 1);
        sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
        sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
      }
    }
    if (exact) BlockByBlock<kB, kAxis0, kTransposed, kHalf>(p, info, n, f, sum);
    const int64_t at = kAxis0 ? int64_t(feature) * p.batch + n : int64_t(n) * p.features + feature;
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.y) + at) =
        make_uint4(Pack16<kHalf>(sum[0], sum[1]), Pack16<kHalf>(sum[2], sum[3]), Pack16<kHalf>(sum[4], sum[5]),
                   Pack16<kHalf>(sum[6], sum[7]));
  }
#endif
}

}  // namespace

template <int kB, bool kHalf>
cudaError_t FinishFill(bool axis0, bool transposed, const SmallParams& p, cudaStream_t stream) {
  auto kernel = axis0 ? (transposed ? Finish<kB, true, true, kHalf> : Finish<kB, true, false, kHalf>)
                      : (transposed ? Finish<kB, false, true, kHalf> : Finish<kB, false, false, kHalf>);
  const int64_t octets = int64_t(p.row_tiles) * p.groups * p.rows * FillPlan::kFeatures / 8;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(int(std::min<int64_t>((octets + 255) / 256, 2 * p.blocks)));
  config.blockDim = dim3(256);
  config.stream = stream;
  // The launch overlaps the first kernel; WaitForPrerequisites waits for its results.
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template cudaError_t FinishFill<8, false>(bool, bool, const SmallParams&, cudaStream_t);
template cudaError_t FinishFill<8, true>(bool, bool, const SmallParams&, cudaStream_t);
template cudaError_t FinishFill<16, false>(bool, bool, const SmallParams&, cudaStream_t);
template cudaError_t FinishFill<16, true>(bool, bool, const SmallParams&, cudaStream_t);

}  // namespace blocksparse::cuda::sm90
