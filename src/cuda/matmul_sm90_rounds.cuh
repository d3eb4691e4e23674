// Forward product and input gradient with blocks of 16: rounds.
//
// A block of 16 is one wgmma of 64 x 16 x 16 for each 64 batch entries: too little to branch around. So the products are
// straight-line code. A tile is 128 batch entries by 24 output blocks; a round is one product for each of the 24, and the
// planner decides which: it packs the tile's blocks into rounds, each block when its activations are in shared memory.
// Activations come in slabs of 64 features and stay for several stages (a window), which lets columns run ahead or catch
// up; the planner also chooses the order of the slabs, so that columns advance evenly and few slots stay empty. An empty
// slot multiplies zeros by zeros.
//
// Warps: two warpgroups of products; one that loads slabs and turns the plan's entries into descriptors; two that copy
// weights, in pieces too small for the copy engine; one that starts the stores of finished tiles.
#pragma once

#include <cstdint>

#include "cuda/arch/sm90.h"
#include "cuda/arch/sm90_wgmma.h"
#include "cuda/matmul_sm90_rounds.h"
#include "kernels/plan_sm90.h"

namespace blocksparse::cuda::sm90 {

template <bool kHalf, bool kAxis0, bool kTransposed>
struct RoundsKernel {
  using Plan = RoundsPlan;
  static constexpr int kB = 16, kColumns = Plan::kColumns, kRows = Plan::kRows;
  static constexpr int kSlabs = 10, kSlabBytes = kRows * 64 * 2;  // ring; also the output's pieces of 64 features
  static constexpr int kWeights = 96, kWeightBytes = kB * kB * 2;
  static constexpr int kZeroBytes = 8192;  // what one product of 64 rows may read
  static constexpr int kSlots = 8;
  static constexpr int kTableBytes = 2 * Plan::kRounds * kColumns * 8;  // descriptors, for either warpgroup
  static constexpr int kSlotBytes = 64;                                 // full, empty and filled barrier, header
  static constexpr int kTiles = 4;                                      // tile numbers on their way to the other warps
  static constexpr int kWeightsAt = kSlabs * kSlabBytes, kZeroAt = kWeightsAt + kWeights * kWeightBytes;
  static constexpr int kTableAt = kZeroAt + kZeroBytes, kBarsAt = kTableAt + kSlots * kTableBytes;
  static constexpr int kTilesAt = kBarsAt + kSlots * kSlotBytes;
  static constexpr int kSharedBytes = kTilesAt + kTiles * 16 + 1024;
  static_assert(kSharedBytes <= 232448, "shared memory of one thread block");

  // Headers: x = rounds, or one of these; y = shared address, z = first batch entry, w = first feature or -1.
  static constexpr uint32_t kStore = 0x80000000u, kEnd = 0xc0000000u;
  static constexpr uint32_t kXHigh = DescriptorHigh(128), kWHigh = DescriptorHigh(32);
  static constexpr int kXUnit = kAxis0 ? 16 * 128 : 32;  // bytes from one unit of 16 features to the next

  // The stages in flight, as one producing warp sees them: `mark` counts what is free again once a stage returns.
  struct Ring {
    uint32_t bars;
    uint32_t issued = 0, released = 0, free = 0, mark = 0;

    __device__ __forceinline__ void Release() {
      BarrierWait(bars + released % kSlots * kSlotBytes + 8, released / kSlots & 1);
      free = __shfl_sync(~0u, mark, released % kSlots);
      ++released;
    }
    // Waits until the stage's slot is there and what is in use stays within `capacity`.
    __device__ __forceinline__ uint32_t Open(uint32_t in_use, uint32_t capacity, uint32_t free_after) {
      while (issued - released >= kSlots) Release();
      while (in_use - free > capacity) Release();
      if ((threadIdx.x & 31) == issued % kSlots) mark = free_after;
      return bars + issued++ % kSlots * kSlotBytes;
    }
  };

  // Order of tiles: as the union tiles' (matmul_sm90_union.cuh).
  static __device__ __forceinline__ int GroupOf(const RoundsParams& p, uint32_t tile) {
    const uint32_t heavy = uint32_t(p.heavy) * p.row_tiles;
    return tile < heavy ? tile / p.row_tiles : p.heavy + (tile - heavy) % (p.groups - p.heavy);
  }
  static __device__ __forceinline__ int RowOf(const RoundsParams& p, uint32_t tile) {
    const uint32_t heavy = uint32_t(p.heavy) * p.row_tiles;
    return kRows * (tile < heavy ? tile % p.row_tiles : (tile - heavy) / (p.groups - p.heavy));
  }

  static __device__ __forceinline__ void ProduceSlabs(const RoundsParams& p, uint32_t shared) {
    const int lane = threadIdx.x & 31;
    Ring ring{shared + kBarsAt};
    uint32_t slabs = 0, slot = kSlabs - 1;  // loaded so far; where the last one lies
    uint32_t weight = 0;                    // position in the ring of weights
    uint32_t tiles_sent = 0;
    const uint32_t tiles = uint32_t(p.groups) * p.row_tiles;
    auto send = [&](uint32_t tile) {
      const uint32_t at = shared + kTilesAt + tiles_sent++ % kTiles * 16;
      if (lane == 0) {
        StoreShared(at + 8, tile);
        BarrierArrive(at);
      }
    };
    auto next_slot = [&] { slot = slot + 1 == kSlabs ? 0 : slot + 1; };

    uint32_t tile = blockIdx.x;
    while (tile < tiles) {
      uint32_t next = tile + gridDim.x;
      if (p.counter != nullptr) {
        if (lane == 0) next = gridDim.x + atomicAdd(p.counter, 1u);
        next = __shfl_sync(~0u, next, 0);
      }
      send(tile);
      const int group = GroupOf(p, tile), row = RowOf(p, tile);
      const int info = p.group[group * Plan::kGroupWords + (lane & 7)];
      const int first = __shfl_sync(~0u, info, 0), stages = __shfl_sync(~0u, info, 1);
      const int32_t* record = p.stage + int64_t(first) * Plan::kStageWords + lane;
      const uint32_t base = slabs;
      constexpr int kAhead = 2;
      int low[kAhead], high[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (i < stages)
          low[i] = record[i * Plan::kStageWords], high[i] = lane < 8 ? record[i * Plan::kStageWords + 32] : 0;
      for (int s = 0; s < stages; s += kAhead)
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (s + i >= stages) break;
          const int words = low[i], more = high[i];
          if (s + i + kAhead < stages) {
            const int32_t* r = record + int64_t(s + i + kAhead) * Plan::kStageWords;
            low[i] = r[0], high[i] = lane < 8 ? r[32] : 0;
          }
          const uint32_t flags = __shfl_sync(~0u, words, 0);
          const int fresh = flags & 15, rounds = flags >> 4 & 15, weights = flags >> 8;
          const uint32_t full = ring.Open(slabs + fresh, kSlabs, base + __shfl_sync(~0u, words, 3));
          slabs += fresh;
          uint32_t to = 0;  // lane l: where slab l goes
#pragma unroll
          for (int f = 0; f < 2; ++f)
            if (f < fresh) {
              next_slot();
              if (lane == f + 1) to = shared + slot * kSlabBytes;
            }
          const uint32_t table = shared + kTableAt + (ring.issued - 1) % kSlots * kTableBytes;
#pragma unroll
          for (int r = 0; r < Plan::kRounds; ++r) {
            const int at = 4 + (r * kColumns + lane) / 2;
            const int in_low = __shfl_sync(~0u, words, at & 31), in_high = __shfl_sync(~0u, more, at & 31);
            const uint32_t entry = uint32_t(at < 32 ? in_low : in_high) >> (lane & 1) * 16 & 0xffff;
            if (r < rounds && lane < kColumns) {
              uint32_t from = slot + kSlabs - (entry & 15), piece = weight + (entry >> 6);
              if (from >= kSlabs) from -= kSlabs;
              if (piece >= kWeights) piece -= kWeights;
              const uint32_t zero = (shared + kZeroAt) >> 4;
              uint32_t x = (shared + from * kSlabBytes + (entry >> 4 & 3) * kXUnit) >> 4, x1 = x + (8192 >> 4);
              uint32_t w = (shared + kWeightsAt + piece * kWeightBytes) >> 4;
              if (entry == 0xffff) x = x1 = w = zero;
              StoreShared2(table + (r * kColumns + lane) * 8, x, w);
              StoreShared2(table + kTableBytes / 2 + (r * kColumns + lane) * 8, x1, w);
            }
          }
          weight += weights;
          if (weight >= kWeights) weight -= kWeights;
          if (lane == 0) StoreShared(full + 32, rounds);
          __syncwarp();
          if (lane == 0) BarrierArriveExpect(full, fresh * kSlabBytes);
          __syncwarp();
          if (lane >= 1 && lane <= fresh) {
            if constexpr (kAxis0) {
              TmaLoad(to, &p.x, row, words, full);
              TmaLoad(to + 8192, &p.x, row + 64, words, full);
            } else {
              TmaLoad(to, &p.x, words, row, full);
            }
          }
        }
#pragma unroll
      for (int c = 0; c < kColumns / 4; ++c) {
        const int feature = __shfl_sync(~0u, info, 2 + c);
        const uint32_t full = ring.Open(slabs + 1, kSlabs, slabs + 1);
        ++slabs;
        next_slot();
        if (lane == 0) {
          StoreShared4(full + 32, make_uint4(kStore, shared + slot * kSlabBytes, row, feature));
          BarrierArrive(full);
        }
        __syncwarp();
      }
      tile = next;
    }
    send(~0u);
    const uint32_t full = ring.Open(slabs, kSlabs, slabs);
    if (lane == 0) {
      StoreShared4(full + 32, make_uint4(kEnd, 0, 0, 0));
      BarrierArrive(full);
    }
  }

  // Copies every second block of each stage.
  static __device__ __forceinline__ void ProduceWeights(const RoundsParams& p, uint32_t shared, int share) {
    const int lane = threadIdx.x & 31;
    Ring ring{shared + kBarsAt};
    uint32_t copied = 0, weight = 0;
    const uint32_t line = lane >> 1, to = shared + kWeightsAt + line * 32 + (((lane & 1) ^ (line >> 2 & 1)) << 4);
    const char* from = static_cast<const char*>(p.w) + lane * 16;
    for (uint32_t sent = 0;; ++sent) {
      const uint32_t mail = shared + kTilesAt + sent % kTiles * 16;
      BarrierWait(mail, sent / kTiles & 1);
      const uint32_t tile = LoadShared(mail + 8);
      if (tile == ~0u) break;
      const int group = GroupOf(p, tile);
      const int first = p.group[group * Plan::kGroupWords], stages = p.group[group * Plan::kGroupWords + 1];
      const int32_t* record = p.stage + int64_t(first) * Plan::kStageWords;
      uint32_t flags = 0;
      int next[3] = {};
      auto fetch = [&](int s) {
        const int32_t* r = record + int64_t(s) * Plan::kStageWords;
        flags = r[0];
        next[0] = r[Plan::kIds + lane];
        next[1] = r[Plan::kIds + 32 + lane];
        next[2] = lane < 8 ? r[Plan::kIds + 64 + lane] : 0;
      };
      if (stages > 0) fetch(0);
      for (int s = 0; s < stages; ++s) {
        const int weights = flags >> 8, ids[3] = {next[0], next[1], next[2]};
        if (s + 1 < stages) fetch(s + 1);
        const uint32_t full = ring.Open(copied + weights, kWeights, copied + weights);
        copied += weights;
#pragma unroll
        for (int q = 0; q < 3; ++q)
          for (int k = share; k < 32 && q * 32 + k < weights; k += 2) {
            const int id = __shfl_sync(~0u, ids[q], k);
            uint32_t piece = weight + q * 32 + k;
            if (piece >= kWeights) piece -= kWeights;
            CopyAsync16(to + piece * kWeightBytes, from + int64_t(id) * kWeightBytes);
          }
        weight += weights;
        if (weight >= kWeights) weight -= kWeights;
        BarrierArriveOnCopies(full);
      }
      for (int c = 0; c < kColumns / 4; ++c) BarrierArriveOnCopies(ring.Open(copied, kWeights, copied));
    }
    BarrierArriveOnCopies(ring.Open(copied, kWeights, copied));
    CopyAsyncWaitAll();
  }

  // As the union tiles' store (matmul_sm90_union.cuh).
  static __device__ __forceinline__ void Store(const RoundsParams& p, uint32_t shared) {
    const int lane = threadIdx.x & 31;
    uint32_t slot = 0, parity = 0, filled = 0;
    for (;;) {
      const uint32_t full = shared + kBarsAt + slot * kSlotBytes;
      BarrierWait(full, parity);
      const uint4 header = LoadShared4(full + 32);
      if (header.x == kEnd) break;
      if (header.x == kStore) {
        BarrierWait(full + 16, filled >> slot & 1);
        filled ^= 1u << slot;
        if (lane == 0) {
          if (int(header.w) >= 0) {
            if constexpr (kAxis0) {
              TmaStore(&p.y, header.z, header.w, header.y);
              TmaStore(&p.y, header.z + 64, header.w, header.y + 8192);
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

  static __device__ __forceinline__ void Fill(const float (&sum)[kColumns][kB / 2], int chunk, uint32_t at) {
    const uint32_t thread = ThreadAnew(), lane = thread & 31, warp = thread >> 5 & 3, group = thread >> 7;
    const uint32_t base = at + group * 8192;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float(&s)[kB / 2] = sum[chunk * 4 + q];
      uint32_t line, column;
      if constexpr (kAxis0) {
        line = q * 16 + (lane >> 4) * 8 + (lane & 7);
        column = warp * 2 + (lane >> 3 & 1);
      } else {
        line = warp * 16 + (lane & 15);
        column = q * 2 + (lane >> 4);
      }
      StoreMatrix4<kAxis0>(base + line * 128 + ((column ^ (line & 7)) << 4), Pack16<kHalf>(s[0], s[1]),
                           Pack16<kHalf>(s[2], s[3]), Pack16<kHalf>(s[4], s[5]), Pack16<kHalf>(s[6], s[7]));
    }
    FenceProxyAsync();
  }

  static __device__ __forceinline__ void Consume(uint32_t shared) {
    const int lane = threadIdx.x & 31, group = threadIdx.x >> 7;
    uint32_t slot = 0, parity = 0;
    const uint32_t bars = shared + kBarsAt, tables = shared + kTableAt + group * (kTableBytes / 2);
    auto advance = [&] {
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    };
    auto receive = [&] {
      BarrierWait(bars + slot * kSlotBytes, parity);
      return __shfl_sync(~0u, LoadShared(bars + slot * kSlotBytes + 32), 0);
    };

    for (;;) {
      uint32_t rounds = receive();
      if (rounds == kEnd) break;
      float sum[kColumns][kB / 2];
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int e = 0; e < kB / 2; ++e) sum[j][e] = 0.f;

      while (rounds < kStore) {
        uint32_t table = tables + slot * kTableBytes;
        FenceProxyAsync();  // weights were written by ordinary copies
        for (uint32_t r = 0; r < rounds; ++r, table += kColumns * 8) {
          constexpr int kAhead = 2;  // pairs of descriptors read before they are needed
          uint4 pair[kAhead + 1];
#pragma unroll
          for (int j = 0; j < kAhead; ++j) pair[j] = LoadShared4(table + j * 16);
          WgmmaFence();
#pragma unroll
          for (int j = 0; j < kColumns / 2; ++j) {
            if (j + kAhead < kColumns / 2) pair[(j + kAhead) % (kAhead + 1)] = LoadShared4(table + (j + kAhead) * 16);
            const uint4 d = pair[j % (kAhead + 1)];
            Wgmma<kB, kHalf>::template Add<kAxis0, !kTransposed>(sum[2 * j], Descriptor(d.x, kXHigh),
                                                                 Descriptor(d.y, kWHigh));
            Wgmma<kB, kHalf>::template Add<kAxis0, !kTransposed>(sum[2 * j + 1], Descriptor(d.z, kXHigh),
                                                                 Descriptor(d.w, kWHigh));
          }
          WgmmaCommit();
        }
        WgmmaWait<0>();
        __syncwarp();
        if (lane == 0) BarrierArrive(bars + slot * kSlotBytes + 8);
        advance();
        rounds = receive();
      }
#pragma unroll
      for (int c = 0; c < kColumns / 4; ++c) {
        if (c > 0) receive();
        Fill(sum, c, LoadShared(bars + slot * kSlotBytes + 36));
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

template <bool kHalf, bool kAxis0, bool kTransposed>
__global__ void __launch_bounds__(384, 1) Rounds(const __grid_constant__ RoundsParams p) {
#ifdef BLOCKSPARSE_SM90_CODE
  using Kernel = RoundsKernel<kHalf, kAxis0, kTransposed>;
  extern __shared__ char dynamic[];
  const uint32_t shared = (SharedAddress(dynamic) + 1023) & ~1023u;
  for (int i = threadIdx.x; i < Kernel::kZeroBytes / 16; i += 384)
    StoreShared4(shared + Kernel::kZeroAt + i * 16, make_uint4(0, 0, 0, 0));
  FenceProxyAsync();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Kernel::kSlots; ++i) {
      const uint32_t bar = shared + Kernel::kBarsAt + i * Kernel::kSlotBytes;
      BarrierInit(bar, 1 + 64);  // the loading warp and the copying warps' lanes
      BarrierInit(bar + 8, 9);
      BarrierInit(bar + 16, 8);
    }
    for (int i = 0; i < Kernel::kTiles; ++i) BarrierInit(shared + Kernel::kTilesAt + i * 16, 1);
    BarrierInitFence();
  }
  __syncthreads();
  const int warp = threadIdx.x >> 5;
  if (warp >= 8) {
    RegistersDown<56>();
    if (warp == 8)
      Kernel::ProduceSlabs(p, shared);
    else if (warp < 11)
      Kernel::ProduceWeights(p, shared, warp - 9);
    else
      Kernel::Store(p, shared);
  } else {
    RegistersUp<224>();
    Kernel::Consume(shared);
  }
#endif
}

template <bool kHalf>
cudaError_t LaunchRounds(bool axis0, bool transposed, const RoundsParams& p, int grid, cudaStream_t stream) {
  auto kernel = axis0 ? (transposed ? Rounds<kHalf, true, true> : Rounds<kHalf, true, false>)
                      : (transposed ? Rounds<kHalf, false, true> : Rounds<kHalf, false, false>);
  constexpr int kBytes = RoundsKernel<kHalf, false, false>::kSharedBytes;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<grid, 384, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace blocksparse::cuda::sm90
