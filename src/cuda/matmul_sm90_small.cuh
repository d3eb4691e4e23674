// Forward product and input gradient for small batches, blocks of 32, 64 and 128.
//
// What binds is reading the weights once, so every multiprocessor must read all the time: tiles are 64 batch entries by
// a group of the union plan (up to 192 output features), and the stages of a tile are split over the thread blocks of a
// cluster. Two thread blocks share a multiprocessor, each one warpgroup of products and one warp that loads. At the end
// every thread block of the cluster leaves its sums in shared memory and adds up one share of the columns over all of
// them, in order.
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
  static constexpr int kRing = 108 * 1024;
  static constexpr int kSharedBytes = kRing + 1024 + kSlots * kSlotBytes;
  static constexpr int kPitch = kFeatures + 8;  // floats from one batch entry's sums to the next
  static_assert(2 * (kSharedBytes + 1024) <= 233472 && 64 * kPitch * 4 <= kRing, "two thread blocks a multiprocessor");

  static constexpr uint32_t kXHigh = DescriptorHigh(kAxis0 ? 128 : kUnit * 2), kWHigh = DescriptorHigh(kUnit * 2);
  static constexpr int kXStep = kAxis0 ? 16 * 128 : 32, kWStep = kTransposed ? 32 : 16 * kUnit * 2;

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

  // As the union tiles' producer (matmul_sm90_union.cuh), for one part of one tile.
  static __device__ __forceinline__ void Produce(const SmallParams& p, uint32_t ring, uint32_t bars, int row, int first,
                                                 int stages) {
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
    const int32_t* record = p.stage + int64_t(first) * UnionPlan::kStageWords + (lane & 15);
    int fetched[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (i < stages) fetched[i] = record[i * UnionPlan::kStageWords];
    for (int base = 0; base < stages; base += kAhead)
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (base + i >= stages) break;
        const int word = fetched[i];
        if (base + i + kAhead < stages) fetched[i] = record[(base + i + kAhead) * UnionPlan::kStageWords];
        const uint32_t flags = __shfl_sync(~0u, word, 0);
        const int weights = flags >> 16 & 31, boxes = flags >> 24 & 3, units = kUnits == 1 || boxes == 0 ? 1 : 2;
        if (lane == issued % kSlots) begin = head;
        if (released == issued) tail = head;
        while (issued - released >= kSlots - 1) release();
        const uint32_t x = reserve(units * kUnitBytes), w = reserve(weights * kWeightBytes);
        const uint32_t full = bars + issued % kSlots * kSlotBytes;
        if (lane == 0) {
          StoreShared4(full + 16,
                       make_uint4(flags & 0x0fffffffu, DescriptorLow(x, 0), DescriptorLow(w, kUnit * 128), 0));
          BarrierArriveExpect(full, units * kUnitBytes + weights * kWeightBytes);
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
            TmaLoad(to, &p.w, 0, word * 64, full);
            TmaLoad(to + 8192, &p.w, 64, word * 64, full);
          }
        }
        ++issued;
      }
    while (released != issued) release();  // the ring is free again: the sums go there
  }

  static __device__ __forceinline__ void Consume(uint32_t ring, uint32_t bars, int stages) {
    const int lane = threadIdx.x & 31;
    float sum[kColumns][kB / 2];
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < kB / 2; ++e) sum[j][e] = 0.f;
    for (int s = 0; s < stages; ++s) {
      const uint32_t slot = bars + s % kSlots * kSlotBytes;
      BarrierWait(slot, s / kSlots & 1);
      const uint4 header = LoadShared4(slot + 16);
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
      if (lane == 0) BarrierArrive(slot + 8);
    }
    NamedBarrier(1, 160);  // with the producer, which has seen every stage return
    const int row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int f = 0; f < kFeatures / 8; ++f) {
      const float* s = &sum[f * 8 / kB][f * 8 % kB / 2];
      StoreSharedFloat2(ring + (row * kPitch + f * 8 + column) * 4, s[0], s[1]);
      StoreSharedFloat2(ring + ((row + 8) * kPitch + f * 8 + column) * 4, s[2], s[3]);
    }
  }

  // This thread block's share of the features, summed over the cluster, eight elements of y at a time.
  static __device__ __forceinline__ void Finish(const SmallParams& p, const int32_t* info, uint32_t ring, int row,
                                                int part) {
    constexpr int kOctets = kFeatures / 8;
    const int first = kOctets * part / p.split, octets = kOctets * (part + 1) / p.split - first;
    const int pieces =
        octets * 64;  // of 1 x 8 elements: axis 1, one entry and 8 features; axis 0, 8 entries, one feature
    for (int t = threadIdx.x; t < pieces; t += 160) {
      const int f = kAxis0 ? first * 8 + t / 8 : (first + t % octets) * 8, n = kAxis0 ? t % 8 * 8 : t / octets;
      const int start = info[2 + f / 64], feature = start + f % 64;
      if (start < 0 || feature >= p.features || row + n >= p.batch) continue;
      float sum[8] = {};
      for (int q = 0; q < p.split; ++q) {
        const uint32_t from = ClusterAddress(ring + (n * kPitch + f) * 4, q);
        if constexpr (kAxis0) {
#pragma unroll
          for (int e = 0; e < 8; ++e) sum[e] += LoadCluster(from + e * kPitch * 4);
        } else {
          const float4 a = LoadCluster4(from), b = LoadCluster4(from + 16);
          sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
          sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
        }
      }
      const int64_t at = kAxis0 ? int64_t(feature) * p.batch + row + n : int64_t(row + n) * p.features + feature;
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.y) + at) =
          make_uint4(Pack16<kHalf>(sum[0], sum[1]), Pack16<kHalf>(sum[2], sum[3]), Pack16<kHalf>(sum[4], sum[5]),
                     Pack16<kHalf>(sum[6], sum[7]));
    }
  }
};

template <int kB, bool kHalf, bool kAxis0, bool kTransposed>
__global__ void __launch_bounds__(160, 2) SmallMatmul(const __grid_constant__ SmallParams p) {
#ifdef BLOCKSPARSE_SM90_CODE
  using Kernel = SmallKernel<kB, kHalf, kAxis0, kTransposed>;
  extern __shared__ char shared[];
  const uint32_t ring = (SharedAddress(shared) + 1023) & ~1023u, bars = ring + Kernel::kRing;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Kernel::kSlots; ++i) {
      BarrierInit(bars + i * Kernel::kSlotBytes, 1);
      BarrierInit(bars + i * Kernel::kSlotBytes + 8, 4);
    }
    BarrierInitFence();
  }
  __syncthreads();
  const int part = blockIdx.x % p.split, tile = blockIdx.x / p.split, row = tile / p.groups * 64;
  const int32_t* info = p.group + tile % p.groups * UnionPlan::kGroupWords;
  const int begin = info[1] * part / p.split, stages = info[1] * (part + 1) / p.split - begin;
  if (threadIdx.x >= 128) {
    Kernel::Produce(p, ring, bars, row, info[0] + begin, stages);
    NamedBarrier(1, 160);
  } else {
    Kernel::Consume(ring, bars, stages);
  }
  __syncwarp();
  ClusterBarrier();
  Kernel::Finish(p, info, ring, row, part);
  __syncwarp();
  ClusterBarrier();  // no thread block leaves while others read its sums
#endif
}

template <int kB, bool kHalf>
cudaError_t LaunchSmall(bool axis0, bool transposed, const SmallParams& p, cudaStream_t stream) {
  auto kernel = axis0 ? (transposed ? SmallMatmul<kB, kHalf, true, true> : SmallMatmul<kB, kHalf, true, false>)
                      : (transposed ? SmallMatmul<kB, kHalf, false, true> : SmallMatmul<kB, kHalf, false, false>);
  constexpr int kBytes = SmallKernel<kB, kHalf, false, false>::kSharedBytes;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.groups * p.row_tiles * p.split);
  config.blockDim = dim3(160);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = p.split;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace blocksparse::cuda::sm90
