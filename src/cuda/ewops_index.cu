// Gather along an axis and maximum over an axis on the GPU. Gradients are gathers too: every element of dx is written
// once, by a thread that looks up whether it was chosen.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/vector.cuh"
#include "kernels/ewops.h"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kLowest = -3.40282347e38f;

// Words of any width: rows are copied as they are. Index is 32 bits wide where the number of words allows it.
template <typename Word, typename Index>
__global__ void __launch_bounds__(kThreads) Gather(FancyGatherProblem p, int64_t row, int64_t n) {
  const int64_t t = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= n) return;
  const Index o = Index(t) / Index(row), w = Index(t) - o * Index(row);
  const int64_t d = max(p.index[o], 0);
  Word word = {};
  if (d < p.dim) word = static_cast<const Word*>(p.x)[(int64_t(o) * p.dim + d) * row + w];
  static_cast<Word*>(p.y)[t] = word;
}

template <typename Word, typename Index>
__global__ void __launch_bounds__(kThreads) GatherGrad(FancyGatherProblem p, int64_t row, int64_t n) {
  const int64_t t = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= n) return;
  const Index matrix_row = Index(t) / Index(row), w = Index(t) - matrix_row * Index(row);
  const Index o = matrix_row / Index(p.dim), d = matrix_row - o * Index(p.dim);
  Word word = {};
  if (int64_t(d) == max(p.index[o], 0)) word = static_cast<const Word*>(p.x)[int64_t(o) * row + w];
  static_cast<Word*>(p.y)[t] = word;
}

template <typename Word>
void LaunchGather(const FancyGatherProblem& p, Stream stream) {
  const int64_t row = p.inner * p.element_bytes / int64_t(sizeof(Word)), n = p.outer * row * (p.gradient ? p.dim : 1);
  const unsigned blocks = unsigned(CeilDiv(n, kThreads));
  if (p.gradient && n <= UINT32_MAX)
    GatherGrad<Word, uint32_t><<<blocks, kThreads, 0, stream>>>(p, row, n);
  else if (p.gradient)
    GatherGrad<Word, uint64_t><<<blocks, kThreads, 0, stream>>>(p, row, n);
  else if (n <= UINT32_MAX)
    Gather<Word, uint32_t><<<blocks, kThreads, 0, stream>>>(p, row, n);
  else
    Gather<Word, uint64_t><<<blocks, kThreads, 0, stream>>>(p, row, n);
}

// A maximum and its first place; the start (kLowest, 0) loses to all that is greater.
struct Best {
  float value = kLowest;
  int64_t place = 0;

  __device__ __forceinline__ void Take(float v, int64_t at) {
    if (v > value) value = v, place = at;
  }
  // Of two that looked at different places.
  __device__ __forceinline__ void Merge(float v, int64_t at) {
    if (v > value || (v == value && at < place)) value = v, place = at;
  }
};

// inner 1: a row for each warp, or for each thread block.
template <typename T, int N, bool kWarp>
__global__ void __launch_bounds__(kThreads) MaxOfRows(ReduceMaxProblem p) {
  constexpr int kWidth = kWarp ? 32 : kThreads;
  const int64_t o = int64_t(blockIdx.x) * (kThreads / kWidth) + threadIdx.x / kWidth;
  if (o >= p.outer) return;  // whole warps
  const T* x = static_cast<const T*>(p.x) + o * p.dim;
  Best best;
#pragma unroll 4
  for (int64_t d = threadIdx.x % kWidth * N; d < p.dim; d += kWidth * N) {
    float v[N];
    Widen(LoadPack<T, N>(x + d), v);
#pragma unroll
    for (int k = 0; k < N; ++k) best.Take(v[k], d + k);
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2)
    best.Merge(__shfl_down_sync(0xffffffff, best.value, half), __shfl_down_sync(0xffffffff, best.place, half));
  if constexpr (!kWarp) {
    __shared__ float values[kThreads / 32];
    __shared__ int64_t places[kThreads / 32];
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = best.value, places[threadIdx.x / 32] = best.place;
    __syncthreads();
    if (threadIdx.x == 0)
      for (int w = 1; w < kThreads / 32; ++w) best.Merge(values[w], places[w]);
  }
  if (threadIdx.x % kWidth == 0) {
    static_cast<T*>(p.y)[o] = FromFloat<T>(best.value);
    p.argmax[o] = best.place;
  }
}

// inner > 1: a thread takes N columns of a matrix, and one of blockDim.y parts of dim, which meet in order.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) MaxOfColumns(ReduceMaxProblem p, int64_t tiles) {
  extern __shared__ float shared[];
  const int64_t o = blockIdx.x / tiles, i = (blockIdx.x % tiles * blockDim.x + threadIdx.x) * N;
  const int rows = (int(p.dim) - 1) / int(blockDim.y) + 1, begin = threadIdx.y * rows,
            end = min(int(p.dim), begin + rows);
  float best[N];
  int place[N] = {};
#pragma unroll
  for (int k = 0; k < N; ++k) best[k] = kLowest;
  if (i < p.inner) {
    const T* x = static_cast<const T*>(p.x) + o * p.dim * p.inner + i;
#pragma unroll 4
    for (int d = begin; d < end; ++d) {
      float v[N];
      Widen(LoadPack<T, N>(x + d * p.inner), v);
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (v[k] > best[k]) best[k] = v[k], place[k] = d;
    }
  }
  if (blockDim.y > 1) {
    float* values = shared;
    int* places = reinterpret_cast<int*>(shared + kThreads * N);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int at = (threadIdx.y * blockDim.x + threadIdx.x) * N + k;
      values[at] = best[k], places[at] = place[k];
    }
    __syncthreads();
    if (threadIdx.y != 0) return;
    for (int part = 1; part < blockDim.y; ++part)
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const int at = (part * blockDim.x + threadIdx.x) * N + k;
        if (values[at] > best[k]) best[k] = values[at], place[k] = places[at];  // later parts have later places
      }
  }
  if (i >= p.inner) return;
  StorePack(static_cast<T*>(p.y) + o * p.inner + i, best);
#pragma unroll
  for (int k = 0; k < N; ++k) p.argmax[o * p.inner + i + k] = place[k];
}

// A gradient for packs of N elements: of N columns, whose places are read once for kRows rows, where inner > 1, or of one
// row. Index is 32 bits wide where the number of packs allows it.
constexpr int kRows = 16;

template <typename T, int N, typename Index>
__global__ void __launch_bounds__(kThreads) MaxGradColumns(ReduceMaxProblem p, int64_t strips, int64_t n) {
  const int64_t t = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= n) return;
  const Index packs = Index(p.inner / N), row = Index(t) / packs, o = row / Index(strips);
  const int64_t i = int64_t(Index(t) - row * packs) * N, from = int64_t(o) * p.inner + i;
  const int begin = int(row - o * Index(strips)) * kRows, end = min(int(p.dim), begin + kRows);
  float dy[N];
  int place[N];
  Widen(LoadPack<T, N>(static_cast<const T*>(p.x) + from), dy);
#pragma unroll
  for (int k = 0; k < N; ++k) place[k] = int(p.argmax[from + k]);
  T* dx = static_cast<T*>(p.y) + int64_t(o) * p.dim * p.inner + i;
#pragma unroll 4
  for (int d = begin; d < end; ++d) {
    float v[N];
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = place[k] == d ? dy[k] : 0.f;
    StorePack(dx + d * p.inner, v);
  }
}

template <typename T, int N, typename Index>
__global__ void __launch_bounds__(kThreads) MaxGradRows(ReduceMaxProblem p, int64_t n) {
  const int64_t t = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= n) return;
  const Index packs = Index(p.dim / N), o = Index(t) / packs;
  const int first = int(Index(t) - o * packs) * N, place = int(p.argmax[o]);
  const float dy = ToFloat(static_cast<const T*>(p.x)[o]);
  float v[N];
#pragma unroll
  for (int k = 0; k < N; ++k) v[k] = place == first + k ? dy : 0.f;
  StorePack(static_cast<T*>(p.y) + t * N, v);
}

template <typename T, typename Index>
__global__ void __launch_bounds__(kThreads) MaxGrad(ReduceMaxProblem p, int64_t n) {
  const int64_t t = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= n) return;
  const Index inner = Index(p.inner), dim = Index(p.dim);
  const Index row = Index(t) / inner, i = Index(t) - row * inner, o = row / dim, d = row - o * dim;
  const int64_t from = int64_t(o) * p.inner + i;
  T value = FromFloat<T>(0.f);
  if (p.argmax[from] == int64_t(d)) value = static_cast<const T*>(p.x)[from];
  static_cast<T*>(p.y)[t] = value;
}

}  // namespace

Status Run(const FancyGatherProblem& p, Stream stream) {
  if (p.outer * p.inner == 0 || (p.gradient && p.dim == 0)) return {};
  if (p.inner * p.element_bytes % 16 == 0 && Aligned({p.x, p.y}))
    LaunchGather<uint4>(p, stream);
  else if (p.element_bytes == 4)
    LaunchGather<uint32_t>(p, stream);
  else
    LaunchGather<uint16_t>(p, stream);
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

Status Run(const ReduceMaxProblem& p, Stream stream) {
  if (p.outer * p.inner == 0) return {};
  WithType(p.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int N = kPerVector<T>;
    const int64_t size = p.outer * p.dim * p.inner;
    const bool packed = (p.inner > 1 ? p.inner : p.dim) % N == 0 && Aligned({p.x, p.y});
    if (p.gradient && packed && p.inner > 1) {
      const int64_t strips = CeilDiv(p.dim, kRows), n = p.outer * strips * (p.inner / N);
      const unsigned blocks = unsigned(CeilDiv(n, kThreads));
      if (n <= UINT32_MAX)
        MaxGradColumns<T, N, uint32_t><<<blocks, kThreads, 0, stream>>>(p, strips, n);
      else
        MaxGradColumns<T, N, uint64_t><<<blocks, kThreads, 0, stream>>>(p, strips, n);
    } else if (p.gradient && packed) {
      const unsigned blocks = unsigned(CeilDiv(size / N, kThreads));
      if (size / N <= UINT32_MAX)
        MaxGradRows<T, N, uint32_t><<<blocks, kThreads, 0, stream>>>(p, size / N);
      else
        MaxGradRows<T, N, uint64_t><<<blocks, kThreads, 0, stream>>>(p, size / N);
    } else if (p.gradient) {
      const unsigned blocks = unsigned(CeilDiv(size, kThreads));
      if (size <= UINT32_MAX)
        MaxGrad<T, uint32_t><<<blocks, kThreads, 0, stream>>>(p, size);
      else
        MaxGrad<T, uint64_t><<<blocks, kThreads, 0, stream>>>(p, size);
    } else if (p.inner > 1) {
      // Where columns alone give too few threads to fill a chip, dim is cut too.
      const int per_thread = packed ? N : 1;
      const bool many = p.outer * p.inner / per_thread >= 1 << 17;
      const dim3 block(many ? 64 : 32, many ? 1 : kThreads / 32);
      const int64_t tiles = CeilDiv(p.inner, int64_t(block.x) * per_thread);
      const unsigned blocks = unsigned(p.outer * tiles);
      const size_t bytes = many ? 0 : 2 * kThreads * per_thread * sizeof(float);
      if (packed)
        MaxOfColumns<T, N><<<blocks, block, bytes, stream>>>(p, tiles);
      else
        MaxOfColumns<T, 1><<<blocks, block, bytes, stream>>>(p, tiles);
    } else {
      const bool by_warp = p.dim <= 2048;
      const unsigned blocks = unsigned(by_warp ? CeilDiv(p.outer, kThreads / 32) : p.outer);
      if (by_warp)
        packed ? MaxOfRows<T, N, true><<<blocks, kThreads, 0, stream>>>(p)
               : MaxOfRows<T, 1, true><<<blocks, kThreads, 0, stream>>>(p);
      else
        packed ? MaxOfRows<T, N, false><<<blocks, kThreads, 0, stream>>>(p)
               : MaxOfRows<T, 1, false><<<blocks, kThreads, 0, stream>>>(p);
    }
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace cuda
}  // namespace blocksparse
