// Loops over vectors of L floats. Unnamed namespace: see cpu/vector.h.
#pragma once

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/math.h"
#include "cpu/pieces.h"
#include "kernels/ewops_formulas.h"

namespace blocksparse {
namespace cpu {
namespace {

// ------------------------------------------------------------------------------------------------------------ maps

template <int L>
BLOCKSPARSE_LOOPS void Map(const EwProblem& p, int64_t begin, int64_t end) {
  using Formulas = EwFormulas<Math<L>>;
  ForDType(p.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    const Element<D>*a = In<D>(p.in[0]), *b = In<D>(p.in[1]), *c = In<D>(p.in[2]);
    Element<D>*y = Out<D>(p.out[0]), *z = Out<D>(p.out[1]);
    if (IsBinary(p.op) && !p.gradient) {
      Formulas::WithBinary(p, [&](auto f) {
        ForPieces<L, 4>(begin, end, [&](int64_t i, auto count) {
          StorePiece<D, L>(y + i, f(LoadPiece<D, L>(a + i, count), LoadPiece<D, L>(b + i, count)), count);
        });
      });
    } else if (IsBinary(p.op)) {
      Formulas::WithBinaryGrad(p, [&](auto f) {
        ForPieces<L, 4>(begin, end, [&](int64_t i, auto count) {
          const auto d = f(LoadPiece<D, L>(a + i, count), LoadPiece<D, L>(b + i, count), LoadPiece<D, L>(c + i, count));
          StorePiece<D, L>(y + i, d.first, count);
          StorePiece<D, L>(z + i, d.second, count);
        });
      });
    } else if (p.gradient) {
      Formulas::WithUnaryGrad(p, [&](auto f) {
        ForPieces<L, 2>(begin, end, [&](int64_t i, auto count) {
          StorePiece<D, L>(y + i, f(LoadPiece<D, L>(a + i, count), LoadPiece<D, L>(b + i, count)), count);
        });
      });
    } else {
      Formulas::WithUnary(p, [&](auto f) {
        ForPieces<L, 2>(begin, end, [&](int64_t i, auto count) {
          StorePiece<D, L>(y + i, f(LoadPiece<D, L>(a + i, count)), count);
        });
      });
    }
  });
}

template <int L>
BLOCKSPARSE_LOOPS void Cast(const CastProblem& p, int64_t begin, int64_t end) {
  ForDType(p.from, [&](auto from) {
    ForDType(p.to, [&](auto to) {
      constexpr DType From = decltype(from)::value, To = decltype(to)::value;
      const Element<From>* x = In<From>(p.x);
      Element<To>* y = Out<To>(p.y);
      const bool aligned = reinterpret_cast<uintptr_t>(y + begin) % (L * sizeof(Element<To>)) == 0;
      if (aligned && p.n * int64_t(sizeof(Element<To>)) >= LastCacheBytes() / 2) {
        for (; begin + L <= end; begin += L) StreamVec<To, L>(y + begin, LoadVec<From, L>(x + begin));
        StreamEnd();
      }
      ForPieces<L, 4>(begin, end, [&](int64_t i, auto count) {
        StorePiece<To, L>(y + i, LoadPiece<From, L>(x + i, count), count);
      });
    });
  });
}

template <int L>
BLOCKSPARSE_LOOPS void AddN(const AddNProblem& p, int64_t begin, int64_t end) {
  ForDType(p.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    ForPieces<L, 2>(begin, end, [&](int64_t i, auto count) {
      Float<L> sum = LoadPiece<D, L>(In<D>(p.x[0]) + i, count);
      for (int k = 1; k < p.count; ++k) sum += LoadPiece<D, L>(In<D>(p.x[k]) + i, count);
      StorePiece<D, L>(Out<D>(p.y) + i, sum, count);
    });
  });
}

// -------------------------------------------------------------------------------------------------------- channels

template <Activation A>
using ActivationIs = std::integral_constant<Activation, A>;

template <class Body>
inline void ForActivation(Activation act, const Body& body) {
  switch (act) {
    case Activation::kNone: return body(ActivationIs<Activation::kNone>());
    case Activation::kRelu: return body(ActivationIs<Activation::kRelu>());
    case Activation::kFastGelu: return body(ActivationIs<Activation::kFastGelu>());
  }
}

// One vector of a gradient.
template <DType D, int L>
struct ChannelGrad {
  using V = Float<L>;
  const Element<D>*dy, *x, *y;
  Element<D>* dx;
  bool gain;

  // Gives t, and t * x where there is an x.
  template <class Act, class Count>
  inline void operator()(Act, int64_t i, Count count, V g, V b, V* t, V* tx) const {
    using Formulas = EwFormulas<Math<L>>;
    V d = LoadPiece<D, L>(dy + i, count);
    const V v = x ? LoadPiece<D, L>(x + i, count) : V{};
    if constexpr (Act::value == Activation::kRelu) {
      const V sign = y ? LoadPiece<D, L>(y + i, count) : g * v + b;
      d = sign > 0.f ? d : V{};
    } else if constexpr (Act::value == Activation::kFastGelu) {
      d = d * Formulas::SwishGrad(g * v + b, kFastGeluAlpha);
    }
    if (dx) StorePiece<D, L>(dx + i, gain ? g * d : d, count);
    *t = d;
    *tx = d * v;
  }
};

constexpr int kTile = 256;  // rows of fewer channels are taken several at once

// inner 1. A group of rows, at least kTile elements, is one long row whose gains and biases repeat.
template <int L>
BLOCKSPARSE_LOOPS void ChannelRows(const ChannelProblem& p, int64_t o0, int64_t o1, float* dbias, float* dgain) {
  using V = Float<L>;
  const int64_t C = p.channels, group = C < kTile ? kTile / C : 1, width = group * C;
  float tiled_gain[kTile], tiled_bias[kTile], bias_sums[kTile] = {}, gain_sums[kTile] = {};
  const float *gain = p.gain, *bias = p.bias;
  float *to_bias = dbias, *to_gain = dgain;
  if (group > 1) {
    for (int64_t i = 0; i < width; ++i) {
      tiled_gain[i] = gain ? gain[i % C] : 1.f;
      tiled_bias[i] = bias ? bias[i % C] : 0.f;
    }
    gain = tiled_gain, bias = tiled_bias;
    to_bias = dbias ? bias_sums : nullptr, to_gain = dgain ? gain_sums : nullptr;
  } else {
    if (dbias) std::fill(dbias, dbias + C, 0.f);
    if (dgain) std::fill(dgain, dgain + C, 0.f);
  }
  constexpr DType F = DType::kFloat32;
  ForDType(p.dtype, [&](auto dtype) {
    ForActivation(p.act, [&](auto act) {
      constexpr DType D = decltype(dtype)::value;
      const ChannelGrad<D, L> grad = {In<D>(p.dy), In<D>(p.x), In<D>(p.y), Out<D>(p.dx), p.gain != nullptr};
      int64_t o = o0;
      while (o < o1) {
        if (!p.gradient) {
          const int64_t rows = std::min(group, o1 - o), first = o * C;
          ForPieces<L>(0, rows * C, [&](int64_t i, auto count) {
            V v = LoadPiece<D, L>(In<D>(p.x) + first + i, count);
            if (gain) v = v * LoadPiece<F, L>(gain + i, count);
            if (bias) v = v + LoadPiece<F, L>(bias + i, count);
            StorePiece<D, L>(Out<D>(p.y) + first + i, EwFormulas<Math<L>>::Act(decltype(act)::value, v), count);
          });
          o += rows;
          continue;
        }
        // Four long rows at a time, so that their sums are touched once.
        const int64_t first = o * C;
        auto piece = [&](int64_t i, auto count, int rows) {
          const V g = gain ? LoadPiece<F, L>(gain + i, count) : Math<L>::Set(1.f);
          const V b = bias ? LoadPiece<F, L>(bias + i, count) : V{};
          V t[4] = {}, tx[4] = {};
          for (int r = 0; r < rows; ++r) grad(act, first + r * width + i, count, g, b, &t[r], &tx[r]);
          const V sum = (t[0] + t[1]) + (t[2] + t[3]);
          if (to_bias) StorePiece<F, L>(to_bias + i, LoadPiece<F, L>(to_bias + i, count) + sum, count);
          const V sum_x = (tx[0] + tx[1]) + (tx[2] + tx[3]);
          if (to_gain) StorePiece<F, L>(to_gain + i, LoadPiece<F, L>(to_gain + i, count) + sum_x, count);
        };
        if (o + 4 * group <= o1) {
          ForPieces<L>(0, width, [&](int64_t i, auto count) { piece(i, count, 4); });
          o += 4 * group;
        } else {
          const int64_t rows = std::min(group, o1 - o);
          ForPieces<L>(0, rows * C, [&](int64_t i, auto count) { piece(i, count, 1); });
          o += rows;
        }
      }
    });
  });
  if (group > 1)
    for (int64_t c = 0; c < C; ++c) {
      float b = 0.f, g = 0.f;
      for (int64_t i = c; i < width; i += C) b += bias_sums[i], g += gain_sums[i];
      if (dbias) dbias[c] = b;
      if (dgain) dgain[c] = g;
    }
}

template <int L>
inline float LaneSum(Float<L> x) {
  for (int half = L / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

template <int L>
BLOCKSPARSE_LOOPS void Channel(const ChannelProblem& p, int64_t o0, int64_t o1, int64_t c0, int64_t c1, int64_t i0,
                               int64_t i1, float* dbias, float* dgain) {
  if (p.inner == 1) return ChannelRows<L>(p, o0, o1, dbias, dgain);
  using V = Float<L>;
  ForDType(p.dtype, [&](auto dtype) {
    ForActivation(p.act, [&](auto act) {
      constexpr DType D = decltype(dtype)::value;
      const ChannelGrad<D, L> grad = {In<D>(p.dy), In<D>(p.x), In<D>(p.y), Out<D>(p.dx), p.gain != nullptr};
      for (int64_t c = c0; c < c1; ++c) {
        const V g = Math<L>::Set(p.gain ? p.gain[c] : 1.f), b = Math<L>::Set(p.bias ? p.bias[c] : 0.f);
        V sum = {}, sum_x = {};
        for (int64_t o = o0; o < o1; ++o) {
          const int64_t first = (o * p.channels + c) * p.inner;
          ForPieces<L>(first + i0, first + i1, [&](int64_t i, auto count) {
            if (p.gradient) {
              V t, tx;
              grad(act, i, count, g, b, &t, &tx);
              sum += t, sum_x += tx;
            } else {
              const V v = g * LoadPiece<D, L>(In<D>(p.x) + i, count) + b;
              StorePiece<D, L>(Out<D>(p.y) + i, EwFormulas<Math<L>>::Act(decltype(act)::value, v), count);
            }
          });
        }
        if (dbias) dbias[c] = LaneSum<L>(sum);
        if (dgain) dgain[c] = LaneSum<L>(sum_x);
      }
    });
  });
}

// ------------------------------------------------------------------------------------------------------ reduce max

template <int L>
inline bool Any(typename Vec<L>::Int mask) {
  const auto words = reinterpret_cast<typename Vec<L>::Wide>(mask);
  uint64_t any = 0;
  for (int i = 0; i < L / 2; ++i) any |= words[i];
  return any != 0;
}

template <int L>
BLOCKSPARSE_LOOPS void ReduceMax(const ReduceMaxProblem& p, int64_t begin, int64_t end, int64_t i0, int64_t i1) {
  using V = Float<L>;
  using Int = typename Vec<L>::Int;
  constexpr float kLowest = -3.40282347e38f;
  ForDType(p.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    for (int64_t o = begin; o < end; ++o) {
      const Element<D>* x = In<D>(p.x) + o * p.dim * p.inner;
      Element<D>* y = Out<D>(p.y) + o * p.inner;
      if (p.inner > 1) {
        // Row by row, so that memory is read in long runs.
        constexpr int kWide = 256;
        constexpr DType F = DType::kFloat32;
        float best[kWide + L];
        int32_t place[kWide + L];
        for (int64_t first = i0; first < i1; first += kWide) {
          const int64_t last = std::min(i1, first + kWide);
          std::fill(best, best + kWide + L, kLowest);
          std::fill(place, place + kWide + L, 0);
          auto compare = [&](int64_t d, auto rows) {
            ForPieces<L>(first, last, [&](int64_t i, auto count) {
              V most = LoadVec<F, L>(best + i - first);
              Int* at = reinterpret_cast<Int*>(place + i - first);
              Int where = *at;
#pragma GCC unroll 4
              for (int r = 0; r < decltype(rows)::value; ++r) {
                const V v = LoadPiece<D, L>(x + (d + r) * p.inner + i, count);
                where = v > most ? Int{} + int32_t(d + r) : where;
                most = v > most ? v : most;
              }
              StoreVec<F, L>(best + i - first, most);
              *at = where;
            });
          };
          int64_t d = 0;
          for (; d + 4 <= p.dim; d += 4) compare(d, std::integral_constant<int, 4>());
          for (; d < p.dim; ++d) compare(d, std::integral_constant<int, 1>());
          ForPieces<L>(first, last,
                       [&](int64_t i, auto count) { StorePiece<D, L>(y + i, LoadVec<F, L>(best + i - first), count); });
          if (p.argmax) std::copy(place, place + (last - first), p.argmax + o * p.inner + first);
        }
        continue;
      }
      // First how large the largest is, then where it is for the first time: if anyone asks, or to tell the two zeros apart.
      constexpr int kSide = 4;  // vectors that do not wait for each other
      V best[kSide];
      for (V& v : best) v = Math<L>::Set(kLowest);
      auto take = [&](V* so_far, int64_t from) {
        const V v = LoadVec<D, L>(x + from);
        *so_far = v > *so_far ? v : *so_far;
      };
      int64_t d = 0, first = 0;
      for (; d + kSide * L <= p.dim; d += kSide * L)
#pragma GCC unroll 4
        for (int j = 0; j < kSide; ++j) take(&best[j], d + j * L);
      for (; d + L <= p.dim; d += L) take(&best[0], d);
      if (d < p.dim && p.dim >= L) take(&best[1], p.dim - L), d = p.dim;
      V top = best[0];
      for (int j = 1; j < kSide; ++j) top = best[j] > top ? best[j] : top;
      for (int half = L / 2; half > 0; half /= 2)
        for (int k = 0; k < half; ++k) top[k] = top[k + half] > top[k] ? top[k + half] : top[k];
      float most = top[0];
      for (; d < p.dim; ++d) {
        const float v = LoadOne<D>(x + d);
        most = v > most ? v : most;
      }
      if (most > kLowest && (p.argmax || most == 0.f)) {
        for (; first + kSide * L <= p.dim; first += kSide * L) {
          Int found = {};
#pragma GCC unroll 4
          for (int j = 0; j < kSide; ++j) found |= LoadVec<D, L>(x + first + j * L) == most;
          if (Any<L>(found)) break;
        }
        while (LoadOne<D>(x + first) != most) ++first;
        most = LoadOne<D>(x + first);
      }
      StoreOne<D>(y, most);
      if (p.argmax) p.argmax[o] = first;
    }
  });
}

}  // namespace
}  // namespace cpu
}  // namespace blocksparse
