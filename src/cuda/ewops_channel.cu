// Bias, gain and activation by channel on the GPU, and their gradients.
//
// Two shapes of tensors: rows, where channels are the last dimension (inner 1), and planes, where each channel is
// contiguous. Sums over a channel are cut by shape alone and their parts added in order.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/sum_parts.h"
#include "cuda/vector.cuh"
#include "kernels/ewops_formulas.h"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;    // rows, or packs of a plane, of a thread forward
constexpr int kGradPack = 4;  // a gradient with gain moves four elements at once: more would take too many registers
constexpr int kPlaneUnroll = 4, kPlaneThreads = 128;  // of a gradient
constexpr int kMaxThreads = 512;                      // of a thread block that sums alone
constexpr int64_t kSmall = 1 << 18;                   // elements up to which one launch sums

enum class Kind { kSum, kPlain, kGain };  // of a gradient: the sum of dy alone, without gain, with it

Kind KindOf(const ChannelProblem& p) {
  if (!p.x && !p.y && !p.dx) return Kind::kSum;
  return p.gain || p.dgain ? Kind::kGain : Kind::kPlain;
}

// N elements of a gradient: dy becomes gain * t; t and t * x are added to the sums. `other` is x, or y where the problem
// has that. The choice of activation stands outside the loop.
template <class M, int N, bool kGain, class Sum>
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
      return d * EwFormulas<M>::SwishGrad((kGain ? g[i] * x : x) + b[i], kFastGeluAlpha);
    });
  else if (p.x)
    each([&](float d, float x, int i) { return (kGain ? g[i] * x : x) + b[i] > 0.f ? d : 0.f; });
  else
    each([](float d, float y, int) { return y > 0.f ? d : 0.f; });
}

// v becomes act(g v + b).
template <class M, int N>
__device__ __forceinline__ void Activate(const ChannelProblem& p, float (&v)[N], const float (&g)[N],
                                         const float (&b)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = g[i] * v[i] + b[i];
  if (p.act == Activation::kRelu) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = EwFormulas<M>::Act(Activation::kRelu, v[i]);
  } else if (p.act == Activation::kFastGelu) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = EwFormulas<M>::Act(Activation::kFastGelu, v[i]);
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
    Activate<MathFor<T>>(p, v, g, b);
    StorePack(y + (row + u * blockDim.y) * C, v);
  }
}

// Of a tile of columns every `parts`-th group of rows: dx, and sums to bias_sums, gain_sums [parts, C]. So the rows that
// are under way at one time are neighbours, which is what the memory likes best.
template <typename T, int N, Kind kKind>
__global__ void __launch_bounds__(kMaxThreads, 2)
    RowsBackward(ChannelProblem p, int64_t column_tiles, int64_t parts, float* bias_sums, float* gain_sums) {
  constexpr bool kGain = kKind == Kind::kGain;
  constexpr int kRows = kKind == Kind::kSum ? 4 : 32 / int(N * sizeof(T));  // under way
  extern __shared__ float shared[];
  AllowKernelAfter();
  const int64_t part = blockIdx.x / column_tiles, C = p.channels;
  const int64_t c = (blockIdx.x % column_tiles * blockDim.x + threadIdx.x) * N;
  const bool inside = c < C;
  const int64_t end = p.outer, group = kRows * blockDim.y;
  const T *dy = static_cast<const T*>(p.dy) + c, *other = static_cast<const T*>(p.x ? p.x : p.y);
  T* dx = static_cast<T*>(p.dx) + c;
  float g[N], b[N], bias_sum[N] = {}, gain_sum[N] = {};
  if (inside) {
    LoadOr<N>(kGain ? p.gain : nullptr, c, 1.f, g);
    LoadOr<N>(p.bias, c, 0.f, b);
    for (int64_t first = part * group + threadIdx.y; first < end; first += parts * group) {
      Pack<T, N> loaded_dy[kRows], loaded[kRows] = {};
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const int64_t row = first + u * blockDim.y;
        if (row >= end) break;
        loaded_dy[u] = LoadPack<T, N>(dy + row * C);
        if (kKind != Kind::kSum && other) loaded[u] = LoadPack<T, N>(other + row * C + c);
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const int64_t row = first + u * blockDim.y;
        if (row >= end) break;
        float dv[N], v[N];
        Widen(loaded_dy[u], dv);
        if constexpr (kKind == Kind::kSum) {
#pragma unroll
          for (int i = 0; i < N; ++i) bias_sum[i] += dv[i];
        } else {
          Widen(loaded[u], v);
          Derivatives<MathFor<T>, N, kGain>(p, dv, v, g, b, [&](int i, float t, float tx) {
            bias_sum[i] += t;
            if (kGain) gain_sum[i] += tx;
          });
          if (p.dx) StorePack(dx + row * C, dv);
        }
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
    Activate<MathFor<T>>(p, v, g, b);
    StorePack(y + i * N, v);
  }
}

// How the planes of one channel are cut: outer in `outers` chunks, inner in `inners`.
struct PlaneParts {
  int64_t outers, inners, outer, inner;
};

// kGroup threads, a warp or the whole block, for each channel and part: few, so that what is under way at one time lies
// close together. N divides inner and the parts of it.
template <typename T, int N, int kGroup, Kind kKind>
__global__ void __launch_bounds__(kPlaneThreads, 6)
    PlanesBackward(ChannelProblem p, PlaneParts parts, float* bias_sums, float* gain_sums) {
  constexpr int kPacks = kPlaneUnroll;
  __shared__ float scratch[kPlaneThreads / 32];
  AllowKernelAfter();
  const int64_t unit = int64_t(blockIdx.x) * (kPlaneThreads / kGroup) + threadIdx.x / kGroup;
  const int64_t c = unit % p.channels, part = unit / p.channels;
  if (part >= parts.outers * parts.inners) return;  // never some of a block that sums together
  const int thread = threadIdx.x % kGroup;
  const int64_t o0 = part / parts.inners * parts.outer, o1 = min(p.outer, o0 + parts.outer);
  const int64_t i0 = part % parts.inners * parts.inner, i1 = min(p.inner, i0 + parts.inner);
  constexpr bool kGain = kKind == Kind::kGain;
  const T *dy = static_cast<const T*>(p.dy), *other = static_cast<const T*>(p.x ? p.x : p.y);
  T* dx = static_cast<T*>(p.dx);
  float g[N], b[N], bias_sum = 0.f, gain_sum = 0.f;
  Fill(g, p.gain ? p.gain[c] : 1.f);
  Fill(b, p.bias ? p.bias[c] : 0.f);
  const int64_t run = i1 > i0 ? (i1 - i0) / N : 0, packs = run * (o1 - o0);
  for (int64_t first = thread; first < packs; first += kPacks * kGroup) {
    Pack<T, N> loaded_dy[kPacks], loaded[kPacks] = {};
    int64_t at[kPacks];
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const int64_t t = first + u * kGroup;
      if (t >= packs) break;
      // A part holds fewer than 2^32 packs.
      const int64_t o = o1 - o0 == 1 ? 0 : uint32_t(t) / uint32_t(run);
      at[u] = ((o0 + o) * p.channels + c) * p.inner + i0 + (t - o * run) * N;
      loaded_dy[u] = LoadPack<T, N>(dy + at[u]);
      if (kKind != Kind::kSum && other) loaded[u] = LoadPack<T, N>(other + at[u]);
    }
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      if (first + u * kGroup >= packs) break;
      float dv[N], v[N];
      Widen(loaded_dy[u], dv);
      if constexpr (kKind == Kind::kSum) {
#pragma unroll
        for (int i = 0; i < N; ++i) bias_sum += dv[i];
      } else {
        Widen(loaded[u], v);
        Derivatives<MathFor<T>, N, kGain>(p, dv, v, g, b, [&](int, float t, float tx) {
          bias_sum += t;
          if (kGain) gain_sum += tx;
        });
        if (p.dx) StorePack(dx + at[u], dv);
      }
    }
  }
  for (int which = 0; which < (kGain ? 2 : 1); ++which) {
    float *sums = which == 0 ? bias_sums : gain_sums, sum = which == 0 ? bias_sum : gain_sum;
    if (!sums) continue;
    if constexpr (kGroup == 32) {
#pragma unroll
      for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(0xffffffff, sum, half);
    } else {
      sum = BlockSum<kPlaneThreads>(sum, scratch);
    }
    if (thread == 0) sums[part * p.channels + c] = sum;
  }
}

// -------------------------------------------------------------------------------------------------------- launches

struct RowShape {
  int64_t column_tiles, parts;
  int width, height;  // of a thread block
};

RowShape BackwardRows(const ChannelProblem& p, int per_pack) {
  RowShape s;
  const int64_t packs = CeilDiv(p.channels, per_pack), n = p.outer * p.channels;
  const bool small = n <= kSmall;
  s.width = small ? 8 : 32;
  s.height = small ? kMaxThreads / s.width : kThreads / s.width;
  s.column_tiles = CeilDiv(packs, s.width);
  // Some 500 blocks run at one time on a large chip; each takes at least a few rows a thread.
  s.parts = small ? 1 : std::max<int64_t>(1, std::min(512 / s.column_tiles, p.outer / (8 * s.height)));
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

// Elements a gradient moves at once.
int GradientPack(const ChannelProblem& p) {
  const int vector = int(16 / SizeOf(p.dtype)), most = p.inner == 1 && KindOf(p) == Kind::kGain ? kGradPack : vector;
  return Packed(p, most) ? most : Packed(p, kGradPack) ? kGradPack : 1;
}

int64_t Parts(const ChannelProblem& p) {
  if (p.inner == 1) return BackwardRows(p, GradientPack(p)).parts;
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
    const auto launch = [&](auto* kernel) {
      kernel<<<blocks, block, shared, stream>>>(p, s.column_tiles, s.parts, bias_sums, gain_sums);
    };
    if constexpr (N <= kGradPack) {
      if (KindOf(p) == Kind::kGain) return launch(RowsBackward<T, N, Kind::kGain>);
    }
    KindOf(p) == Kind::kSum ? launch(RowsBackward<T, N, Kind::kSum>) : launch(RowsBackward<T, N, Kind::kPlain>);
  } else {
    const PlaneParts parts = BackwardPlanes(p);
    const int64_t units = p.channels * parts.outers * parts.inners;
    const auto launch = [&](auto* kernel, int group) {
      kernel<<<unsigned(CeilDiv(units, kPlaneThreads / group)), kPlaneThreads, 0, stream>>>(p, parts, bias_sums,
                                                                                            gain_sums);
    };
    // A warp alone waits for nobody, where it has no more than one round of work.
    const bool warps = parts.outer * parts.inner <= 4 * 32 * N;
    if (KindOf(p) == Kind::kSum)
      warps ? launch(PlanesBackward<T, N, 32, Kind::kSum>, 32)
            : launch(PlanesBackward<T, N, kPlaneThreads, Kind::kSum>, kPlaneThreads);
    else if (KindOf(p) == Kind::kPlain)
      warps ? launch(PlanesBackward<T, N, 32, Kind::kPlain>, 32)
            : launch(PlanesBackward<T, N, kPlaneThreads, Kind::kPlain>, kPlaneThreads);
    else
      warps ? launch(PlanesBackward<T, N, 32, Kind::kGain>, 32)
            : launch(PlanesBackward<T, N, kPlaneThreads, Kind::kGain>, kPlaneThreads);
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
    if (p.gradient) {
      const int pack = GradientPack(p);
      if (pack == N)
        LaunchBackward<T, N>(p, bias_sums, gain_sums, stream);
      else if (pack == kGradPack)
        LaunchBackward<T, kGradPack>(p, bias_sums, gain_sums, stream);
      else
        LaunchBackward<T, 1>(p, bias_sums, gain_sums, stream);
    } else
      Packed(p, N) ? LaunchForward<T, N>(p, stream) : LaunchForward<T, 1>(p, stream);
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  if (parts > 1) {
    return SumParts(bias_sums, p.dbias, gain_sums, p.dgain, parts, C, stream);
  }
  return {};
}

}  // namespace cuda
}  // namespace blocksparse
