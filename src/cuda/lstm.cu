// The gates of an LSTM cell on the GPU. A thread takes N neighbouring columns of all four gates.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/sum_parts.h"
#include "cuda/vector.cuh"
#include "kernels/lstm_formulas.h"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kSmall = 1 << 16;  // elements of the state up to which one launch sums the bias's gradient

// Five transcendental functions for 14 bytes: with 16-bit activations arithmetic would be what limits.
struct LstmMath : FastMath {
  __device__ __forceinline__ static float Sigmoid(float x) { return Reciprocal(1.f + Power(-kLog2E * x)); }
  // sigmoid(a) tanh(x), with one reciprocal for both.
  __device__ __forceinline__ static float SigmoidTanh(float a, float x) {
    const float e = Power(-2.f * kLog2E * fabsf(x)), divisor = 1.f + e;
    const float r = Reciprocal((1.f + Power(-kLog2E * a)) * divisor);
    return r * (fabsf(x) < kNear ? TanhNear0(x) * divisor : copysignf(1.f - e, x));
  }
};

template <typename T>
struct Formulas : LstmFormulas<LstmMath> {
  __device__ __forceinline__ static Next Forward(float c, float i, float u, float f, float o) {
    const float next = LstmMath::Sigmoid(f) * c + LstmMath::SigmoidTanh(i, u);
    return {next, LstmMath::SigmoidTanh(o, next)};
  }
};
template <>
struct Formulas<float> : LstmFormulas<Math> {};

// What is read of N columns of one row: `at` is their place in the state, `gate_at` in a gate.
template <typename T, int N>
struct Inputs {
  Pack<T, N> c, gate[4], dc, dh;

  __device__ __forceinline__ void Load(const LstmGatesProblem& p, int64_t at, int64_t gate_at) {
    const auto load = [](const void* from, int64_t at) { return LoadPack<T, N>(static_cast<const T*>(from) + at); };
    c = load(p.c, at);
#pragma unroll
    for (int g = 0; g < 4; ++g) gate[g] = load(p.gate[g], gate_at);
    if (!p.gradient) return;
    dc = dh = Pack<T, N>{};
    if (p.dc_next) dc = load(p.dc_next, at);
    if (p.dh_next) dh = load(p.dh_next, at);
  }
};

template <typename T, int N>
__device__ __forceinline__ void StoreWide(void* p, int64_t at, const float (&x)[N]) {
  StorePack(static_cast<T*>(p) + at, x);
}

template <int N>
__device__ __forceinline__ void LoadBias(const LstmGatesProblem& p, int64_t k, float (&bias)[4][N]) {
#pragma unroll
  for (int g = 0; g < 4; ++g) {
#pragma unroll
    for (int j = 0; j < N; ++j) bias[g][j] = 0.f;
    if (p.bias) LoadFloats<N>(p.bias + g * p.width + k, bias[g]);
  }
}

// The activations, or the gradients, with those of the gates left in `dgate`.
template <typename T, int N>
__device__ __forceinline__ void Columns(const LstmGatesProblem& p, const Inputs<T, N>& in, const float (&bias)[4][N],
                                        int64_t at, int64_t gate_at, float (&dgate)[4][N]) {
  float c[N], gate[4][N], dc[N], dh[N];
  Widen(in.c, c);
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    Widen(in.gate[g], gate[g]);
#pragma unroll
    for (int j = 0; j < N; ++j) gate[g][j] += bias[g][j];
  }
  if (!p.gradient) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const auto next = Formulas<T>::Forward(c[j], gate[0][j], gate[1][j], gate[2][j] + p.forget_bias, gate[3][j]);
      dc[j] = next.c, dh[j] = next.h;
    }
    StoreWide<T>(p.c_next, at, dc);
    StoreWide<T>(p.h_next, at, dh);
    return;
  }
  Widen(in.dc, dc);
  Widen(in.dh, dh);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const auto d =
        Formulas<T>::Backward(c[j], gate[0][j], gate[1][j], gate[2][j] + p.forget_bias, gate[3][j], dc[j], dh[j]);
    dc[j] = d.c, dgate[0][j] = d.i, dgate[1][j] = d.u, dgate[2][j] = d.f, dgate[3][j] = d.o;
  }
  StoreWide<T>(p.dc, at, dc);
#pragma unroll
  for (int g = 0; g < 4; ++g) StoreWide<T>(p.dgate[g], gate_at, dgate[g]);
}

// Each pack by itself. N divides width, or there is one row, whose last elements are taken one by one.
template <typename T, int N, typename Index>
__global__ void __launch_bounds__(kThreads) Map(LstmGatesProblem p, int64_t packs) {
  const int64_t t = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (t < packs) {
    const Index per_row = Index(p.width / N), row = Index(t) / per_row, k = (Index(t) - row * per_row) * N;
    const int64_t at = int64_t(row) * p.width + k, gate_at = int64_t(row) * p.stride + k;
    float dgate[4][N], bias[4][N];
    Inputs<T, N> in;
    in.Load(p, at, gate_at);
    LoadBias(p, k, bias);
    Columns(p, in, bias, at, gate_at, dgate);
  }
  if constexpr (N > 1) {
    const int64_t k = p.width / N * N + threadIdx.x;
    if (p.rows == 1 && blockIdx.x == 0 && k < p.width) {
      float dgate[4][1], bias[4][1];
      Inputs<T, 1> in;
      in.Load(p, k, k);
      LoadBias(p, k, bias);
      Columns(p, in, bias, k, k, dgate);
    }
  }
}

// Of a tile of columns every `parts`-th group of rows. A gradient's sums over rows go to `sums` [parts, 4, width], if it
// is given.
template <typename T, int N, bool kGradient>
__global__ void __launch_bounds__(kThreads, kGradient ? 3 : 4)
    Rows(LstmGatesProblem p, int64_t column_tiles, int64_t parts, float* sums) {
  __shared__ float shared[kGradient ? kThreads * N : 1];
  AllowKernelAfter();
  p.gradient = kGradient;
  const int64_t part = blockIdx.x / column_tiles, step = parts * blockDim.y;
  const int64_t k = (blockIdx.x % column_tiles * blockDim.x + threadIdx.x) * N;
  float sum[4][N] = {};
  int64_t row = part * blockDim.y + threadIdx.y;
  if (k < p.width && row < p.rows) {
    float bias[4][N];
    LoadBias(p, k, bias);
    for (; row < p.rows; row += step) {
      Inputs<T, N> in;
      float dgate[4][N];
      in.Load(p, row * p.width + k, row * p.stride + k);
      Columns(p, in, bias, row * p.width + k, row * p.stride + k, dgate);
      if constexpr (kGradient) {
#pragma unroll
        for (int g = 0; g < 4; ++g)
#pragma unroll
          for (int j = 0; j < N; ++j) sum[g][j] += dgate[g][j];
      }
    }
  }
  if constexpr (kGradient) {
    if (!sums) return;
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

// How rows are cut, by shape alone.
struct Parts {
  static constexpr int kPerThread = 4;
  int threads_x;
  int64_t column_tiles, parts;

  explicit Parts(const LstmGatesProblem& p) {
    const bool small = p.rows * p.width <= kSmall;
    threads_x = small ? 8 : 32;
    column_tiles = CeilDiv(p.width, threads_x * kPerThread);
    // Some 2000 thread blocks, so that the last ones are few, of at least four rows a thread. No power of 2: rows that far
    // apart would want the same part of the memory.
    const int64_t most = CeilDiv(p.rows, 4 * kThreads / threads_x);
    parts = small ? 1 : std::max<int64_t>(1, std::min(CeilDiv(2112, column_tiles), most));
  }
};

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
void LaunchRows(const LstmGatesProblem& p, const Parts& cut, float* sums, Stream stream) {
  // With one column a thread a tile is a quarter as wide.
  const int64_t tiles = CeilDiv(p.width, cut.threads_x * N);
  const dim3 block(cut.threads_x, kThreads / cut.threads_x);
  if (p.gradient)
    Rows<T, N, true><<<unsigned(tiles * cut.parts), block, 0, stream>>>(p, tiles, cut.parts, sums);
  else
    Rows<T, N, false><<<unsigned(tiles * cut.parts), block, 0, stream>>>(p, tiles, cut.parts, nullptr);
}

}  // namespace

int64_t WorkspaceBytes(const LstmGatesProblem& p) {
  const int64_t parts = Parts(p).parts;
  return p.dbias && parts > 1 ? parts * 4 * p.width * int64_t(sizeof(float)) : 0;
}

Status Run(const LstmGatesProblem& problem, void* workspace, Stream stream) {
  LstmGatesProblem p = problem;
  if (p.width == 0) return {};
  constexpr int64_t kRow = 1024;
  if (p.rows == 1 && !p.bias && !p.dbias && p.width % kRow == 0)  // any shape will do
    p.rows = p.width / kRow, p.width = p.stride = kRow;
  const Parts cut(p);
  const bool partial = p.dbias && cut.parts > 1;
  float* sums = partial ? static_cast<float*>(workspace) : p.dbias;
  WithType(p.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int N = Parts::kPerThread;
    const bool packed = PerThread(p, N) == N;
    // For 16-bit types arithmetic counts, of which a row after another needs less; else one pack a thread, since what is
    // under way at one time then lies close together.
    if (p.dbias || (packed && cut.parts > 1 && sizeof(T) == 2))
      packed ? LaunchRows<T, N>(p, cut, sums, stream) : LaunchRows<T, 1>(p, cut, sums, stream);
    else
      packed ? LaunchMap<T, N>(p, stream) : LaunchMap<T, 1>(p, stream);
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return partial ? SumParts(sums, p.dbias, nullptr, nullptr, cut.parts, 4 * p.width, stream) : Status();
}

}  // namespace cuda
}  // namespace blocksparse
