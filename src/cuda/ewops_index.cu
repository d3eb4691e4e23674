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

constexpr int kColumns = 32, kParts = kThreads / kColumns;

// inner > 1: 32 columns of a matrix for each thread block, whose rows of threads take parts of dim.
template <typename T>
__global__ void __launch_bounds__(kThreads) MaxOfColumns(ReduceMaxProblem p, int64_t tiles) {
  const int64_t o = blockIdx.x / tiles, i = blockIdx.x % tiles * kColumns + threadIdx.x;
  const int64_t rows = (p.dim + kParts - 1) / kParts, end = min(p.dim, (threadIdx.y + 1) * rows);
  Best best;
  if (i < p.inner) {
    const T* x = static_cast<const T*>(p.x) + o * p.dim * p.inner + i;
#pragma unroll 8
    for (int64_t d = threadIdx.y * rows; d < end; ++d) best.Take(ToFloat(x[d * p.inner]), d);
  }
  __shared__ float values[kParts][kColumns];
  __shared__ int64_t places[kParts][kColumns];
  values[threadIdx.y][threadIdx.x] = best.value, places[threadIdx.y][threadIdx.x] = best.place;
  __syncthreads();
  if (threadIdx.y != 0 || i >= p.inner) return;
  for (int part = 1; part < kParts; ++part) best.Merge(values[part][threadIdx.x], places[part][threadIdx.x]);
  static_cast<T*>(p.y)[o * p.inner + i] = FromFloat<T>(best.value);
  p.argmax[o * p.inner + i] = best.place;
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
    if (p.gradient) {
      const int64_t n = p.outer * p.dim * p.inner;
      const unsigned blocks = unsigned(CeilDiv(n, kThreads));
      if (n <= UINT32_MAX)
        MaxGrad<T, uint32_t><<<blocks, kThreads, 0, stream>>>(p, n);
      else
        MaxGrad<T, uint64_t><<<blocks, kThreads, 0, stream>>>(p, n);
    } else if (p.inner > 1) {
      const int64_t tiles = CeilDiv(p.inner, kColumns);
      MaxOfColumns<T><<<unsigned(p.outer * tiles), dim3(kColumns, kParts), 0, stream>>>(p, tiles);
    } else {
      constexpr int N = kPerVector<T>;
      const bool packed = p.dim % N == 0 && Aligned({p.x}), by_warp = p.dim <= 2048;
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
