// The gates of an LSTM cell on the GPU. A thread takes N neighbouring columns of all four gates.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/vector.cuh"
#include "kernels/ewops.h"
#include "kernels/lstm_formulas.h"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kSmall = 1 << 16;  // elements of the state up to which one launch sums the bias's gradient

// Five transcendental functions for 14 bytes: with 16-bit activations arithmetic would be what limits. These are the
// hardware's exponential and reciprocal, to 2^-22 where arguments are of order 1 and to |x| 2^-24 where they are large.
struct FastMath {
  using V = float;
  __device__ __forceinline__ static float Power(float x) {  // 2^x
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ __forceinline__ static float Reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ __forceinline__ static float Sigmoid(float x) { return Reciprocal(1.f + Power(-1.44269504f * x)); }
  // Near 0, where 1 - 2 / (e^2x + 1) would cancel, an odd polynomial: that of cpu/math.h.
  __device__ __forceinline__ static float Tanh(float x) {
    const float square = x * x;
    const float small =
        x +
        x * square *
            (-0.333332986f +
             square * (0.133319587f + square * (-0.0537866801f + square * (0.0208053775f + square * -0.00590586057f))));
    const float large = 1.f - 2.f * Reciprocal(1.f + Power(2.88539008f * fabsf(x)));
    return fabsf(x) < 0.6f ? small : copysignf(large, x);
  }
};

template <typename T>
struct MathFor {
  using Type = FastMath;
};
template <>
struct MathFor<float> {
  using Type = Math;
};

template <typename T, int N>
__device__ __forceinline__ void LoadWide(const void* p, int64_t at, float (&x)[N]) {
  Widen(LoadPack<T, N>(static_cast<const T*>(p) + at), x);
}
template <typename T, int N>
__device__ __forceinline__ void StoreWide(void* p, int64_t at, const float (&x)[N]) {
  StorePack(static_cast<T*>(p) + at, x);
}

// N columns of one row: `at` their place in the state, `gate_at` in a gate. The activations, or the gradients, with
// those of the gates left in `dgate`.
template <typename T, int N>
__device__ __forceinline__ void Columns(const LstmGatesProblem& p, int64_t k, int64_t at, int64_t gate_at,
                                        float (&dgate)[4][N]) {
  using Formulas = LstmFormulas<typename MathFor<T>::Type>;
  float c[N], gate[4][N], dc[N] = {}, dh[N] = {};
  LoadWide<T>(p.c, at, c);
#pragma unroll
  for (int g = 0; g < 4; ++g) LoadWide<T>(p.gate[g], gate_at, gate[g]);
  if (p.gradient) {
    if (p.dc_next) LoadWide<T>(p.dc_next, at, dc);
    if (p.dh_next) LoadWide<T>(p.dh_next, at, dh);
  }
  if (p.bias) {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      float bias[N];
      LoadFloats<N>(p.bias + g * p.width + k, bias);
#pragma unroll
      for (int j = 0; j < N; ++j) gate[g][j] += bias[j];
    }
  }
  if (!p.gradient) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const auto next = Formulas::Forward(c[j], gate[0][j], gate[1][j], gate[2][j] + p.forget_bias, gate[3][j]);
      dc[j] = next.c, dh[j] = next.h;
    }
    StoreWide<T>(p.c_next, at, dc);
    StoreWide<T>(p.h_next, at, dh);
    return;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const auto d =
        Formulas::Backward(c[j], gate[0][j], gate[1][j], gate[2][j] + p.forget_bias, gate[3][j], dc[j], dh[j]);
    dc[j] = d.c, dgate[0][j] = d.i, dgate[1][j] = d.u, dgate[2][j] = d.f, dgate[3][j] = d.o;
  }
  StoreWide<T>(p.dc, at, dc);
#pragma unroll
  for (int g = 0; g < 4; ++g) StoreWide<T>(p.dgate[g], gate_at, dgate[g]);
}

// Without sums. N divides width, or there is one row, whose last elements are taken one by one.
template <typename T, int N, typename Index>
__global__ void __launch_bounds__(kThreads) Map(LstmGatesProblem p, int64_t packs) {
  const int64_t t = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  float dgate[4][N];
  if (t < packs) {
    const Index per_row = Index(p.width / N), row = Index(t) / per_row, k = (Index(t) - row * per_row) * N;
    Columns<T, N>(p, k, int64_t(row) * p.width + k, int64_t(row) * p.stride + k, dgate);
  }
  if constexpr (N > 1) {
    const int64_t k = p.width / N * N + threadIdx.x;
    if (p.rows == 1 && blockIdx.x == 0 && k < p.width) {
      float one[4][1];
      Columns<T, 1>(p, k, k, k, one);
    }
  }
}

// A gradient with its sums over rows: part [part * rows, (part + 1) * rows) of a tile of columns, to sums [parts, 4, width].
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, 2)
    Sum(LstmGatesProblem p, int64_t column_tiles, int64_t rows, float* sums) {
  __shared__ float shared[kThreads * N];
  const int64_t part = blockIdx.x / column_tiles, end = min(p.rows, (part + 1) * rows);
  const int64_t k = (blockIdx.x % column_tiles * blockDim.x + threadIdx.x) * N;
  float sum[4][N] = {};
  if (k < p.width)
    for (int64_t row = part * rows + threadIdx.y; row < end; row += blockDim.y) {
      float dgate[4][N];
      Columns<T, N>(p, k, row * p.width + k, row * p.stride + k, dgate);
#pragma unroll
      for (int g = 0; g < 4; ++g)
#pragma unroll
        for (int j = 0; j < N; ++j) sum[g][j] += dgate[g][j];
    }
  // The rows of threads meet in order; shared memory is [blockDim.y][blockDim.x * N].
  const int width = blockDim.x * N, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; ++j) shared[threadIdx.y * width + threadIdx.x * N + j] = sum[g][j];
    __syncthreads();
    for (int j = thread; j < width; j += kThreads) {
      const int64_t column = blockIdx.x % column_tiles * width + j;
      if (column >= p.width) break;
      float total = shared[j];
      for (int r = 1; r < blockDim.y; ++r) total += shared[r * width + j];
      sums[(part * 4 + g) * p.width + column] = total;
    }
  }
}

// Columns that one thread takes: as many as all addresses allow.
int PerThread(const LstmGatesProblem& p, int most) {
  const int64_t size = SizeOf(p.dtype);
  for (int n = most; n > 1; n /= 2) {
    bool fits = p.rows == 1 || p.width % n == 0;
    for (int g = 0; g < 4; ++g)
      for (const void* q : {p.c, p.gate[g], static_cast<const void*>(p.c_next), static_cast<const void*>(p.h_next),
                            p.dc_next, p.dh_next, static_cast<const void*>(p.dc), static_cast<const void*>(p.dgate[g])})
        fits = fits && reinterpret_cast<uintptr_t>(q) % (n * size) == 0;
    // Four floats of the bias at once.
    if (n >= 4) fits = fits && reinterpret_cast<uintptr_t>(p.bias) % 16 == 0 && (!p.bias || p.width % 4 == 0);
    if (fits && n * size >= 8) return n;
  }
  return 1;
}

// How the sums are cut, by shape alone.
struct Parts {
  static constexpr int kPerThread = 4;
  int threads_x;
  int64_t column_tiles, parts, rows;

  explicit Parts(const LstmGatesProblem& p) {
    const bool small = p.rows * p.width <= kSmall;
    threads_x = small ? 8 : 32;
    column_tiles = CeilDiv(p.width, threads_x * kPerThread);
    // Some 4096 thread blocks, so that the last ones are few, of at least four rows a thread.
    const int64_t most = CeilDiv(p.rows, 4 * kThreads / threads_x);
    parts = small ? 1 : std::max<int64_t>(1, std::min(CeilDiv(4096, column_tiles), most));
    rows = std::max<int64_t>(1, CeilDiv(p.rows, parts));
    parts = std::max<int64_t>(1, CeilDiv(p.rows, rows));
  }
};

int64_t PartialBytes(const LstmGatesProblem& p, const Parts& cut) {
  return p.dbias && cut.parts > 1 ? cut.parts * 4 * p.width * int64_t(sizeof(float)) : 0;
}

ChannelProblem SumOfParts(const LstmGatesProblem& p, const Parts& cut, const float* partial) {
  ChannelProblem sum;
  sum.gradient = true;
  sum.outer = cut.parts;
  sum.channels = 4 * p.width;
  sum.dy = partial;
  sum.dbias = p.dbias;
  return sum;
}

template <typename T, int N>
void LaunchMap(const LstmGatesProblem& p, Stream stream) {
  const int64_t packs = p.rows * (p.width / N);
  const unsigned blocks = unsigned(std::max<int64_t>(1, CeilDiv(packs, kThreads)));
  if (p.rows * p.width <= UINT32_MAX)
    Map<T, N, uint32_t><<<blocks, kThreads, 0, stream>>>(p, packs);
  else
    Map<T, N, uint64_t><<<blocks, kThreads, 0, stream>>>(p, packs);
}

template <typename T, int N>
void LaunchSum(const LstmGatesProblem& p, const Parts& cut, float* sums, Stream stream) {
  // With one column a thread a tile is a quarter as wide.
  const int64_t tiles = CeilDiv(p.width, cut.threads_x * N);
  Sum<T, N><<<unsigned(tiles * cut.parts), dim3(cut.threads_x, kThreads / cut.threads_x), 0, stream>>>(p, tiles,
                                                                                                       cut.rows, sums);
}

}  // namespace

int64_t WorkspaceBytes(const LstmGatesProblem& p) {
  const Parts cut(p);
  const int64_t partial = PartialBytes(p, cut);
  return partial > 0 ? partial + WorkspaceBytes(SumOfParts(p, cut, nullptr)) : 0;
}

Status Run(const LstmGatesProblem& p, void* workspace, Stream stream) {
  if (p.width == 0) return {};
  const Parts cut(p);
  const int64_t partial_bytes = PartialBytes(p, cut);
  float* sums = partial_bytes > 0 ? static_cast<float*>(workspace) : p.dbias;
  WithType(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (p.dbias) {
      if (PerThread(p, Parts::kPerThread) == Parts::kPerThread)
        LaunchSum<T, Parts::kPerThread>(p, cut, sums, stream);
      else
        LaunchSum<T, 1>(p, cut, sums, stream);
      return;
    }
    const int n = PerThread(p, kPerVector<T>);
    if (n == kPerVector<T>)
      LaunchMap<T, kPerVector<T>>(p, stream);
    else if (n == 4)
      LaunchMap<T, 4>(p, stream);
    else
      LaunchMap<T, 1>(p, stream);
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  if (partial_bytes == 0) return {};
  return Run(SumOfParts(p, cut, sums), static_cast<char*>(workspace) + partial_bytes, stream);
}

}  // namespace cuda
}  // namespace blocksparse
