// Forward product and input gradient with blocks of 32, 64 and 128: union tiles.
//
// A tile is 256 batch entries by up to 192 output features (128 for blocks of 128): the largest that two warpgroups'
// accumulators hold, since what binds is bytes arriving at the multiprocessor. The tile
// visits the union of the input blocks that its output blocks need. The planner lists the visits as stages of one or two
// units (64 input features, or 32 for blocks of 32); a mask says which of the tile's output blocks each unit feeds.
//
// One warp produces: it takes the next tile, and for each stage reserves shared memory in a ring, writes a header and
// starts the copies. Activations and weights share the ring, each taking what it needs, so its depth follows the layout.
// The finished tile goes out through the same ring: the producer hands the consumers empty slots as if they were stages,
// they fill them, and another warp starts the stores and returns the slots once the copy engine has read them. So the
// next tile's loads and products run while the last one is being stored.
//
// With gates a block's product is made apart, scaled in float32 and added to the sums, for which tiles are narrower; a
// gate of 1 saves that, and blocks whose gate is 0 are left out by the producer.
#pragma once

#include <cstdint>

#include "cuda/arch/sm90.h"
#include "cuda/arch/sm90_wgmma.h"
#include "cuda/matmul_sm90_union.h"
#include "kernels/plan_sm90.h"

namespace blocksparse::cuda::sm90 {

template <int kB, bool kHalf, bool kAxis0, bool kTransposed, bool kGated>
struct UnionKernel {
  static constexpr int kUnit = kB < 64 ? kB : 64;  // input features per unit
  static constexpr int kUnits = kB == 32 ? 2 : 1;  // units per stage
  static constexpr int kColumns = kGated ? UnionPlan::GatedColumns(kB) : UnionPlan::Columns(kB);
  static constexpr int kChunks = kColumns * kB / 64;           // 64-feature pieces of the output tile
  static constexpr int kWide = kGated && kB == 128 ? 64 : kB;  // columns of one product
  using Sums = float[2][kColumns * kB / kWide][kWide / 2];     // of 64 rows each
  static constexpr int kRows = UnionPlan::kRows;
  static constexpr int kUnitBytes = kRows * kUnit * 2;
  static constexpr int kWeightBytes = kUnit * kB * 2;
  static constexpr int kChunkBytes = kRows * 64 * 2;
  static constexpr int kThreads = 384;
  static constexpr int kSlots = 16;
  static constexpr int kSlotBytes = kGated ? 80 : 64;  // full, empty and filled barrier, header at 32, gates at 48
  static_assert(!kGated || kUnits * kColumns * 4 <= kSlotBytes - 48);
  static constexpr int kHeaders = kSlots * kSlotBytes;
  static constexpr int kRing = (232448 - 1024 - kHeaders) / 1024 * 1024;
  static constexpr int kSharedBytes = kRing + 1024 + kHeaders;

  // Headers: x = kind. Stage: masks; y = activations, z = weights (descriptor low words). Store: y = shared address,
  // z = first batch entry, w = first feature or -1.
  static constexpr uint32_t kStore = 0x80000000u, kEnd = 0xc0000000u;

  // Activations: batch entries along M. Axis 1: rows of features, K-major. Axis 0: rows of 64 batch entries.
  static constexpr uint32_t kXHigh = DescriptorHigh(kAxis0 ? 128 : kUnit * 2);
  static constexpr int kXStep = kAxis0 ? 16 * 128 : 32;                 // bytes from one 16-deep slice to the next
  static constexpr int kXHalf = kAxis0 ? kUnit * 128 : 64 * kUnit * 2;  // bytes from one 64-entry slice to the next
  static constexpr uint32_t kWHigh = DescriptorHigh(kUnit * 2);
  static constexpr int kWStep = kTransposed ? 32 : 16 * kUnit * 2;

  // One unit against the output blocks of its mask. The branch around each block costs about 200 clocks of this
  // warpgroup, which the other's products hide.
  static __device__ __forceinline__ void Unit(Sums& sum, uint32_t mask, uint32_t x, uint32_t xhigh, uint32_t xhalf,
                                              uint32_t& w) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (kColumns == 1 || (mask >> j & 1)) {
#pragma unroll
        for (int k = 0; k < kUnit / 16; ++k)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            Wgmma<kB, kHalf>::template Add<kAxis0, !kTransposed>(sum[i][j],
                                                                 Descriptor(x + k * (kXStep >> 4) + i * xhalf, xhigh),
                                                                 Descriptor(w + k * (kWStep >> 4), kWHigh));
        w += kWeightBytes >> 4;
      }
    }
  }

  // The same with a gate for each block.
  static __device__ __forceinline__ void GatedUnit(Sums& sum, uint32_t mask, uint32_t x, uint32_t xhigh, uint32_t xhalf,
                                                   uint32_t& w, uint32_t& gates) {
    constexpr int kParts = kB / kWide;
    auto add = [&](float(&to)[kWide / 2], int i, int part, int k) {
      Wgmma<kWide, kHalf>::template Add<kAxis0, !kTransposed>(
          to, Descriptor(x + k * (kXStep >> 4) + i * xhalf, xhigh),
          Descriptor(w + k * (kWStep >> 4) + part * (8192 >> 4), kWHigh));
    };
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (kColumns == 1 || (mask >> j & 1)) {
        const float gate = __uint_as_float(__shfl_sync(~0u, LoadShared(gates), 0));
        if (kB < 128 && gate == 1.f) {  // blocks of 128 would spill registers
          WgmmaFence();
#pragma unroll
          for (int k = 0; k < kUnit / 16; ++k)
#pragma unroll
            for (int part = 0; part < kParts; ++part)
#pragma unroll
              for (int i = 0; i < 2; ++i) add(sum[i][j * kParts + part], i, part, k);
          WgmmaCommit();
          WgmmaWait<0>();
        } else {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            float apart[2][kWide / 2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
              for (int e = 0; e < kWide / 2; ++e) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(apart[i][e]));
            WgmmaFence();
#pragma unroll
            for (int k = 0; k < kUnit / 16; ++k)
#pragma unroll
              for (int i = 0; i < 2; ++i) add(apart[i], i, part, k);
            WgmmaCommit();
            WgmmaWait<0>();
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
              for (int e = 0; e < kWide / 2; ++e) {
                float& s = sum[i][j * kParts + part][e];
                s = fmaf(gate, apart[i][e], s);
              }
          }
        }
        w += kWeightBytes >> 4;
        gates += 4;
      }
    }
  }

  static __device__ __forceinline__ void Produce(const UnionParams& p, uint32_t ring, uint32_t bars) {
    const int lane = threadIdx.x & 31;
    uint32_t issued = 0, released = 0;  // stages
    uint32_t position = 0;              // in the ring
    uint32_t head = 0, tail = 0;        // bytes ever reserved; the same where the oldest stage in flight begins
    uint32_t begin = 0;                 // lane l: head where the stage in slot l began

    auto release = [&] {
      const uint32_t slot = released % kSlots;
      BarrierWait(bars + slot * kSlotBytes + 8, released / kSlots & 1);
      ++released;
      tail = __shfl_sync(~0u, begin, released % kSlots);
    };
    auto open = [&] {
      if (lane == issued % kSlots) begin = head;
      if (released == issued) tail = head;
      while (issued - released >= kSlots - 1) release();
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

    const uint32_t tiles = uint32_t(p.groups) * p.row_tiles;
    uint32_t tile = blockIdx.x;
    while (tile < tiles) {
      // Heavy groups first, over the whole batch; the rest group by group, so that one stretch of activations serves
      // all of them while it is in L2.
      uint32_t group, row_tile;
      if (tile < uint32_t(p.heavy) * p.row_tiles) {
        group = tile / p.row_tiles;
        row_tile = tile % p.row_tiles;
      } else {
        const uint32_t rest = tile - p.heavy * p.row_tiles, light = p.groups - p.heavy;
        const uint32_t stretch = rest / (light * p.together), at = rest - stretch * light * p.together;
        const uint32_t rows = min(uint32_t(p.together), p.row_tiles - stretch * p.together);
        group = p.heavy + at / rows;
        row_tile = stretch * p.together + at % rows;
      }
      const int32_t* info = p.group + group * UnionPlan::kGroupWords;
      const int stages = info[1], row = row_tile * kRows;

      // A record a stage, two to a load, read well ahead: lanes 0-15 hold the even one.
      constexpr int kAhead = 3;
      const int32_t* record = p.stage + int64_t(info[0]) * UnionPlan::kStageWords + lane;
      int fetched[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (2 * i < stages) fetched[i] = record[i * 32];
      // Gates of the blocks in this lane's word of a record, read one pair of records ahead.
      float gates[kAhead];
      auto fetch_gates = [&](int i) {
        const int at = lane & 15;
        gates[i] = at >= 3 && at < 15 ? p.gate[kB == 128 ? fetched[i] >> 1 : fetched[i]] : 0.f;
      };
      if constexpr (kGated)
        if (stages > 0) fetch_gates(0);
      for (int base = 0; base < stages; base += 2 * kAhead)
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (base + 2 * i >= stages) break;
          const int both = fetched[i];
          if (base + 2 * (i + kAhead) < stages) fetched[i] = record[(base / 2 + i + kAhead) * 32];
          if constexpr (kGated)
            if (base + 2 * (i + 1) < stages) fetch_gates((i + 1) % kAhead);
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            if (base + 2 * i + odd >= stages) break;
            const int word = odd ? __shfl_down_sync(~0u, both, 16) : both;  // of lane 0-15
            uint32_t flags = __shfl_sync(~0u, word, 0);
            int weights = flags >> 16 & 31, place = lane - 3;  // of this lane's block among the stage's
            const int boxes = flags >> 24 & 3, units = kUnits == 1 || boxes == 0 ? 1 : 2;
            bool mine = lane >= 3 && lane < 3 + weights;
            float gate = 1.f;
            if constexpr (kGated) {
              gate = odd ? __shfl_down_sync(~0u, gates[i], 16) : gates[i];
              mine = mine && gate != 0.f;
              const uint32_t open_gates = __ballot_sync(~0u, mine) >> 3;
              if (open_gates == 0) continue;
              uint32_t left = flags & 0xffff, mask = 0;
              for (int b = 0; b < weights; ++b) {
                const uint32_t bit = left & (0u - left);
                left ^= bit;
                if (open_gates >> b & 1) mask |= bit;
              }
              flags = (flags & 0xffff0000u) | mask;
              weights = __popc(open_gates);
              if (mine) place = __popc(open_gates & ((1u << (lane - 3)) - 1));
            }
            open();
            const uint32_t x = reserve(units * kUnitBytes), w = reserve(weights * kWeightBytes);
            const uint32_t full = bars + issued % kSlots * kSlotBytes;
            if constexpr (kGated) {
              if (mine) StoreShared(full + 48 + place * 4, __float_as_uint(gate));
              __syncwarp();
            }
            if (lane == 0) {
              StoreShared4(full + 32, make_uint4(flags & 0x0fffffffu, x >> 4, DescriptorLow(w, kUnit * 128), 0));
              BarrierArriveExpect(full, units * kUnitBytes + weights * kWeightBytes);
            }
            __syncwarp();
            if constexpr (kAxis0) {
              if (p.chunked) {
                if (lane >= 1 && lane <= units) TmaLoad3(x + (lane - 1) * kUnitBytes, &p.x, 0, word, row / 64, full);
              } else if (lane >= 1 && lane <= units)
#pragma unroll
                for (int c = 0; c < kRows / 64; ++c)
                  TmaLoad(x + (lane - 1) * kUnitBytes + c * kUnit * 128, &p.x, row + c * 64, word, full);
            } else {
              if (kUnits == 2 && boxes == 1) {
                if (lane == 1) TmaLoad(x, &p.x_wide, word, row, full);
              } else if (lane >= 1 && lane <= units) {
                TmaLoad(x + (lane - 1) * kUnitBytes, &p.x, word, row, full);
              }
            }
            if (mine) {
              const uint32_t to = w + place * kWeightBytes;
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
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int feature = info[2 + c];
        open();
        const uint32_t at = reserve(kChunkBytes), full = bars + issued % kSlots * kSlotBytes;
        if (lane == 0) {
          StoreShared4(full + 32, make_uint4(kStore, at, row, feature));
          BarrierArrive(full);
        }
        __syncwarp();
        ++issued;
      }
      if (p.counter == nullptr) break;
      if (lane == 0) tile = gridDim.x + atomicAdd(p.counter, 1u);
      tile = __shfl_sync(~0u, tile, 0);
    }
    open();
    if (lane == 0) {
      const uint32_t full = bars + issued % kSlots * kSlotBytes;
      StoreShared4(full + 32, make_uint4(kEnd, 0, 0, 0));
      BarrierArrive(full);
    }
  }

  // One 64-feature piece of the tile's output into shared memory.
  static __device__ __forceinline__ void Fill(const Sums& sum, int chunk, uint32_t at) {
    const uint32_t thread = ThreadAnew(), lane = thread & 31, warp = thread >> 5 & 3, group = thread >> 7;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t base = at + (group * 2 + i) * 8192;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        uint32_t r[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {  // features 16 q + 8 (e / 2), batch entries 8 (e % 2)
          const int feature = chunk * 64 + q * 16 + (e >> 1) * 8;
          const float* s = &sum[i][feature / kWide][feature % kWide / 2 + (e & 1) * 2];
          r[e] = Pack16<kHalf>(s[0], s[1]);
        }
        uint32_t line, column;  // of 16 bytes in rows of 128
        if constexpr (kAxis0) {
          line = q * 16 + (lane >> 4) * 8 + (lane & 7);
          column = warp * 2 + (lane >> 3 & 1);
        } else {
          line = warp * 16 + (lane & 15);
          column = q * 2 + (lane >> 4);
        }
        StoreMatrix4<kAxis0>(base + line * 128 + ((column ^ (line & 7)) << 4), r[0], r[1], r[2], r[3]);
      }
    }
    FenceProxyAsync();
  }

  // Walks all stages, since slots return in order; acts on those that hold output.
  static __device__ __forceinline__ void Store(const UnionParams& p, uint32_t bars) {
    const int lane = threadIdx.x & 31;
    uint32_t slot = 0, parity = 0;
    uint32_t filled = 0;  // bit s: parity of the filled barrier of slot s, which only stages that hold output complete
    for (;;) {
      const uint32_t full = bars + slot * kSlotBytes;
      BarrierWait(full, parity);
      const uint4 header = LoadShared4(full + 32);
      if (header.x == kEnd) break;
      if (header.x == kStore) {
        BarrierWait(full + 16, filled >> slot & 1);
        filled ^= 1u << slot;
        if (lane == 0) {
          if (int(header.w) >= 0) {
            if constexpr (kAxis0) {
              if (p.chunked)
                TmaStore3(&p.y, 0, header.w, header.z / 64, header.y);
              else
#pragma unroll
                for (int c = 0; c < kRows / 64; ++c) TmaStore(&p.y, header.z + c * 64, header.w, header.y + c * 8192);
            } else {
              TmaStore(&p.y, header.w, header.z, header.y);
            }
          }
          TmaStoreCommit();
          TmaStoreWaitRead<0>();
        }
      }
      __syncwarp();
      if (lane == 0) BarrierArrive(full + 8);
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
  }

  static __device__ __forceinline__ void Consume(uint32_t bars) {
    const int lane = threadIdx.x & 31, group = threadIdx.x >> 7;
    uint32_t slot = 0, parity = 0;

    auto advance = [&] {
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    };
    auto receive = [&] {
      BarrierWait(bars + slot * kSlotBytes, parity);
      return LoadShared4(bars + slot * kSlotBytes + 32);
    };

    for (;;) {
      uint4 header = receive();
      uint32_t flags = __shfl_sync(~0u, header.x, 0);
      if (flags == kEnd) break;
      Sums sum;
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < kColumns * kB / kWide; ++j)
#pragma unroll
          for (int e = 0; e < kWide / 2; ++e) sum[i][j][e] = 0.f;

      while (flags < kStore) {
        uint32_t x = __shfl_sync(~0u, header.y, 0), w = __shfl_sync(~0u, header.z, 0);
        [[maybe_unused]] uint32_t gates = bars + slot * kSlotBytes + 48;
        auto unit = [&](uint32_t mask, uint32_t x, uint32_t high, uint32_t half) {
          if constexpr (kGated)
            GatedUnit(sum, mask, x, high, half, w, gates);
          else
            Unit(sum, mask, x, high, half, w);
        };
        WgmmaFence();
        if constexpr (kUnits == 1) {
          unit(flags, x + group * (kXHalf >> 3), kXHigh, kXHalf >> 4);
        } else {
          const bool wide = !kAxis0 && (flags >> 24 & 3) == 1;
          const uint32_t half = wide ? 64 * 128 >> 4 : kXHalf >> 4, high = wide ? DescriptorHigh(128) : kXHigh;
          x += group * 2 * half;
          unit(flags & 0xff, x, high, half);
          unit(flags >> 8 & 0xff, x + (wide ? 64 >> 4 : kUnitBytes >> 4), high, half);
        }
        WgmmaCommit();
        // Waiting here costs nothing: the other warpgroup's products fill the gap.
        WgmmaWait<0>();
        __syncwarp();
        if (lane == 0) BarrierArrive(bars + slot * kSlotBytes + 8);
        advance();
        header = receive();
        flags = __shfl_sync(~0u, header.x, 0);
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (c > 0) header = receive();
        Fill(sum, c, header.y);
        __syncwarp();
        if (lane == 0) {
          BarrierArrive(bars + slot * kSlotBytes + 16);
          BarrierArrive(bars + slot * kSlotBytes + 8);
        }
        advance();
      }
    }
  }
};

template <int kB, bool kHalf, bool kAxis0, bool kTransposed, bool kGated>
__global__ void __launch_bounds__(384, 1) UnionMatmul(const __grid_constant__ UnionParams p) {
#ifdef BLOCKSPARSE_SM90_CODE
  using Kernel = UnionKernel<kB, kHalf, kAxis0, kTransposed, kGated>;
  extern __shared__ char shared[];
  const uint32_t ring = (SharedAddress(shared) + 1023) & ~1023u, bars = ring + Kernel::kRing;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Kernel::kSlots; ++i) {
      BarrierInit(bars + i * Kernel::kSlotBytes, 1);
      BarrierInit(bars + i * Kernel::kSlotBytes + 8, 9);
      BarrierInit(bars + i * Kernel::kSlotBytes + 16, 8);
    }
    BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    RegistersDown<56>();
    if (threadIdx.x < 288)
      Kernel::Produce(p, ring, bars);
    else if (threadIdx.x < 320)
      Kernel::Store(p, bars);
  } else {
    RegistersUp<224>();
    Kernel::Consume(bars);
  }
#endif
}

template <int kB, bool kHalf, bool kGated>
cudaError_t LaunchUnion(bool axis0, bool transposed, const UnionParams& p, int grid, cudaStream_t stream) {
  auto kernel =
      axis0 ? (transposed ? UnionMatmul<kB, kHalf, true, true, kGated> : UnionMatmul<kB, kHalf, true, false, kGated>)
            : (transposed ? UnionMatmul<kB, kHalf, false, true, kGated> : UnionMatmul<kB, kHalf, false, false, kGated>);
  using Kernel = UnionKernel<kB, kHalf, false, false, kGated>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<grid, Kernel::kThreads, Kernel::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace blocksparse::cuda::sm90
