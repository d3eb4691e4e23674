// wgmma for float32: operands rounded to TF32, D[64, N] += A[64, 8] B[8, N]; and bfloat16 pieces of float32 operands,
// D[64, N] = or += A[64, 16] B[16, N]. As sm90_wgmma.h, with both operands contiguous along the reduction.
#pragma once

#include <cstdint>

#include "cuda/arch/sm90_wgmma.h"

namespace blocksparse::cuda::sm90 {

// Whether a sum of pieces may differ from the sum of the numbers: not finite, or small enough for pieces to be lost.
__device__ __forceinline__ bool OddFloat(float x) {
  constexpr uint32_t kLow = 27u << 23, kInf = 0xffu << 23;  // 2^-100, infinity
  const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
  return bits - kLow >= kInf - kLow && bits != 0;
}

// The registers of a sum: in the instruction, before both descriptors, and in the list of the asm statement.
#define BLOCKSPARSE_NAMES8 "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9"
#define BLOCKSPARSE_NAMES16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17"
#define BLOCKSPARSE_NAMES32                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33"
#define BLOCKSPARSE_NAMES64                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "  \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65"
#define BLOCKSPARSE_SUM4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BLOCKSPARSE_SUM8(i) BLOCKSPARSE_SUM4(i), BLOCKSPARSE_SUM4(i + 4)
#define BLOCKSPARSE_SUM16(i) BLOCKSPARSE_SUM8(i), BLOCKSPARSE_SUM8(i + 8)
#define BLOCKSPARSE_SUM32(i) BLOCKSPARSE_SUM16(i), BLOCKSPARSE_SUM16(i + 16)
#define BLOCKSPARSE_SUM64(i) BLOCKSPARSE_SUM32(i), BLOCKSPARSE_SUM32(i + 32)

template <int N>
struct WgmmaFloat;

#define BLOCKSPARSE_WGMMA_FLOAT(N, REGISTERS)                                                               \
  template <>                                                                                               \
  struct WgmmaFloat<N> {                                                                                    \
    static __device__ __forceinline__ void AddTf32(float (&d)[REGISTERS], uint64_t a, uint64_t b) {         \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 " BLOCKSPARSE_NAMES##REGISTERS  \
                   ", 1, 1, 1;"                                                                             \
                   : BLOCKSPARSE_SUM##REGISTERS(0)                                                          \
                   : "l"(a), "l"(b));                                                                       \
    }                                                                                                       \
    static __device__ __forceinline__ void Set(float (&d)[REGISTERS], uint64_t a, uint64_t b) {             \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 " BLOCKSPARSE_NAMES##REGISTERS \
                   ", 0, 1, 1, 0, 0;"                                                                       \
                   : BLOCKSPARSE_SUM##REGISTERS(0)                                                          \
                   : "l"(a), "l"(b));                                                                       \
    }                                                                                                       \
    static __device__ __forceinline__ void Add(float (&d)[REGISTERS], uint64_t a, uint64_t b) {             \
      Wgmma<N, false>::template Add<0, 0>(d, a, b);                                                         \
    }                                                                                                       \
  };

BLOCKSPARSE_WGMMA_FLOAT(16, 8)
BLOCKSPARSE_WGMMA_FLOAT(32, 16)
BLOCKSPARSE_WGMMA_FLOAT(64, 32)
BLOCKSPARSE_WGMMA_FLOAT(128, 64)

#undef BLOCKSPARSE_WGMMA_FLOAT
#undef BLOCKSPARSE_SUM64
#undef BLOCKSPARSE_SUM32
#undef BLOCKSPARSE_SUM16
#undef BLOCKSPARSE_SUM8
#undef BLOCKSPARSE_SUM4
#undef BLOCKSPARSE_NAMES64
#undef BLOCKSPARSE_NAMES32
#undef BLOCKSPARSE_NAMES16
#undef BLOCKSPARSE_NAMES8

}  // namespace blocksparse::cuda::sm90
