// Element types on the device: to float32 and back, rounded to nearest even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/common.h"

namespace blocksparse {
namespace cuda {

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(__half x) { return __half2float(x); }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T FromFloat(float x);
template <>
__device__ inline float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ inline __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Calls `body` with a value of the element type, so that a lambda can take it as `auto`.
template <typename Body>
auto WithType(DType dtype, Body body) {
  if (dtype == DType::kFloat16) return body(__half());
  if (dtype == DType::kBFloat16) return body(__nv_bfloat16());
  return body(float());
}

}  // namespace cuda
}  // namespace blocksparse
