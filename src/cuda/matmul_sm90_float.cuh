// Forward product and input gradient of float32, by TF32 products or, exact, by products of bfloat16 pieces: union tiles
// as in matmul_sm90_union.cuh, over operands that matmul_sm90_float_prepare.cu has laid out.
//
// Exact: x = x1 + x2 + x3 and w = w1 + w2 + w3, each piece the bfloat16 nearest to what is left; of the nine products the
// six that count are summed, the small ones first. The matrix units cut what they add, so no sum of theirs runs on: each
// slice of 16 features starts anew, ends with x1 w1, and is added to the total in ordinary, rounded arithmetic.
#pragma once

#include <cstdint>

#include "cuda/arch/sm90.h"
#include "cuda/arch/sm90_wgmma_float.h"
#include "cuda/matmul_sm90_float.h"
#include "kernels/plan_sm90.h"

namespace blocksparse::cuda::sm90 {

template <int kB, bool kExact>
struct FloatKernel {
  static constexpr int kPlanes = Planes(kExact);
  static constexpr int kStep = FloatStep(kExact, kB);  // input features of a step
  // Steps of a record of the plan, which has 64 features, or two units of 32.
  static constexpr int kSteps = kB == 32 ? 2 : (kB < 64 ? kB : 64) / kStep;
  static constexpr int kColumns = UnionPlan::Columns(kB);
  // Blocks of 16 are little work: two records make one step.
  static constexpr int kPair = kB == 16 ? 2 : 1;
  static constexpr int kChunks = kColumns * kB / 32;  // 32-feature pieces of the output tile
  static constexpr int kGroups = FloatGroups(kExact, kB), kRows = FloatRows(kExact, kB);
  static constexpr int kHalves = kRows / (64 * kGroups);  // 64-row products of a warpgroup
  static constexpr int kParts = kGroups == 2 ? 2 : 1;     // sums of slices on their way
  static constexpr int kLine = kStep * PieceBytes(kExact);
  static constexpr int kXPlane = kRows * kLine, kXBytes = kPlanes * kXPlane;
  static constexpr int kWPlane = kB * kLine, kWBytes = kPlanes * kWPlane;
  static constexpr int kChunkBytes = kRows * 128;
  static constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 128;
  static constexpr int kSlots = 16;
  static constexpr int kSlotBytes = 64;  // full, empty and filled barrier, header
  static constexpr int kHeaders = kSlots * kSlotBytes;
  static constexpr int kRing = (232448 - 1024 - kHeaders) / 1024 * 1024;
  static constexpr int kSharedBytes = kRing + 1024 + kHeaders;
  static constexpr uint32_t kHigh = DescriptorHigh(kLine);

  // Headers: x = kind. Step: mask; y = activations, z = weights (shared addresses / 16). Store: y = shared address, z =
  // first batch entry, w = first feature or -1.
  static constexpr uint32_t kStore = 0x80000000u, kEnd = 0xc0000000u;

  static __device__ __forceinline__ void Produce(const FloatParams& p, uint32_t ring, uint32_t bars) {
    const int lane = threadIdx.x & 31;
    uint32_t issued = 0, released = 0;  // steps
    uint32_t position = 0;              // in the ring
    uint32_t head = 0, tail = 0;        // bytes ever reserved; the same where the oldest step in flight begins
    uint32_t begin = 0;                 // lane l: head where the step in slot l began

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
      bytes = (bytes + 1023) & ~1023u;
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
      // Heavy groups first, over the whole batch. The rest in bands of some rows, each group over a whole band, so that its
      // weights, which as a whole are larger than the L2 cache, serve the band.
      uint32_t group, row_tile;
      if (tile < uint32_t(p.heavy) * p.row_tiles) {
        group = tile / p.row_tiles;
        row_tile = tile % p.row_tiles;
      } else {
        const uint32_t rest = tile - p.heavy * p.row_tiles, light = p.groups - p.heavy, band = rest / (light * p.band);
        const uint32_t rows = min(uint32_t(p.band), p.row_tiles - band * p.band), within = rest - band * light * p.band;
        group = p.heavy + within / rows;
        row_tile = band * p.band + within % rows;
      }
      const int32_t* info = p.group + group * UnionPlan::kGroupWords;
      const int stages = info[1], row = row_tile * kRows;
      const int32_t* record = p.stage + int64_t(info[0]) * UnionPlan::kStageWords + (lane & 15);
      constexpr int kAhead = 4;  // records read before they are needed
      int fetched[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (i < stages) fetched[i] = record[i * UnionPlan::kStageWords];
      for (int base = 0; base < stages; base += kAhead)
#pragma unroll
        for (int i = 0; i < kAhead; i += kPair) {
          if (base + i >= stages) break;
          const int word = fetched[i], second = kPair == 2 && base + i + 1 < stages ? fetched[i + 1] : 0;
#pragma unroll
          for (int j = i; j < i + kPair; ++j)
            if (base + j + kAhead < stages) fetched[j] = record[int64_t(base + j + kAhead) * UnionPlan::kStageWords];
          const uint32_t flags = __shfl_sync(~0u, word, 0);
          int first_piece = 3;
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            const int unit = kB == 32 ? s : 0, skip = kB == 32 ? 0 : s * kStep;
            uint32_t mask = kB == 32 ? flags >> 8 * unit & 0xff : flags & 0xffff;
            int weights = __popc(mask), units = 1;
            if (weights == 0) break;
            int feature = __shfl_sync(~0u, word, 1 + unit) + skip;          // lane l: of unit l
            int piece = __shfl_sync(~0u, word, (first_piece + lane) & 15);  // lane l: block of weight l
            if constexpr (kB == 32) first_piece += weights;
            if constexpr (kPair == 2) {
              const uint32_t more = __shfl_sync(~0u, second, 0) & 0xfff;
              const int feature1 = __shfl_sync(~0u, second, 1);
              const int piece1 = __shfl_sync(~0u, second, (first_piece + lane - weights) & 15);
              if (lane >= 1) feature = feature1;
              if (lane >= weights) piece = piece1;
              mask |= more << kColumns;
              weights += __popc(more);
              units += more != 0;
            }
            open();
            const uint32_t x = reserve(units * kXBytes), w = reserve(weights * kWBytes);
            const uint32_t full = bars + issued % kSlots * kSlotBytes;
            if (lane == 0) {
              StoreShared4(full + 32, make_uint4(mask, x >> 4, w >> 4, 0));
              BarrierArriveExpect(full, units * kXBytes + weights * kWBytes);
            }
            __syncwarp();
            if (lane < units * kPlanes)
              TmaLoad(x + lane * kXPlane, &p.x, feature, lane % kPlanes * p.x_plane + row, full);
            for (int from = 0; from < weights * kPlanes; from += 32) {
              const int l = from + lane, plane = l / weights, which = l % weights;
              const int block = __shfl_sync(~0u, piece, which);
              if (l < weights * kPlanes)
                TmaLoad(w + which * kWBytes + plane * kWPlane, &p.w, (kB == 128 ? (block & 1) * 64 : 0) + skip,
                        plane * p.w_plane + (kB == 128 ? block >> 1 : block) * kB, full);
            }
            ++issued;
          }
        }
#pragma unroll 1
      for (int c = 0; c < kChunks; ++c) {
        const int feature = info[2 + c / 2];
        open();
        const uint32_t at = reserve(kChunkBytes), full = bars + issued % kSlots * kSlotBytes;
        if (lane == 0) {
          StoreShared4(full + 32, make_uint4(kStore, at, row, feature < 0 ? -1 : feature + c % 2 * 32));
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

  // Walks all steps, since slots return in order; acts on those that hold output.
  static __device__ __forceinline__ void Store(const FloatParams& p, uint32_t bars) {
    const int lane = threadIdx.x & 31;
    uint32_t slot = 0, parity = 0;
    uint32_t filled = 0;  // bit s: parity of the filled barrier of slot s, which only steps that hold output complete
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
            if (p.axis0) {
#pragma unroll
              for (int c = 0; c < kRows / 32; ++c) TmaStore(&p.y, header.z + c * 32, header.w, header.y + c * 4096);
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

  // One 32-feature piece of the tile's output into shared memory. Axis 0: boxes of 32 batch entries, one after another.
  static __device__ __forceinline__ void Fill(const FloatParams& p, const float (&sum)[kHalves][kColumns][kB / 2],
                                              int chunk, uint32_t at) {
    const uint32_t thread = ThreadAnew(), lane = thread & 31, warp = thread >> 5 & 3, group = thread >> 7;
    bool odd = false;
#pragma unroll
    for (int i = 0; i < kHalves; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int feature = chunk * 32 + q * 8;
          const float* s = &sum[i][feature / kB][feature % kB / 2 + r * 2];
          const uint32_t row = (group * kHalves + i) * 64 + warp * 16 + (lane >> 2) + r * 8;
          if (p.axis0) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const uint32_t line = q * 8 + (lane & 3) * 2 + e, column = row % 32 / 4;
              StoreShared(at + row / 32 * 4096 + line * 128 + ((column ^ (line & 7)) << 4) + row % 4 * 4,
                          __float_as_uint(s[e]));
            }
          } else {
            const uint32_t column = q * 2 + (lane >> 1 & 1);
            StoreShared2(at + row * 128 + ((column ^ (row & 7)) << 4) + (lane & 1) * 8, __float_as_uint(s[0]),
                         __float_as_uint(s[1]));
          }
          if constexpr (kExact) odd |= OddFloat(s[0]) || OddFloat(s[1]);
        }
    if (kExact && odd) *p.odd = 1;
    FenceProxyAsync();
  }

  static __device__ __forceinline__ void Multiply(float (&sum)[kHalves][kColumns][kB / 2], uint32_t mask, uint32_t x,
                                                  uint32_t w) {
    if constexpr (!kExact) {
      WgmmaFence();
#pragma unroll
      for (int u = 0; u < kPair; ++u)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          if (kColumns == 1 || (mask >> (u * kColumns + j) & 1)) {
#pragma unroll
            for (int k = 0; k < kStep / 8; ++k)
#pragma unroll
              for (int i = 0; i < kHalves; ++i)
                WgmmaFloat<kB>::AddTf32(sum[i][j],
                                        Descriptor(x + (u * kXBytes >> 4) + k * 2 + i * (64 * kLine >> 4), kHigh),
                                        Descriptor(w + k * 2, kHigh));
            w += kWBytes >> 4;
          }
        }
      WgmmaCommit();
      WgmmaWait<0>();
    } else {
      constexpr int kX = kXPlane >> 4, kW = kWPlane >> 4, kSlices = kStep / 16;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (kColumns == 1 || (mask >> j & 1)) {
          float part[kParts][kB / 2];
#pragma unroll
          for (int k = 0; k < kSlices + kParts - 1; ++k) {
            if (k < kSlices) {
              const uint32_t a = x + k * 2, b = w + k * 2;
              float(&to)[kB / 2] = part[k % kParts];
              auto add = [&](int i, int l) {
                WgmmaFloat<kB>::Add(to, Descriptor(a + i * kX, kHigh), Descriptor(b + l * kW, kHigh));
              };
              WgmmaFence();
              WgmmaFloat<kB>::Set(to, Descriptor(a + 2 * kX, kHigh), Descriptor(b, kHigh));
              add(0, 2), add(1, 1), add(1, 0), add(0, 1), add(0, 0);
              WgmmaCommit();
            }
            const int done = k - (kParts - 1);
            if (done >= 0) {
              if (kParts == 2 && k < kSlices)
                WgmmaWait<1>();
              else
                WgmmaWait<0>();
#pragma unroll
              for (int e = 0; e < kB / 2; ++e) sum[0][j][e] += part[done % kParts][e];
            }
          }
          w += kWBytes >> 4;
        }
      }
    }
  }

  static __device__ __forceinline__ void Consume(const FloatParams& p, uint32_t bars) {
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
      float sum[kHalves][kColumns][kB / 2];
#pragma unroll
      for (int i = 0; i < kHalves; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
          for (int e = 0; e < kB / 2; ++e) sum[i][j][e] = 0.f;
      while (flags < kStore) {
        const uint32_t x = __shfl_sync(~0u, header.y, 0), w = __shfl_sync(~0u, header.z, 0);
        Multiply(sum, flags, x + group * (kHalves * 64 * kLine >> 4), w);
        __syncwarp();
        if (lane == 0) BarrierArrive(bars + slot * kSlotBytes + 8);
        advance();
        header = receive();
        flags = __shfl_sync(~0u, header.x, 0);
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (c > 0) header = receive();
        Fill(p, sum, c, header.y);
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

template <int kB, bool kExact>
__global__ void __launch_bounds__(FloatKernel<kB, kExact>::kThreads, 1)
    FloatMatmul(const __grid_constant__ FloatParams p) {
#ifdef BLOCKSPARSE_SM90_CODE
  using Kernel = FloatKernel<kB, kExact>;
  extern __shared__ char shared[];
  const uint32_t ring = (SharedAddress(shared) + 1023) & ~1023u, bars = ring + Kernel::kRing;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Kernel::kSlots; ++i) {
      BarrierInit(bars + i * Kernel::kSlotBytes, 1);
      BarrierInit(bars + i * Kernel::kSlotBytes + 8, Kernel::kGroups * 4 + 1);
      BarrierInit(bars + i * Kernel::kSlotBytes + 16, Kernel::kGroups * 4);
    }
    BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x >= Kernel::kConsumers) {
    RegistersDown<56>();
    if (threadIdx.x < Kernel::kConsumers + 32)
      Kernel::Produce(p, ring, bars);
    else if (threadIdx.x < Kernel::kConsumers + 64)
      Kernel::Store(p, bars);
  } else {
    RegistersUp<Kernel::kGroups == 3 ? 152 : 224>();
    Kernel::Consume(p, bars);
  }
#endif
}

template <int kB, bool kExact>
cudaError_t LaunchFloat(const FloatParams& p, int grid, cudaStream_t stream) {
  constexpr int kBytes = FloatKernel<kB, kExact>::kSharedBytes;
  cudaError_t error =
      cudaFuncSetAttribute(FloatMatmul<kB, kExact>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  FloatMatmul<kB, kExact><<<grid, FloatKernel<kB, kExact>::kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace blocksparse::cuda::sm90
