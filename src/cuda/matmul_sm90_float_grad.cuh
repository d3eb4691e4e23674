// Weight gradient of float32 with blocks of 32, 64 and 128: sets of blocks as in matmul_sm90_weight_grad.cuh, over
// operands that matmul_sm90_float_prepare.cu has laid out as [features][batch]; exact sums as in matmul_sm90_float.cuh.
#pragma once

#include <cstdint>

#include "cuda/arch/sm90.h"
#include "cuda/arch/sm90_wgmma_float.h"
#include "cuda/matmul_sm90_float_grad.h"
#include "cuda/matmul_sm90_weight_grad_store.cuh"

namespace blocksparse::cuda::sm90 {

template <int kB, bool kExact>
struct FloatGradKernel {
  static constexpr int kPlanes = Planes(kExact);
  static constexpr int kTokens = FloatGradTokens(kExact, kB), kLine = kTokens * PieceBytes(kExact);
  static constexpr int kTileBytes = kB * kLine;  // of one plane
  static constexpr int kAllSlots = FloatGradSlots(kExact, kB), kGroupSlots = kAllSlots / 2;
  static constexpr int kHalves = kB == 128 ? 2 : 1;  // 64-row products a slot
  static constexpr int kSlots = 16;
  static constexpr int kItemBytes = 24 * 16 + 16;
  static constexpr int kHeaders = kSlots * 32 + 2 * (16 + kItemBytes);
  static constexpr int kRing = (232448 - 1024 - kHeaders) / 1024 * 1024;
  static constexpr int kSharedBytes = kRing + 1024 + kHeaders;
  static constexpr uint32_t kHigh = DescriptorHigh(kLine);

  struct Unit {
    int item, part, first, steps;
  };
  static __device__ __forceinline__ Unit UnitOf(const WeightGradParams& p, int unit) {
    if (unit < p.whole) return {unit, -1, 0, p.total_steps};
    const int rest = unit - p.whole, part = rest % p.split;
    const int first = int(int64_t(p.total_steps) * part / p.split);
    return {p.whole + rest / p.split, rest, first, int(int64_t(p.total_steps) * (part + 1) / p.split) - first};
  }

  // Items: full barrier, empty barrier, slots, {steps, part, bytes of a plane / 16}.
  static __device__ __forceinline__ uint32_t ItemBarrier(uint32_t bars, uint32_t i) {
    return bars + kSlots * 32 + (i & 1) * (16 + kItemBytes);
  }

  static __device__ __forceinline__ void Produce(const FloatGradParams& params, uint32_t ring, uint32_t bars) {
    const WeightGradParams& p = params.base;
    const int lane = threadIdx.x & 31;
    uint32_t issued = 0, released = 0, position = 0, head = 0, tail = 0, begin = 0;
    const int units = p.whole + (p.items - p.whole) * p.split;
    uint32_t count = 0;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x, ++count) {
      const Unit u = UnitOf(p, unit);
      const int32_t* words = p.item + int64_t(u.item) * WeightGradPlan::kItemWords;
      const int xs = words[0], tiles = xs + words[1];
      const int feature0 = lane < tiles ? words[WeightGradPlan::kTiles + lane] : 0;
      const int feature1 = lane + 32 < tiles ? words[WeightGradPlan::kTiles + lane + 32] : 0;
      const uint32_t item = ItemBarrier(bars, count);
      BarrierWait(item + 8, count / 2 & 1 ^ 1);
      if (lane < kAllSlots) {
        const int4 slot = *reinterpret_cast<const int4*>(words + WeightGradPlan::kSlots + lane * 4);
        StoreShared4(item + 16 + lane * 16,
                     make_uint4((slot.x & 255) * kTileBytes >> 4, slot.y * kTileBytes >> 4, slot.z, slot.w));
      }
      if (lane == 0) StoreShared4(item + 16 + 24 * 16, make_uint4(u.steps, u.part, tiles * kTileBytes >> 4, 0));
      __syncwarp();
      if (lane == 0) BarrierArrive(item);

      int pair = 0;
      while (pair + 1 < p.pairs && u.first >= p.steps[pair + 1]) ++pair;
      for (int step = u.first; step < u.first + u.steps; ++step) {
        while (pair + 1 < p.pairs && step >= p.steps[pair + 1]) ++pair;
        const int n = (step - p.steps[pair]) * kTokens;
        const uint32_t bytes = tiles * kPlanes * kTileBytes, room = (bytes + 1023) & ~1023u;
        auto release = [&] {
          BarrierWait(bars + released % kSlots * 32 + 8, released / kSlots & 1);
          ++released;
          tail = __shfl_sync(~0u, begin, released % kSlots);
        };
        if (lane == issued % kSlots) begin = head;
        if (released == issued) tail = head;
        while (issued - released >= kSlots - 1) release();
        if (position + room > kRing) {
          head += kRing - position;
          position = 0;
        }
        const uint32_t at = ring + position, full = bars + issued % kSlots * 32;
        position += room;
        head += room;
        while (head - tail > kRing && released != issued) release();
        if (lane == 0) {
          StoreShared(full + 16, at >> 4);
          BarrierArriveExpect(full, bytes);
        }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int t = lane + half * 32, feature = half ? feature1 : feature0;
          if (t < tiles) {
            const CUtensorMap* map = t < xs ? &p.x[pair] : &p.dy[pair];
            const int plane = t < xs ? params.x_plane[pair] : params.dy_plane[pair];
#pragma unroll
            for (int l = 0; l < kPlanes; ++l)
              TmaLoad(at + (l * tiles + t) * kTileBytes, map, n, l * plane + feature, full);
          }
        }
        ++issued;
      }
    }
    const uint32_t item = ItemBarrier(bars, count);
    BarrierWait(item + 8, count / 2 & 1 ^ 1);
    if (lane == 0) {
      StoreShared4(item + 16 + 24 * 16, make_uint4(~0u, 0, 0, 0));
      BarrierArrive(item);
    }
  }

  static __device__ __forceinline__ void Multiply(float (&sum)[kGroupSlots][kHalves][kB / 2], uint32_t table,
                                                  uint32_t at, uint32_t plane) {
    if constexpr (!kExact) {
      WgmmaFence();
#pragma unroll
      for (int s = 0; s < kGroupSlots; ++s) {
        const uint4 tiles = LoadShared4(table + s * 16);
        const uint32_t x = tiles.x + at, dy = tiles.y + at;
#pragma unroll
        for (int k = 0; k < kLine / 32; ++k)
#pragma unroll
          for (int h = 0; h < kHalves; ++h)
            WgmmaFloat<kB>::AddTf32(sum[s][h], Descriptor(x + k * 2 + (h * 64 * kLine >> 4), kHigh),
                                    Descriptor(dy + k * 2, kHigh));
      }
      WgmmaCommit();
      WgmmaWait<0>();
    } else {
      // Pieces of 64 rows by at most 64 columns, one slice of the batch deep: one is added while the next is made.
      constexpr int kN = kB < 64 ? kB : 64, kAcross = kB / kN, kSlices = kLine / 32;
      constexpr int kPieces = kGroupSlots * kSlices * kHalves * kAcross;
      float part[2][kN / 2];
      uint32_t x = 0, dy = 0;
#pragma unroll
      for (int i = 0; i <= kPieces; ++i) {
        if (i < kPieces) {
          constexpr int kInSlot = kSlices * kHalves * kAcross;
          if (i % kInSlot == 0) {
            const uint4 tiles = LoadShared4(table + i / kInSlot * 16);
            x = tiles.x + at, dy = tiles.y + at;
          }
          const int k = i % kInSlot / (kHalves * kAcross), h = i / kAcross % kHalves, n = i % kAcross;
          const uint32_t a = x + k * 2 + (h * 64 * kLine >> 4), b = dy + k * 2 + (n * 64 * kLine >> 4);
          float(&to)[kN / 2] = part[i & 1];
          auto add = [&](int j, int l) {
            WgmmaFloat<kN>::Add(to, Descriptor(a + j * plane, kHigh), Descriptor(b + l * plane, kHigh));
          };
          WgmmaFence();
          WgmmaFloat<kN>::Set(to, Descriptor(a + 2 * plane, kHigh), Descriptor(b, kHigh));
          add(0, 2), add(1, 1), add(1, 0), add(0, 1), add(0, 0);
          WgmmaCommit();
        }
        if (i > 0) {
          if (i < kPieces)
            WgmmaWait<1>();
          else
            WgmmaWait<0>();
          constexpr int kInSlot = kSlices * kHalves * kAcross;
          const int done = i - 1;
#pragma unroll
          for (int e = 0; e < kN / 2; ++e)
            sum[done / kInSlot][done / kAcross % kHalves][done % kAcross * (kN / 2) + e] += part[done & 1][e];
        }
      }
    }
  }

  static __device__ __forceinline__ void Consume(const FloatGradParams& params, uint32_t bars) {
    const WeightGradParams& p = params.base;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, group = threadIdx.x >> 7;
    uint32_t slot = 0, parity = 0;
    for (uint32_t count = 0;; ++count) {
      const uint32_t item = ItemBarrier(bars, count);
      BarrierWait(item, count / 2 & 1);
      const uint4 info = LoadShared4(item + 16 + 24 * 16);
      const int steps = __shfl_sync(~0u, info.x, 0);
      if (steps < 0) break;
      const uint32_t table = item + 16 + group * kGroupSlots * 16, plane = __shfl_sync(~0u, info.z, 0);
      float sum[kGroupSlots][kHalves][kB / 2];
#pragma unroll
      for (int s = 0; s < kGroupSlots; ++s)
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
          for (int e = 0; e < kB / 2; ++e) sum[s][h][e] = 0.f;
      for (int step = 0; step < steps; ++step) {
        BarrierWait(bars + slot * 32, parity);
        Multiply(sum, table, __shfl_sync(~0u, LoadShared(bars + slot * 32 + 16), 0), plane);
        __syncwarp();
        if (lane == 0) BarrierArrive(bars + slot * 32 + 8);
        if (++slot == kSlots) {
          slot = 0;
          parity ^= 1;
        }
      }

      const int part = __shfl_sync(~0u, info.y, 0);
      bool odd = false;
#pragma unroll
      for (int s = 0; s < kGroupSlots; ++s) {
        const uint4 ids = LoadShared4(table + s * 16);
        const int id = WeightGradBlock<kB>(ids, warp);
        if (id < 0) continue;
        const bool open = p.gate == nullptr || p.gate[id] != 0.f;
        const int offset = WeightGradElement<kB>(warp, lane);
        const int64_t at = int64_t(id) * kB * kB + offset;
        constexpr int kBlocks = kAllSlots * (kB == 32 ? 2 : 1);
        const int block = (group * kGroupSlots + s) * (kB == 32 ? 2 : 1) + (kB == 32 ? warp >> 1 : 0);
        float* partial = p.partial + (int64_t(part) * kBlocks + block) * kB * kB + offset;
        const bool plain = part < 0 && p.addend == nullptr && p.out_dtype == DType::kFloat32;
        float* to = part >= 0 ? partial : static_cast<float*>(p.out) + at;
        ForPairs<kB>(sum[s], open, [&](int skip, float a, float b) {
          if (plain || part >= 0)
            *reinterpret_cast<float2*>(to + skip) = make_float2(a, b);
          else
            StoreWeightGrad(p, at + skip, a, b);
          if constexpr (kExact) odd |= OddFloat(a) || OddFloat(b);
        });
      }
      if (kExact && odd) *params.odd = 1;
      __syncwarp();
      if (lane == 0) BarrierArrive(item + 8);
    }
  }
};

template <int kB, bool kExact>
__global__ void __launch_bounds__(384, 1) FloatGrad(const __grid_constant__ FloatGradParams p) {
#ifdef BLOCKSPARSE_SM90_CODE
  using Kernel = FloatGradKernel<kB, kExact>;
  extern __shared__ char shared[];
  const uint32_t ring = (SharedAddress(shared) + 1023) & ~1023u, bars = ring + Kernel::kRing;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Kernel::kSlots; ++i) {
      BarrierInit(bars + i * 32, 1);
      BarrierInit(bars + i * 32 + 8, 8);
    }
    for (int i = 0; i < 2; ++i) {
      BarrierInit(Kernel::ItemBarrier(bars, i), 1);
      BarrierInit(Kernel::ItemBarrier(bars, i) + 8, 8);
    }
    BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    RegistersDown<40>();
    if (threadIdx.x < 288) Kernel::Produce(p, ring, bars);
  } else {
    RegistersUp<232>();
    Kernel::Consume(p, bars);
  }
#endif
}

template <int kB, bool kExact>
cudaError_t LaunchFloatGrad(const FloatGradParams& p, int grid, cudaStream_t stream) {
  constexpr int kBytes = FloatGradKernel<kB, kExact>::kSharedBytes;
  cudaError_t error = cudaFuncSetAttribute(FloatGrad<kB, kExact>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  FloatGrad<kB, kExact><<<grid, 384, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace blocksparse::cuda::sm90
