// Forward product and input gradient for small batches, blocks of 32, 64 and 128.
//
// What binds is reading the weights once, so every multiprocessor must read all the time, and equally much: the stages
// of the union plan's groups are one long list, of which every thread block takes an equal stretch, whatever groups it
// touches. The thread block with the first stage of a group owns it: the others leave their sums of it in global memory,
// and the owner adds them to its own in order. Thread blocks count backwards, so that whoever waits does so for one that
// started earlier. A flag is up when it holds the launch's ticket, so that nobody has to take flags down first.
//
// A thread block is two pipelines, each of one warp that loads and one warpgroup that multiplies. In batches of up to 64
// they take stages in turn and add their sums in shared memory; in larger ones each has 64 of the tile's 128 entries.
#pragma once

#include <cstdint>

#include "cuda/arch/sm90.h"
#include "cuda/arch/sm90_wgmma.h"
#include "cuda/matmul_sm90_small.h"
#include "kernels/plan_sm90.h"

namespace blocksparse::cuda::sm90 {

template <int kB, bool kHalf, bool kAxis0, bool kTransposed>
struct SmallKernel {
  static constexpr int kUnit = kB < 64 ? kB : 64, kUnits = kB == 32 ? 2 : 1;
  static constexpr int kColumns = UnionPlan::Columns(kB), kFeatures = kColumns * kB;
  static constexpr int kUnitBytes = 64 * kUnit * 2, kWeightBytes = kUnit * kB * 2;
  static constexpr int kSlots = 16;
  static constexpr int kSlotBytes = 32;  // full and empty barrier, header
  static constexpr int kHeaders = 2 * kSlots * kSlotBytes, kMerge = 64 * kFeatures * 4;
  static constexpr int kRing = (232448 - 1024 - kHeaders - kMerge) / 2048 * 1024;
  static constexpr int kSharedBytes = 1024 + 2 * kRing + kMerge + kHeaders;
  static constexpr int kThreads = 384;

  static constexpr uint32_t kXHigh = DescriptorHigh(kAxis0 ? 128 : kUnit * 2), kWHigh = DescriptorHigh(kUnit * 2);
  static constexpr int kXStep = kAxis0 ? 16 * 128 : 32, kWStep = kTransposed ? 32 : 16 * kUnit * 2;

  static __device__ __forceinline__ int Block(const SmallParams& p) { return p.blocks - 1 - blockIdx.x; }

  // This pipeline's stages: first, first + stride, ... below end, of the list of all row tiles.
  struct Stretch {
    int first, end, stride;
    __device__ __forceinline__ Stretch(const SmallParams& p, int half)
        : first(SmallFirst(p, Block(p)) + (p.rows == 64 ? half : 0)),
          end(SmallFirst(p, Block(p) + 1)),
          stride(p.rows == 64 ? 2 : 1) {}
  };

  static __device__ __forceinline__ void Unit(float (&sum)[kColumns][kB / 2], uint32_t mask, uint32_t x, uint32_t xhigh,
                                              uint32_t& w) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (kColumns == 1 || (mask >> j & 1)) {
#pragma unroll
        for (int k = 0; k < kUnit / 16; ++k)
          Wgmma<kB, kHalf>::template Add<kAxis0, !kTransposed>(sum[j], Descriptor(x + k * (kXStep >> 4), xhigh),
                                                               Descriptor(w + k * (kWStep >> 4), kWHigh));
        w += kWeightBytes >> 4;
      }
    }
  }

  // As the union tiles' producer (matmul_sm90_union.cuh).
  static __device__ __forceinline__ void Produce(const SmallParams& p, uint32_t ring, uint32_t bars, int half) {
    const int lane = threadIdx.x & 31;
    uint32_t issued = 0, released = 0, position = 0, head = 0, tail = 0, begin = 0;
    auto release = [&] {
      BarrierWait(bars + released % kSlots * kSlotBytes + 8, released / kSlots & 1);
      ++released;
      tail = __shfl_sync(~0u, begin, released % kSlots);
    };
    auto reserve = [&](uint32_t bytes) {
      if (position + bytes > kRing) {
        head += kRing - position;
        position = 0;
      }
      const uint32_t at = ring + position;
      position += bytes;
      head += bytes;
      while (head - tail > kRing && released != issued) release();
      return at;
    };
    constexpr int kAhead = 4;
    const Stretch mine(p, half);
    const int step = mine.stride;
    const int32_t* record = p.stage + (lane & 15);
    int fetched[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (mine.first + i * step < mine.end)
        fetched[i] = record[(mine.first + i * step) % p.stages * UnionPlan::kStageWords];
    for (int base = mine.first; base < mine.end; base += kAhead * step)
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int t = base + i * step, later = t + kAhead * step;
        if (t >= mine.end) break;
        const int word = fetched[i];
        if (later < mine.end) fetched[i] = record[later % p.stages * UnionPlan::kStageWords];
        const int row = t / p.stages * p.rows + (p.rows == 128 ? half * 64 : 0);
        const uint32_t flags = __shfl_sync(~0u, word, 0);
        const int weights = flags >> 16 & 31, boxes = flags >> 24 & 3, units = kUnits == 1 || boxes == 0 ? 1 : 2;
        if (lane == issued % kSlots) begin = head;
        if (released == issued) tail = head;
        while (issued - released >= kSlots - 1) release();
        const uint32_t x = reserve(units * kUnitBytes), w = reserve(weights * kWeightBytes);
        const uint32_t full = bars + issued % kSlots * kSlotBytes;
        if (lane == 0) {
          const int unit_bytes = kAxis0 ? kUnitBytes : p.box_rows * kUnit * 2;
          StoreShared4(full + 16,
                       make_uint4(flags & 0x0fffffffu, DescriptorLow(x, 0), DescriptorLow(w, kUnit * 128), 0));
          BarrierArriveExpect(full, units * unit_bytes + weights * kWeightBytes);
        }
        __syncwarp();
        if constexpr (kAxis0) {
          if (lane >= 1 && lane <= units) TmaLoad(x + (lane - 1) * kUnitBytes, &p.x, row, word, full);
        } else if (kUnits == 2 && boxes == 1) {
          if (lane == 1) TmaLoad(x, &p.x_wide, word, row, full);
        } else if (lane >= 1 && lane <= units) {
          TmaLoad(x + (lane - 1) * kUnitBytes, &p.x, word, row, full);
        }
        if (lane >= 3 && lane < 3 + weights) {
          const uint32_t to = w + (lane - 3) * kWeightBytes;
          if constexpr (kB < 128) {
            TmaLoad(to, &p.w, 0, word * kB, full);
          } else if constexpr (kTransposed) {
            TmaLoad(to, &p.w, (word & 1) * 64, (word >> 1) * 128, full);
          } else {
            TmaLoad3(to, &p.w, 0, word * 64, 0, full);
          }
        }
        ++issued;
      }
  }

  static __device__ __forceinline__ void Consume(const SmallParams& p, uint32_t bars, uint32_t merge, int half) {
    const int lane = threadIdx.x & 31;
    const Stretch mine(p, half);
    int t = SmallFirst(p, Block(p)), stage = mine.first;
    int tile_row = t / p.stages, group = p.stage[(t - tile_row * p.stages) * UnionPlan::kStageWords + 15];
    uint32_t slot = 0, parity = 0;
#pragma unroll 1
    while (t < mine.end) {
      const int32_t* info = p.group + group * UnionPlan::kGroupWords;
      const int group_end = tile_row * p.stages + info[0] + info[1], stop = min(mine.end, group_end);
      float sum[kColumns][kB / 2];
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int e = 0; e < kB / 2; ++e) sum[j][e] = 0.f;
#pragma unroll 1
      for (; stage < stop; stage += mine.stride) {
        const uint32_t at = bars + slot * kSlotBytes;
        BarrierWait(at, parity);
        const uint4 header = LoadShared4(at + 16);
        const uint32_t flags = __shfl_sync(~0u, header.x, 0), x = __shfl_sync(~0u, header.y, 0);
        uint32_t w = __shfl_sync(~0u, header.z, 0);
        WgmmaFence();
        if constexpr (kUnits == 1) {
          Unit(sum, flags, x, kXHigh, w);
        } else {
          const bool wide = !kAxis0 && (flags >> 24 & 3) == 1;
          const uint32_t high = wide ? DescriptorHigh(128) : kXHigh;
          Unit(sum, flags & 0xff, x, high, w);
          Unit(sum, flags >> 8 & 0xff, x + (wide ? 64 >> 4 : kUnitBytes >> 4), high, w);
        }
        WgmmaCommit();
        WgmmaWait<0>();
        __syncwarp();
        if (lane == 0) BarrierArrive(at + 8);
        if (++slot == kSlots) {
          slot = 0;
          parity ^= 1;
        }
      }
      // Without this the compiler moves sums to other registers inside the loop and waits for each product.
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int e = 0; e < kB / 2; ++e) asm volatile("" : "+f"(sum[j][e])::"memory");
      const int first = tile_row * p.stages + info[0];
      if (p.rows == 64) {
        const uint32_t at = merge + (threadIdx.x & 127) * 16;
        if (half == 1) {
#pragma unroll
          for (int q = 0; q < kFeatures / 8; ++q) {
            const float* s = &sum[q * 8 / kB][q * 8 % kB / 2];
            StoreShared4(at + q * 2048, make_uint4(__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]),
                                                   __float_as_uint(s[3])));
          }
          NamedBarrier(1, 256);
        } else {
          NamedBarrier(1, 256);
#pragma unroll
          for (int q = 0; q < kFeatures / 8; ++q) {
            float* s = &sum[q * 8 / kB][q * 8 % kB / 2];
            const uint4 v = LoadShared4(at + q * 2048);
            s[0] += __uint_as_float(v.x), s[1] += __uint_as_float(v.y);
            s[2] += __uint_as_float(v.z), s[3] += __uint_as_float(v.w);
          }
          Close(p, sum, tile_row, group, t, first, group_end);
        }
        NamedBarrier(1, 256);
      } else {
        Close(p, sum, tile_row, group, t, first, group_end);
      }
      t = stop;
      if (t == (tile_row + 1) * p.stages)
        ++tile_row, group = 0;
      else
        ++group;
    }
  }

  // What becomes of a warpgroup's sums of stages [t, ...) of a tile whose stages are [first, end).
  static __device__ __forceinline__ void Close(const SmallParams& p, float (&sum)[kColumns][kB / 2], int tile_row,
                                               int group, int t, int first, int end) {
    constexpr int kQuads = kFeatures / 8;
    const int lane = threadIdx.x & 31, warp = p.rows == 64 ? threadIdx.x / 32 & 3 : threadIdx.x / 32;
    const int tile = tile_row * p.groups + group;
    auto place = [&](int block) { return (int64_t(block + tile) * (p.rows / 16) + warp) * kQuads * 32 + lane; };
    if (t > first) {
      float4* to = reinterpret_cast<float4*>(p.partial) + place(Block(p));
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const float* s = &sum[q * 8 / kB][q * 8 % kB / 2];
        __stcg(to + q * 32, make_float4(s[0], s[1], s[2], s[3]));
      }
      __threadfence();
      __syncwarp();
      if (lane == 0) StoreRelease(p.flags + (Block(p) + tile) * 8 + warp, p.ticket);
      return;
    }
    for (int block = Block(p) + 1; block < p.blocks && SmallFirst(p, block) < end; ++block) {
      uint64_t* flag = p.flags + (block + tile) * 8 + warp;
      while (LoadAcquire(flag) != p.ticket) {
      }
      __syncwarp();
      const float4* from = reinterpret_cast<const float4*>(p.partial) + place(block);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        float* s = &sum[q * 8 / kB][q * 8 % kB / 2];
        const float4 more = __ldcg(from + q * 32);
        s[0] += more.x, s[1] += more.y, s[2] += more.z, s[3] += more.w;
      }
      if (lane == 0) *flag = 0;  // a graph may launch with the same ticket again
    }
    Write(p, sum, tile_row, group, warp);
  }

  static __device__ __forceinline__ void Write(const SmallParams& p, const float (&sum)[kColumns][kB / 2], int tile_row,
                                               int group, int warp) {
    const int lane = threadIdx.x & 31, n = tile_row * p.rows + warp * 16 + lane / 4;
    const int32_t* info = p.group + group * UnionPlan::kGroupWords;
    uint16_t* y = static_cast<uint16_t*>(p.y);
#pragma unroll
    for (int q = 0; q < kFeatures / 8; ++q) {
      const float* s = &sum[q * 8 / kB][q * 8 % kB / 2];
      const int start = info[2 + q / 8], feature = start + q % 8 * 8 + lane % 4 * 2;
      if (start < 0 || feature >= p.features) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (n + r * 8 >= p.batch) continue;
        const uint32_t both = Pack16<kHalf>(s[r * 2], s[r * 2 + 1]);
        if constexpr (kAxis0) {
          uint16_t* to = y + int64_t(feature) * p.batch + n + r * 8;
          to[0] = uint16_t(both);
          to[p.batch] = uint16_t(both >> 16);
        } else {
          *reinterpret_cast<uint32_t*>(y + int64_t(n + r * 8) * p.features + feature) = both;
        }
      }
    }
  }

  // Groups without a stage, which come last.
  static __device__ __forceinline__ void WriteZeros(const SmallParams& p) {
    const float zeros[kColumns][kB / 2] = {};
    for (int group = p.groups - 1 - blockIdx.x; group >= 0; group -= gridDim.x) {
      if (p.group[group * UnionPlan::kGroupWords + 1] != 0) break;
      for (int row = 0; row < p.row_tiles; ++row)
        for (int warp = threadIdx.x / 32; warp < p.rows / 16; warp += 8) Write(p, zeros, row, group, warp);
    }
  }
};

template <int kB, bool kHalf, bool kAxis0, bool kTransposed>
__global__ void __launch_bounds__(384, 1) SmallMatmul(const __grid_constant__ SmallParams p) {
#ifdef BLOCKSPARSE_SM90_CODE
  using Kernel = SmallKernel<kB, kHalf, kAxis0, kTransposed>;
  extern __shared__ char shared[];
  const uint32_t ring = (SharedAddress(shared) + 1023) & ~1023u, merge = ring + 2 * Kernel::kRing,
                 bars = merge + Kernel::kMerge;
  if (threadIdx.x < 2 * Kernel::kSlots) {
    BarrierInit(bars + threadIdx.x * Kernel::kSlotBytes, 1);
    BarrierInit(bars + threadIdx.x * Kernel::kSlotBytes + 8, 4);
    BarrierInitFence();
  }
  if (threadIdx.x == 256) {
    PrefetchMap(&p.x);
    PrefetchMap(&p.w);
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    RegistersDown<40>();
    const int half = threadIdx.x / 32 - 8;
    if (half < 2)
      Kernel::Produce(p, ring + half * Kernel::kRing, bars + half * Kernel::kSlots * Kernel::kSlotBytes, half);
  } else {
    RegistersUp<232>();
    const int half = threadIdx.x / 128;
    Kernel::Consume(p, bars + half * Kernel::kSlots * Kernel::kSlotBytes, merge, half);
    Kernel::WriteZeros(p);
  }
#endif
}

template <int kB, bool kHalf>
cudaError_t LaunchSmall(bool axis0, bool transposed, const SmallParams& p, cudaStream_t stream) {
  auto kernel = axis0 ? (transposed ? SmallMatmul<kB, kHalf, true, true> : SmallMatmul<kB, kHalf, true, false>)
                      : (transposed ? SmallMatmul<kB, kHalf, false, true> : SmallMatmul<kB, kHalf, false, false>);
  using Kernel = SmallKernel<kB, kHalf, false, false>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<p.blocks, Kernel::kThreads, Kernel::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace blocksparse::cuda::sm90
