// Weight gradient with blocks of 32, 64 and 128.
//
// A thread block holds the sums of a set of blocks (2, 12 or 48: all the accumulators there are) and walks the batch.
// Each step brings one tile of x for each of the set's rows and one of dy for each of its columns; the planner chose the
// set so that tiles serve several blocks. The products are straight-line code: every slot names its two tiles.
// Blocks of 32 go two to a slot, one above the other, to fill wgmma's 64 rows.
#pragma once

#include <cstdint>

#include "cuda/arch/sm90.h"
#include "cuda/arch/sm90_wgmma.h"
#include "cuda/matmul_sm90_weight_grad_store.cuh"
#include "kernels/plan_sm90.h"

namespace blocksparse::cuda::sm90 {

template <int kB, bool kHalf, bool kAxis0>
struct WeightGradKernel {
  static constexpr int kTokens = WeightGradTokens(kB, kAxis0 ? 0 : 1);
  static constexpr int kWidth = kB < 64 ? kB : 64;  // features in one row of a tile on axis 1
  static constexpr int kTileBytes = kB * kTokens * 2;
  static constexpr int kGroupSlots = WeightGradPlan::Slots(kB) / 2;  // of one warpgroup
  static constexpr int kHalves = kB == 128 ? 2 : 1;                  // 64-row products a slot
  static constexpr int kSlots = 16;
  static constexpr int kItemBytes = 24 * 16 + 16;
  static constexpr int kHeaders = kSlots * 32 + 2 * (16 + kItemBytes);
  static constexpr int kRing = (232448 - 1024 - kHeaders) / 1024 * 1024;
  static constexpr int kSharedBytes = kRing + 1024 + kHeaders;

  // Axis 1: tiles are [batch][features], neither operand K-major. Axis 0: [features][batch], both are.
  static constexpr uint32_t kHigh = DescriptorHigh(kAxis0 ? kTokens * 2 : kWidth * 2);
  static constexpr int kStep = kAxis0 ? 32 : 16 * kWidth * 2;  // bytes from one 16-deep slice to the next

  static constexpr int kSums = kGroupSlots * kHalves * kB / 2;  // of a thread

  // What a thread block does, piece by piece.
  struct Piece {
    int item, first, steps;
    int partial;      // where the sums go, or -1: to the output
    int parts, part;  // how many helpers' sums are to be added, and the first one's place
  };
  struct Walk {
    int unit = blockIdx.x;
    int64_t at = 0, end = 0;  // a helper's stretch of the steps that owners leave
    bool owner;

    __device__ __forceinline__ Walk(const WeightGradParams& p) {
      const int block = blockIdx.x, rest = p.items - p.whole;
      owner = block >= p.helpers && block - p.helpers < rest;
      if (block < p.helpers) {
        const int64_t all = int64_t(rest) * (p.total_steps - p.own);
        at = all * block / p.helpers;
        end = all * (block + 1) / p.helpers;
      }
    }
    __device__ __forceinline__ bool Next(const WeightGradParams& p, Piece* piece) {
      if (unit < p.whole) {
        *piece = {unit, 0, p.total_steps, -1, 0, 0};
        unit += gridDim.x;
        return true;
      }
      if (at < end) {
        const int left = p.total_steps - p.own, i = int(at / left), first = int(at % left);
        const int steps = int(min(int64_t(left - first), end - at));
        *piece = {p.whole + i, p.own + first, steps, int(blockIdx.x) + i, 0, 0};
        at += steps;
        return true;
      }
      if (!owner) return false;
      owner = false;
      const int i = blockIdx.x - p.helpers;
      *piece = {p.whole + i, 0, p.own, -1, 0, 0};
      const int64_t left = p.total_steps - p.own, all = (p.items - p.whole) * left;
      if (all > 0) {
        int h = int(i * left * p.helpers / all);
        while (all * (h + 1) / p.helpers <= i * left) ++h;
        piece->part = h + i;
        for (; h < p.helpers && all * h / p.helpers < (i + 1) * left; ++h) ++piece->parts;
      }
      return true;
    }
  };

  // Items: full barrier, empty barrier, slots, {steps, partial, parts, part}.
  static __device__ __forceinline__ uint32_t ItemBarrier(uint32_t bars, uint32_t i) {
    return bars + kSlots * 32 + (i & 1) * (16 + kItemBytes);
  }

  static __device__ __forceinline__ void Produce(const WeightGradParams& p, uint32_t ring, uint32_t bars) {
    const int lane = threadIdx.x & 31;
    uint32_t issued = 0, released = 0, position = 0, head = 0, tail = 0, begin = 0;
    uint32_t count = 0;
    Walk walk(p);
    Piece u;
    for (; walk.Next(p, &u); ++count) {
      const int32_t* words = p.item + int64_t(u.item) * WeightGradPlan::kItemWords;
      const int xs = words[0], tiles = xs + words[1];
      const int feature0 = lane < tiles ? words[WeightGradPlan::kTiles + lane] : 0;
      const int feature1 = lane + 32 < tiles ? words[WeightGradPlan::kTiles + lane + 32] : 0;
      const uint32_t item = ItemBarrier(bars, count);
      BarrierWait(item + 8, count / 2 & 1 ^ 1);
      if (lane < 2 * kGroupSlots) {
        const int4 slot = *reinterpret_cast<const int4*>(words + WeightGradPlan::kSlots + lane * 4);
        const uint32_t x = slot.x & 255, lower = slot.x >> 8;
        const uint32_t chunk = kB == 32 ? (lower - x) * kTileBytes : kTokens * 128;
        StoreShared4(item + 16 + lane * 16,
                     make_uint4(DescriptorLow(x * kTileBytes, chunk), DescriptorLow(slot.y * kTileBytes, kTokens * 128),
                                slot.z, slot.w));
      }
      if (lane == 0) StoreShared4(item + 16 + 24 * 16, make_uint4(u.steps, u.partial, u.parts, u.part));
      BarrierArrive(item);

      int pair = 0;
      while (pair + 1 < p.pairs && u.first >= p.steps[pair + 1]) ++pair;
      for (int step = u.first; step < u.first + u.steps; ++step) {
        while (pair + 1 < p.pairs && step >= p.steps[pair + 1]) ++pair;
        const int n = (step - p.steps[pair]) * kTokens;
        const uint32_t bytes = tiles * kTileBytes;
        auto release = [&] {
          BarrierWait(bars + released % kSlots * 32 + 8, released / kSlots & 1);
          ++released;
          tail = __shfl_sync(~0u, begin, released % kSlots);
        };
        if (lane == issued % kSlots) begin = head;
        if (released == issued) tail = head;
        while (issued - released >= kSlots - 1) release();
        if (position + bytes > kRing) {
          head += kRing - position;
          position = 0;
        }
        const uint32_t at = ring + position, full = bars + issued % kSlots * 32;
        position += bytes;
        head += bytes;
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
            const uint32_t to = at + t * kTileBytes;
            if constexpr (kAxis0) {
              TmaLoad(to, map, n, feature, full);
            } else if constexpr (kB == 128) {
              TmaLoad3(to, map, 0, n, feature / 64, full);
            } else {
              TmaLoad(to, map, feature, n, full);
            }
          }
        }
        ++issued;
      }
    }
    const uint32_t item = ItemBarrier(bars, count);
    BarrierWait(item + 8, count / 2 & 1 ^ 1);
    if (lane == 0) StoreShared4(item + 16 + 24 * 16, make_uint4(~0u, 0, 0, 0));
    BarrierArrive(item);
  }

  // Sums of a helper, as the threads hold them.
  static __device__ __forceinline__ float4* PartialAt(const WeightGradParams& p, int partial) {
    const uint32_t thread = ThreadAnew();
    return reinterpret_cast<float4*>(p.partial) + (int64_t(partial) * 2 + (thread >> 7)) * (kSums / 4) * 128 +
           (thread & 127);
  }
  static __device__ __forceinline__ void StorePartial(const WeightGradParams& p, const float* sum, int partial) {
    float4* to = PartialAt(p, partial);
#pragma unroll
    for (int q = 0; q < kSums / 4; ++q)
      __stcg(to + q * 128, make_float4(sum[q * 4], sum[q * 4 + 1], sum[q * 4 + 2], sum[q * 4 + 3]));
    __threadfence();
    __syncwarp();
    if ((ThreadAnew() & 31) == 0) AddRelease(p.done + partial, 1);
  }
  static __device__ __forceinline__ void AddPartials(const WeightGradParams& p, float* sum, int part, int parts) {
    for (; parts > 0; --parts, ++part) {
      while (LoadAcquire(p.done + part) < 8) __nanosleep(64);
      __syncwarp();
      const float4* from = PartialAt(p, part);
#pragma unroll
      for (int q = 0; q < kSums / 4; ++q) {
        const float4 more = __ldcg(from + q * 128);
        sum[q * 4] += more.x, sum[q * 4 + 1] += more.y, sum[q * 4 + 2] += more.z, sum[q * 4 + 3] += more.w;
      }
    }
  }

  static __device__ __forceinline__ void Consume(const WeightGradParams& p, uint32_t bars) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, group = threadIdx.x >> 7;
    uint32_t slot = 0, parity = 0;
    for (uint32_t count = 0;; ++count) {
      const uint32_t item = ItemBarrier(bars, count);
      BarrierWait(item, count / 2 & 1);
      const uint4 info = LoadShared4(item + 16 + 24 * 16);
      const int steps = __shfl_sync(~0u, info.x, 0);
      if (steps < 0) break;
      const uint32_t table = item + 16 + group * kGroupSlots * 16;
      float sum[kGroupSlots][kHalves][kB / 2];
#pragma unroll
      for (int s = 0; s < kGroupSlots; ++s)
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
          for (int e = 0; e < kB / 2; ++e) sum[s][h][e] = 0.f;
      uint32_t previous = 0;
      for (int step = 0; step < steps; ++step) {
        BarrierWait(bars + slot * 32, parity);
        const uint32_t at = __shfl_sync(~0u, LoadShared(bars + slot * 32 + 16), 0);
        WgmmaFence();
#pragma unroll
        for (int s = 0; s < kGroupSlots; ++s) {
          const uint4 tiles = LoadShared4(table + s * 16);
          const uint32_t x = tiles.x + at, dy = tiles.y + at;
#pragma unroll
          for (int k = 0; k < kTokens / 16; ++k)
#pragma unroll
            for (int h = 0; h < kHalves; ++h)
              Wgmma<kB, kHalf>::template Add<!kAxis0, !kAxis0>(
                  sum[s][h], Descriptor(x + (k * kStep + h * kTokens * 128 >> 4), kHigh),
                  Descriptor(dy + (k * kStep >> 4), kHigh));
        }
        WgmmaCommit();
        if constexpr (kB == 128) {
          WgmmaWait<1>();
          __syncwarp();
          if (previous != 0 && lane == 0) BarrierArrive(previous);
          previous = bars + slot * 32 + 8;
        } else {  // stages are long and few: return each at once
          WgmmaWait<0>();
          __syncwarp();
          if (lane == 0) BarrierArrive(bars + slot * 32 + 8);
        }
        if (++slot == kSlots) {
          slot = 0;
          parity ^= 1;
        }
      }
      WgmmaWait<0>();
      __syncwarp();
      if (previous != 0 && lane == 0) BarrierArrive(previous);

      const int partial = __shfl_sync(~0u, info.y, 0), parts = __shfl_sync(~0u, info.z, 0);
      if (partial >= 0) {
        StorePartial(p, &sum[0][0][0], partial);
        __syncwarp();
        if (lane == 0) BarrierArrive(item + 8);
        continue;
      }
      if (parts > 0) AddPartials(p, &sum[0][0][0], __shfl_sync(~0u, info.w, 0), parts);
      const bool plain = p.addend == nullptr && p.out_dtype == (kHalf ? DType::kFloat16 : DType::kBFloat16);
#pragma unroll
      for (int s = 0; s < kGroupSlots; ++s) {
        const uint4 ids = LoadShared4(table + s * 16);
        const int id = WeightGradBlock<kB>(ids, warp);
        if (id < 0) continue;
        const bool open = p.gate == nullptr || p.gate[id] != 0.f;
        const int64_t at = int64_t(id) * kB * kB + WeightGradElement<kB>(warp, lane);
        if (plain && kB == 128) {
          // Neighbours exchange halves, so that each stores eight bytes and four of them a whole sector;
          // smaller blocks have no registers left for it.
          const bool odd = lane & 1;
          uint16_t* out = static_cast<uint16_t*>(p.out) + at + (odd ? 8 - 2 : 0);
#pragma unroll
          for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
              for (int e = 0; e < kB / 8; e += 2) {
                const float* v = &sum[s][h][e * 4 + r * 2];
                const uint32_t left = Pack16<kHalf>(open ? v[0] : 0.f, open ? v[1] : 0.f);
                const uint32_t right = Pack16<kHalf>(open ? v[4] : 0.f, open ? v[5] : 0.f);
                const uint32_t other = __shfl_xor_sync(~0u, odd ? left : right, 1);
                *reinterpret_cast<uint2*>(out + (h * 64 + r * 8) * kB + e * 8) =
                    odd ? make_uint2(other, right) : make_uint2(left, other);
              }
        } else if (plain) {
          uint16_t* out = static_cast<uint16_t*>(p.out) + at;
          ForPairs<kB>(sum[s], open, [&](int skip, float a, float b) {
            *reinterpret_cast<uint32_t*>(out + skip) = Pack16<kHalf>(a, b);
          });
        } else {
          ForPairs<kB>(sum[s], open, [&](int skip, float a, float b) { StoreWeightGrad(p, at + skip, a, b); });
        }
      }
      __syncwarp();
      if (lane == 0) BarrierArrive(item + 8);
    }
  }
};

template <int kB, bool kHalf, bool kAxis0>
__global__ void __launch_bounds__(384, 1) WeightGrad(const __grid_constant__ WeightGradParams p) {
#ifdef BLOCKSPARSE_SM90_CODE
  using Kernel = WeightGradKernel<kB, kHalf, kAxis0>;
  extern __shared__ char shared[];
  const uint32_t ring = (SharedAddress(shared) + 1023) & ~1023u, bars = ring + Kernel::kRing;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Kernel::kSlots; ++i) {
      BarrierInit(bars + i * 32, 1);
      BarrierInit(bars + i * 32 + 8, 8);
    }
    for (int i = 0; i < 2; ++i) {
      BarrierInit(Kernel::ItemBarrier(bars, i), 32);
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

template <int kB, bool kHalf>
cudaError_t LaunchWeightGrad(bool axis0, const WeightGradParams& p, int grid, cudaStream_t stream) {
  auto kernel = axis0 ? WeightGrad<kB, kHalf, true> : WeightGrad<kB, kHalf, false>;
  constexpr int kBytes = WeightGradKernel<kB, kHalf, false>::kSharedBytes;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<grid, 384, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace blocksparse::cuda::sm90
