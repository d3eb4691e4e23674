// Storing the weight gradient's sums, as wgmma leaves them in registers: of each 64 rows a warp holds 16, a thread two of
// them eight apart, and there two neighbours in every eight columns.
#pragma once

#include <cstdint>

#include "cuda/arch/sm90.h"
#include "cuda/matmul_sm90_weight_grad.h"

namespace blocksparse::cuda::sm90 {

// The block that a warp holds of a slot. Blocks of 32: warps 0 and 1 hold the upper one, 2 and 3 the lower.
template <int kB>
__device__ __forceinline__ int WeightGradBlock(uint4 slot, int warp) {
  return kB == 32 && warp >= 2 ? int(slot.w) : int(slot.z);
}

// The first of a thread's elements of its block.
template <int kB>
__device__ __forceinline__ int WeightGradElement(int warp, int lane) {
  return (warp * 16 + (lane >> 2)) % kB * kB + (lane & 3) * 2;
}

// Calls store(skip, a, b) for each two neighbours that a thread holds, `skip` after its first element; zeros where the
// block's gate is shut.
template <int kB, class Store>
__device__ __forceinline__ void ForPairs(const float (&sum)[kB == 128 ? 2 : 1][kB / 2], bool open, Store store) {
#pragma unroll
  for (int h = 0; h < (kB == 128 ? 2 : 1); ++h)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int e = 0; e < kB / 8; ++e) {
        const float a = sum[h][e * 4 + r * 2], b = sum[h][e * 4 + r * 2 + 1];
        store((h * 64 + r * 8) * kB + e * 8, open ? a : 0.f, open ? b : 0.f);
      }
}

// With what is to be added to them, in the type that is asked for.
__device__ __forceinline__ void StoreWeightGrad(const WeightGradParams& p, int64_t at, float a, float b) {
  if (p.addend != nullptr) {
    const float2 add = *reinterpret_cast<const float2*>(p.addend + at);
    a += add.x, b += add.y;
  }
  if (p.out_dtype == DType::kFloat32)
    *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = make_float2(a, b);
  else
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at) =
        p.out_dtype == DType::kFloat16 ? Pack16<true>(a, b) : Pack16<false>(a, b);
}

}  // namespace blocksparse::cuda::sm90
