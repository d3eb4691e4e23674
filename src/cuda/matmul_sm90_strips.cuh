// Forward product and input gradient for batches of up to 64, blocks of 8 to 64.
//
// What binds is reading the weights once, so that every multiprocessor must keep many copies under way, whatever the size
// of the blocks. A warp owns a strip of 16 output features and walks the strip's pieces of weights, 16 x 16 (of blocks of
// 8: four blocks of one column), on its own: it copies them into slots of its own, several ahead, and multiplies them by
// mma.sync; no barrier lies between the warps but those of the activations. Zeros are neither read nor multiplied.
//
// A cluster of four thread blocks has the same strips, each a quarter of the input features; activations come in slabs of
// 256 features, which all warps of a thread block share. At the end the four add their sums through distributed shared
// memory, in order. Where a layout has few strips, several warps (parts) share one.
#pragma once

#include <cstdint>

#include "cuda/arch/sm90.h"
#include "cuda/matmul_sm90_strips.h"
#include "kernels/plan_strips.h"

namespace blocksparse::cuda::sm90 {

template <bool kTranspose>
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t address) {
  if constexpr (kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

template <bool kHalf>
__device__ __forceinline__ void Mma16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kHalf)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void ClusterBarrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 16 bytes of the shared memory of the cluster's thread block `rank`.
__device__ __forceinline__ float4 LoadCluster4(uint32_t address, int rank) {
  float4 v;
  asm volatile(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(address), "r"(rank)
      : "memory");
  return v;
}

template <int kB, bool kHalf, bool kAxis0, bool kTransposed, int kM>
struct StripKernel {
  using Plan = StripPlan;
  static constexpr int kWarps = Plan::kWarps, kThreads = (kWarps + 1) * 32;
  static constexpr int kBoxBytes = kAxis0 ? 64 * 128 : kM * 16 * 128, kSlabBytes = Plan::kSlab / 64 * kBoxBytes;
  static constexpr int kSlabs = 4;  // in shared memory
  static constexpr int kSlots = 7;  // pieces of weights a warp has under way
  static constexpr int kSums = kWarps * kM * 2 * 512;
  static constexpr int kRing = kSlabs * kSlabBytes > kSums ? kSlabs* kSlabBytes : kSums;
  static constexpr int kPlaces = kRing + kWarps * kSlots * 512;  // what each slot's piece is for
  static constexpr int kZero = kPlaces + kWarps * 32, kBars = kZero + 16;
  static constexpr int kSharedBytes = 1024 + kBars + kSlabs * 16;
  static constexpr int kBlocks = Plan::Blocks(kB), kRecord = kBlocks + 1, kInLine = Plan::InLine(kB);
  static_assert(kSharedBytes <= 232448, "shared memory");

  static __device__ __forceinline__ int First(const StripParams& p, int rank) { return p.slabs * rank / 4; }

  static __device__ __forceinline__ void Produce(const StripParams& p, uint32_t ring, int rank) {
    const int first = First(p, rank), slabs = First(p, rank + 1) - first;
    for (int s = 0; s < slabs; ++s) {
      const uint32_t full = ring + kBars + s % kSlabs * 16;
      if (s >= kSlabs) BarrierWait(full + 8, s / kSlabs & 1 ^ 1);
      BarrierArriveExpect(full, Plan::kSlab / 64 * (kAxis0 ? kBoxBytes : p.box_rows * 128));
#pragma unroll
      for (int i = 0; i < Plan::kSlab / 64; ++i) {
        const int feature = (first + s) * Plan::kSlab + i * 64;
        TmaLoad(ring + s % kSlabs * kSlabBytes + i * kBoxBytes, &p.x, kAxis0 ? 0 : feature, kAxis0 ? feature : 0, full);
      }
    }
  }

  static __device__ __forceinline__ void Consume(const StripParams& p, uint32_t ring, int cluster, int rank) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, j = lane >> 3, r = lane & 7;
    const int slabs = First(p, rank + 1) - First(p, rank);
    const uint32_t slots = ring + kRing + warp * (kSlots * 512), bars = ring + kBars;
    const uint16_t* weights = static_cast<const uint16_t*>(p.weights);

    // The list of pieces, a line at a time, the next one already on its way.
    int line = p.lines[((cluster * 4 + rank) * kWarps + warp) * Plan::kLine + lane], next = 0;
    const int rest = __shfl_sync(~0u, line, 0), count = __shfl_sync(~0u, line, 1);
    const int32_t* coming = p.lines + int64_t(rest) * Plan::kLine + lane;
    if (count > kInLine) next = *coming;
    int issued = 0, in_line = 0, left = count - kInLine;  // left: beyond this line
    // Where this lane's 16 bytes lie in a piece, and in its slot.
    const int row = lane >> 1, half = lane & 1;
    const int skip = kB == 8 ? r * 8 : row * kB + half * 8;
    const uint32_t to = kB == 8 ? lane * 16 : row * 32 + ((half ^ (row >> 2 & 1)) << 4);
    const uint32_t places = ring + kPlaces + warp * 32;
    auto issue = [&](int s) {
      if (issued < count) {
        if (in_line == kInLine) {
          line = next;
          in_line = 0;
          left -= kInLine;
          coming += Plan::kLine;
          if (left > 0) next = *coming;
        }
        const int at = 2 + in_line * kRecord;
        const int id = __shfl_sync(~0u, line, at + (kB == 8 ? j : 0));
        if (lane == at + kBlocks) StoreShared(places + s * 4, line);
        const uint16_t* from = weights + int64_t(kB == 8 ? max(id, 0) * int64_t(4) : id) * 16 + skip;
        const uint32_t shared = slots + s * 512 + to;
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
                     "r"(kB > 8 || id >= 0 ? 16 : 0)
                     : "memory");
        ++issued;
        ++in_line;
      }
      CopyAsyncCommit();
    };
#pragma unroll 1
    for (int s = 0; s < kSlots; ++s) issue(s);
    int s = 0;  // the slot of the piece at hand

    float sum[kM][2][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[m][t][e] = 0.f;

    int slab = -1;
    uint32_t x = ring - kSlabBytes;
    auto advance = [&](int to_slab) {
      while (slab < to_slab) {
        __syncwarp();
        if (slab >= 0 && lane == 0) BarrierArrive(bars + slab % kSlabs * 16 + 8);
        ++slab;
        x = ring + slab % kSlabs * kSlabBytes;
        BarrierWait(bars + slab % kSlabs * 16, slab / kSlabs & 1);
      }
    };
    // Activations of 8 features, of this lane's half of 16 (f8: number of the 8 in the slab).
    auto activations = [&](uint32_t f8, int m, uint32_t(&a)[4]) {
      const uint32_t box = x + (f8 >> 3) * kBoxBytes;
      if constexpr (kAxis0)
        LoadMatrix4<true>(a, box + ((f8 & 7) * 8 + r) * 128 + (((m * 2 + (j & 1)) ^ r) << 4));
      else
        LoadMatrix4<false>(a, box + (m * 16 + (j & 1) * 8 + r) * 128 + (((f8 & 7) ^ r) << 4));
    };
    const uint32_t weights_at = kB == 8       ? lane * 16
                                : kTransposed ? ((j >> 1) * 8 + r) * 32 + (((j & 1) ^ (r >> 2)) << 4)
                                              : ((j & 1) * 8 + r) * 32 + (((j >> 1) ^ (r >> 2)) << 4);
#pragma unroll 1
    for (int done = 0; done < count; ++done) {
      CopyAsyncWait<kSlots - 1>();
      __syncwarp();
      const uint32_t where = LoadShared(places + s * 4);
      uint32_t w[4], a[4];
      LoadMatrix4<!kTransposed>(w, slots + s * 512 + weights_at);
      advance(where >> 25);
      if constexpr (kB == 8) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint32_t f8 = where >> ((step * 2 + (j >> 1)) * 6) & 63;
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            const uint32_t box = x + (f8 >> 3) * kBoxBytes;
            uint32_t from;
            if constexpr (kAxis0)
              from = box + ((f8 & 7) * 8 + r) * 128 + (((m * 2 + (j & 1)) ^ r) << 4);
            else
              from = box + (m * 16 + (j & 1) * 8 + r) * 128 + (((f8 & 7) ^ r) << 4);
            LoadMatrix4<kAxis0>(a, f8 & 32 ? ring + kZero : from);
            if (where >> 24 & 1)
              Mma16816<kHalf>(sum[m][1], a, w[step * 2], w[step * 2 + 1]);
            else
              Mma16816<kHalf>(sum[m][0], a, w[step * 2], w[step * 2 + 1]);
          }
        }
      } else {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          activations((where & 31) + (j >> 1), m, a);
          Mma16816<kHalf>(sum[m][0], a, w[0], w[1]);
          Mma16816<kHalf>(sum[m][1], a, w[2], w[3]);
        }
      }
      __syncwarp();
      issue(s);
      if (++s == kSlots) s = 0;
    }
    advance(slabs - 1);
    NamedBarrier(1, kWarps * 32);  // nobody reads activations any more: the sums take their place
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int t = 0; t < 2; ++t)
        StoreShared4(ring + (((warp * kM + m) * 2 + t) * 32 + lane) * 16,
                     make_uint4(__float_as_uint(sum[m][t][0]), __float_as_uint(sum[m][t][1]),
                                __float_as_uint(sum[m][t][2]), __float_as_uint(sum[m][t][3])));
  }

  // Each thread block adds up and writes every fourth unit, a strip's 16 batch entries.
  static __device__ __forceinline__ void Finish(const StripParams& p, uint32_t ring, int cluster, int rank) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, strips = kWarps / p.parts;
    for (int unit = warp * 4 + rank; unit < strips * kM; unit += kWarps * 4) {
      const int strip = unit / kM, m = unit % kM, feature0 = (cluster * strips + strip) * 16;
      if (feature0 >= p.features || m * 16 >= p.batch) continue;
      float sum[2][4] = {};
      for (int part = 0; part < p.parts; ++part)
#pragma unroll
        for (int from = 0; from < 4; ++from)
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            const int at = (((strip * p.parts + part) * kM + m) * 2 + t) * 32 + lane;
            const float4 v = LoadCluster4(ring + at * 16, from);
            sum[t][0] += v.x, sum[t][1] += v.y, sum[t][2] += v.z, sum[t][3] += v.w;
          }
      uint16_t* y = static_cast<uint16_t*>(p.y);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int feature = feature0 + t * 8 + lane % 4 * 2;
        if (feature >= p.features) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int n = m * 16 + lane / 4 + h * 8;
          if (n >= p.batch) continue;
          const uint32_t both = Pack16<kHalf>(sum[t][h * 2], sum[t][h * 2 + 1]);
          if constexpr (kAxis0) {
            y[int64_t(feature) * p.batch + n] = uint16_t(both);
            y[int64_t(feature + 1) * p.batch + n] = uint16_t(both >> 16);
          } else {
            *reinterpret_cast<uint32_t*>(y + int64_t(n) * p.features + feature) = both;
          }
        }
      }
    }
  }
};

template <int kB, bool kHalf, bool kAxis0, bool kTransposed, int kM>
__global__ void __launch_bounds__((StripPlan::kWarps + 1) * 32, 1) Strips(const __grid_constant__ StripParams p) {
#ifdef BLOCKSPARSE_SM90_CODE
  using Kernel = StripKernel<kB, kHalf, kAxis0, kTransposed, kM>;
  extern __shared__ char shared[];
  const int cluster = blockIdx.x / 4, rank = blockIdx.x % 4;
  // Aligned by address within the thread block: the same in all four.
  const uint32_t ring = (SharedAddress(shared) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Kernel::kSlabs; ++i) {
      BarrierInit(ring + Kernel::kBars + i * 16, 1);
      BarrierInit(ring + Kernel::kBars + i * 16 + 8, Kernel::kWarps);
    }
    BarrierInitFence();
    StoreShared4(ring + Kernel::kZero, make_uint4(0, 0, 0, 0));
  }
  __syncthreads();
  if (threadIdx.x < Kernel::kWarps * 32) {
    Kernel::Consume(p, ring, cluster, rank);
  } else {
    if (threadIdx.x == Kernel::kWarps * 32) Kernel::Produce(p, ring, rank);
    __syncwarp();
  }
  ClusterBarrier();
  if (threadIdx.x < Kernel::kWarps * 32) Kernel::Finish(p, ring, cluster, rank);
  ClusterBarrier();  // nobody leaves while others read
#endif
}

template <int kB, bool kHalf, bool kAxis0, bool kTransposed, int kM>
cudaError_t LaunchStrips(const StripParams& p, cudaStream_t stream) {
  using Kernel = StripKernel<kB, kHalf, kAxis0, kTransposed, kM>;
  auto kernel = Strips<kB, kHalf, kAxis0, kTransposed, kM>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.clusters * 4);
  config.blockDim = dim3(Kernel::kThreads);
  config.dynamicSmemBytes = Kernel::kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 4, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <int kB, bool kHalf>
cudaError_t LaunchStrips(bool axis0, bool transposed, const StripParams& p, cudaStream_t stream) {
  const bool few = p.batch <= 16;
  if (axis0)
    return transposed ? (few ? LaunchStrips<kB, kHalf, true, true, 1>(p, stream)
                             : LaunchStrips<kB, kHalf, true, true, 4>(p, stream))
                      : (few ? LaunchStrips<kB, kHalf, true, false, 1>(p, stream)
                             : LaunchStrips<kB, kHalf, true, false, 4>(p, stream));
  return transposed ? (few ? LaunchStrips<kB, kHalf, false, true, 1>(p, stream)
                           : LaunchStrips<kB, kHalf, false, true, 4>(p, stream))
                    : (few ? LaunchStrips<kB, kHalf, false, false, 1>(p, stream)
                           : LaunchStrips<kB, kHalf, false, false, 4>(p, stream));
}

}  // namespace blocksparse::cuda::sm90
