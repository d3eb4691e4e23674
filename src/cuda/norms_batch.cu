// Batch norm on the GPU. A channel is read twice, to sum and to write: in one launch, in which thread blocks write a
// channel some channels after others have summed it, while it is still in the cache. Of small channels one thread block
// does both.
#include <algorithm>

#include "cuda/norms.cuh"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 256;
template <bool kGradient>
constexpr int kBlocks = kGradient ? 3 : 4;  // of a multiprocessor
constexpr int kUnroll = 4;                  // packs in flight, of each tensor
constexpr int kMaxParts = 32;               // a warp adds them

// A channel's packs, outer * inner / N, in `parts` runs; one thread block to a run of a channel.
struct Runs {
  int64_t packs, run;
  uint32_t plane;  // packs of one outer index
  // pack / plane = pack * multiplier >> shift for packs below 2^31 (T. Granlund, P. L. Montgomery, 1994).
  uint32_t multiplier;
  int shift, parts;

  Runs(const BatchNormProblem& p, int per_pack) {
    plane = uint32_t(p.inner / per_pack);
    shift = 31;
    while ((uint64_t(1) << (shift - 31)) < plane) ++shift;
    multiplier = uint32_t((uint64_t(1) << shift) / plane + 1);
    packs = p.outer * int64_t(plane);
    // As little to a block as keeps it busy: the less is under way, the more of it the cache still has.
    const int64_t wanted = std::min<int64_t>(kMaxParts, CeilDiv(packs, kThreads * kUnroll));
    run = CeilDiv(packs, std::max<int64_t>(1, wanted));
    if (p.outer * p.channels * p.inner <= kSmallTensor) run = packs;
    parts = int(CeilDiv(packs, run));
  }
};

// What a block knows of the elements it sums. Statistics: sums over x - shift and its square. Gradient: sums of dy x^ and
// dy, and no shift.
struct Partial {
  float shift, a, b;
};

template <typename T, int N>
struct Channel {
  const BatchNormProblem& p;
  const Runs& runs;
  int64_t c, begin, end;

  __device__ __forceinline__ int64_t At(int64_t pack) const {
    if (runs.packs > INT32_MAX) {
      const int64_t o = pack / runs.plane;
      return (o * p.channels + c) * p.inner + (pack - o * runs.plane) * N;
    }
    const uint32_t small = uint32_t(pack), o = uint32_t(uint64_t(small) * runs.multiplier >> runs.shift);
    return (int64_t(o) * p.channels + c) * p.inner + (small - o * runs.plane) * N;
  }

  // body(offset) for this thread's packs, kUnroll of them at a time: `load` for each, then `use` for each.
  template <typename Load, typename Use>
  __device__ __forceinline__ void ForPacks(const Load& load, const Use& use) const {
    int64_t at[kUnroll];
    for (int64_t pack = begin + threadIdx.x; pack < end; pack += kThreads * kUnroll) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (pack + u * kThreads < end) at[u] = At(pack + u * kThreads), load(u, at[u]);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (pack + u * kThreads < end) use(u, at[u]);
    }
  }

  __device__ __forceinline__ int64_t Count(int part) const {
    return (min(runs.packs, (part + 1) * runs.run) - part * runs.run) * N;
  }
};

// Sums of a block, in every thread. `scratch` is [2][kThreads / 32].
__device__ __forceinline__ void BlockSums(float& a, float& b, float (*scratch)[kThreads / 32]) {
  a = WarpSum(a), b = WarpSum(b);
  const int lane = threadIdx.x % 32;
  __syncthreads();
  if (lane == 0) scratch[0][threadIdx.x / 32] = a, scratch[1][threadIdx.x / 32] = b;
  __syncthreads();
  a = WarpSum(lane < kThreads / 32 ? scratch[0][lane] : 0.f);
  b = WarpSum(lane < kThreads / 32 ? scratch[1][lane] : 0.f);
}

__device__ __forceinline__ Statistics Given(const BatchNormProblem& p, int64_t c) {
  return {p.mean[c], p.residual ? p.residual[c] : 0.f, 1.f / sqrtf(p.variance[c] + p.epsilon)};
}

template <typename T, int N>
__device__ Partial SumRun(const Channel<T, N>& channel, float (*scratch)[kThreads / 32]) {
  const BatchNormProblem& p = channel.p;
  const T *x = static_cast<const T*>(p.x), *dy = static_cast<const T*>(p.dy);
  Pack<T, N> xs[kUnroll], dys[kUnroll];
  float a = 0.f, b = 0.f;
  if (p.gradient) {
    const Statistics stats = Given(p, channel.c);
    const float base = -stats.residual * stats.rstd;
    channel.ForPacks([&](int u, int64_t at) { xs[u] = LoadPack<T, N>(x + at), dys[u] = LoadPack<T, N>(dy + at); },
                     [&](int u, int64_t) {
                       float v[N], t[N];
                       Widen(xs[u], v);
                       Widen(dys[u], t);
#pragma unroll
                       for (int i = 0; i < N; ++i) {
                         a += t[i] * ((v[i] - stats.mean) * stats.rstd + base);
                         b += t[i];
                       }
                     });
    BlockSums(a, b, scratch);
    return {0.f, a, b};
  }
  // The shift, the same in every warp: the mean of the run's first packs. A mean s of m of n values has (s - mean)^2 at
  // most n / m of their variance, which so loses no more than the bits of 1 + n / m.
  const int lane = threadIdx.x % 32;
  float first = 0.f;
  if (channel.begin + lane < channel.end) {
    float v[N];
    Widen(LoadPack<T, N>(x + channel.At(channel.begin + lane)), v);
#pragma unroll
    for (int i = 0; i < N; ++i) first += v[i];
  }
  const float shift = WarpSum(first) / float(min(int64_t(32), channel.end - channel.begin) * N);
  channel.ForPacks([&](int u, int64_t at) { xs[u] = LoadPack<T, N>(x + at); },
                   [&](int u, int64_t) {
                     float v[N];
                     Widen(xs[u], v);
#pragma unroll
                     for (int i = 0; i < N; ++i) {
                       const float d = v[i] - shift;
                       a += d;
                       b += d * d;
                     }
                   });
  BlockSums(a, b, scratch);
  return {shift, a, b};
}

// The sums of a channel's parts, moved to one shift and added in order, by the first warp of the block.
template <typename T, int N>
__device__ Partial AddRuns(const Channel<T, N>& channel, const Partial* partials, Partial* result) {
  const int lane = threadIdx.x % 32, parts = channel.runs.parts;
  if (threadIdx.x < 32) {
    Partial mine = {};
    if (lane < parts) {  // other blocks wrote it while this one ran
      const Partial* from = partials + channel.c * parts + lane;
      mine = {__ldcg(&from->shift), __ldcg(&from->a), __ldcg(&from->b)};
    }
    const float n = lane < parts ? float(channel.Count(lane)) : 0.f, total = WarpSum(n);
    const float center = channel.p.gradient ? 0.f : WarpSum(mine.shift * (n / total));
    const float delta = lane < parts ? mine.shift - center : 0.f;
    const float a = WarpSum(mine.a + n * delta), b = WarpSum(mine.b + delta * (2.f * mine.a + n * delta));
    if (lane == 0) *result = {center, a, b};
  }
  __syncthreads();
  return *result;
}

// What makes y or dx of a channel, from its sums over n elements; `first` writes what there is one of.
struct Affine {
  float mean, factor, base;

  __device__ __forceinline__ Affine(const BatchNormProblem& p, int64_t c, const Partial& sums, float n, bool first) {
    Statistics stats;
    if (p.inference) {
      stats = Given(p, c);
    } else {
      float variance;
      FinishMoments(sums.shift, sums.a / n, sums.b / n, &stats.mean, &stats.residual, &variance);
      if (sums.b != sums.b) variance = sums.b;  // NaN
      stats.rstd = 1.f / sqrtf(variance + p.epsilon);
      if (first) p.mean[c] = stats.mean, p.residual[c] = stats.residual, p.variance[c] = variance;
    }
    mean = stats.mean, factor = stats.rstd * p.gain[c], base = p.bias[c] - stats.residual * factor;
  }
  __device__ __forceinline__ float operator()(float x) const { return (x - mean) * factor + base; }
};

// dx = dy factor + (x^ slope + offset), x^ = (x - mean) rstd + base
struct AffineGradient {
  float mean, rstd, base, factor, slope, offset;

  __device__ __forceinline__ AffineGradient(const BatchNormProblem& p, int64_t c, const Partial& sums, float n,
                                            bool first) {
    if (first) p.dgain[c] = sums.a, p.dbias[c] = sums.b;
    const Statistics stats = Given(p, c);
    mean = stats.mean, rstd = stats.rstd, base = -stats.residual * stats.rstd;
    factor = stats.rstd * p.gain[c];
    slope = p.inference ? 0.f : -sums.a / n * factor, offset = p.inference ? 0.f : -sums.b / n * factor;
  }
  __device__ __forceinline__ float operator()(float dy, float x) const {
    // A slope of 0 does not make a NaN of an infinite x.
    return slope == 0.f ? dy * factor + offset : dy * factor + (((x - mean) * rstd + base) * slope + offset);
  }
};

template <typename T, int N>
__device__ void ApplyRun(const Channel<T, N>& channel, const Partial& sums, bool first) {
  const BatchNormProblem& p = channel.p;
  const float n = float(channel.runs.packs * N);
  const T* x = static_cast<const T*>(p.x);
  first = first && threadIdx.x == 0;
  Pack<T, N> xs[kUnroll], dys[kUnroll];
  if (p.gradient) {
    const AffineGradient gradient(p, channel.c, sums, n, first);
    const T* dy = static_cast<const T*>(p.dy);
    T* dx = static_cast<T*>(p.dx);
    channel.ForPacks([&](int u, int64_t at) { xs[u] = LoadPack<T, N>(x + at), dys[u] = LoadPack<T, N>(dy + at); },
                     [&](int u, int64_t at) {
                       float v[N], t[N];
                       Widen(xs[u], v);
                       Widen(dys[u], t);
#pragma unroll
                       for (int i = 0; i < N; ++i) t[i] = gradient(t[i], v[i]);
                       StorePack(dx + at, t);
                     });
    return;
  }
  const Affine affine(p, channel.c, sums, n, first);
  T* y = static_cast<T*>(p.y);
  channel.ForPacks([&](int u, int64_t at) { xs[u] = LoadPack<T, N>(x + at); },
                   [&](int u, int64_t at) {
                     float v[N];
                     Widen(xs[u], v);
#pragma unroll
                     for (int i = 0; i < N; ++i) v[i] = affine(v[i]);
                     StorePack(y + at, v);
                   });
}

// A channel for each thread block: its sums and its result, or with the statistics given the result alone.
template <typename T, int N, bool kSums>
__global__ void __launch_bounds__(kThreads, 3) BatchNorm(BatchNormProblem p, Runs runs) {
  __shared__ float scratch[2][kThreads / 32];
  const int64_t part = blockIdx.x % runs.parts, c = blockIdx.x / runs.parts;
  const Channel<T, N> channel = {p, runs, c, part * runs.run, min(runs.packs, (part + 1) * runs.run)};
  Partial sums = {};
  if constexpr (kSums) sums = SumRun(channel, scratch);
  ApplyRun(channel, sums, part == 0);
}

// Counters of a launch, 0 before it: thread blocks that began, and parts of each channel that are summed.
struct Progress {
  unsigned* began;
  unsigned* summed;
  int lag;  // channels
};

// The parts of channel 0 to be summed, those of channel 1, ..., and `lag` channels later the same to be written, in the
// order in which thread blocks begin: whoever waits for a sum waits for a block that runs already.
template <typename T, int N, bool kGradient>
__global__ void __launch_bounds__(kThreads, kBlocks<kGradient>)
    BatchNormLagging(BatchNormProblem p, Runs runs, Partial* partials, Progress progress) {
  p.gradient = kGradient;
  __shared__ float scratch[2][kThreads / 32];
  __shared__ Partial all;
  __shared__ unsigned turn;
  if (threadIdx.x == 0) turn = atomicAdd(progress.began, 1u);  // an integer: no order changes a result
  __syncthreads();
  const unsigned parts = runs.parts, step = turn / (2 * parts), item = turn % (2 * parts), part = item % parts;
  const bool writes = item >= parts;
  const int64_t c = int64_t(step) - (writes ? progress.lag : 0);
  if (c < 0 || c >= p.channels) return;
  const Channel<T, N> channel = {p, runs, c, part * runs.run, min(runs.packs, (part + 1) * runs.run)};
  if (!writes) {
    const Partial sums = SumRun(channel, scratch);
    if (threadIdx.x > 0) return;
    partials[c * parts + part] = sums;
    __threadfence();
    atomicAdd(progress.summed + c, 1u);
    return;
  }
  if (threadIdx.x == 0) {
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(progress.summed + c) : "memory");
    } while (seen < parts);
  }
  __syncthreads();
  ApplyRun(channel, AddRuns(channel, partials, &all), part == 0);
}

int PerPack(const BatchNormProblem& p) {
  const int per_pack = int(16 / SizeOf(p.dtype));
  return p.inner % per_pack == 0 && Aligned({p.x, p.y, p.dy, p.dx}) ? per_pack : 1;
}

bool Empty(const BatchNormProblem& p) { return p.outer == 0 || p.channels == 0 || p.inner == 0; }

int64_t ProgressBytes(const BatchNormProblem& p) { return CeilDiv((1 + p.channels) * 4, 16) * 16; }

template <typename T, int N>
Status Launch(const BatchNormProblem& p, void* workspace, const Chip& chip, Stream stream) {
  const Runs runs(p, N);
  const unsigned blocks = unsigned(p.channels * runs.parts);
  if (p.inference && !p.gradient) {
    BatchNorm<T, N, false><<<blocks, kThreads, 0, stream>>>(p, runs);
  } else if (runs.parts == 1) {
    BatchNorm<T, N, true><<<blocks, kThreads, 0, stream>>>(p, runs);
  } else {
    BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(workspace, 0, ProgressBytes(p), stream));
    auto* counters = static_cast<unsigned*>(workspace);
    auto* partials = reinterpret_cast<Partial*>(static_cast<char*>(workspace) + ProgressBytes(p));
    // What runs at one time, and a little more.
    const int blocks_at_once = (p.gradient ? kBlocks<true> : kBlocks<false>)*chip.multiprocessors;
    const int lag = int(std::min<int64_t>(p.channels, CeilDiv(blocks_at_once, 2 * runs.parts) + 1));
    const unsigned turns = unsigned((p.channels + lag) * 2 * runs.parts);
    const Progress progress = {counters, counters + 1, lag};
    if (p.gradient)
      BatchNormLagging<T, N, true><<<turns, kThreads, 0, stream>>>(p, runs, partials, progress);
    else
      BatchNormLagging<T, N, false><<<turns, kThreads, 0, stream>>>(p, runs, partials, progress);
  }
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace

int64_t WorkspaceBytes(const BatchNormProblem& p, const Chip&) {
  if (Empty(p) || (p.inference && !p.gradient)) return 0;
  const Runs runs(p, PerPack(p));
  return runs.parts > 1 ? ProgressBytes(p) + p.channels * runs.parts * int64_t(sizeof(Partial)) : 0;
}

Status Run(const BatchNormProblem& p, void* workspace, const Chip& chip, Stream stream) {
  if (Empty(p)) {
    const size_t bytes = size_t(p.channels) * sizeof(float);
    float *const sums[] = {p.dgain, p.dbias}, *const statistics[] = {p.mean, p.residual, p.variance};
    if (bytes > 0 && p.gradient)
      for (float* sum : sums) BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(sum, 0, bytes, stream));
    if (bytes > 0 && !p.gradient && !p.inference)
      for (float* value : statistics) BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(value, 0, bytes, stream));
    return {};
  }
  if (p.channels > INT32_MAX / (4 * kMaxParts) || p.inner > INT32_MAX)
    return Status::Invalid("batch norm takes up to 2^24 channels and 2^31 positions, got " +
                           std::to_string(p.channels) + " and " + std::to_string(p.inner));
  return WithType(p.dtype, [&](auto type) {
    using T = decltype(type);
    return PerPack(p) > 1 ? Launch<T, kPerVector<T>>(p, workspace, chip, stream)
                          : Launch<T, 1>(p, workspace, chip, stream);
  });
}

}  // namespace cuda
}  // namespace blocksparse
