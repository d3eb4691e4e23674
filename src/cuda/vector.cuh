// N elements moved by one instruction, and sums of a thread block in a fixed order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "cuda/convert.cuh"

namespace blocksparse {
namespace cuda {

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T element[N];
};

// Elements in the 16 bytes that one thread moves at once.
template <typename T>
constexpr int kPerVector = 16 / int(sizeof(T));

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> LoadPack(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}

template <typename T, int N>
__device__ __forceinline__ void Widen(const Pack<T, N>& pack, float (&x)[N]) {
  if constexpr (std::is_same<T, __nv_bfloat16>::value && N % 2 == 0) {
    // Two at a time, each with one instruction: they stay together in a register until then.
    const auto* words = reinterpret_cast<const uint32_t*>(&pack);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = ToFloat(pack.element[i]);
  }
}

template <typename T, int N>
__device__ __forceinline__ void StorePack(T* p, const float (&x)[N]) {
  Pack<T, N> pack;
  if constexpr (N % 2 == 0 && sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {  // one instruction rounds two
      if constexpr (std::is_same<T, __half>::value) {
        const __half2 two = __floats2half2_rn(x[i], x[i + 1]);
        pack.element[i] = two.x, pack.element[i + 1] = two.y;
      } else {
        const __nv_bfloat162 two = __floats2bfloat162_rn(x[i], x[i + 1]);
        pack.element[i] = two.x, pack.element[i + 1] = two.y;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) pack.element[i] = FromFloat<T>(x[i]);
  }
  *reinterpret_cast<Pack<T, N>*>(p) = pack;
}

template <int N>
__device__ __forceinline__ void LoadFloats(const float* p, float (&x)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(p + i);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = p[i];
  }
}

// Whether packs of 16 bytes may be used: null pointers are not.
inline bool Aligned(std::initializer_list<const void*> pointers) {
  for (const void* p : pointers)
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  return true;
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The sum over the threads of a block of `kThreads`, in thread 0. `scratch` is shared memory for kThreads / 32 floats.
template <int kThreads>
__device__ __forceinline__ float BlockSum(float x, float* scratch) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) x += __shfl_down_sync(0xffffffff, x, half);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int w = 1; w < kThreads / 32; ++w) x += scratch[w];
  __syncthreads();
  return x;
}

// The arithmetic that kernels/ewops_formulas.h asks for.
struct Math {
  using V = float;
  static constexpr float kInfinity = __builtin_huge_valf();
  __device__ __forceinline__ static float Set(float x) { return x; }
  __device__ __forceinline__ static float Abs(float x) { return fabsf(x); }
  __device__ __forceinline__ static float Sqrt(float x) { return __fsqrt_rn(x); }
  __device__ __forceinline__ static float Exp(float x) { return expf(x); }
  __device__ __forceinline__ static float Expm1(float x) { return expm1f(x); }
  __device__ __forceinline__ static float Log(float x) { return logf(x); }
  __device__ __forceinline__ static float Tanh(float x) { return tanhf(x); }
  __device__ __forceinline__ static float Sigmoid(float x) {
    // The divisor lies in [1, 2], where the fast division is right to 2 units in the last place.
    const float e = expf(-fabsf(x)), s = __fdividef(1.f, 1.f + e);
    return x < 0.f ? e * s : s;
  }
};

}  // namespace cuda
}  // namespace blocksparse
