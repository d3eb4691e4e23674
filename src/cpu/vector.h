// Vectors of L floats in GCC's vector extensions: one source for every instruction set, L chosen by the including file.
// Everything is in an unnamed namespace: files compiled for different instruction sets must not share a function.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "cpu/convert.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace blocksparse {
namespace cpu {
namespace {

// No alignment is asked of any address.
template <int L>
struct Vec;
#define BLOCKSPARSE_VEC(L)                                                             \
  template <>                                                                          \
  struct Vec<L> {                                                                      \
    typedef float Float __attribute__((vector_size(4 * L), aligned(4), may_alias));    \
    typedef int32_t Int __attribute__((vector_size(4 * L), aligned(4), may_alias));    \
    typedef uint32_t Word __attribute__((vector_size(4 * L), aligned(4), may_alias));  \
    typedef uint64_t Wide __attribute__((vector_size(4 * L), aligned(8), may_alias));  \
    typedef uint16_t Short __attribute__((vector_size(2 * L), aligned(2), may_alias)); \
  }
BLOCKSPARSE_VEC(4);
BLOCKSPARSE_VEC(8);
BLOCKSPARSE_VEC(16);
#undef BLOCKSPARSE_VEC

template <int L>
using Float = typename Vec<L>::Float;

template <DType D>
struct ElementOf {
  using Type = uint16_t;
};
template <>
struct ElementOf<DType::kFloat32> {
  using Type = float;
};
template <DType D>
using Element = typename ElementOf<D>::Type;

template <DType D, int L>
inline Float<L> LoadVec(const Element<D>* p) {
  using V = Vec<L>;
  if constexpr (D == DType::kFloat32) {
    return *reinterpret_cast<const typename V::Float*>(p);
  } else if constexpr (D == DType::kBFloat16) {
    typename V::Short bits = *reinterpret_cast<const typename V::Short*>(p);
    return reinterpret_cast<typename V::Float>(__builtin_convertvector(bits, typename V::Word) << 16);
  } else {
#if defined(__AVX512F__)
    if constexpr (L == 16) {
      // Zero-masked forms: the plain ones warn of an uninitialized value in GCC's own header.
      return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
#endif
#if defined(__F16C__)
    if constexpr (L == 8) return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
    Float<L> out;
    for (int i = 0; i < L; ++i) out[i] = HalfToFloat(p[i]);
    return out;
  }
}

template <DType D, int L>
inline void StoreVec(Element<D>* p, Float<L> x) {
  using V = Vec<L>;
  if constexpr (D == DType::kFloat32) {
    *reinterpret_cast<typename V::Float*>(p) = x;
  } else if constexpr (D == DType::kBFloat16) {
    const auto bits = reinterpret_cast<typename V::Word>(x);
    const typename V::Word rounded = bits + 0x7fffu + (bits >> 16 & 1u), nan = bits | 0x400000u;
    const typename V::Word word = (x != x ? nan : rounded) >> 16;
#if defined(__AVX2__)
    if constexpr (L == 8) {
      const __m256i wide = reinterpret_cast<__m256i>(word);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                       _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
      return;
    }
#endif
    *reinterpret_cast<typename V::Short*>(p) = __builtin_convertvector(word, typename V::Short);
  } else {
#if defined(__AVX512F__)
    if constexpr (L == 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT));
      return;
    }
#endif
#if defined(__F16C__)
    if constexpr (L == 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
      return;
    }
#endif
    for (int i = 0; i < L; ++i) p[i] = FloatToHalf(x[i]);
  }
}

template <DType D>
inline float LoadOne(const Element<D>* p) {
  if constexpr (D == DType::kFloat32) return *p;
  if constexpr (D == DType::kFloat16) return HalfToFloat(*p);
  if constexpr (D == DType::kBFloat16) return BFloat16ToFloat(*p);
}

template <DType D>
inline void StoreOne(Element<D>* p, float x) {
  if constexpr (D == DType::kFloat32) *p = x;
  if constexpr (D == DType::kFloat16) *p = FloatToHalf(x);
  if constexpr (D == DType::kBFloat16) *p = FloatToBFloat16(x);
}

// Swaps the off-diagonal D x D pieces of rows a and b, where b lies D rows below a.
template <int D, int L, int... J>
inline void Exchange(Float<L>& a, Float<L>& b, std::integer_sequence<int, J...>) {
  const typename Vec<L>::Int low = {((J & D) ? L + J - D : J)...}, high = {((J & D) ? L + J : J + D)...};
  const Float<L> t = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = t;
}

// Transposes L rows of L floats in log2(L) rounds (J. O. Eklundh, 1972).
template <int L, int D = L / 2>
inline void Transpose(Float<L>* rows) {
  if constexpr (D > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i)
      if (!(i & D)) Exchange<D, L>(rows[i], rows[i + D], std::make_integer_sequence<int, L>());
    Transpose<L, D / 2>(rows);
  }
}

// The sum of each of L rows of L lanes, in one fixed order.
template <int L>
inline Float<L> RowSums(Float<L>* rows) {
  Transpose<L>(rows);
  Float<L> sum = rows[0];
#pragma GCC unroll 16
  for (int i = 1; i < L; ++i) sum += rows[i];
  return sum;
}

// Calls body with the dtype as a compile-time constant.
template <class Body>
inline void ForDType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32: return body(std::integral_constant<DType, DType::kFloat32>());
    case DType::kFloat16: return body(std::integral_constant<DType, DType::kFloat16>());
    case DType::kBFloat16: return body(std::integral_constant<DType, DType::kBFloat16>());
  }
}

}  // namespace
}  // namespace cpu
}  // namespace blocksparse
