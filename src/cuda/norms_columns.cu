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

// A thread's packs: of x, for a gradient also of dy, and then smaller, as registers are few.
template <typename T, bool kGradient>
struct Held {
  static constexpr int N = kGradient ? 4 : kPerVector<T>;
  static constexpr int kPackBytes = N * int(sizeof(T)), kStep = kThreads * kPackBytes;  // of one tensor
  static constexpr int kTensors = kGradient ? 2 : 1, kMost = kHeldBytes / (kStep * kTensors);
  static constexpr int kMaxLanes = kWide / kPackBytes, kMaxShare = kMost * (kThreads * 2 / kMaxLanes);
};

struct Tiling {
  int lanes;     // across a tile
  int members;   // blocks of a cluster
  int share;     // features of a block
  int packs;     // of a thread in a tile, of each tensor
  int clusters;  // of each segment
  int across;    // tiles in a row
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

// From shared memory, in one instruction.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> LoadPlace(const char* place) {
  using Word = typename std::conditional<sizeof(T) * N == 16, uint4, uint2>::type;
  const Word bits = *reinterpret_cast<const Word*>(place);
  Pack<T, N> pack;
  memcpy(&pack, &bits, sizeof(bits));
  return pack;
}

template <typename T, bool kGradient, bool kRelu>
__global__ void __launch_bounds__(kThreads, kBlocks)
    Columns(LayerNormProblem p, Tiling tiling, float* dgain, float* dbias) {
  using Here = Held<T, kGradient>;
  constexpr int N = Here::N, P = Here::kMost, kStep = Here::kStep, kTensors = Here::kTensors;
  constexpr int kColumns = Here::kMaxLanes * N;
  extern __shared__ __align__(16) char held[];
  __shared__ __align__(16) float scratch[2][kWarps][kColumns];
  // The sums of all blocks of the cluster, which each puts there; in turn, as one may still be read while the next comes.
  __shared__ float told[2][kGradient ? 2 : 3][kMaxMembers][kColumns];
  __shared__ uint64_t arrived[2];
  __shared__ __align__(16) float shifts[kColumns];
  __shared__ __align__(16) float total[3][kColumns];
  __shared__ float gains[Here::kMaxShare], biases[Here::kMaxShare];
  AllowKernelAfter();
  const int lanes = tiling.lanes, rows = kThreads / lanes, packs = tiling.packs, members = tiling.members;
  const int rank = blockIdx.x % members, y0 = threadIdx.x / lanes, column = threadIdx.x % lanes * N;
  const int F = int(p.features), s = blockIdx.x / members % int(p.segments);
  const int part = blockIdx.x / members / int(p.segments);
  const int f0 = rank * tiling.share, tiles = int(p.outer) * tiling.across;
  const int mine = min(tiling.share, F - f0);  // features; a last block may have none
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  char* const places = held + threadIdx.x * Here::kPackBytes;
  const T *const x = static_cast<const T*>(p.x), *const dy = static_cast<const T*>(p.dy);

  const auto has = [&](int j) { return y0 + j * rows < mine; };
  const auto inside = [&](int q) { return q % tiling.across * (lanes * N) + column < p.inner; };
  const auto first = [&](int q) {  // where this thread's first feature of tile q lies
    return (q / tiling.across * Channels(p) + (int64_t(s) * F + f0 + y0)) * p.inner + q % tiling.across * (lanes * N) +
           column;
  };
  const auto row_of = [&](int q) {
    return (s * p.outer + q / tiling.across) * p.inner + q % tiling.across * (lanes * N);
  };
  const auto place = [&](int j) { return places + j * (kStep * kTensors); };

  const int64_t step = int64_t(rows) * p.inner;
  const auto copy = [&](int j, int64_t from) {
    CopyAsync<Here::kPackBytes>(place(j), x + from + j * step);
    if (kGradient) CopyAsync<Here::kPackBytes>(place(j) + kStep, dy + from + j * step);
  };
  if (part < tiles && inside(part)) {
    const int64_t from = first(part);
    for (int j = 0; j < packs; ++j)
      if (has(j)) copy(j, from);
  }

  float gain_sums[kGradient ? P : 1] = {}, bias_sums[kGradient ? P : 1] = {};
  for (int f = threadIdx.x; f < mine; f += kThreads)
    gains[f] = p.gain[int64_t(s) * F + f0 + f], biases[f] = p.bias[int64_t(s) * F + f0 + f];
  __syncthreads();

  // Sums a and b over the threads with the same columns: scratch[k][w] are sums of the warps.
  const auto sum_warps = [&](int kinds, float(&a)[N], float(&b)[N]) {
    for (int lanes_apart = 16; lanes_apart >= lanes; lanes_apart /= 2) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        a[k] += __shfl_xor_sync(0xffffffff, a[k], lanes_apart);
        if (kinds > 1) b[k] += __shfl_xor_sync(0xffffffff, b[k], lanes_apart);
      }
    }
    if (lane < lanes) {
#pragma unroll
      for (int k = 0; k < N; k += 4) {
        *reinterpret_cast<float4*>(&scratch[0][warp][column + k]) = make_float4(a[k], a[k + 1], a[k + 2], a[k + 3]);
        if (kinds > 1)
          *reinterpret_cast<float4*>(&scratch[1][warp][column + k]) = make_float4(b[k], b[k + 1], b[k + 2], b[k + 3]);
      }
    }
    __syncthreads();
  };
  const auto add_warps = [&](int kind, int c) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += scratch[kind][w][c];
    return sum;
  };

  const float inverse = 1.f / float(F);
  const int columns = lanes * N;
  constexpr int kKinds = kGradient ? 2 : 3;
  if (members > 1) BeginTelling(arrived);
  int turn = 0, parity = 0;  // of tiles; of their barriers, each of which takes every second tile
  for (int q = part; q < tiles; q += tiling.clusters, parity ^= turn, turn ^= 1) {
    const bool here = inside(q);
    float mean[N] = {}, rstd[N] = {}, base[N] = {}, a[N] = {}, b[N] = {};
    if (kGradient && here) {
      LoadFloats<N>(p.mean + row_of(q) + column, mean);
      LoadFloats<N>(p.rstd + row_of(q) + column, rstd);
      LoadFloats<N>(p.residual + row_of(q) + column, base);
#pragma unroll
      for (int k = 0; k < N; ++k) base[k] = -base[k] * rstd[k];
    }
    CommitCopies();
    WaitForCopies<0>();
    const auto each = [&](auto&& body) {
#pragma unroll
      for (int j = 0; j < P; ++j)
        if (j < packs && here && has(j)) body(j, place(j));
    };
    if constexpr (kGradient) {
      each([&](int j, const char* pack) {
        float v[N], t[N];
        Widen(LoadPlace<T, N>(pack), v);
        Widen(LoadPlace<T, N>(pack + kStep), t);
        const float gain = gains[y0 + j * rows], bias = kRelu ? biases[y0 + j * rows] : 0.f;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float xhat = (v[k] - mean[k]) * rstd[k] + base[k];
          t[k] = BeforeRelu(kRelu, t[k], xhat, gain, bias);
          gain_sums[j] += t[k] * xhat;
          bias_sums[j] += t[k];
          const float d = t[k] * gain;
          a[k] += d;
          b[k] += d * xhat;
        }
      });
    } else {
      // The shift: the mean of the first of every thread's packs. A mean s of m of n values has (s - mean)^2 at most n / m
      // of their variance, which so loses no more than the bits of 1 + n / m.
      if (here && has(0)) Widen(LoadPlace<T, N>(place(0)), a);
      sum_warps(1, a, b);
      if (threadIdx.x < columns) shifts[threadIdx.x] = add_warps(0, threadIdx.x) / float(max(1, min(rows, mine)));
      __syncthreads();
      float shift[N];
#pragma unroll
      for (int k = 0; k < N; ++k) shift[k] = shifts[column + k], a[k] = 0.f;
      each([&](int, const char* pack) {
        float v[N];
        Widen(LoadPlace<T, N>(pack), v);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float d = v[k] - shift[k];
          a[k] += d;
          b[k] += d * d;
        }
      });
    }
    sum_warps(2, a, b);
    if (threadIdx.x < kKinds * columns) {
      const int kind = threadIdx.x / columns, c = threadIdx.x % columns;
      const float sum = kind < 2 ? add_warps(kind, c) : shifts[c];
      float* place = &told[turn][kind][rank][c];
      if (members == 1) *place = sum;
      for (int r = 0; members > 1 && r < members; ++r) Tell(place, &arrived[turn], r, sum);
    }
    if (members == 1) {
      __syncthreads();
    } else {
      if (threadIdx.x == 0) Expect(&arrived[turn], members * kKinds * columns * int(sizeof(float)));
      if (threadIdx.x < columns) WaitUntilTold(&arrived[turn], parity);
    }
    if (threadIdx.x < columns) {
      const int c = threadIdx.x;
      const auto theirs = [&](int kind, int r) { return told[turn][kind][r][c]; };
      if constexpr (kGradient) {
        float sum_a = 0.f, sum_b = 0.f;
#pragma unroll 4
        for (int r = 0; r < members; ++r) sum_a += theirs(0, r), sum_b += theirs(1, r);
        total[0][c] = sum_a * inverse, total[1][c] = sum_b * inverse;
      } else {
        const auto features = [&](int r) { return float(max(0, min(tiling.share, F - r * tiling.share))); };
        float center = 0.f, sum_a = 0.f, sum_b = 0.f;
#pragma unroll 4
        for (int r = 0; r < members; ++r) center += theirs(2, r) * (features(r) * inverse);
#pragma unroll 4
        for (int r = 0; r < members; ++r) {
          const float n = features(r), off = theirs(0, r), delta = n > 0.f ? theirs(2, r) - center : 0.f;
          sum_a += off + n * delta;
          sum_b += theirs(1, r) + delta * (2.f * off + n * delta);
        }
        const Statistics stats = FinishStatistics(center, sum_a * inverse, sum_b * inverse, p.epsilon);
        total[0][c] = stats.mean, total[1][c] = -stats.residual * stats.rstd, total[2][c] = stats.rstd;
        if (rank == 0 && q % tiling.across * columns + c < p.inner) {
          p.mean[row_of(q) + c] = stats.mean, p.residual[row_of(q) + c] = stats.residual;
          p.rstd[row_of(q) + c] = stats.rstd;
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N; ++k) {
      a[k] = total[0][column + k], b[k] = total[1][column + k];
      if (!kGradient) mean[k] = a[k], base[k] = b[k], rstd[k] = total[2][column + k];
    }
    T* out = static_cast<T*>(kGradient ? p.dx : p.y) + (here ? first(q) : 0);
    const int next = q + tiling.clusters;
    const bool comes = next < tiles && inside(next);
    const int64_t from = comes ? first(next) : 0;
#pragma unroll
    for (int j = 0; j < P; ++j) {
      if (j >= packs || !has(j)) break;
      if (here) {
        float v[N];
        Widen(LoadPlace<T, N>(place(j)), v);
        const float gain = gains[y0 + j * rows], bias = kRelu || !kGradient ? biases[y0 + j * rows] : 0.f;
        if constexpr (kGradient) {
          float t[N];
          Widen(LoadPlace<T, N>(place(j) + kStep), t);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            const float xhat = (v[k] - mean[k]) * rstd[k] + base[k];
            const float d = BeforeRelu(kRelu, t[k], xhat, gain, bias) * gain;
            v[k] = ((d - a[k]) - xhat * b[k]) * rstd[k];
          }
        } else {
#pragma unroll
          for (int k = 0; k < N; ++k) v[k] = Relu(kRelu, ((v[k] - mean[k]) * rstd[k] + base[k]) * gain + bias);
        }
        StorePack(out + j * step, v);
      }
      if (comes) copy(j, from);  // to where what was just read lay
    }
  }

  if constexpr (kGradient) {
#pragma unroll
    for (int j = 0; j < P; ++j) {
      for (int apart = lanes / 2; apart > 0; apart /= 2) {
        gain_sums[j] += __shfl_xor_sync(0xffffffff, gain_sums[j], apart);
        bias_sums[j] += __shfl_xor_sync(0xffffffff, bias_sums[j], apart);
      }
      if (has(j) && column == 0) {
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
  t.packs = packs(t.lanes, t.members);
  t.share = int(CeilDiv(p.features, t.members));
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
