// Layer norm over features at a stride, as with features first. Pieces wide enough for the memory (256 bytes of a row),
// with all features, do not fit one multiprocessor: a group of thread blocks takes a tile of columns, each block some of
// its features, which stay in its shared memory. The blocks exchange sums through global memory, and each works on the
// next tile while the sums of the last are on their way. All blocks run at once, by a cooperative launch.
#include <algorithm>

#include "cuda/norms.cuh"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWidth = 16;                // packs of 16 bytes, a tile's width
constexpr int kRows = kThreads / kWidth;  // features at a time
constexpr int kWarps = kThreads / 32;
// Tiles in shared memory: one that waits for its sums, one being summed, and one on its way.
constexpr int kStages = 3;
constexpr int kStageBytes = 65536;
// Packs of a thread in one tile, of each tensor.
constexpr int Packs(bool gradient) { return kStageBytes / (kThreads * 16) / (gradient ? 2 : 1); }
constexpr int Kinds(bool gradient) { return gradient ? 2 : 3; }  // of sums
// Tiles that have places of their own for what the blocks of a group tell each other. A block that sums tile t has
// finished tile t - 2, for which all others had to sum it, and before that to finish t - 4.
constexpr int kTurns = 4;

struct Exchange {
  float* sums;         // [groups of all segments][kTurns][kinds][columns][members]
  unsigned* arrivals;  // [groups of all segments][kTurns], 0 at the launch: blocks that wrote their sums
  int members;         // blocks of a group
  int share;           // features of a block
  int groups;          // of each segment
};

template <typename T>
struct Tile {
  static constexpr int N = kPerVector<T>, kColumns = kWidth * N;
};

// Adds x over the threads that have the same columns; thread c < kColumns returns the sum of column c. `scratch` is
// [kWarps][kColumns].
template <typename T>
__device__ __forceinline__ float ColumnSum(float (&x)[kPerVector<T>], float* scratch) {
  constexpr int N = kPerVector<T>, kColumns = Tile<T>::kColumns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] += __shfl_xor_sync(0xffffffff, x[i], kWidth);
  __syncthreads();
  if (lane < kWidth) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      *reinterpret_cast<float4*>(&scratch[warp * kColumns + lane * N + i]) =
          make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
  __syncthreads();
  float sum = 0.f;
  if (threadIdx.x < kColumns) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += scratch[w * kColumns + threadIdx.x];
  }
  return sum;
}

__device__ __forceinline__ void Arrive(unsigned* counter) {
  __syncthreads();  // everybody's sums are written
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1u);  // an integer: no order of arrival changes a result
  }
}

__device__ __forceinline__ void WaitFor(const unsigned* counter, unsigned count) {
  if (threadIdx.x == 0) {
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < count);
    __threadfence();
  }
  __syncthreads();
}

// Where a block stands: its segment, group and features, and the tiles of its group.
struct Place {
  int64_t s, part, f0, tiles, total;
  int group, rank, mine;

  __device__ Place(const LayerNormProblem& p, const Exchange& e, int64_t tiles) : tiles(tiles) {
    group = blockIdx.x / e.members, rank = blockIdx.x % e.members;
    s = group % p.segments, part = group / p.segments;
    f0 = int64_t(rank) * e.share;
    mine = int(min(int64_t(e.share), p.features - f0));
    total = p.outer * tiles;
  }
};

template <typename T, bool kGradient>
__global__ void __launch_bounds__(kThreads, 1)
    Columns(LayerNormProblem p, Exchange e, int64_t tiles, float* dgain, float* dbias) {
  constexpr int N = kPerVector<T>, kColumns = Tile<T>::kColumns;
  constexpr int kTensors = kGradient ? 2 : 1, kKinds = kGradient ? 2 : 3;
  constexpr int kPacks = kStageBytes / (kThreads * 16) / kTensors;
  extern __shared__ __align__(16) char held[];
  __shared__ __align__(16) float scratch[kWarps * kColumns];
  __shared__ float own[kColumns], total[3][kColumns];
  const Place at(p, e, tiles);
  const int64_t F = p.features;
  const int y0 = threadIdx.x / kWidth, column = threadIdx.x % kWidth * N;
  float* sums = e.sums + int64_t(at.group) * kTurns * kKinds * kColumns * e.members;
  unsigned* arrivals = e.arrivals + at.group * kTurns;
  char* mine = held + threadIdx.x * 16;

  const auto slot = [&](int stage, int tensor, int j) {
    return mine + ((stage * kTensors + tensor) * kPacks + j) * (kThreads * 16);
  };
  const auto inside = [&](int64_t q) { return q < at.total && q % tiles * kColumns + column < p.inner; };
  const auto first = [&](int64_t q) {  // where this thread's first feature of tile q lies
    return (q / tiles * Channels(p) + at.s * F + at.f0 + y0) * p.inner + q % tiles * kColumns + column;
  };
  const auto row_of = [&](int64_t q) { return (at.s * p.outer + q / tiles) * p.inner + q % tiles * kColumns; };
  const auto issue = [&](int64_t q, int stage) {
    if (inside(q)) {
      const int64_t from = first(q);
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        if (y0 + j * kRows >= at.mine) break;
        CopyAsync(slot(stage, 0, j), static_cast<const T*>(p.x) + from + int64_t(j) * kRows * p.inner);
        if (kGradient) CopyAsync(slot(stage, 1, j), static_cast<const T*>(p.dy) + from + int64_t(j) * kRows * p.inner);
      }
    }
    CommitCopies();
  };

  float gain[kPacks], bias[kPacks], gain_sums[kPacks] = {}, bias_sums[kPacks] = {};
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const bool has = y0 + j * kRows < at.mine;
    const int64_t f = at.s * F + at.f0 + y0 + j * kRows;
    gain[j] = has ? p.gain[f] : 0.f, bias[j] = has ? p.bias[f] : 0.f;
  }
  const auto statistics = [&](int64_t q, float(&mean)[N], float(&rstd)[N], float(&base)[N]) {
    float residual[N];
    LoadFloats<N>(p.mean + row_of(q) + column, mean);
    LoadFloats<N>(p.rstd + row_of(q) + column, rstd);
    LoadFloats<N>(p.residual + row_of(q) + column, residual);
#pragma unroll
    for (int k = 0; k < N; ++k) base[k] = -residual[k] * rstd[k];
  };

  // This block's sums of a tile, told to the group.
  const auto sum_tile = [&](int64_t q, int stage, int turn) {
    float a[N] = {}, b[N] = {}, shift[N] = {};
    if constexpr (kGradient) {
      if (inside(q)) {
        float mean[N], rstd[N], base[N];
        statistics(q, mean, rstd, base);
#pragma unroll
        for (int j = 0; j < kPacks; ++j) {
          if (y0 + j * kRows >= at.mine) break;
          float v[N], t[N];
          Widen(LoadShared<T>(slot(stage, 0, j)), v);
          Widen(LoadShared<T>(slot(stage, 1, j)), t);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            const float xhat = (v[k] - mean[k]) * rstd[k] + base[k];
            t[k] = BeforeRelu(p.relu, t[k], xhat, gain[j], bias[j]);
            gain_sums[j] += t[k] * xhat;
            bias_sums[j] += t[k];
            const float d = t[k] * gain[j];
            a[k] += d;
            b[k] += d * xhat;
          }
        }
      }
    } else {
      float v[kPacks][N] = {};
      const bool here = inside(q);
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        if (!here || y0 + j * kRows >= at.mine) break;
        Widen(LoadShared<T>(slot(stage, 0, j)), v[j]);
#pragma unroll
        for (int k = 0; k < N; ++k) shift[k] += v[j][k];
      }
      const float sum = ColumnSum<T>(shift, scratch);
      if (threadIdx.x < kColumns) own[threadIdx.x] = sum / float(at.mine);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < N; ++k) shift[k] = own[column + k];
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        if (!here || y0 + j * kRows >= at.mine) break;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float d = v[j][k] - shift[k];
          a[k] += d;
          b[k] += d * d;
        }
      }
    }
    const float sum_a = ColumnSum<T>(a, scratch), sum_b = ColumnSum<T>(b, scratch);
    if (threadIdx.x < kColumns) {
      float* to = sums + turn * kKinds * kColumns * e.members + int64_t(threadIdx.x) * e.members + at.rank;
      __stcg(to, sum_a);
      __stcg(to + kColumns * e.members, sum_b);
      if (!kGradient) __stcg(to + 2 * kColumns * e.members, own[threadIdx.x]);
    }
    Arrive(arrivals + turn);
  };

  // The result of a tile, from everybody's sums, added in order; `count` arrivals tell that they are there.
  const auto finish_tile = [&](int64_t q, int stage, int turn, unsigned count) {
    WaitFor(arrivals + turn, count);
    const float inverse = 1.f / float(F);
    if (threadIdx.x < kColumns) {
      const int c = threadIdx.x, M = e.members;
      const float* from = sums + turn * kKinds * kColumns * M + int64_t(c) * M;
      const auto theirs = [&](int kind, int r) { return __ldcg(from + kind * kColumns * M + r); };
      if constexpr (kGradient) {
        float a = 0.f, b = 0.f;
#pragma unroll 8
        for (int r = 0; r < M; ++r) a += theirs(0, r), b += theirs(1, r);
        total[0][c] = a * inverse, total[1][c] = b * inverse;
      } else {
        // Every block has its own shift and sums around it: moved to one shift, near the mean.
        const auto features = [&](int r) { return float(min(int64_t(e.share), F - int64_t(r) * e.share)); };
        float center = 0.f, a = 0.f, b = 0.f;
#pragma unroll 8
        for (int r = 0; r < M; ++r) center += theirs(2, r) * (features(r) * inverse);
#pragma unroll 8
        for (int r = 0; r < M; ++r) {
          const float n = features(r), delta = theirs(2, r) - center, off = theirs(0, r);
          a += off + n * delta;
          b += theirs(1, r) + delta * (2.f * off + n * delta);
        }
        const Statistics stats = FinishStatistics(center, a * inverse, b * inverse, p.epsilon);
        total[0][c] = stats.mean, total[1][c] = -stats.residual * stats.rstd, total[2][c] = stats.rstd;
        if (at.rank == 0 && q % tiles * kColumns + c < p.inner) {
          p.mean[row_of(q) + c] = stats.mean, p.residual[row_of(q) + c] = stats.residual;
          p.rstd[row_of(q) + c] = stats.rstd;
        }
      }
    }
    __syncthreads();
    if (!inside(q)) return;
    T* out = static_cast<T*>(kGradient ? p.dx : p.y) + first(q);
    float mean[N], rstd[N], base[N];
    if constexpr (kGradient) {
      statistics(q, mean, rstd, base);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k)
        mean[k] = total[0][column + k], base[k] = total[1][column + k], rstd[k] = total[2][column + k];
    }
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (y0 + j * kRows >= at.mine) break;
      float v[N];
      Widen(LoadShared<T>(slot(stage, 0, j)), v);
      if constexpr (kGradient) {
        float t[N];
        Widen(LoadShared<T>(slot(stage, 1, j)), t);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float xhat = (v[k] - mean[k]) * rstd[k] + base[k];
          const float d = BeforeRelu(p.relu, t[k], xhat, gain[j], bias[j]) * gain[j];
          v[k] = ((d - total[0][column + k]) - xhat * total[1][column + k]) * rstd[k];
        }
      } else {
#pragma unroll
        for (int k = 0; k < N; ++k) v[k] = Relu(p.relu, ((v[k] - mean[k]) * rstd[k] + base[k]) * gain[j] + bias[j]);
      }
      StoreVector(out + int64_t(j) * kRows * p.inner, v);
    }
  };

  issue(at.part, 0);
  issue(at.part + e.groups, 1);
  int64_t last = -1;
  int done = 0, stage = 0;  // tiles summed; where the next one lies
  const auto finish_last = [&] {
    const int tile = done - 1;
    finish_tile(last, (stage + kStages - 1) % kStages, tile % kTurns, unsigned(tile / kTurns + 1) * e.members);
  };
  for (int64_t q = at.part; q < at.total; q += e.groups) {
    WaitForCopies<1>();  // all but the newest
    sum_tile(q, stage, done % kTurns);
    if (last >= 0) finish_last();
    issue(q + 2 * e.groups, (stage + kStages - 1) % kStages);
    last = q;
    ++done;
    stage = (stage + 1) % kStages;
  }
  if (last >= 0) finish_last();

  if constexpr (kGradient) {
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int f = y0 + j * kRows;
#pragma unroll
      for (int lanes = 1; lanes < kWidth; lanes *= 2) {
        gain_sums[j] += __shfl_xor_sync(0xffffffff, gain_sums[j], lanes);
        bias_sums[j] += __shfl_xor_sync(0xffffffff, bias_sums[j], lanes);
      }
      if (f < at.mine && threadIdx.x % kWidth == 0) {
        dgain[at.part * Channels(p) + at.s * F + at.f0 + f] = gain_sums[j];
        dbias[at.part * Channels(p) + at.s * F + at.f0 + f] = bias_sums[j];
      }
    }
  }
}

struct Launch {
  Exchange exchange = {};
  int64_t tiles = 0, blocks = 0, arrival_bytes = 0, sum_bytes = 0;
};

Launch Plan(const LayerNormProblem& p, const Chip& chip) {
  Launch launch;
  Exchange& e = launch.exchange;
  const int columns = kWidth * int(16 / SizeOf(p.dtype));
  launch.tiles = CeilDiv(p.inner, columns);
  // As many groups as find room, then as many members as each can have.
  const int64_t least = CeilDiv(p.features, int64_t(kRows) * Packs(p.gradient)) * p.segments;
  if (least > chip.multiprocessors) return launch;
  const int64_t groups = std::min<int64_t>(chip.multiprocessors / least, p.outer * launch.tiles);
  const int64_t room = chip.multiprocessors / (groups * p.segments);
  e.groups = int(groups);
  e.share = int(CeilDiv(CeilDiv(p.features, room), kRows) * kRows);
  e.members = int(CeilDiv(p.features, e.share));
  launch.blocks = groups * p.segments * e.members;
  launch.arrival_bytes = CeilDiv(groups * p.segments * kTurns * int64_t(sizeof(unsigned)), 256) * 256;
  launch.sum_bytes = groups * p.segments * kTurns * Kinds(p.gradient) * columns * e.members * int64_t(sizeof(float));
  return launch;
}

template <typename T, bool kGradient>
Status LaunchColumns(const LayerNormProblem& p, const Launch& launch, float* dgain, float* dbias, Stream stream) {
  auto* kernel = Columns<T, kGradient>;
  constexpr int kBytes = kStages * kStageBytes;
  BLOCKSPARSE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(launch.blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  BLOCKSPARSE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, p, launch.exchange, launch.tiles, dgain, dbias));
  return {};
}

}  // namespace

LayerFamily ChooseColumns(const LayerNormProblem& p, const Chip& chip) {
  LayerFamily family;
  constexpr int kStatic = 16384;  // what the kernel has besides
  if (p.inner % (16 / SizeOf(p.dtype)) != 0 || p.rows() * p.features <= kSmallTensor ||
      kStages * kStageBytes + kStatic > chip.shared_memory ||
      !Aligned({p.x, p.y, p.dy, p.dx, p.mean, p.residual, p.rstd}))
    return family;
  const Launch launch = Plan(p, chip);
  // A tile that is mostly empty reads too little at a time; the kernels for any shape do better there.
  if (launch.blocks == 0 || p.inner * SizeOf(p.dtype) < 64) return family;
  family.fits = true;
  family.parts = p.gradient ? launch.exchange.groups : 1;
  family.scratch = launch.arrival_bytes + launch.sum_bytes;
  return family;
}

Status RunColumns(const LayerNormProblem& p, void* scratch, float* dgain, float* dbias, const Chip& chip,
                  Stream stream) {
  Launch launch = Plan(p, chip);
  launch.exchange.arrivals = static_cast<unsigned*>(scratch);
  launch.exchange.sums = reinterpret_cast<float*>(static_cast<char*>(scratch) + launch.arrival_bytes);
  BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(scratch, 0, launch.arrival_bytes, stream));
  Status status;
  WithType(p.dtype, [&](auto type) {
    using T = decltype(type);
    status = p.gradient ? LaunchColumns<T, true>(p, launch, dgain, dbias, stream)
                        : LaunchColumns<T, false>(p, launch, dgain, dbias, stream);
  });
  return status;
}

}  // namespace cuda
}  // namespace blocksparse
