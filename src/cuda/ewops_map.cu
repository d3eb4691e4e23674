// Elementwise operators, casts and sums of tensors on the GPU: one pass, bound by memory.
#include <type_traits>

#include "cuda/check.h"
#include "cuda/vector.cuh"
#include "kernels/ewops_formulas.h"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// A thread takes one pack: what is under way at one time then lies close together, which is what the memory likes best.
int Blocks(int64_t n, int per_thread) { return int(CeilDiv(CeilDiv(n, per_thread), kThreads)); }

// ------------------------------------------------------------------------------------------------------------ maps

enum class Arity { kUnary, kUnaryGrad, kBinary, kBinaryGrad };

template <typename T, int N, Arity A>
__device__ __forceinline__ void Compute(const EwProblem& p, float (&x)[3][N], float (&y)[2][N]) {
  using Formulas = EwFormulas<MathFor<T>>;
  if constexpr (A == Arity::kUnary) {
    Formulas::WithUnary(p, [&](auto f) {
#pragma unroll
      for (int i = 0; i < N; ++i) y[0][i] = f(x[0][i]);
    });
  } else if constexpr (A == Arity::kUnaryGrad) {
    Formulas::WithUnaryGrad(p, [&](auto f) {
#pragma unroll
      for (int i = 0; i < N; ++i) y[0][i] = f(x[0][i], x[1][i]);
    });
  } else if constexpr (A == Arity::kBinary) {
    Formulas::WithBinary(p, [&](auto f) {
#pragma unroll
      for (int i = 0; i < N; ++i) y[0][i] = f(x[0][i], x[1][i]);
    });
  } else {
    Formulas::WithBinaryGrad(p, [&](auto f) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const auto d = f(x[0][i], x[1][i], x[2][i]);
        y[0][i] = d.first, y[1][i] = d.second;
      }
    });
  }
}

template <typename T, int N, Arity A>
__global__ void __launch_bounds__(kThreads) Map(EwProblem p) {
  constexpr int kIn = A == Arity::kUnary ? 1 : A == Arity::kBinaryGrad ? 3 : 2;
  constexpr int kOut = A == Arity::kBinaryGrad ? 2 : 1;
  const T* in[3] = {static_cast<const T*>(p.in[0]), static_cast<const T*>(p.in[1]), static_cast<const T*>(p.in[2])};
  T* out[2] = {static_cast<T*>(p.out[0]), static_cast<T*>(p.out[1])};
  const int64_t packs = p.n / N, pack = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (pack < packs) {
    Pack<T, N> loaded[kIn];
#pragma unroll
    for (int k = 0; k < kIn; ++k) loaded[k] = LoadPack<T, N>(in[k] + pack * N);
    float x[3][N], y[2][N];
#pragma unroll
    for (int k = 0; k < kIn; ++k) Widen(loaded[k], x[k]);
    Compute<T, N, A>(p, x, y);
#pragma unroll
    for (int k = 0; k < kOut; ++k) StorePack(out[k] + pack * N, y[k]);
  }
  if constexpr (N > 1) {  // what is left after the last pack
    const int64_t i = packs * N + threadIdx.x;
    if (blockIdx.x == 0 && i < p.n) {
      float x[3][1], y[2][1];
      for (int k = 0; k < kIn; ++k) x[k][0] = ToFloat(in[k][i]);
      Compute<T, 1, A>(p, x, y);
      for (int k = 0; k < kOut; ++k) out[k][i] = FromFloat<T>(y[k][0]);
    }
  }
}

template <Arity A>
void LaunchMap(const EwProblem& p, Stream stream) {
  WithType(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (Aligned({p.in[0], p.in[1], p.in[2], p.out[0], p.out[1]}))
      Map<T, kPerVector<T>, A><<<Blocks(p.n, kPerVector<T>), kThreads, 0, stream>>>(p);
    else
      Map<T, 1, A><<<Blocks(p.n, 1), kThreads, 0, stream>>>(p);
  });
}

// ----------------------------------------------------------------------------------------------------------- casts

template <typename From, typename To, int N>
__global__ void __launch_bounds__(kThreads) Cast(const From* x, To* y, int64_t n) {
  const int64_t packs = n / N, pack = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (pack < packs) {
    float values[N];
    Widen(LoadPack<From, N>(x + pack * N), values);
    StorePack(y + pack * N, values);
  }
  const int64_t i = packs * N + threadIdx.x;
  if (N > 1 && blockIdx.x == 0 && i < n) y[i] = FromFloat<To>(ToFloat(x[i]));
}

// -------------------------------------------------------------------------------------------------- sums of tensors

template <int kCapacity>
struct Addends {
  const void* x[kCapacity];
};

template <typename T, int N, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    AddN(const __grid_constant__ Addends<kCapacity> addends, int count, T* y, int64_t n) {
  const int64_t packs = n / N, pack = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (pack < packs) {
    float sum[N] = {};
#pragma unroll 4
    for (int k = 0; k < count; ++k) {
      float values[N];
      Widen(LoadPack<T, N>(static_cast<const T*>(addends.x[k]) + pack * N), values);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] = k == 0 ? values[j] : sum[j] + values[j];  // -0 stays -0
    }
    StorePack(y + pack * N, sum);
  }
  const int64_t i = packs * N + threadIdx.x;
  if (N > 1 && blockIdx.x == 0 && i < n) {
    float total = ToFloat(static_cast<const T*>(addends.x[0])[i]);
    for (int k = 1; k < count; ++k) total += ToFloat(static_cast<const T*>(addends.x[k])[i]);
    y[i] = FromFloat<T>(total);
  }
}

template <int kCapacity>
void LaunchAddN(const AddNProblem& p, Stream stream) {
  Addends<kCapacity> addends;
  bool aligned = Aligned({p.y});
  for (int k = 0; k < p.count; ++k) {
    addends.x[k] = p.x[k];
    aligned = aligned && Aligned({p.x[k]});
  }
  WithType(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (aligned)
      AddN<T, kPerVector<T>, kCapacity>
          <<<Blocks(p.n, kPerVector<T>), kThreads, 0, stream>>>(addends, p.count, static_cast<T*>(p.y), p.n);
    else
      AddN<T, 1, kCapacity><<<Blocks(p.n, 1), kThreads, 0, stream>>>(addends, p.count, static_cast<T*>(p.y), p.n);
  });
}

}  // namespace

Status Run(const EwProblem& p, Stream stream) {
  if (p.n == 0) return {};
  if (IsBinary(p.op))
    p.gradient ? LaunchMap<Arity::kBinaryGrad>(p, stream) : LaunchMap<Arity::kBinary>(p, stream);
  else
    p.gradient ? LaunchMap<Arity::kUnaryGrad>(p, stream) : LaunchMap<Arity::kUnary>(p, stream);
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

Status Run(const CastProblem& p, Stream stream) {
  if (p.n == 0) return {};
  WithType(p.from, [&](auto from) {
    WithType(p.to, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      if constexpr (!std::is_same<From, To>::value) {
        // The wider side moves 16 bytes at once, so that both sides are contiguous over a warp.
        constexpr int N = sizeof(From) == 4 || sizeof(To) == 4 ? 4 : 8;
        const From* x = static_cast<const From*>(p.x);
        To* y = static_cast<To*>(p.y);
        if (Aligned({p.x, p.y}))
          Cast<From, To, N><<<Blocks(p.n, N), kThreads, 0, stream>>>(x, y, p.n);
        else
          Cast<From, To, 1><<<Blocks(p.n, 1), kThreads, 0, stream>>>(x, y, p.n);
      } else {
        cudaMemcpyAsync(p.y, p.x, p.n * sizeof(From), cudaMemcpyDeviceToDevice, stream);
      }
    });
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

Status Run(const AddNProblem& p, Stream stream) {
  if (p.n == 0) return {};
  if (p.count <= 16)
    LaunchAddN<16>(p, stream);
  else
    LaunchAddN<AddNProblem::kMaxCount>(p, stream);
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace cuda
}  // namespace blocksparse
