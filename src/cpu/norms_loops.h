// Loops over vectors of L floats. Unnamed namespace: see cpu/vector.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/norms_kernels.h"
#include "cpu/pieces.h"

namespace blocksparse {
namespace cpu {
namespace {

constexpr int kSums = 4;           // sums side by side, so that additions do not wait for each other
constexpr int kColumnVectors = 4;  // of a tile of columns
constexpr int64_t kChunk = 4096;   // elements of a channel that stay in the cache between two passes
constexpr int64_t kRun = 64;       // of features that are summed one after another, so that rounding does not add up

template <int L>
inline Float<L> Keep(Float<L> x, std::integral_constant<int, L>) {
  return x;
}
// The first `count` lanes, and zeros after them.
template <int L>
inline Float<L> Keep(Float<L> x, int count) {
  for (int i = count; i < L; ++i) x[i] = 0.f;
  return x;
}

template <int L>
inline float Total(Float<L> x) {
  float sum = 0.f;
  for (int half = L / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  sum = x[0];
  return sum;
}

// Sums over [0, n) of the values that body(i, count) adds to its argument: Count vectors.
template <int L, int Count, class Body>
inline void Sum(int64_t n, float (&total)[Count], const Body& body) {
  Float<L> sums[kSums][Count] = {};
  int64_t i = 0;
  constexpr std::integral_constant<int, L> whole;
  for (; i + kSums * L <= n; i += kSums * L) {
#pragma GCC unroll 4
    for (int k = 0; k < kSums; ++k) body(i + k * L, whole, sums[k]);
  }
  for (; i + L <= n; i += L) body(i, whole, sums[0]);
  if (i < n) body(i, int(n - i), sums[1]);
  for (int k = 0; k < Count; ++k) total[k] = Total<L>((sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k]));
}

// Mean and squared distances of n elements, in two passes: the second is over distances from the first's mean.
template <DType D, int L>
inline Moments MomentsOf(const Element<D>* x, int64_t n) {
  float sum[1], sums[2];
  Sum<L>(n, sum, [&](int64_t i, auto count, Float<L>* s) { s[0] += LoadPiece<D, L>(x + i, count); });
  const float shift = sum[0] / float(n);
  Sum<L>(n, sums, [&](int64_t i, auto count, Float<L>* s) {
    const Float<L> d = Keep<L>(LoadPiece<D, L>(x + i, count) - shift, count);
    s[0] += d;
    s[1] += d * d;
  });
  const double off = double(sums[0]) / double(n);
  return {double(n), shift + off, std::max(0., double(sums[1]) - double(sums[0]) * off)};
}

struct Statistics {
  float mean, residual, rstd;

  Statistics(float mean, float residual, float rstd) : mean(mean), residual(residual), rstd(rstd) {}
  Statistics(const Moments& m, float epsilon)
      : mean(float(m.mean)),
        residual(std::isfinite(m.mean) ? float(m.mean - mean) : 0.f),
        rstd(float(1 / std::sqrt(m.squares / m.count + double(epsilon)))) {}

  template <class V>
  V Normalize(V x) const {
    return ((x - mean) - residual) * rstd;
  }
};

// dy, or 0 where a relu's input was not positive.
template <bool kRelu, int L>
inline Float<L> BeforeRelu(Float<L> dy, Float<L> pre) {
  if constexpr (kRelu)
    return pre > Float<L>{} ? dy : Float<L>{};
  else
    return dy;
}

template <class Body>
inline void ForBool(bool value, const Body& body) {
  if (value)
    body(std::true_type());
  else
    body(std::false_type());
}

// ------------------------------------------------------------------------------------------------------ layer norm

template <DType D, int L, bool kRelu>
inline void RowForward(const LayerNormProblem& p, const Element<D>* x, const float* gain, const float* bias,
                       Element<D>* y, const Statistics& stats) {
  ForPieces<L>(0, p.features, [&](int64_t i, auto count) {
    Float<L> v = stats.Normalize(LoadPiece<D, L>(x + i, count));
    v = v * LoadPiece<DType::kFloat32, L>(gain + i, count) + LoadPiece<DType::kFloat32, L>(bias + i, count);
    if constexpr (kRelu) v = v < Float<L>{} ? Float<L>{} : v;  // NaN stays
    StorePiece<D, L>(y + i, v, count);
  });
}

template <DType D, int L, bool kRelu>
inline void RowBackward(const LayerNormProblem& p, const Element<D>* dy, const Element<D>* x, const float* gain,
                        const float* bias, Element<D>* dx, const Statistics& stats, float* dgain, float* dbias) {
  constexpr DType F32 = DType::kFloat32;
  float sums[2];
  Sum<L>(p.features, sums, [&](int64_t i, auto count, Float<L>* s) {
    const Float<L> v = stats.Normalize(LoadPiece<D, L>(x + i, count)), g = LoadPiece<F32, L>(gain + i, count);
    Float<L> t = LoadPiece<D, L>(dy + i, count);
    if constexpr (kRelu) t = BeforeRelu<kRelu, L>(t, v * g + LoadPiece<F32, L>(bias + i, count));
    StorePiece<F32, L>(dbias + i, LoadPiece<F32, L>(dbias + i, count) + t, count);
    StorePiece<F32, L>(dgain + i, LoadPiece<F32, L>(dgain + i, count) + t * v, count);
    const Float<L> d = t * g;  // beyond `count` dy and gain are 0, and x^ is finite unless the statistics are not
    s[0] += d;
    s[1] += Keep<L>(d * v, count);
  });
  const float mean = sums[0] / float(p.features), slope = sums[1] / float(p.features);
  ForPieces<L>(0, p.features, [&](int64_t i, auto count) {
    const Float<L> v = stats.Normalize(LoadPiece<D, L>(x + i, count)), g = LoadPiece<F32, L>(gain + i, count);
    Float<L> t = LoadPiece<D, L>(dy + i, count);
    if constexpr (kRelu) t = BeforeRelu<kRelu, L>(t, v * g + LoadPiece<F32, L>(bias + i, count));
    StorePiece<D, L>(dx + i, ((t * g - mean) - v * slope) * stats.rstd, count);
  });
}

template <int L>
void LayerRows(const LayerNormProblem& p, int64_t s, int64_t o0, int64_t o1, float* dgain, float* dbias) {
  const int64_t F = p.features;
  const float *gain = p.gain + s * F, *bias = p.bias + s * F;
  if (p.gradient) {
    std::fill_n(dgain + s * F, F, 0.f);
    std::fill_n(dbias + s * F, F, 0.f);
  }
  if (F == 0) return;
  ForDType(p.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    ForBool(p.relu, [&](auto relu) {
      constexpr bool kRelu = decltype(relu)::value;
      for (int64_t o = o0; o < o1; ++o) {
        const int64_t row = s * p.outer + o, first = o * p.channels() + s * F;
        const Element<D>* x = In<D>(p.x) + first;
        if (p.gradient) {
          const Statistics stats(p.mean[row], p.residual[row], p.rstd[row]);
          RowBackward<D, L, kRelu>(p, In<D>(p.dy) + first, x, gain, bias, Out<D>(p.dx) + first, stats, dgain + s * F,
                                   dbias + s * F);
        } else {
          const Statistics stats(MomentsOf<D, L>(x, F), p.epsilon);
          p.mean[row] = stats.mean, p.residual[row] = stats.residual, p.rstd[row] = stats.rstd;
          RowForward<D, L, kRelu>(p, x, gain, bias, Out<D>(p.y) + first, stats);
        }
      }
    });
  });
}

// A tile of `vectors` vectors of columns, the last with `count` lanes, in scratch [features][vectors * L] so that rows a
// power of 2 apart do not meet in the same few places of the cache.
template <DType D, int L, int V, class Count>
inline void ColumnsForward(const LayerNormProblem& p, const Element<D>* x, const float* gain, const float* bias,
                           Element<D>* y, int64_t row, Count count, float* scratch) {
  constexpr DType F32 = DType::kFloat32;
  const int64_t F = p.features;
  Float<L> mean[V] = {}, residual[V] = {}, rstd[V] = {};
  for (int64_t f = 0; f < F; ++f) {
#pragma GCC unroll 4
    for (int k = 0; k < V; ++k) {
      const Float<L> v = LoadPiece<D, L>(x + f * p.inner + k * L, count);
      mean[k] += v;  // a shift: any number near the mean will do
      StoreVec<F32, L>(scratch + (f * V + k) * L, v);
    }
  }
  const float inverse = 1.f / float(F);
#pragma GCC unroll 4
  for (int k = 0; k < V; ++k) mean[k] *= inverse;
  for (int64_t f0 = 0; f0 < F; f0 += kRun) {
    Float<L> off[V] = {}, square[V] = {};
    for (int64_t f = f0; f < std::min(F, f0 + kRun); ++f) {
#pragma GCC unroll 4
      for (int k = 0; k < V; ++k) {
        const Float<L> d = LoadVec<F32, L>(scratch + (f * V + k) * L) - mean[k];
        off[k] += d;
        square[k] += d * d;
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < V; ++k) residual[k] += off[k], rstd[k] += square[k];
  }
  for (int k = 0; k < V; ++k) {
    for (int i = 0; i < L; ++i) {
      const double off = double(residual[k][i]) / double(F);
      const Statistics stats({double(F), mean[k][i] + off, std::max(0., rstd[k][i] - residual[k][i] * off)}, p.epsilon);
      mean[k][i] = stats.mean, residual[k][i] = stats.residual, rstd[k][i] = stats.rstd;
    }
    StorePiece<F32, L>(p.mean + row + k * L, mean[k], count);
    StorePiece<F32, L>(p.residual + row + k * L, residual[k], count);
    StorePiece<F32, L>(p.rstd + row + k * L, rstd[k], count);
  }
  for (int64_t f = 0; f < F; ++f) {
#pragma GCC unroll 4
    for (int k = 0; k < V; ++k) {
      Float<L> v = LoadVec<F32, L>(scratch + (f * V + k) * L);
      v = ((v - mean[k]) - residual[k]) * rstd[k] * gain[f] + bias[f];
      if (p.relu) v = v < Float<L>{} ? Float<L>{} : v;
      StorePiece<D, L>(y + f * p.inner + k * L, v, count);
    }
  }
}

template <DType D, int L, int V, class Count>
inline void ColumnsBackward(const LayerNormProblem& p, const Element<D>* dy, const Element<D>* x, const float* gain,
                            const float* bias, Element<D>* dx, int64_t row, Count count, float* dgain, float* dbias,
                            float* scratch) {
  constexpr DType F32 = DType::kFloat32;
  const int64_t F = p.features;
  Float<L> mean[V], residual[V], rstd[V], sum[V] = {}, slope[V] = {};
  for (int k = 0; k < V; ++k) {
    mean[k] = LoadPiece<F32, L>(p.mean + row + k * L, count);
    residual[k] = LoadPiece<F32, L>(p.residual + row + k * L, count);
    rstd[k] = LoadPiece<F32, L>(p.rstd + row + k * L, count);
  }
  for (int64_t f0 = 0; f0 < F; f0 += L) {
    Float<L> gains[L] = {}, biases[L] = {}, run[V] = {}, slope_run[V] = {};
    const int features = int(std::min<int64_t>(L, F - f0));
    for (int j = 0; j < features; ++j) {
      const int64_t f = f0 + j;
#pragma GCC unroll 4
      for (int k = 0; k < V; ++k) {
        const Float<L> v = ((LoadPiece<D, L>(x + f * p.inner + k * L, count) - mean[k]) - residual[k]) * rstd[k];
        Float<L> t = LoadPiece<D, L>(dy + f * p.inner + k * L, count);
        if (p.relu) t = BeforeRelu<true, L>(t, v * gain[f] + bias[f]);
        const Float<L> d = t * gain[f];
        gains[j] += t * v;
        biases[j] += t;
        run[k] += d;
        slope_run[k] += d * v;
        StoreVec<F32, L>(scratch + ((2 * f) * V + k) * L, d);
        StoreVec<F32, L>(scratch + ((2 * f + 1) * V + k) * L, v);
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < V; ++k) sum[k] += run[k], slope[k] += slope_run[k];
    const Float<L> gain_sums = RowSums<L>(gains), bias_sums = RowSums<L>(biases);
    for (int j = 0; j < features; ++j) {
      dgain[f0 + j] += gain_sums[j];
      dbias[f0 + j] += bias_sums[j];
    }
  }
  const float inverse = 1.f / float(F);
#pragma GCC unroll 4
  for (int k = 0; k < V; ++k) sum[k] *= inverse, slope[k] *= inverse;
  for (int64_t f = 0; f < F; ++f) {
#pragma GCC unroll 4
    for (int k = 0; k < V; ++k) {
      const Float<L> d = LoadVec<F32, L>(scratch + ((2 * f) * V + k) * L);
      const Float<L> v = LoadVec<F32, L>(scratch + ((2 * f + 1) * V + k) * L);
      StorePiece<D, L>(dx + f * p.inner + k * L, ((d - sum[k]) - v * slope[k]) * rstd[k], count);
    }
  }
}

template <int L>
void LayerColumns(const LayerNormProblem& p, int64_t s, int64_t o, int64_t i0, int64_t i1, float* dgain, float* dbias,
                  float* scratch) {
  const int64_t F = p.features;
  if (F == 0) return;
  ForDType(p.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    const auto tile = [&](auto vectors, int64_t i, auto count) {
      constexpr int V = decltype(vectors)::value;
      const int64_t first = (o * p.channels() + s * F) * p.inner + i, row = (s * p.outer + o) * p.inner + i;
      const float *gain = p.gain + s * F, *bias = p.bias + s * F;
      if (p.gradient)
        ColumnsBackward<D, L, V>(p, In<D>(p.dy) + first, In<D>(p.x) + first, gain, bias, Out<D>(p.dx) + first, row,
                                 count, dgain + s * F, dbias + s * F, scratch);
      else
        ColumnsForward<D, L, V>(p, In<D>(p.x) + first, gain, bias, Out<D>(p.y) + first, row, count, scratch);
    };
    constexpr std::integral_constant<int, 1> one;
    constexpr std::integral_constant<int, L> whole;
    if (i1 - i0 == kColumnVectors * L) return tile(std::integral_constant<int, kColumnVectors>(), i0, whole);
    int64_t i = i0;
    for (; i + L <= i1; i += L) tile(one, i, whole);
    if (i < i1) tile(one, i, int(i1 - i));
  });
}

// ------------------------------------------------------------------------------------------------------ batch norm

// body(first, n): chunks of the channel's elements, at most kChunk each.
template <class Body>
inline void ForChunks(const BatchNormProblem& p, int64_t c, int64_t o0, int64_t o1, const Body& body) {
  for (int64_t o = o0; o < o1; ++o)
    for (int64_t i = 0; i < p.inner; i += kChunk)
      body((o * p.channels + c) * p.inner + i, std::min(kChunk, p.inner - i));
}

inline Statistics ChannelStatistics(const BatchNormProblem& p, int64_t c) {
  return {p.mean[c], p.residual ? p.residual[c] : 0.f, float(1 / std::sqrt(double(p.variance[c]) + double(p.epsilon)))};
}

template <int L>
Moments BatchMoments(const BatchNormProblem& p, int64_t c, int64_t o0, int64_t o1) {
  Moments moments;
  ForDType(p.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    ForChunks(p, c, o0, o1,
              [&](int64_t first, int64_t n) { moments = Merge(moments, MomentsOf<D, L>(In<D>(p.x) + first, n)); });
  });
  return moments;
}

template <int L>
ChannelSums BatchSums(const BatchNormProblem& p, int64_t c, int64_t o0, int64_t o1) {
  ChannelSums sums;
  const Statistics stats = ChannelStatistics(p, c);
  ForDType(p.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    ForChunks(p, c, o0, o1, [&](int64_t first, int64_t n) {
      float total[2];
      Sum<L>(n, total, [&](int64_t i, auto count, Float<L>* s) {
        const Float<L> t = LoadPiece<D, L>(In<D>(p.dy) + first + i, count);
        s[0] += t;
        s[1] += Keep<L>(t * stats.Normalize(LoadPiece<D, L>(In<D>(p.x) + first + i, count)), count);
      });
      sums.dbias += total[0];
      sums.dgain += total[1];
    });
  });
  return sums;
}

template <int L>
void BatchApply(const BatchNormProblem& p, int64_t c, int64_t o0, int64_t o1) {
  const Statistics stats = ChannelStatistics(p, c);
  const double n = double(p.outer) * double(p.inner);
  const float gain = p.gain[c];
  ForDType(p.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    ForChunks(p, c, o0, o1, [&](int64_t first, int64_t count) {
      const Element<D>* x = In<D>(p.x) + first;
      if (!p.gradient) {
        const float bias = p.bias[c];
        ForPieces<L>(0, count, [&](int64_t i, auto piece) {
          const Float<L> v = stats.Normalize(LoadPiece<D, L>(x + i, piece));
          StorePiece<D, L>(Out<D>(p.y) + first + i, v * gain + bias, piece);
        });
      } else {
        const float mean = p.inference ? 0.f : float(p.dbias[c] / n), slope = p.inference ? 0.f : float(p.dgain[c] / n);
        const float factor = stats.rstd * gain;
        ForPieces<L>(0, count, [&](int64_t i, auto piece) {
          const Float<L> v = stats.Normalize(LoadPiece<D, L>(x + i, piece));
          const Float<L> t = LoadPiece<D, L>(In<D>(p.dy) + first + i, piece);
          StorePiece<D, L>(Out<D>(p.dx) + first + i, p.inference ? t * factor : ((t - mean) - v * slope) * factor,
                           piece);
        });
      }
    });
  });
}

template <int L>
NormsKernels MakeNormsKernels(const char* name) {
  return {name, kColumnVectors * L, LayerRows<L>, LayerColumns<L>, BatchMoments<L>, BatchSums<L>, BatchApply<L>};
}

}  // namespace
}  // namespace cpu
}  // namespace blocksparse
