// Float conversions in portable C++: float16 and bfloat16 to float32 and back, to nearest even, subnormals kept.
// All static: files compiled for different instruction sets must not share a function.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common.h"

namespace blocksparse {
namespace cpu {

static inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float BFloat16ToFloat(uint16_t x) { return FloatOf(uint32_t(x) << 16); }

static inline uint16_t FloatToBFloat16(float x) {
  const uint32_t bits = BitsOf(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);  // NaN stays NaN, quiet
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

static inline float HalfToFloat(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000u) << 16, magnitude = x & 0x7fffu;
  if (magnitude >= 0x7c00u) return FloatOf(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);  // infinity, NaN
  if (magnitude >= 0x400u) return FloatOf(sign | ((magnitude << 13) + 0x38000000u));
  // A subnormal, in units of 2^-24. No step of this is subnormal in float32, so no mode of the CPU can flush it.
  return FloatOf(sign | BitsOf(FloatOf((magnitude << 13) + 0x38800000u) - 0x1p-14f));
}

static inline uint16_t FloatToHalf(float x) {
  const uint32_t sign = BitsOf(x) >> 16 & 0x8000u, magnitude = BitsOf(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u)  // below 2^-14: a subnormal, in units of 2^-24; the sum does the rounding
    return uint16_t(sign | (BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f)));
  return uint16_t(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
}

static inline float Load(const void* data, int64_t i, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return dtype == DType::kFloat16 ? HalfToFloat(bits) : BFloat16ToFloat(bits);
}

static inline void Store(void* data, int64_t i, DType dtype, float value) {
  if (dtype == DType::kFloat32)
    static_cast<float*>(data)[i] = value;
  else
    static_cast<uint16_t*>(data)[i] = dtype == DType::kFloat16 ? FloatToHalf(value) : FloatToBFloat16(value);
}

}  // namespace cpu
}  // namespace blocksparse
