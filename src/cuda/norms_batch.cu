// Batch norm on the GPU: one launch that sums, one that reads again and writes; for small tensors both in one.
#include <algorithm>

#include "cuda/norms.cuh"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;         // packs in flight, of each tensor
constexpr int kMaxParts = 32;      // a warp adds them
constexpr int64_t kBlocks = 4096;  // that keep a chip busy

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
    const int64_t wanted = std::min(CeilDiv(kBlocks, p.channels), packs / (4 * kThreads * kUnroll));
    run = CeilDiv(packs, std::max<int64_t>(1, std::min<int64_t>(kMaxParts, wanted)));
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
  // The mean of the first few elements of every thread is a shift near enough to the mean of all.
  float first = 0.f, count = 0.f;
  if (channel.begin + threadIdx.x < channel.end) {
    float v[N];
    Widen(LoadPack<T, N>(x + channel.At(channel.begin + threadIdx.x)), v);
#pragma unroll
    for (int i = 0; i < N; ++i) first += v[i];
    count = float(N);
  }
  BlockSums(first, count, scratch);
  const float shift = first / count;
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
    const Partial mine = lane < parts ? partials[channel.c * parts + lane] : Partial{};
    const float n = lane < parts ? float(channel.Count(lane)) : 0.f, total = WarpSum(n);
    const float center = channel.p.gradient ? 0.f : WarpSum(mine.shift * (n / total));
    const float delta = lane < parts ? mine.shift - center : 0.f;
    const float a = WarpSum(mine.a + n * delta), b = WarpSum(mine.b + delta * (2.f * mine.a + n * delta));
    if (lane == 0) *result = {center, a, b};
  }
  __syncthreads();
  return *result;
}

// y or dx of a run, from the channel's sums.
template <typename T, int N>
__device__ void ApplyRun(const Channel<T, N>& channel, const Partial& sums, bool first) {
  const BatchNormProblem& p = channel.p;
  const int64_t c = channel.c;
  const float n = float(channel.runs.packs * N), gain = p.gain[c];
  const T* x = static_cast<const T*>(p.x);
  Pack<T, N> xs[kUnroll], dys[kUnroll];
  if (p.gradient) {
    if (first && threadIdx.x == 0) p.dgain[c] = sums.a, p.dbias[c] = sums.b;
    const Statistics stats = Given(p, c);
    // dx = dy factor + (x^ slope + mean), x^ = (x - stats.mean) rstd + base
    const float factor = stats.rstd * gain, base = -stats.residual * stats.rstd;
    const float mean = p.inference ? 0.f : -sums.b / n * factor, slope = p.inference ? 0.f : -sums.a / n * factor;
    const T* dy = static_cast<const T*>(p.dy);
    T* dx = static_cast<T*>(p.dx);
    channel.ForPacks([&](int u, int64_t at) { xs[u] = LoadPack<T, N>(x + at), dys[u] = LoadPack<T, N>(dy + at); },
                     [&](int u, int64_t at) {
                       float v[N], t[N];
                       Widen(xs[u], v);
                       Widen(dys[u], t);
#pragma unroll
                       for (int i = 0; i < N; ++i)
                         t[i] = p.inference
                                    ? t[i] * factor
                                    : t[i] * factor + (((v[i] - stats.mean) * stats.rstd + base) * slope + mean);
                       StorePack(dx + at, t);
                     });
    return;
  }
  Statistics stats;
  if (p.inference) {
    stats = Given(p, c);
  } else {
    float variance;
    FinishMoments(sums.shift, sums.a / n, sums.b / n, &stats.mean, &stats.residual, &variance);
    if (sums.b != sums.b) variance = sums.b;  // NaN
    stats.rstd = 1.f / sqrtf(variance + p.epsilon);
    if (first && threadIdx.x == 0) p.mean[c] = stats.mean, p.residual[c] = stats.residual, p.variance[c] = variance;
  }
  const float bias = p.bias[c], factor = stats.rstd * gain, base = bias - stats.residual * factor;
  T* y = static_cast<T*>(p.y);
  channel.ForPacks([&](int u, int64_t at) { xs[u] = LoadPack<T, N>(x + at); },
                   [&](int u, int64_t at) {
                     float v[N];
                     Widen(xs[u], v);
#pragma unroll
                     for (int i = 0; i < N; ++i) v[i] = (v[i] - stats.mean) * factor + base;
                     StorePack(y + at, v);
                   });
}

enum class Step { kSum, kApply, kBoth };

// Channels vary slowest, and the second launch goes backwards: what the first read last may still be in the cache.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) BatchNorm(BatchNormProblem p, Runs runs, Partial* partials, Step step) {
  __shared__ float scratch[2][kThreads / 32];
  __shared__ Partial all;
  const int64_t block = step == Step::kApply ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t part = block % runs.parts;
  const Channel<T, N> channel = {p, runs, block / runs.parts, part * runs.run, min(runs.packs, (part + 1) * runs.run)};
  Partial sums = {};
  if (step != Step::kApply) sums = SumRun(channel, scratch);
  if (step == Step::kSum) {
    if (threadIdx.x == 0) partials[block] = sums;
    return;
  }
  if (step == Step::kApply && (p.gradient || !p.inference)) sums = AddRuns(channel, partials, &all);
  ApplyRun(channel, sums, part == 0);
}

int PerPack(const BatchNormProblem& p) {
  const int per_pack = int(16 / SizeOf(p.dtype));
  return p.inner % per_pack == 0 && Aligned({p.x, p.y, p.dy, p.dx}) ? per_pack : 1;
}

bool Empty(const BatchNormProblem& p) { return p.outer == 0 || p.channels == 0 || p.inner == 0; }

template <typename T, int N>
void Launch(const BatchNormProblem& p, Partial* partials, Stream stream) {
  const Runs runs(p, N);
  const unsigned blocks = unsigned(p.channels * runs.parts);
  const auto launch = [&](Step step) { BatchNorm<T, N><<<blocks, kThreads, 0, stream>>>(p, runs, partials, step); };
  if (p.inference && !p.gradient) return launch(Step::kApply);
  if (runs.parts == 1) return launch(Step::kBoth);
  launch(Step::kSum);
  launch(Step::kApply);
}

}  // namespace

int64_t WorkspaceBytes(const BatchNormProblem& p, const Chip&) {
  if (Empty(p) || (p.inference && !p.gradient)) return 0;
  const Runs runs(p, PerPack(p));
  return runs.parts > 1 ? p.channels * runs.parts * int64_t(sizeof(Partial)) : 0;
}

Status Run(const BatchNormProblem& p, void* workspace, const Chip&, Stream stream) {
  if (Empty(p)) {
    const size_t bytes = size_t(p.channels) * sizeof(float);
    float *const sums[] = {p.dgain, p.dbias}, *const statistics[] = {p.mean, p.residual, p.variance};
    if (bytes > 0 && p.gradient)
      for (float* sum : sums) BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(sum, 0, bytes, stream));
    if (bytes > 0 && !p.gradient && !p.inference)
      for (float* value : statistics) BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(value, 0, bytes, stream));
    return {};
  }
  if (p.channels > INT32_MAX / kMaxParts || p.inner > INT32_MAX)
    return Status::Invalid("batch norm takes up to 2^26 channels and 2^31 positions, got " +
                           std::to_string(p.channels) + " and " + std::to_string(p.inner));
  WithType(p.dtype, [&](auto type) {
    using T = decltype(type);
    auto* partials = static_cast<Partial*>(workspace);
    PerPack(p) > 1 ? Launch<T, kPerVector<T>>(p, partials, stream) : Launch<T, 1>(p, partials, stream);
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace cuda
}  // namespace blocksparse
