// N elements moved by one instruction, and sums of a thread block in a fixed order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

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

// Whether a kernel's code is Hopper's or newer, so that what only that has is in it: a build may leave the chip out.
template <typename Kernel>
bool CompiledForHopper(Kernel* kernel) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) return attributes.ptxVersion >= 90;
  cudaGetLastError();
  return false;
}

// In a kernel launched to overlap the one before it: until that one is over and its results are there.
__device__ __forceinline__ void WaitForKernelBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets a kernel that may overlap this one come up as soon as there is room.
__device__ __forceinline__ void AllowKernelAfter() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
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
    // e / (1 + e) or 1 / (1 + e), with what the sum lost given back in the remainder: as near as expf is, whose last place
    // may count twice in the result, and half a place more.
    const float e = expf(-fabsf(x)), divisor = 1.f + e, lost = e - (divisor - 1.f), dividend = x < 0.f ? e : 1.f;
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(divisor));
    r = fmaf(r, fmaf(-divisor, r, 1.f), r);
    const float quotient = dividend * r;
    return fmaf(fmaf(-lost, quotient, fmaf(-divisor, quotient, dividend)), r, quotient);
  }
};

// For 16-bit types, where the functions above would cost more than the memory: the hardware's exponential, logarithm and
// reciprocal. Right to some 2^-21 of the result, for a large argument x of exp to |x| 2^-23.
struct FastMath : Math {
  __device__ __forceinline__ static float Reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ __forceinline__ static float Power(float x) {  // 2^x, or 0 if that is subnormal
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static constexpr float kLog2E = 1.44269504f;
  __device__ __forceinline__ static float Exp(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(kLog2E * x));
    return y;
  }
  __device__ __forceinline__ static float Sigmoid(float x) {
    const float e = Exp(-fabsf(x)), r = Reciprocal(1.f + e);
    return x < 0.f ? e * r : r;
  }
  __device__ __forceinline__ static float Log(float x) {
    // The hardware's logarithm is right to 2^-22, which near 1 is much of the result: the series of ln(1 + d) there.
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    const float d = x - 1.f;
    const float near = d + d * d * (-0.5f + d * (0.333333333f + d * (-0.25f + d * 0.2f)));
    return fabsf(d) < 0.0625f ? near : 0.693147181f * y;
  }
  // 1 - 2 / (e^2x + 1) cancels near 0: the odd series there.
  static constexpr float kNear = 0.25f;
  __device__ __forceinline__ static float TanhNear0(float x) {
    const float square = x * x;
    return x + x * square * (-0.333333333f + square * (0.133333333f + square * -0.0539682540f));
  }
  __device__ __forceinline__ static float Tanh(float x) {
    const float far = 1.f - 2.f * Reciprocal(1.f + Power(2.f * kLog2E * fabsf(x)));
    return fabsf(x) < kNear ? TanhNear0(x) : copysignf(far, x);
  }
};

template <typename T>
using MathFor = typename std::conditional<std::is_same<T, float>::value, Math, FastMath>::type;

}  // namespace cuda
}  // namespace blocksparse
