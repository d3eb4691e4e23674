// Forward and input gradient: see matmul_kernels.h. Included by each instruction set's file.
#pragma once

#include "cpu/matmul_kernels.h"
#include "cpu/vector.h"

namespace blocksparse {
namespace cpu {
namespace {

// Outputs x vectors of sums that stay in registers: 12 of 16 registers, 24 of 32. Panels of two and three vectors meet in
// one column and share the packed weights.
template <int L>
constexpr int TileOutputs(int vectors) {
  return L == 16 || vectors == 1 ? 8 : 4;
}

// Up to this block size the pieces of a panel are too short for the hardware to see a stream in them.
constexpr int kScattered = 32;

struct Tile {
  const float* panel;
  const int32_t* in;      // [count] input block of each entry
  const float* weights;   // blocks, from the tile's first output on
  const int32_t* blocks;  // [count] block of each entry
  int count;
  const char* ahead;  // weights to prefetch: of block next[e], `ahead_step` bytes a feature
  const int32_t* next;
  int64_t ahead_block, ahead_step;
  float* out;
  bool add;
};

// out [M][V * L] (+)= the M outputs' weights times the panel. Every sum runs over blocks and features in order, so that
// the bits depend neither on M nor on V nor on how often the sums were put aside.
template <int L, int M, int V, int B, bool kTransposed>
void RunTile(const Tile& t) {
  constexpr int kWidth = V * L;
  Float<L> sum[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v)
      sum[m][v] = t.add ? LoadVec<DType::kFloat32, L>(t.out + m * kWidth + v * L) : Float<L>{};
  for (int e = 0; e < t.count; ++e) {
    const float* x = t.panel + t.in[e] * int64_t(B * kWidth);
    const float* w = t.weights + t.blocks[e] * int64_t(B * B);
    const char* ahead = t.ahead + t.next[e] * t.ahead_block;
    const int64_t ahead_step = t.ahead_step;
    const float* next_x = t.panel + t.in[e + 1] * int64_t(B * kWidth);  // anywhere behind the last: never read
    // Not unrolled: with two steps in one body GCC moves the sums between registers.
#pragma GCC unroll 1
    for (int c = 0; c < B; ++c) {
      __builtin_prefetch(ahead, 0, 2);
      if constexpr (B <= kScattered) {
        __builtin_prefetch(next_x + c * kWidth);
        if constexpr (kWidth > 16) __builtin_prefetch(next_x + c * kWidth + 16);
        if constexpr (kWidth > 32) __builtin_prefetch(next_x + c * kWidth + 32);
      }
      ahead += ahead_step;
      Float<L> xs[V];
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) xs[v] = LoadVec<DType::kFloat32, L>(x + c * kWidth + v * L);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const float scalar = w[kTransposed ? m * B + c : c * B + m];
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) sum[m][v] += xs[v] * scalar;
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) StoreVec<DType::kFloat32, L>(t.out + m * kWidth + v * L, sum[m][v]);
}

template <int L, int B, bool kTransposed>
void RunTile(const Tile& t, int vectors) {
  if (vectors == 3) return RunTile<L, TileOutputs<L>(3), 3, B, kTransposed>(t);
  if (vectors == 2) return RunTile<L, TileOutputs<L>(2), 2, B, kTransposed>(t);
  return RunTile<L, TileOutputs<L>(1), 1, B, kTransposed>(t);
}

// Rows (transposed) or columns [o0, o1) of a block to float32, times its gate; the rest of `out` is left as it is.
template <int L, int B, bool kTransposed, DType D>
void ConvertWeights(const Element<D>* w, int o0, int o1, float gate, float* out) {
  constexpr int kLanes = L < 8 ? L : 8;
  const int r0 = kTransposed ? o0 : 0, r1 = kTransposed ? o1 : B, c0 = kTransposed ? 0 : o0, c1 = kTransposed ? B : o1;
  for (int r = r0; r < r1; ++r)
    for (int c = c0; c < c1; c += kLanes)
      StoreVec<DType::kFloat32, kLanes>(out + r * B + c, LoadVec<D, kLanes>(w + r * B + c) * gate);
}

template <int L, int M, int B, bool kTransposed>
void RunColumnOf(const Column& column) {
  constexpr int kMost = kReduction / B > 1 ? kReduction / B : 1, kArea = B * B;
  static const int32_t kInOrder[kReduction / 8] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,
                                                   10, 11, 12, 13, 14, 15, 16, 17, 18, 19};
  const int64_t size = SizeOf(column.dtype);
  const bool direct = column.dtype == DType::kFloat32 && !column.gate;
  const float* weights = direct ? static_cast<const float*>(column.weights) : column.scratch;
  int32_t in[kMost + 1] = {};
  Tile tile;
  tile.add = false;
  for (int e = 0; e < column.count || !tile.add;) {
    if (direct) {
      tile.in = column.in + e;
      tile.blocks = column.ids + e;
      tile.count = column.count - e < kMost ? column.count - e : kMost;
      e += tile.count;
    } else {
      tile.in = in;
      tile.blocks = kInOrder;
      tile.count = 0;
      for (; e < column.count && tile.count < kMost; ++e) {
        const int64_t id = column.ids[e];
        const float gate = column.gate ? column.gate[id] : 1.f;
        if (gate == 0.f) continue;
        ForDType(column.dtype, [&](auto dtype) {
          constexpr DType D = decltype(dtype)::value;
          ConvertWeights<L, B, kTransposed, D>(static_cast<const Element<D>*>(column.weights) + id * kArea, column.o0,
                                               column.o1, gate, column.scratch + tile.count * kArea);
        });
        in[tile.count++] = column.in[e];
      }
    }
    // While the first panel is worked on, the weights of the next round come to the second-level cache.
    tile.next = column.ids + e;
    for (int p = 0; p < column.panels; ++p) {
      tile.panel = column.panel[p];
      tile.out = column.out[p];
      tile.ahead_block = p == 0 ? kArea * size : 0;
      tile.ahead_step = p == 0 ? M * size : 0;
      for (int o = column.o0; o < column.o1; o += M, tile.out += M * column.width[p]) {
        tile.weights = weights + (kTransposed ? o * B : o);
        tile.ahead = static_cast<const char*>(column.weights) + o * B * size;
        RunTile<L, B, kTransposed>(tile, column.width[p] / L);
      }
    }
    tile.add = true;
  }
}

template <int L, int B>
void RunColumnOf(const Column& column) {
  constexpr int kOne = TileOutputs<L>(1), kMore = TileOutputs<L>(3);
  const bool one = column.width[0] == L;
  if (column.transposed) return one ? RunColumnOf<L, kOne, B, true>(column) : RunColumnOf<L, kMore, B, true>(column);
  return one ? RunColumnOf<L, kOne, B, false>(column) : RunColumnOf<L, kMore, B, false>(column);
}

template <int L>
void RunColumn(const Column& column) {
  switch (column.bsize) {
    case 8: return RunColumnOf<L, 8>(column);
    case 16: return RunColumnOf<L, 16>(column);
    case 32: return RunColumnOf<L, 32>(column);
    case 64: return RunColumnOf<L, 64>(column);
    case 128: return RunColumnOf<L, 128>(column);
  }
}

// A batch of one, outputs side by side in memory: V vectors of outputs, even and odd features summed apart to keep more
// sums in flight. Reads each weight once.
template <int L, int V, DType D>
void OneAcross(const Column& column, int o) {
  const int64_t b = column.bsize;
  Float<L> sum[2][V] = {};
  for (int e = 0; e < column.count; ++e) {
    const int64_t id = column.ids[e];
    const float gate = column.gate ? column.gate[id] : 1.f;
    if (gate == 0.f) continue;
    const float* x = column.panel[0] + column.in[e] * b;
    const Element<D>* w = static_cast<const Element<D>*>(column.weights) + id * b * b + o;
    for (int64_t c = 0; c < b; c += 2)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const float scalar = x[c + i] * gate;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[i][v] += LoadVec<D, L>(w + (c + i) * b + v * L) * scalar;
      }
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v)
    StoreVec<DType::kFloat32, L>(column.out[0] + (o - column.o0) + v * L, sum[0][v] + sum[1][v]);
}

// A batch of one, reduction side by side in memory: L outputs, lanes over features.
template <int L, DType D>
void OneAlong(const Column& column, int o) {
  const int64_t b = column.bsize;
  Float<L> sum[L] = {};
  for (int e = 0; e < column.count; ++e) {
    const int64_t id = column.ids[e];
    const float gate = column.gate ? column.gate[id] : 1.f;
    if (gate == 0.f) continue;
    const float* x = column.panel[0] + column.in[e] * b;
    const Element<D>* w = static_cast<const Element<D>*>(column.weights) + id * b * b + o * b;
    for (int64_t c = 0; c < b; c += L) {
      const Float<L> xs = LoadVec<DType::kFloat32, L>(x + c) * gate;
#pragma GCC unroll 16
      for (int m = 0; m < L; ++m) sum[m] += LoadVec<D, L>(w + m * b + c) * xs;
    }
  }
  StoreVec<DType::kFloat32, L>(column.out[0] + (o - column.o0), RowSums<L>(sum));
}

template <int L>
void RunColumnOfOne(const Column& column) {
  ForDType(column.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    constexpr int kShort = L < 8 ? L : 8;  // a block of 8 is half a vector of 16
    int o = column.o0;
    if (column.transposed) {
      if (column.bsize >= L)
        for (; o + L <= column.o1; o += L) OneAlong<L, D>(column, o);
      for (; o < column.o1; o += kShort) OneAlong<kShort, D>(column, o);
    } else {
      for (; o + 4 * L <= column.o1; o += 4 * L) OneAcross<L, 4, D>(column, o);
      for (; o + 2 * L <= column.o1; o += 2 * L) OneAcross<L, 2, D>(column, o);
      for (; o + L <= column.o1; o += L) OneAcross<L, 1, D>(column, o);
      for (; o < column.o1; o += kShort) OneAcross<kShort, 1, D>(column, o);
    }
  });
}

template <int L, DType D>
void PackPanelOf(const Activations& a, int64_t n0, int count, int64_t f0, int64_t f1, int width, float* panel) {
  const Element<D>* x = static_cast<const Element<D>*>(a.data);
  panel -= f0 * width;
  if (a.axis == 0) {
    for (int64_t f = f0; f < f1; ++f) {
      const Element<D>* row = x + f * a.n + n0;
      int i = 0;
      for (; i + L <= count; i += L) StoreVec<DType::kFloat32, L>(panel + f * width + i, LoadVec<D, L>(row + i));
      for (; i < count; ++i) panel[f * width + i] = LoadOne<D>(row + i);
      for (; i < width; ++i) panel[f * width + i] = 0.f;
    }
    return;
  }
  for (int r = 0; r < width; r += L) {
    int64_t f = f0;
    for (; f + L <= f1; f += L) {
      Float<L> rows[L];
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i)  // lanes past the batch are computed and dropped: any entry will do
        rows[i] = LoadVec<D, L>(x + (n0 + (r + i < count ? r + i : count - 1)) * a.features + f);
      Transpose<L>(rows);
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) StoreVec<DType::kFloat32, L>(panel + (f + i) * width + r, rows[i]);
    }
    for (; f < f1; ++f)
      for (int i = r; i < r + L; ++i)
        panel[f * width + i] = LoadOne<D>(x + (n0 + (i < count ? i : count - 1)) * a.features + f);
  }
}

template <int L>
void PackPanel(const Activations& a, int64_t n0, int count, int64_t f0, int64_t f1, int width, float* panel) {
  ForDType(a.dtype, [&](auto dtype) { PackPanelOf<L, decltype(dtype)::value>(a, n0, count, f0, f1, width, panel); });
}

template <int L, DType D>
void UnpackPanelOf(const float* sums, int width, const Activations& a, int64_t n0, int count, int64_t f0, int64_t f1) {
  Element<D>* y = static_cast<Element<D>*>(a.data);
  sums -= f0 * width;
  if (a.axis == 0) {
    for (int64_t f = f0; f < f1; ++f) {
      Element<D>* row = y + f * a.n + n0;
      int i = 0;
      for (; i + L <= count; i += L) StoreVec<D, L>(row + i, LoadVec<DType::kFloat32, L>(sums + f * width + i));
      for (; i < count; ++i) StoreOne<D>(row + i, sums[f * width + i]);
    }
    return;
  }
  for (int r = 0; r < count; r += L) {
    int64_t f = f0;
    for (; f + L <= f1; f += L) {
      Float<L> rows[L];
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) rows[i] = LoadVec<DType::kFloat32, L>(sums + (f + i) * width + r);
      Transpose<L>(rows);
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i)
        if (r + i < count) StoreVec<D, L>(y + (n0 + r + i) * a.features + f, rows[i]);
    }
    for (; f < f1; ++f)
      for (int i = r; i < r + L && i < count; ++i) StoreOne<D>(y + (n0 + i) * a.features + f, sums[f * width + i]);
  }
}

template <int L>
void UnpackPanel(const float* sums, int width, const Activations& a, int64_t n0, int count, int64_t f0, int64_t f1) {
  ForDType(a.dtype, [&](auto dtype) { UnpackPanelOf<L, decltype(dtype)::value>(sums, width, a, n0, count, f0, f1); });
}

}  // namespace
}  // namespace cpu
}  // namespace blocksparse
