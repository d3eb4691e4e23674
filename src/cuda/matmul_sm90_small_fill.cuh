// Forward product and input gradient for small batches, blocks of 8 and 16: zero-filled tiles.
//
// Blocks this small leave the tensor cores idle one by one. So the weights of 64 input by 256 output features are laid
// out densely in shared memory, zeros where there is no block, and multiplied as they are: in batches of up to 64 the
// dense product takes about as long as reading a quarter of the weights. A place in shared memory is cleared only where
// the tile before left a block and this one has none. Output features lie along M, batch entries along N.
//
// Work is shared evenly as in matmul_sm90_small.cuh, but a second kernel adds up the sums, in order. Its launch is prepared
// while the first one runs.
#pragma once

#include <cstdint>

#include "cuda/arch/sm90.h"
#include "cuda/arch/sm90_wgmma.h"
#include "cuda/matmul_sm90_small.h"
#include "kernels/plan_sm90.h"

namespace blocksparse::cuda::sm90 {

template <int kB, bool kHalf, bool kAxis0, bool kTransposed>
struct FillKernel {
  static constexpr int kFeatures = FillPlan::kFeatures;
  static constexpr int kWeightBytes = kFeatures * 128, kXBytes = 64 * 128;
  static constexpr int kStageBytes = kWeightBytes + kXBytes, kStages = 5;
  static constexpr int kWarps = 8;             // that fill
  static constexpr int kLists = kStages * 16;  // after the barriers: for each warp two lists of places, a byte each
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kLists + kWarps * 64;
  static constexpr int kThreads = 256 + kWarps * 32;
  static constexpr int kIds = FillPlan::Ids(kB);     // of a stage
  static constexpr int kMine = kIds / kWarps;        // of a warp
  static constexpr int kPerCopy = kB == 16 ? 1 : 4;  // blocks that one copy instruction of a warp brings
  static_assert(kMine <= 32 && kSharedBytes <= 232448, "ids lie one a lane");

  static constexpr uint32_t kHigh = DescriptorHigh(128);
  static constexpr int kWStep = kTransposed ? 32 : 16 * 128, kXStep = kAxis0 ? 16 * 128 : 32;

  // Where row r, 16-byte piece q of a block lies in a tile. `unit` numbers the tile's places for blocks, those along the
  // output fastest.
  static __device__ __forceinline__ uint32_t Offset(uint32_t unit, uint32_t r, uint32_t q) {
    constexpr int kWide = kFeatures / kB, kPieces = kB / 8;
    const uint32_t in = unit / kWide, out = unit % kWide;
    if constexpr (kTransposed) {  // rows are output features, 64 to a chunk
      const uint32_t row = out * kB + r, piece = in * kPieces + q;
      return row * 128 + ((piece ^ (row & 7)) << 4);
    } else {  // rows are input features; chunks of 64 output features
      const uint32_t row = in * kB + r, piece = out * kPieces + q;
      return (piece >> 3) * 8192 + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
    }
  }

  static __device__ __forceinline__ void Produce(const SmallParams& p, uint32_t ring, uint32_t bars) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 - 8, end = SmallFirst(p, blockIdx.x + 1);
    const int first = SmallFirst(p, blockIdx.x);
    const uint16_t* weights = static_cast<const uint16_t*>(p.weights);
    // Where this lane's 16 bytes lie in a block, and in the tile when the block is its first.
    constexpr int kPieces = kB / 8;  // 16-byte pieces in a row of a block
    const int within = lane % (kB * kPieces), block = lane / (kB * kPieces), r = within / kPieces, q = within % kPieces;
    const int* ids = p.stage + 4 * p.stages;  // after the records
    constexpr int kAhead = 4;
    int fetched[kAhead], inputs[kAhead];
    auto fetch = [&](int i, int t) {
      if (t >= end) return;
      t %= p.stages;
      if (lane < kMine) fetched[i] = ids[int64_t(t) * kIds + warp * kMine + lane];
      inputs[i] = p.stage[4 * t];
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(i, first + i);
    // A stage is handed over once this warp's copies have landed and are visible to the tensor cores: kLag stages later.
    constexpr int kLag = 2;
    int handed = first;
    uint32_t handed_slot = 0;
    auto hand_over = [&] {
      FenceProxyAsync();
      __syncwarp();
      if (lane == 0) BarrierArrive(bars + handed_slot * 16);
      if (++handed_slot == kStages) handed_slot = 0;
      ++handed;
    };
    const uint32_t lists = bars + kLists + warp * 64;
    uint32_t occupied = ~0u;  // lane s: places of slot s that may hold something
    uint32_t slot = 0, parity = 1;
    for (int base = first; base < end; base += kAhead)
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        const int t = base + ahead;
        if (t >= end) break;
        const int mine = fetched[ahead], input = inputs[ahead];
        fetch(ahead, t + kAhead);
        const uint32_t at = ring + slot * kStageBytes, full = bars + slot * 16;
        BarrierWait(full + 8, parity);
        if (warp == 0 && lane == 0) {
          BarrierArriveExpect(full, kAxis0 ? kXBytes : p.box_rows * 128);
          const int row = t / p.stages * 64;
          TmaLoad(at + kWeightBytes, &p.x, kAxis0 ? row : input, kAxis0 ? input : row, full);
        }
        // Which of this warp's places hold a block now, and which held one in this slot before and are to be cleared.
        const uint32_t all = kMine == 32 ? ~0u : (1u << kMine) - 1;
        const uint32_t present = __ballot_sync(~0u, lane < kMine && mine >= 0);
        const uint32_t clear = __shfl_sync(~0u, occupied, slot) & ~present & all;
        if (lane == slot) occupied = present;
        const uint32_t below = (1u << lane) - 1;
        if (present >> lane & 1) StoreSharedByte(lists + __popc(present & below), lane);
        if (clear >> lane & 1) StoreSharedByte(lists + 32 + __popc(clear & below), lane);
        __syncwarp();
        for (int i = 0; i < __popc(present); i += kPerCopy) {
          const bool some = i + block < __popc(present);
          const int place = some ? LoadSharedByte(lists + i + block) : 0, id = __shfl_sync(~0u, mine, place);
          if (some)
            CopyAsync16(at + Offset(warp * kMine + place, r, q), weights + int64_t(id) * (kB * kB) + within * 8);
        }
        for (int i = block; i < __popc(clear); i += kPerCopy)
          StoreShared4(at + Offset(warp * kMine + LoadSharedByte(lists + 32 + i), r, q), make_uint4(0, 0, 0, 0));
        __syncwarp();
        CopyAsyncCommit();
        if (t - handed >= kLag) {
          CopyAsyncWait<kLag>();
          hand_over();
        }
        if (++slot == kStages) {
          slot = 0;
          parity ^= 1;
        }
      }
    CopyAsyncWait<0>();
    while (handed < end) hand_over();
  }

  // Zeros times infinity or NaN would spoil outputs that do not depend on them: each thread block looks at a share of x
  // and says whether it found one; the second kernel then adds up block by block (matmul_sm90_small_fill_finish.cu).
  static __device__ __forceinline__ void LookForNonFinite(const SmallParams& p) {
    constexpr uint32_t kExponent = kHalf ? 0x7c007c00u : 0x7f807f80u, kOne = kHalf ? 0x04000400u : 0x00800080u;
    const int64_t pieces = int64_t(p.batch) * p.inputs / 8;
    bool found = false;
    for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < pieces; i += gridDim.x * 256) {
      const uint4 v = reinterpret_cast<const uint4*>(p.x_values)[i];
      // An exponent of all ones carries into the sign's bit.
      found |=
          (((v.x & kExponent) + kOne | (v.y & kExponent) + kOne | (v.z & kExponent) + kOne | (v.w & kExponent) + kOne) &
           0x80008000u) != 0;
    }
    if (__any_sync(~0u, found)) found = true;
    if ((threadIdx.x & 31) == 0) p.flags[blockIdx.x * 8 + threadIdx.x / 32] = found;
  }

  static __device__ __forceinline__ void Consume(const SmallParams& p, uint32_t ring, uint32_t bars) {
    const int lane = threadIdx.x & 31, group_of_warps = threadIdx.x / 128, end = SmallFirst(p, blockIdx.x + 1);
    int t = SmallFirst(p, blockIdx.x), tile_row = t / p.stages;
    int group = t < end ? p.stage[4 * (t - tile_row * p.stages) + 1] : 0;
    uint32_t slot = 0, parity = 0, previous = 0;
#pragma unroll 1
    while (t < end) {
      const int32_t* info = p.group + group * UnionPlan::kGroupWords;
      const int stop = min(end, tile_row * p.stages + info[0] + info[1]);
      float sum[2][32];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int e = 0; e < 32; ++e) sum[m][e] = 0.f;
#pragma unroll 1
      for (; t < stop; ++t) {
        const uint32_t full = bars + slot * 16;
        BarrierWait(full, parity);
        const uint32_t at = ring + slot * kStageBytes;
        const uint32_t w = DescriptorLow(at + group_of_warps * 2 * 8192, 8192),
                       x = DescriptorLow(at + kWeightBytes, 8192);
        WgmmaFence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int m = 0; m < 2; ++m)
            Wgmma<64, kHalf>::template Add<!kTransposed, kAxis0>(
                sum[m], Descriptor(w + (m * 8192 + k * kWStep >> 4), kHigh), Descriptor(x + (k * kXStep >> 4), kHigh));
        WgmmaCommit();
        WgmmaWait<1>();
        if (previous != 0 && lane == 0) BarrierArrive(previous);
        previous = full + 8;
        if (++slot == kStages) {
          slot = 0;
          parity ^= 1;
        }
      }
      WgmmaWait<0>();
      if (previous != 0 && lane == 0) BarrierArrive(previous);
      previous = 0;
      // To global memory: [batch entry][feature] on axis 1, [feature][batch entry] on axis 0.
      const int tile = tile_row * p.groups + group;
      const int row = group_of_warps * 128 + (threadIdx.x & 127) / 32 * 16 + lane / 4, column = lane % 4 * 2;
      float* to = p.partial + int64_t(blockIdx.x + tile) * (64 * kFeatures);
      to += kAxis0 ? row * 64 + column : column * kFeatures + row;
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int e = 0; e < 8; ++e)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float a = sum[m][e * 4 + r * 2], b = sum[m][e * 4 + r * 2 + 1];
            if constexpr (kAxis0) {
              *reinterpret_cast<float2*>(to + (m * 64 + r * 8) * 64 + e * 8) = make_float2(a, b);
            } else {
              to[e * 8 * kFeatures + m * 64 + r * 8] = a;
              to[(e * 8 + 1) * kFeatures + m * 64 + r * 8] = b;
            }
          }
      if (t == (tile_row + 1) * p.stages)
        ++tile_row, group = 0;
      else
        ++group;
    }
  }
};

template <int kB, bool kHalf, bool kAxis0, bool kTransposed>
__global__ void __launch_bounds__(512, 1) FillMatmul(const __grid_constant__ SmallParams p) {
#ifdef BLOCKSPARSE_SM90_CODE
  using Kernel = FillKernel<kB, kHalf, kAxis0, kTransposed>;
  extern __shared__ char shared[];
  const uint32_t ring = (SharedAddress(shared) + 1023) & ~1023u, bars = ring + Kernel::kStages * Kernel::kStageBytes;
  LaunchDependents();
  if (threadIdx.x < Kernel::kStages) {
    BarrierInit(bars + threadIdx.x * 16, 1 + Kernel::kWarps);
    BarrierInit(bars + threadIdx.x * 16 + 8, 8);
    BarrierInitFence();
  }
  if (threadIdx.x == 256) PrefetchMap(&p.x);
  __syncthreads();
  if (threadIdx.x >= 256) {
    Kernel::Produce(p, ring, bars);
  } else {
    Kernel::LookForNonFinite(p);
    Kernel::Consume(p, ring, bars);
  }
#endif
}

template <int kB, bool kHalf>
cudaError_t LaunchFill(bool axis0, bool transposed, const SmallParams& p, cudaStream_t stream) {
  auto kernel = axis0 ? (transposed ? FillMatmul<kB, kHalf, true, true> : FillMatmul<kB, kHalf, true, false>)
                      : (transposed ? FillMatmul<kB, kHalf, false, true> : FillMatmul<kB, kHalf, false, false>);
  using Kernel = FillKernel<kB, kHalf, false, false>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<p.blocks, Kernel::kThreads, Kernel::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace blocksparse::cuda::sm90
