// Layer norm over features at a stride, as with features first. A tile of columns, wide enough for the memory (128 bytes
// of a row) and with all features, is read once and stays in the shared memory of a cluster of thread blocks, each of
// which has some of the features. The blocks tell each other their sums through shared memory.
#include <algorithm>
#include <atomic>

#include "cuda/arch/sm90.h"
#include "cuda/norms.cuh"

namespace blocksparse {
namespace cuda {
namespace {

// Two blocks share a multiprocessor, so that one works while another waits for its cluster or for the memory.
constexpr int kThreads = 512, kWarps = kThreads / 32, kBlocks = 2;
constexpr int kMaxMembers = 16;       // blocks of a cluster
constexpr int kWide = 128;            // bytes across a tile; or half of it
constexpr int kHeldBytes = 64 << 10;  // most that a block holds
constexpr int kSampling = 8;          // warps whose first packs give the shift

// A thread's packs of a tile: of x, for a gradient also of dy, and then smaller, as registers are few.
template <typename T, bool kGradient>
struct Held {
  static constexpr int N = kGradient ? 4 : kPerVector<T>;
  static constexpr int kPackBytes = N * int(sizeof(T)), kStep = kThreads * kPackBytes;  // of one tensor
  static constexpr int kTensors = kGradient ? 2 : 1, kMost = kHeldBytes / (kStep * kTensors);
  static constexpr int kKinds = kGradient ? 2 : 3;  // of sums
  static constexpr int kMaxShare = kMost * (kThreads * 2 * kPackBytes / kWide);
};

struct Tiling {
  int lanes;     // packs across a tile
  int members;   // blocks of a cluster
  int share;     // features of a block
  int clusters;  // of each segment
  int across;    // tiles in a row
  int64_t step;  // bytes from a thread's pack to its next
};

// How the blocks of a cluster tell each other their sums. Only Hopper and newer chips have clusters: kernels for others
// are launched without.
__device__ __forceinline__ void BeginTelling(uint64_t (&arrived)[2]) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    sm90::BarrierInit(sm90::SharedAddress(&arrived[0]), 1);
    sm90::BarrierInit(sm90::SharedAddress(&arrived[1]), 1);
    sm90::BarrierInitFence();
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Puts a value to the same place of block `rank`, and counts it there.
__device__ __forceinline__ void Tell(float* place, uint64_t* arrived, int rank, float value) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 place, barrier;\nmapa.shared::cluster.u32 place, %0, %2;\nmapa.shared::cluster.u32 barrier, %1, "
      "%2;\nst.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [place], %3, [barrier];\n}" ::"r"(
          sm90::SharedAddress(place)),
      "r"(sm90::SharedAddress(arrived)), "r"(rank), "f"(value)
      : "memory");
#endif
}

// One thread says how much comes.
__device__ __forceinline__ void Expect(uint64_t* arrived, int bytes) {
#if __CUDA_ARCH__ >= 900
  sm90::BarrierArriveExpect(sm90::SharedAddress(arrived), bytes);
#endif
}

__device__ __forceinline__ void WaitUntilTold(uint64_t* arrived, int parity) {
#if __CUDA_ARCH__ >= 900
  sm90::BarrierWait(sm90::SharedAddress(arrived), parity);
#endif
}

// From shared memory, whose address stays a register: left to the compiler it is made anew each time, at some cost.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> LoadPlace(uint32_t place) {
  Pack<T, N> pack;
  if constexpr (sizeof(pack) == 16) {
    uint4 bits;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(place));
    memcpy(&pack, &bits, 16);
  } else {
    uint2 bits;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "r"(place));
    memcpy(&pack, &bits, 8);
  }
  return pack;
}

template <int kBytes>
__device__ __forceinline__ void CopyToPlace(uint32_t place, const char* from) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(place), "l"(from) : "memory");
}

// max(x, 0), or NaN if x is that.
__device__ __forceinline__ float AtLeast0(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// A tile: the outer index, and which of a row's tiles.
struct Where {
  int o, c;
};

template <typename T, bool kGradient, bool kRelu>
__global__ void __launch_bounds__(kThreads, kBlocks)
    Columns(LayerNormProblem p, Tiling tiling, float* dgain, float* dbias) {
  using Here = Held<T, kGradient>;
  constexpr int N = Here::N, P = Here::kMost, kStep = Here::kStep, kTensors = Here::kTensors, kKinds = Here::kKinds;
  constexpr int kColumns = kWide / int(sizeof(T)), kBytes = Here::kPackBytes;
  extern __shared__ __align__(16) char held[];
  __shared__ __align__(16) float scratch[2 * kWarps * kColumns];  // [2][kWarps][columns]
  // The sums of all blocks of the cluster, which each puts there; in turn, as one may still be read while the next comes.
  __shared__ float told[2][kKinds][kMaxMembers][kColumns];
  __shared__ uint64_t arrived[2];
  __shared__ __align__(16) float shifts[kColumns];
  __shared__ __align__(16) float total[kGradient ? 2 : 3][kColumns];
  __shared__ float2 affine[Here::kMaxShare];  // gains and biases
  AllowKernelAfter();
  const int lanes = tiling.lanes, rows = kThreads / lanes, members = tiling.members, columns = lanes * N;
  const int rank = blockIdx.x % members, y0 = threadIdx.x / lanes, column = threadIdx.x % lanes * N;
  const int F = int(p.features), s = blockIdx.x / members % int(p.segments);
  const int part = blockIdx.x / members / int(p.segments);
  const int f0 = rank * tiling.share, tiles = int(p.outer) * tiling.across;
  const int mine = min(tiling.share, F - f0);  // features; a last block may have none
  const int packs = mine > y0 ? (mine - y0 + rows - 1) / rows : 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t places = sm90::SharedAddress(held) + threadIdx.x * kBytes;
  const uint32_t my_affine = sm90::SharedAddress(affine + y0);

  // This thread's packs of a tile, from its first feature on.
  const auto count = [&](int q, Where at) { return q < tiles && at.c * columns + column < p.inner ? packs : 0; };
  const auto first = [&](Where at) {  // in bytes
    return ((at.o * Channels(p) + int64_t(s) * F + f0 + y0) * p.inner + at.c * columns + column) * int64_t(sizeof(T));
  };
  const auto row_of = [&](Where at) { return (s * p.outer + at.o) * p.inner + at.c * columns; };
  const int skip_o = tiling.clusters / tiling.across, skip_c = tiling.clusters % tiling.across;
  const auto after = [&](Where at) {
    at.o += skip_o, at.c += skip_c;
    if (at.c >= tiling.across) at.c -= tiling.across, ++at.o;
    return at;
  };
  const auto copy = [&](uint32_t place, int64_t bytes) {
    CopyToPlace<kBytes>(place, static_cast<const char*>(p.x) + bytes);
    if (kGradient) CopyToPlace<kBytes>(place + kStep, static_cast<const char*>(p.dy) + bytes);
  };
  Where here = {part / tiling.across, part % tiling.across};
  int64_t from = first(here);
  for (int j = 0; j < count(part, here); ++j, from += tiling.step) copy(places + j * (kStep * kTensors), from);

  float gain_sums[kGradient ? P : 1] = {}, bias_sums[kGradient ? P : 1] = {};
  for (int f = threadIdx.x; f < mine; f += kThreads)
    affine[f] = {p.gain[int64_t(s) * F + f0 + f], p.bias[int64_t(s) * F + f0 + f]};
  __syncthreads();

  // What the block has to say of a tile: sums of the warps in `scratch` and the shift, when all threads are back.
  const auto sum_tile = [&](int n, Where at, float(&mean)[N], float(&rstd)[N], float(&base)[N]) {
    float a[N] = {}, b[N] = {};
    if constexpr (kGradient) {
      if (n > 0) {
        LoadFloats<N>(p.mean + row_of(at) + column, mean);
        LoadFloats<N>(p.rstd + row_of(at) + column, rstd);
        LoadFloats<N>(p.residual + row_of(at) + column, base);
#pragma unroll
        for (int k = 0; k < N; ++k) base[k] = -base[k] * rstd[k];
      }
      CommitCopies();
      WaitForCopies<0>();
#pragma unroll
      for (int j = 0; j < P; ++j) {
        if (j >= n) break;
        float v[N], t[N], gain[2];
        Widen(LoadPlace<T, N>(places + j * (kStep * kTensors)), v);
        Widen(LoadPlace<T, N>(places + j * (kStep * kTensors) + kStep), t);
        Widen(LoadPlace<float, 2>(my_affine + j * rows * 8), gain);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float xhat = (v[k] - mean[k]) * rstd[k] + base[k];
          t[k] = BeforeRelu(kRelu, t[k], xhat, gain[0], gain[1]);
          gain_sums[j] += t[k] * xhat;
          bias_sums[j] += t[k];
          const float d = t[k] * gain[0];
          a[k] += d;
          b[k] += d * xhat;
        }
      }
    } else {
      CommitCopies();
      WaitForCopies<0>();
      // The shift: the mean of the first packs of some warps. A mean s of m of n values has (s - mean)^2 at most n / m of
      // their variance, which so loses no more than the bits of 1 + n / m.
      if (warp < kSampling) {
        if (n > 0) Widen(LoadPlace<T, N>(places), a);
        for (int apart = 16; apart >= lanes; apart /= 2) {
#pragma unroll
          for (int k = 0; k < N; ++k) a[k] += __shfl_xor_sync(0xffffffff, a[k], apart);
        }
        if (lane < lanes) {
#pragma unroll
          for (int k = 0; k < N; k += 4)
            *reinterpret_cast<float4*>(scratch + warp * columns + column + k) =
                make_float4(a[k], a[k + 1], a[k + 2], a[k + 3]);
        }
      }
      __syncthreads();
      if (threadIdx.x < columns) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < kSampling; ++w) sum += scratch[w * columns + threadIdx.x];
        shifts[threadIdx.x] = sum / float(max(1, min(kSampling * rows / kWarps, mine)));
      }
      __syncthreads();
      float shift[N];
      LoadFloats<N>(shifts + column, shift);
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] = 0.f;
#pragma unroll
      for (int j = 0; j < P; ++j) {
        if (j >= n) break;
        float v[N];
        Widen(LoadPlace<T, N>(places + j * kStep), v);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float d = v[k] - shift[k];
          a[k] += d;
          b[k] += d * d;
        }
      }
    }
    // Over the rows of the warp: in every step a lane passes on half of its sums and keeps the other half.
    const bool upper16 = lane & 16, upper8 = lane & 8, upper4 = lane & 4;
#pragma unroll
    for (int k = 0; k < N; ++k) a[k] = (upper16 ? b[k] : a[k]) + __shfl_xor_sync(0xffffffff, upper16 ? a[k] : b[k], 16);
    if (lanes <= 8) {
#pragma unroll
      for (int k = 0; k < N / 2; ++k)
        a[k] = (upper8 ? a[k + N / 2] : a[k]) + __shfl_xor_sync(0xffffffff, upper8 ? a[k] : a[k + N / 2], 8);
    }
    if (lanes <= 4) {
#pragma unroll
      for (int k = 0; k < N / 4; ++k)
        a[k] = (upper4 ? a[k + N / 4] : a[k]) + __shfl_xor_sync(0xffffffff, upper4 ? a[k] : a[k + N / 4], 4);
    }
    const int kept = N * lanes / 16;  // from this column on
    float* to = scratch + (upper16 * kWarps + warp) * columns + column + (lane & 15 & -lanes) * N / 16;
#pragma unroll
    for (int k = 0; k < N; k += 4)
      if (kept >= 4 && k < kept) *reinterpret_cast<float4*>(to + k) = make_float4(a[k], a[k + 1], a[k + 2], a[k + 3]);
    if (kept == 2) *reinterpret_cast<float2*>(to) = make_float2(a[0], a[1]);
    if (kept == 1) *to = a[0];
    __syncthreads();
  };

  // Two neighbouring threads share what is to be done for a column.
  const auto of_both = [](float x) { return x + __shfl_xor_sync(0xffffffff, x, 1); };
  const int half = threadIdx.x % 2, c = threadIdx.x / 2 & (columns - 1), which = threadIdx.x / 2;
  const int kind = (which >= columns) + (which >= 2 * columns) + (which >= 3 * columns);
  const auto to_tell = [&] {
    if (kind >= 2) return shifts[c];
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; w += 2) sum += scratch[(kind * kWarps + w + half) * columns + c];
    return of_both(sum);
  };
  const auto tell = [&](int turn, float sum) {
    float* place = &told[turn][kind][rank][c];
    if (members == 1 && half == 0) *place = sum;
    for (int r = half; members > 1 && r < members; r += 2) Tell(place, &arrived[turn], r, sum);
    if (members > 1 && threadIdx.x == 0) Expect(&arrived[turn], members * kKinds * columns * int(sizeof(float)));
  };
  const float inverse = 1.f / float(F);
  // A column of a tile, from what all blocks told.
  const auto finish_column = [&](Where at, int turn) {
    const auto theirs = [&](int kind, int r) { return told[turn][kind][r][c]; };
    float sum_a = 0.f, sum_b = 0.f;
    if constexpr (kGradient) {
      for (int r = half; r < members; r += 2) sum_a += theirs(0, r), sum_b += theirs(1, r);
      sum_a = of_both(sum_a), sum_b = of_both(sum_b);
      if (half > 0) return;
      total[0][c] = sum_a * inverse, total[1][c] = sum_b * inverse;
    } else {
      const auto features = [&](int r) { return float(max(0, min(tiling.share, F - r * tiling.share))); };
      float center = 0.f;
      for (int r = half; r < members; r += 2) center += theirs(2, r) * (features(r) * inverse);
      center = of_both(center);
      for (int r = half; r < members; r += 2) {
        const float n = features(r), off = theirs(0, r), delta = n > 0.f ? theirs(2, r) - center : 0.f;
        sum_a += off + n * delta;
        sum_b += theirs(1, r) + delta * (2.f * off + n * delta);
      }
      sum_a = of_both(sum_a), sum_b = of_both(sum_b);
      if (half > 0) return;
      const Statistics stats = FinishStatistics(center, sum_a * inverse, sum_b * inverse, p.epsilon);
      total[0][c] = stats.mean, total[1][c] = -stats.residual * stats.rstd, total[2][c] = stats.rstd;
      if (rank == 0 && at.c * columns + c < p.inner) {
        p.mean[row_of(at) + c] = stats.mean, p.residual[row_of(at) + c] = stats.residual;
        p.rstd[row_of(at) + c] = stats.rstd;
      }
    }
  };
  if (members > 1) BeginTelling(arrived);
  int turn = 0, parity = 0;  // of tiles; of their barriers, each of which takes every second tile
  for (int q = part; q < tiles; q += tiling.clusters, parity ^= turn, turn ^= 1) {
    const int n = count(q, here);
    float mean[N] = {}, rstd[N] = {}, base[N] = {};
    sum_tile(n, here, mean, rstd, base);
    if (kind < kKinds) tell(turn, to_tell());
    if (members == 1) __syncthreads();
    if (kind == 0) {
      if (members > 1) WaitUntilTold(&arrived[turn], parity);
      finish_column(here, turn);
    }
    __syncthreads();
    const Where next = after(here);
    const int coming = count(q + tiling.clusters, next);
    float a[N], b[N];
    if constexpr (kGradient) {
      LoadFloats<N>(total[0] + column, a);
      LoadFloats<N>(total[1] + column, b);
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] *= rstd[k], b[k] *= rstd[k];
    } else {
      LoadFloats<N>(total[0] + column, mean);
      LoadFloats<N>(total[1] + column, base);
      LoadFloats<N>(total[2] + column, rstd);
    }
    int64_t to = first(here);
    from = first(next);
    uint32_t place = places, gains = my_affine;
    for (int j = 0; j < packs; ++j) {
      if (n > 0) {
        float v[N], gain[2];
        Widen(LoadPlace<T, N>(place), v);
        Widen(LoadPlace<float, 2>(gains), gain);
        if constexpr (kGradient) {
          float t[N];
          Widen(LoadPlace<T, N>(place + kStep), t);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            const float xhat = (v[k] - mean[k]) * rstd[k] + base[k];
            const float d = BeforeRelu(kRelu, t[k], xhat, gain[0], gain[1]) * gain[0];
            v[k] = (d * rstd[k] - a[k]) - xhat * b[k];
          }
        } else {
#pragma unroll
          for (int k = 0; k < N; ++k) {
            v[k] = ((v[k] - mean[k]) * rstd[k] + base[k]) * gain[0] + gain[1];
            if (kRelu) v[k] = AtLeast0(v[k]);
          }
        }
        StorePack(reinterpret_cast<T*>(static_cast<char*>(kGradient ? p.dx : p.y) + to), v);
      }
      if (coming > 0) copy(place, from);  // to where what was just read lay
      to += tiling.step, from += tiling.step;
      place += kStep * kTensors, gains += rows * 8;
    }
    here = next;
  }

  if constexpr (kGradient) {
#pragma unroll
    for (int j = 0; j < P; ++j) {
      for (int apart = lanes / 2; apart > 0; apart /= 2) {
        gain_sums[j] += __shfl_xor_sync(0xffffffff, gain_sums[j], apart);
        bias_sums[j] += __shfl_xor_sync(0xffffffff, bias_sums[j], apart);
      }
      if (j < packs && column == 0) {
        const int64_t f = part * Channels(p) + int64_t(s) * F + f0 + y0 + j * rows;
        dgain[f] = gain_sums[j];
        dbias[f] = bias_sums[j];
      }
    }
  }
}

template <typename Body>
auto WithKernel(const LayerNormProblem& p, const Body& body) {
  return WithType(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (p.gradient) return p.relu ? body(Columns<T, true, true>) : body(Columns<T, true, false>);
    return p.relu ? body(Columns<T, false, true>) : body(Columns<T, false, false>);
  });
}

cudaLaunchConfig_t Config(int clusters, int members, cudaLaunchAttribute* attribute) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(clusters * members));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kHeldBytes;
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim = {unsigned(members), 1, 1};
  config.attrs = attribute;
  config.numAttrs = members > 1 ? 1 : 0;
  return config;
}

template <typename Kernel>
Status AllowBlocks(Kernel* kernel) {
  BLOCKSPARSE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kHeldBytes));
  if (CompiledForHopper(kernel))
    BLOCKSPARSE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  return {};
}

// Clusters that run at once. They are of neighbours, so that some multiprocessors may be left over.
template <typename Kernel>
int ActiveClusters(Kernel* kernel, int members, const Chip& chip) {
  if (members == 1) return kBlocks * chip.multiprocessors;
  static std::atomic<int> known[kMaxMembers + 1];
  int clusters = known[members].load(std::memory_order_relaxed);
  if (clusters > 0) return clusters;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = Config(1, members, &attribute);
  if (!AllowBlocks(kernel).ok() || cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess ||
      clusters < 1) {
    cudaGetLastError();
    clusters = std::max(1, kBlocks * (chip.multiprocessors / 16 * 16) / members);
  }
  known[members].store(clusters, std::memory_order_relaxed);
  return clusters;
}

Tiling Plan(const LayerNormProblem& p, const Chip& chip) {
  const int N = p.gradient ? 4 : int(16 / SizeOf(p.dtype)), pack_bytes = N * int(SizeOf(p.dtype));
  const int widest = kWide / pack_bytes, most_packs = kHeldBytes / (kThreads * pack_bytes) / (p.gradient ? 2 : 1);
  static const bool hopper = CompiledForHopper(Columns<float, false, false>);
  const int most_members = hopper ? kMaxMembers : 1;
  const int64_t row_packs = p.inner / N;
  const auto packs = [&](int lanes, int members) {
    return int(std::min<int64_t>(INT32_MAX, CeilDiv(CeilDiv(p.features, members), kThreads / lanes)));
  };
  Tiling t = {};
  // Less than 64 bytes of a row at a time is too little; the kernels for any shape do better there.
  for (int lanes = widest; lanes >= widest / 2 && t.lanes == 0; lanes /= 2) {
    if (lanes > row_packs) continue;
    for (int members = 1; members <= most_members && t.lanes == 0; members *= 2)
      if (packs(lanes, members) <= most_packs) t.lanes = lanes, t.members = members;
  }
  if (t.lanes == 0) return t;
  t.across = int(CeilDiv(row_packs, t.lanes));
  // Few tiles: more blocks to each.
  const int64_t tiles = p.outer * t.across * p.segments;
  while (t.members < most_members && 2 * t.members * tiles <= kBlocks * chip.multiprocessors &&
         packs(t.lanes, t.members) > 1)
    t.members *= 2;
  t.share = int(CeilDiv(p.features, t.members));
  t.step = kThreads / t.lanes * p.inner * SizeOf(p.dtype);
  const int active = WithKernel(p, [&](auto* kernel) { return ActiveClusters(kernel, t.members, chip); });
  t.clusters = int(std::max<int64_t>(1, std::min<int64_t>(active / p.segments, p.outer * t.across)));
  return t;
}

}  // namespace

LayerFamily ChooseColumns(const LayerNormProblem& p, const Chip& chip) {
  LayerFamily family;
  constexpr int kStatic = 48 << 10;  // what the kernel has besides
  if (p.inner % (p.gradient ? 4 : 16 / SizeOf(p.dtype)) != 0 || p.rows() * p.features <= kSmallTensor ||
      kBlocks * (kHeldBytes + kStatic) > chip.shared_memory || p.segments > chip.multiprocessors ||
      p.outer * p.inner > INT32_MAX / 2 || p.features > INT32_MAX / 2 ||
      !Aligned({p.x, p.y, p.dy, p.dx, p.mean, p.residual, p.rstd}))
    return family;
  const Tiling tiling = Plan(p, chip);
  if (tiling.lanes == 0) return family;
  family.fits = true;
  family.parts = p.gradient ? tiling.clusters : 1;
  return family;
}

Status RunColumns(const LayerNormProblem& p, float* dgain, float* dbias, const Chip& chip, Stream stream) {
  const Tiling tiling = Plan(p, chip);
  return WithKernel(p, [&](auto* kernel) -> Status {
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = Config(int(tiling.clusters * p.segments), tiling.members, &attribute);
    config.stream = stream;
    BLOCKSPARSE_RETURN_IF_ERROR(AllowBlocks(kernel));
    BLOCKSPARSE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, p, tiling, dgain, dbias));
    return {};
  });
}

}  // namespace cuda
}  // namespace blocksparse
