// Elementary functions on vectors of L floats, each within 2.5 units in the last place of float32 (test/test_ewops.py).
// Subnormal, infinite and NaN arguments and results are what mathematics says. The polynomials are minimax fits on the
// reduced ranges named beside them. Unnamed namespace: see cpu/vector.h.
#pragma once

#include "cpu/vector.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace blocksparse {
namespace cpu {
namespace {

template <int L>
struct Math {
  using V = Float<L>;
  using Int = typename Vec<L>::Int;

  static constexpr float kInfinity = __builtin_inff();

  static inline V Set(float x) { return V{} + x; }
  static inline Int Bits(V x) { return reinterpret_cast<Int>(x); }
  static inline V FromBits(Int x) { return reinterpret_cast<V>(x); }
  static inline V Abs(V x) { return FromBits(Bits(x) & 0x7fffffff); }
  static inline V CopySign(V magnitude, V sign) { return FromBits(Bits(magnitude) | (Bits(sign) & INT32_MIN)); }

  static inline V Sqrt(V x) {
#if defined(__AVX512F__)
    if constexpr (L == 16) return _mm512_maskz_sqrt_ps(0xffff, x);
#endif
#if defined(__AVX__)
    if constexpr (L == 8) return _mm256_sqrt_ps(x);
#endif
#if defined(__SSE2__)
    if constexpr (L == 4) return _mm_sqrt_ps(x);
#endif
    for (int i = 0; i < L; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
  }

  // x = n ln 2 + r with |r| <= ln(2) / 2; q = (exp(r) - 1 - r) / r^2.
  struct Reduced {
    V r, q;
    Int n;
  };
  static inline Reduced Reduce(V x) {
    constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: adding it rounds to a whole number
    const V shifted = x * 1.44269504f + kMagic, whole = shifted - kMagic;
    const V r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;  // ln 2 in two pieces, the first of 9 bits
    const V q = 0.5f + r * (0.166666672f +
                            r * (0.0416662693f + r * (0.00833326485f + r * (0.001394619f + r * 0.000199179703f))));
    return {r, q, Bits(shifted) - Bits(Set(kMagic))};
  }
  // x 2^n, in two steps so that a subnormal result is rounded once and 2^128 needs no infinity.
  static inline V Scale(V x, Int n) {
    const Int half = n >> 1;
    return x * FromBits((half + 127) << 23) * FromBits((n - half + 127) << 23);
  }
  static inline V Clamp(V x, float low, float high) {
    x = x > high ? Set(high) : x;
    return x < low ? Set(low) : x;
  }

  static inline V Exp(V x) {
    const Reduced e = Reduce(Clamp(x, -104.f, 89.f));  // beyond, 0 and infinity
    return Scale(1.f + (e.r + e.r * e.r * e.q), e.n);
  }

  static inline V Expm1(V x) {
    const Reduced e = Reduce(Clamp(x, -104.f, 89.f));
    const V small = e.r + e.r * e.r * e.q;
    return e.n == 0 ? small : Scale(1.f + small, e.n) - 1.f;
  }

  // x = 2^n (1 + f) with f in [sqrt(1/2) - 1, sqrt(2) - 1]; log(1 + f) = f - f^2 / 2 + f^3 p(f).
  static inline V Log(V x) {
    const Int tiny = x < 1.17549435e-38f;
    const V scaled = tiny ? x * 8388608.f : x;
    const Int exponent = (Bits(scaled) - 0x3f3504f3) >> 23;  // from the bits of sqrt(1/2)
    const V f = FromBits(Bits(scaled) - (exponent << 23)) - 1.f;
    const V p = 0.333333105f +
                f * (-0.249999866f +
                     f * (0.200022429f +
                          f * (-0.166692704f +
                               f * (0.142183259f +
                                    f * (-0.123838f + f * (0.118750758f + f * (-0.117940918f + f * 0.0691559538f)))))));
    const V whole = __builtin_convertvector(exponent - (tiny & 23), V);
    const V square = f * f;
    V y = square * f * p + whole * -2.12194440e-4f;
    y = (y - 0.5f * square) + f;
    y = y + whole * 0.693359375f;
    y = x == kInfinity ? x : y;
    y = x == 0.f ? Set(-kInfinity) : y;
    return x >= 0.f ? y : Set(__builtin_nanf(""));
  }

  static inline V Sigmoid(V x) {
    const V e = Exp(-Abs(x));
    return (x < 0.f ? e : Set(1.f)) / (1.f + e);
  }

  // e / (e + 2) with e = exp(2 |x|) - 1 = 2^n (exp(r) - 1) + (2^n - 1), which does not cancel.
  static inline V Tanh(V x) {
    const Reduced two = Reduce(Clamp(2.f * Abs(x), 0.f, 20.f));  // beyond, 1
    const V power = FromBits((two.n + 127) << 23);
    const V e = power * (two.r + two.r * two.r * two.q) + (power - 1.f);
    return CopySign(e / (e + 2.f), x);
  }
};

}  // namespace
}  // namespace cpu
}  // namespace blocksparse
