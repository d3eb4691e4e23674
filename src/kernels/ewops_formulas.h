// The formulas of the elementwise operators, once for both backends. M is a backend's arithmetic: M::V is a float or a
// vector of floats, and Exp, Log, ... work on it. Comparisons give what `? :` takes, for floats and for GCC's vectors.
//
// With...(op, ..., body) calls body with the formula of an op as a callable, so that the choice is made outside the loop.
#pragma once

#include "kernels/ewops.h"

#ifdef __CUDACC__
#define BLOCKSPARSE_FORMULA __device__ __forceinline__
#else
#define BLOCKSPARSE_FORMULA inline __attribute__((always_inline))
#endif

namespace blocksparse {

constexpr float kFastGeluAlpha = 1.702f;  // D. Hendrycks, K. Gimpel, "Gaussian error linear units", 2016

template <class M>
struct EwFormulas {
  using V = typename M::V;
  struct Pair {
    V first, second;
  };

  BLOCKSPARSE_FORMULA static V Swish(V x, float alpha) { return x * M::Sigmoid(alpha * x); }
  // The derivative; s (1 - s) is 0 where x may be too large for the product.
  BLOCKSPARSE_FORMULA static V SwishGrad(V x, float alpha) {
    const V s = M::Sigmoid(alpha * x), slope = alpha * (s * (1.f - s));
    return s + (slope == 0.f ? slope : x * slope);
  }
  // 0.5 (1 + tanh(u)) is sigmoid(2u), which does not cancel where x is negative.
  static constexpr float kGelu = 1.5957691216f;  // 2 sqrt(2 / pi)
  BLOCKSPARSE_FORMULA static V Gelu(V x, float alpha) { return x * M::Sigmoid(kGelu * (x + alpha * x * x * x)); }
  BLOCKSPARSE_FORMULA static V GeluGrad(V x, float alpha) {
    const V s = M::Sigmoid(kGelu * (x + alpha * x * x * x)), slope = kGelu * (s * (1.f - s));
    return s + (slope == 0.f ? slope : x * slope * (1.f + 3.f * alpha * x * x));
  }

  template <class Body>
  BLOCKSPARSE_FORMULA static void WithUnary(const EwProblem& p, const Body& body) {
    const float alpha = p.alpha, low = p.low, high = p.high;
    switch (p.op) {
      case EwOp::kNeg: return body([](V x) { return -x; });
      case EwOp::kRcp: return body([](V x) { return 1.f / x; });
      case EwOp::kSqr: return body([](V x) { return x * x; });
      case EwOp::kSqrt: return body([](V x) { return M::Sqrt(x); });
      case EwOp::kExp: return body([](V x) { return M::Exp(x); });
      case EwOp::kLog: return body([](V x) { return M::Log(x); });
      case EwOp::kSigmoid: return body([](V x) { return M::Sigmoid(x); });
      case EwOp::kTanh: return body([](V x) { return M::Tanh(x); });
      case EwOp::kRelu: return body([](V x) { return x < 0.f ? M::Set(0.f) : x; });
      case EwOp::kElu: return body([alpha](V x) { return x > 0.f ? x : alpha * M::Expm1(x); });
      case EwOp::kGelu: return body([alpha](V x) { return Gelu(x, alpha); });
      case EwOp::kSwish: return body([alpha](V x) { return Swish(x, alpha); });
      case EwOp::kFilter: {
        const bool zero_infs = p.zero_infs, zero_nans = p.zero_nans;
        return body([=](V x) {
          if (zero_infs) x = M::Abs(x) == M::kInfinity ? M::Set(0.f) : x;
          if (zero_nans) x = x == x ? x : M::Set(0.f);
          x = alpha * x;
          x = x > high ? M::Set(high) : x;
          return x < low ? M::Set(low) : x;
        });
      }
      case EwOp::kConcreteInfer:
        return body([=](V x) {
          const V t = M::Sigmoid(x) * (high - low) + low;
          return t < 0.f ? M::Set(0.f) : (t > 1.f ? M::Set(1.f) : t);
        });
      default: return;
    }
  }

  // f(dz, x), or f(dz, z) for sigmoid, tanh, relu and concrete.
  template <class Body>
  BLOCKSPARSE_FORMULA static void WithUnaryGrad(const EwProblem& p, const Body& body) {
    const float alpha = p.alpha, low = p.low, range = p.high - p.low;
    switch (p.op) {
      case EwOp::kNeg: return body([](V dz, V) { return -dz; });
      case EwOp::kRcp:
        return body([](V dz, V x) {
          const V z = 1.f / x;
          return -(dz * z) * z;
        });
      case EwOp::kSqr: return body([](V dz, V x) { return 2.f * dz * x; });
      case EwOp::kSqrt: return body([](V dz, V x) { return 0.5f * dz / M::Sqrt(x); });
      case EwOp::kExp: return body([](V dz, V x) { return dz * M::Exp(x); });
      case EwOp::kLog: return body([](V dz, V x) { return dz / x; });
      case EwOp::kSigmoid: return body([](V dz, V z) { return dz * (z - z * z); });
      case EwOp::kTanh: return body([](V dz, V z) { return dz * (1.f - z * z); });
      case EwOp::kRelu: return body([](V dz, V z) { return z > 0.f ? dz : M::Set(0.f); });
      case EwOp::kElu: return body([alpha](V dz, V x) { return x > 0.f ? dz : dz * (alpha * M::Exp(x)); });
      case EwOp::kGelu: return body([alpha](V dz, V x) { return dz * GeluGrad(x, alpha); });
      case EwOp::kSwish: return body([alpha](V dz, V x) { return dz * SwishGrad(x, alpha); });
      case EwOp::kConcrete:
        return body([=](V dgate, V s) {
          const V t = s * range + low, d = dgate * (range * alpha) * (s * (1.f - s));
          return t < 0.f ? M::Set(0.f) : (t > 1.f ? M::Set(0.f) : d);
        });
      default: return;
    }
  }

  template <class Body>
  BLOCKSPARSE_FORMULA static void WithBinary(const EwProblem& p, const Body& body) {
    switch (p.op) {
      case EwOp::kAdd: return body([](V x, V y) { return x + y; });
      case EwOp::kSub: return body([](V x, V y) { return x - y; });
      case EwOp::kMul: return body([](V x, V y) { return x * y; });
      case EwOp::kDiv: return body([](V x, V y) { return x / y; });
      // NaN in either operand is the result.
      case EwOp::kMaximum: return body([](V x, V y) { return x != x ? x : (x > y ? x : y); });
      case EwOp::kMinimum: return body([](V x, V y) { return x != x ? x : (x < y ? x : y); });
      default: return;
    }
  }

  // f(dz, x, y); a tie of maximum and minimum gives both operands the whole gradient.
  template <class Body>
  BLOCKSPARSE_FORMULA static void WithBinaryGrad(const EwProblem& p, const Body& body) {
    switch (p.op) {
      case EwOp::kMul: return body([](V dz, V x, V y) { return Pair{dz * y, dz * x}; });
      case EwOp::kDiv:
        return body([](V dz, V x, V y) {
          const V dx = dz / y;
          return Pair{dx, -dx * (x / y)};
        });
      case EwOp::kMaximum:
        return body([](V dz, V x, V y) {
          const V zero = M::Set(0.f);
          return Pair{x >= y ? dz : zero, y >= x ? dz : zero};
        });
      case EwOp::kMinimum:
        return body([](V dz, V x, V y) {
          const V zero = M::Set(0.f);
          return Pair{x <= y ? dz : zero, y <= x ? dz : zero};
        });
      default: return;
    }
  }

  BLOCKSPARSE_FORMULA static V Act(Activation act, V v) {
    if (act == Activation::kRelu) return v < 0.f ? M::Set(0.f) : v;
    if (act == Activation::kFastGelu) return Swish(v, kFastGeluAlpha);
    return v;
  }
};

// What a unary gradient reads besides dz: the output, for three of them.
inline bool GradientFromOutput(EwOp op) { return op == EwOp::kSigmoid || op == EwOp::kTanh || op == EwOp::kRelu; }

inline bool IsBinary(EwOp op) { return op <= EwOp::kMinimum; }

}  // namespace blocksparse
