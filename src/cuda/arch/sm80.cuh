// Instructions of compute capability 8.0, one function each: asynchronous copies, matrix loads, matrix products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace blocksparse {
namespace cuda {
namespace sm80 {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies to shared memory; without `read`, zeros, and the source may be any address.
__device__ inline void CopyAsync16(uint32_t to, const void* from, bool read) {
  asm volatile(
      "{\n.reg .pred skip;\nsetp.eq.s32 skip, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, skip;\n}\n" ::"r"(to),
      "l"(from), "r"(int(read)));
}
// The first `valid` bytes, and zeros after them.
__device__ inline void CopyAsync8(uint32_t to, const void* from, int valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(to), "l"(from), "r"(valid));
}
__device__ inline void CopyAsync4(uint32_t to, const void* from, int valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from), "r"(valid));
}
__device__ inline void CopyAsyncCommit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kPending>
__device__ inline void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

__device__ inline void StoreShared2(uint32_t to, uint16_t value) {
  asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(to), "h"(value) : "memory");
}
__device__ inline uint32_t LoadShared4(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(from));
  return value;
}

__device__ inline float2 LoadShared8(uint32_t from) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(value.x), "=f"(value.y) : "r"(from));
  return value;
}
__device__ inline float4 LoadShared16(uint32_t from) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(from));
  return value;
}

// Keeps a value in its register: the compiler would rather work it out again in every round of a loop.
__device__ inline void Keep(int& x) { asm volatile("" : "+r"(x)); }
__device__ inline void Keep(uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ inline void Keep(int64_t& x) { asm volatile("" : "+l"(x)); }
__device__ inline void Keep(const char*& x) { asm volatile("" : "+l"(x)); }

// Four (two) 8 x 8 matrices of 16-bit elements; with `transposed` each is transposed on the way.
__device__ inline void LoadMatrix4(uint32_t (&r)[4], uint32_t from, bool transposed) {
  if (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}
__device__ inline void LoadMatrix2(uint32_t (&r)[2], uint32_t from, bool transposed) {
  if (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(from));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n" : "=r"(r[0]), "=r"(r[1]) : "r"(from));
}

// d += a b: a [16, 16], b [16, 8].
__device__ inline void Mma16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void Mma16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d += a b: a [16, 8], b [8, 8].
__device__ inline void Mma8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, __half) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}
__device__ inline void Mma8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}
__device__ inline void MmaTf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// To TF32, to nearest, ties away from zero.
__device__ inline uint32_t RoundTf32(uint32_t x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(y) : "f"(__uint_as_float(x)));
  return y;
}

}  // namespace sm80
}  // namespace cuda
}  // namespace blocksparse
