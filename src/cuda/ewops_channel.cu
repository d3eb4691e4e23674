// Bias, gain and activation by channel on the GPU, and their gradients.
//
// Two shapes of tensors: rows, where channels are the last dimension (inner 1), and planes, where each channel is
// contiguous. Sums over a channel are cut by shape alone and their parts added in order.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/vector.cuh"
#include "kernels/ewops_formulas.h"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // rows, or packs of a plane, in flight
// Gradients move four elements at once: more would take the registers of the threads that hide the memory's latency.
constexpr int kGradPack = 4;
template <typename T>
constexpr int kGradUnroll = sizeof(T) == 2 ? 4 : 2;  // packs in flight of each operand
constexpr int kMaxThreads = 512;                     // of a thread block that sums alone
constexpr int64_t kSmall = 1 << 18;                  // elements up to which one launch sums

using Formulas = EwFormulas<Math>;

// N elements of a gradient: dy becomes gain * t; t and t * x are added to the sums. `other` is x, or y where the problem
// has that. The choice of activation stands outside the loop.
template <int N, bool kGain, class Sum>
__device__ __forceinline__ void Derivatives(const ChannelProblem& p, float (&dy)[N], const float (&other)[N],
                                            const float (&g)[N], const float (&b)[N], const Sum& sum) {
  const auto each = [&](auto derivative) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float t = derivative(dy[i], other[i], i);
      dy[i] = kGain ? g[i] * t : t;
      sum(i, t, t * other[i]);
    }
  };
  if (p.act == Activation::kNone)
    each([](float d, float, int) { return d; });
  else if (p.act == Activation::kFastGelu)
    each([&](float d, float x, int i) {
      return d * Formulas::SwishGrad((kGain ? g[i] * x : x) + b[i], kFastGeluAlpha);
    });
  else if (p.x)
    each([&](float d, float x, int i) { return (kGain ? g[i] * x : x) + b[i] > 0.f ? d : 0.f; });
  else
    each([](float d, float y, int) { return y > 0.f ? d : 0.f; });
}

// v becomes act(g v + b).
template <int N>
__device__ __forceinline__ void Activate(const ChannelProblem& p, float (&v)[N], const float (&g)[N],
                                         const float (&b)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = g[i] * v[i] + b[i];
  if (p.act == Activation::kRelu) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = Formulas::Act(Activation::kRelu, v[i]);
  } else if (p.act == Activation::kFastGelu) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = Formulas::Act(Activation::kFastGelu, v[i]);
  }
}

template <int N>
__device__ __forceinline__ void Fill(float (&x)[N], float value) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = value;
}

template <int N>
__device__ __forceinline__ void LoadOr(const float* p, int64_t c, float otherwise, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = otherwise;
  if (p) LoadFloats<N>(p + c, x);
}

// ------------------------------------------------------------------------------------------------------------ rows

// A thread keeps the gain and bias of N channels and takes kUnroll rows.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, 4) RowsForward(ChannelProblem p, int64_t column_tiles) {
  const int64_t c = (blockIdx.x % column_tiles * blockDim.x + threadIdx.x) * N, C = p.channels;
  const int64_t row = blockIdx.x / column_tiles * (blockDim.y * kUnroll) + threadIdx.y;
  if (c >= C) return;
  const T* x = static_cast<const T*>(p.x) + c;
  T* y = static_cast<T*>(p.y) + c;
  Pack<T, N> loaded[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
    if (row + u * blockDim.y < p.outer) loaded[u] = LoadPack<T, N>(x + (row + u * blockDim.y) * C);
  float g[N], b[N];
  LoadOr<N>(p.gain, c, 1.f, g);
  LoadOr<N>(p.bias, c, 0.f, b);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (row + u * blockDim.y >= p.outer) break;
    float v[N];
    Widen(loaded[u], v);
    Activate(p, v, g, b);
    StorePack(y + (row + u * blockDim.y) * C, v);
  }
}

// Rows [part * rows, (part + 1) * rows) of a tile of columns: dx, and sums to bias_sums, gain_sums [parts, C].
template <typename T, int N, bool kGain>
__global__ void __launch_bounds__(kMaxThreads, 2)
    RowsBackward(ChannelProblem p, int64_t column_tiles, int64_t rows, float* bias_sums, float* gain_sums) {
  constexpr int kRows = kGradUnroll<T>;
  extern __shared__ float shared[];
  const int64_t part = blockIdx.x / column_tiles, C = p.channels;
  const int64_t c = (blockIdx.x % column_tiles * blockDim.x + threadIdx.x) * N;
  const bool inside = c < C;
  const int64_t end = min(p.outer, (part + 1) * rows);
  const T *dy = static_cast<const T*>(p.dy) + c, *other = static_cast<const T*>(p.x ? p.x : p.y);
  T* dx = static_cast<T*>(p.dx) + c;
  float g[N], b[N], bias_sum[N] = {}, gain_sum[N] = {};
  if (inside) {
    LoadOr<N>(kGain ? p.gain : nullptr, c, 1.f, g);
    LoadOr<N>(p.bias, c, 0.f, b);
    for (int64_t first = part * rows + threadIdx.y; first < end; first += kRows * blockDim.y) {
      Pack<T, N> loaded_dy[kRows], loaded[kRows] = {};
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const int64_t row = first + u * blockDim.y;
        if (row >= end) break;
        loaded_dy[u] = LoadPack<T, N>(dy + row * C);
        if (other) loaded[u] = LoadPack<T, N>(other + row * C + c);
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const int64_t row = first + u * blockDim.y;
        if (row >= end) break;
        float dv[N], v[N];
        Widen(loaded_dy[u], dv);
        Widen(loaded[u], v);
        Derivatives<N, kGain>(p, dv, v, g, b, [&](int i, float t, float tx) {
          bias_sum[i] += t;
          if (kGain) gain_sum[i] += tx;
        });
        if (p.dx) StorePack(dx + row * C, dv);
      }
    }
  }
  // The rows of threads meet in order; shared memory is [blockDim.y][blockDim.x * N].
  const int width = blockDim.x * N, thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int which = 0; which < (kGain ? 2 : 1); ++which) {
    float* sums = which == 0 ? bias_sums : gain_sums;
    if (!sums) continue;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i)
      shared[threadIdx.y * width + threadIdx.x * N + i] = which == 0 ? bias_sum[i] : gain_sum[i];
    __syncthreads();
    for (int j = thread; j < width; j += blockDim.x * blockDim.y) {
      const int64_t column = blockIdx.x % column_tiles * width + j;
      if (column >= C) break;
      float sum = shared[j];
      for (int r = 1; r < blockDim.y; ++r) sum += shared[r * width + j];
      sums[part * C + column] = sum;
    }
  }
}

// ---------------------------------------------------------------------------------------------------------- planes

// N divides inner, so that a pack lies within one channel. Index is 32 bits wide where the number of packs allows it.
template <typename T, int N, typename Index>
__global__ void __launch_bounds__(kThreads) PlanesForward(ChannelProblem p, int64_t packs) {
  const T* x = static_cast<const T*>(p.x);
  T* y = static_cast<T*>(p.y);
  const int64_t first = int64_t(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  const Index inner = Index(p.inner / N), channels = Index(p.channels);
  Pack<T, N> loaded[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
    if (first + u * kThreads < packs) loaded[u] = LoadPack<T, N>(x + (first + u * kThreads) * N);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + u * kThreads;
    if (i >= packs) break;
    const Index c = Index(i) / inner % channels;
    float v[N], g[N], b[N];
    Fill(g, p.gain ? p.gain[c] : 1.f);
    Fill(b, p.bias ? p.bias[c] : 0.f);
    Widen(loaded[u], v);
    Activate(p, v, g, b);
    StorePack(y + i * N, v);
  }
}

// How the planes of one channel are cut: outer in `outers` chunks, inner in `inners`.
struct PlaneParts {
  int64_t outers, inners, outer, inner;
};

// One thread block for each channel and part. N divides inner and the parts of it.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, 4)
    PlanesBackward(ChannelProblem p, PlaneParts parts, float* bias_sums, float* gain_sums) {
  constexpr int kPacks = kGradUnroll<T>;
  __shared__ float scratch[kThreads / 32];
  const int64_t c = blockIdx.x % p.channels, part = blockIdx.x / p.channels;
  const int64_t o0 = part / parts.inners * parts.outer, o1 = min(p.outer, o0 + parts.outer);
  const int64_t i0 = part % parts.inners * parts.inner, i1 = min(p.inner, i0 + parts.inner);
  const T *dy = static_cast<const T*>(p.dy), *other = static_cast<const T*>(p.x ? p.x : p.y);
  T* dx = static_cast<T*>(p.dx);
  float g[N], b[N], bias_sum = 0.f, gain_sum = 0.f;
  Fill(g, p.gain ? p.gain[c] : 1.f);
  Fill(b, p.bias ? p.bias[c] : 0.f);
  const int64_t run = i1 > i0 ? (i1 - i0) / N : 0, packs = run * (o1 - o0);
  for (int64_t first = threadIdx.x; first < packs; first += kPacks * kThreads) {
    Pack<T, N> loaded_dy[kPacks], loaded[kPacks] = {};
    int64_t at[kPacks];
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const int64_t t = first + u * kThreads;
      if (t >= packs) break;
      // A part holds fewer than 2^32 packs.
      const int64_t o = o1 - o0 == 1 ? 0 : uint32_t(t) / uint32_t(run);
      at[u] = ((o0 + o) * p.channels + c) * p.inner + i0 + (t - o * run) * N;
      loaded_dy[u] = LoadPack<T, N>(dy + at[u]);
      if (other) loaded[u] = LoadPack<T, N>(other + at[u]);
    }
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      if (first + u * kThreads >= packs) break;
      float dv[N], v[N];
      Widen(loaded_dy[u], dv);
      Widen(loaded[u], v);
      Derivatives<N, true>(p, dv, v, g, b, [&](int, float t, float tx) {
        bias_sum += t;
        gain_sum += tx;
      });
      if (p.dx) StorePack(dx + at[u], dv);
    }
  }
  if (bias_sums) {
    const float sum = BlockSum<kThreads>(bias_sum, scratch);
    if (threadIdx.x == 0) bias_sums[part * p.channels + c] = sum;
  }
  if (gain_sums) {
    const float sum = BlockSum<kThreads>(gain_sum, scratch);
    if (threadIdx.x == 0) gain_sums[part * p.channels + c] = sum;
  }
}

// ------------------------------------------------------------------------------------------------------------ sums

constexpr int kSumRows = 16;

// sum[c] = sum over parts of partial[part][c]; blockIdx.y picks the array.
__global__ void __launch_bounds__(32 * kSumRows)
    SumParts(const float* partial0, float* sum0, const float* partial1, float* sum1, int64_t parts, int64_t channels) {
  const float* partial = blockIdx.y == 0 ? partial0 : partial1;
  float* sum = blockIdx.y == 0 ? sum0 : sum1;
  if (!sum) return;
  __shared__ float shared[kSumRows][32];
  const int64_t c = int64_t(blockIdx.x) * 32 + threadIdx.x;
  float mine = 0.f;
  if (c < channels)
    for (int64_t part = threadIdx.y; part < parts; part += kSumRows) mine += partial[part * channels + c];
  shared[threadIdx.y][threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.y != 0 || c >= channels) return;
  for (int r = 1; r < kSumRows; ++r) mine += shared[r][threadIdx.x];
  sum[c] = mine;
}

// -------------------------------------------------------------------------------------------------------- launches

struct RowShape {
  int64_t column_tiles, parts, rows;  // rows of a part
  int width, height;                  // of a thread block
};

RowShape BackwardRows(const ChannelProblem& p, int per_pack) {
  RowShape s;
  const int64_t packs = CeilDiv(p.channels, per_pack), n = p.outer * p.channels;
  const bool small = n <= kSmall;
  s.width = small ? 8 : 32;
  s.height = small ? kMaxThreads / s.width : kThreads / s.width;
  s.column_tiles = CeilDiv(packs, s.width);
  // Some 2000 blocks give every chip several rounds of work; each takes at least a few rows a thread.
  s.parts = small ? 1 : std::max<int64_t>(1, std::min(2048 / s.column_tiles, p.outer / (8 * s.height)));
  s.rows = std::max<int64_t>(1, CeilDiv(p.outer, s.parts));
  s.parts = std::max<int64_t>(1, CeilDiv(p.outer, s.rows));
  return s;
}

PlaneParts BackwardPlanes(const ChannelProblem& p) {
  PlaneParts parts = {1, 1, p.outer, p.inner};
  if (p.outer * p.channels * p.inner <= kSmall) return parts;
  // Too few channels to fill a chip, or planes too long for a block: cut outer first, then inner.
  const int64_t plane = p.outer * p.inner;
  const int64_t wanted = std::max(CeilDiv(1024, p.channels), plane >> 24), most = std::max<int64_t>(1, plane >> 12);
  const int64_t cut = std::min(wanted, most);
  parts.outer = CeilDiv(p.outer, std::min(cut, p.outer));
  parts.outers = CeilDiv(p.outer, parts.outer);
  parts.inner = CeilDiv(CeilDiv(p.inner, CeilDiv(cut, parts.outers)), 64) * 64;
  parts.inners = CeilDiv(p.inner, parts.inner);
  return parts;
}

bool Packed(const ChannelProblem& p, int per_pack) {
  return (p.inner == 1 ? p.channels : p.inner) % per_pack == 0 && Aligned({p.x, p.y, p.dy, p.dx}) &&
         (p.inner > 1 || Aligned({p.gain, p.bias}));
}

int64_t Parts(const ChannelProblem& p) {
  if (p.inner == 1) return BackwardRows(p, Packed(p, kGradPack) ? kGradPack : 1).parts;
  const PlaneParts parts = BackwardPlanes(p);
  return parts.outers * parts.inners;
}

template <typename T, int N>
void LaunchForward(const ChannelProblem& p, Stream stream) {
  if (p.inner == 1) {
    const int64_t packs = CeilDiv(p.channels, N);
    unsigned width = 1;
    while (width < 32 && width < packs) width *= 2;
    const dim3 block(width, kThreads / width);
    const int64_t tiles = CeilDiv(packs, width), rows = CeilDiv(p.outer, block.y * kUnroll);
    RowsForward<T, N><<<unsigned(tiles * rows), block, 0, stream>>>(p, tiles);
  } else {
    const int64_t packs = p.outer * p.channels * p.inner / N;
    const unsigned blocks = unsigned(CeilDiv(packs, kThreads * kUnroll));
    if (packs <= UINT32_MAX)
      PlanesForward<T, N, uint32_t><<<blocks, kThreads, 0, stream>>>(p, packs);
    else
      PlanesForward<T, N, uint64_t><<<blocks, kThreads, 0, stream>>>(p, packs);
  }
}

template <typename T, int N>
void LaunchBackward(const ChannelProblem& p, float* bias_sums, float* gain_sums, Stream stream) {
  if (p.inner == 1) {
    const RowShape s = BackwardRows(p, N);
    const int shared = s.width * N * s.height * int(sizeof(float));
    const unsigned blocks = unsigned(s.column_tiles * s.parts);
    const dim3 block(s.width, s.height);
    if (p.gain || p.dgain)
      RowsBackward<T, N, true><<<blocks, block, shared, stream>>>(p, s.column_tiles, s.rows, bias_sums, gain_sums);
    else
      RowsBackward<T, N, false><<<blocks, block, shared, stream>>>(p, s.column_tiles, s.rows, bias_sums, gain_sums);
  } else {
    const PlaneParts parts = BackwardPlanes(p);
    PlanesBackward<T, N>
        <<<unsigned(p.channels * parts.outers * parts.inners), kThreads, 0, stream>>>(p, parts, bias_sums, gain_sums);
  }
}

}  // namespace

int64_t WorkspaceBytes(const ChannelProblem& p) {
  if (!p.gradient || p.channels == 0 || p.inner == 0) return 0;
  const int64_t parts = Parts(p);
  const int sums = (p.dbias != nullptr) + (p.dgain != nullptr);
  return parts > 1 ? sums * parts * p.channels * int64_t(sizeof(float)) : 0;
}

Status Run(const ChannelProblem& p, void* workspace, Stream stream) {
  const int64_t C = p.channels;
  if (C == 0) return {};
  if (p.outer == 0 || p.inner == 0) {
    if (p.dbias) BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(p.dbias, 0, C * sizeof(float), stream));
    if (p.dgain) BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(p.dgain, 0, C * sizeof(float), stream));
    return {};
  }
  const int64_t parts = p.gradient ? Parts(p) : 1;
  float *bias_sums = p.dbias, *gain_sums = p.dgain;
  if (parts > 1) {
    float* partial = static_cast<float*>(workspace);
    if (p.dbias) bias_sums = partial, partial += parts * C;
    if (p.dgain) gain_sums = partial;
  }
  WithType(p.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int N = kPerVector<T>;
    if (p.gradient)
      Packed(p, kGradPack) ? LaunchBackward<T, kGradPack>(p, bias_sums, gain_sums, stream)
                           : LaunchBackward<T, 1>(p, bias_sums, gain_sums, stream);
    else
      Packed(p, N) ? LaunchForward<T, N>(p, stream) : LaunchForward<T, 1>(p, stream);
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  if (parts > 1) {
    const dim3 grid(unsigned(CeilDiv(C, 32)), p.dgain ? 2 : 1);
    SumParts<<<grid, dim3(32, kSumRows), 0, stream>>>(bias_sums, p.dbias, gain_sums, p.dgain, parts, C);
    BLOCKSPARSE_CUDA_LAUNCHED();
  }
  return {};
}

}  // namespace cuda
}  // namespace blocksparse
