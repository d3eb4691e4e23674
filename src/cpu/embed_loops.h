// Loops over vectors of L floats. Unnamed namespace: see cpu/vector.h.
#pragma once

#include <algorithm>

#include "cpu/embed_kernels.h"
#include "cpu/ewops_loops.h"

namespace blocksparse {
namespace cpu {
namespace {

constexpr int64_t kRun = 128;   // terms added up by themselves, so that rounding errors do not grow with all of them
constexpr int64_t kAhead = 16;  // rows fetched before they are added: no hardware foresees where they lie

// The sums of kVectors vectors of `count` elements each.
template <DType D, int L, int kVectors, class Count>
inline void SumColumns(const Element<D>* x, int64_t width, const uint32_t* places, int64_t n, Element<D>* y,
                       Count count) {
  constexpr int kLine = std::max(1, 64 / int(L * sizeof(Element<D>)));  // vectors in a cache line
  Float<L> total[kVectors] = {};
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t end = std::min(n, begin + kRun);
    Float<L> sum[kVectors] = {};
    for (int64_t i = begin; i < end; ++i) {
      const Element<D>* ahead = x + int64_t(places[std::min(i + kAhead, n - 1)]) * width;
      for (int v = 0; v < kVectors; v += kLine) __builtin_prefetch(ahead + v * L);
      const Element<D>* row = x + int64_t(places[i]) * width;
      for (int v = 0; v < kVectors; ++v) sum[v] += LoadPiece<D, L>(row + v * L, count);
    }
    for (int v = 0; v < kVectors; ++v) total[v] += sum[v];
  }
  for (int v = 0; v < kVectors; ++v) StorePiece<D, L>(y + v * L, total[v], count);
}

template <int L>
void SumRows(DType dtype, const void* x, int64_t width, const uint32_t* places, int64_t n, int64_t k0, int64_t k1,
             void* y) {
  ForDType(dtype, [&](auto d) {
    constexpr DType D = decltype(d)::value;
    constexpr int kVectors = 4;
    int64_t k = k0;
    for (; k + kVectors * L <= k1; k += kVectors * L)
      SumColumns<D, L, kVectors>(In<D>(x) + k, width, places, n, Out<D>(y) + k, std::integral_constant<int, L>());
    ForPieces<L>(k, k1, [&](int64_t i, auto count) {
      SumColumns<D, L, 1>(In<D>(x) + i, width, places, n, Out<D>(y) + i, count);
    });
  });
}

}  // namespace
}  // namespace cpu
}  // namespace blocksparse
