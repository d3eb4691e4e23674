// Forward and input gradient: see matmul_kernels.h. Included by each instruction set's file.
#pragma once

#include "cpu/matmul_kernels.h"
#include "cpu/vector.h"

namespace blocksparse {
namespace cpu {
namespace {

// Outputs x vectors of sums that stay in registers: 12 of 16 registers, 24 of 32.
template <int L>
constexpr int TileOutputs(int vectors) {
  return L == 16 || vectors == 1 ? 8 : 4;
}

struct Tile {
  const float* panel;
  const float* weights;  // of the tile's first output
  const int32_t *in, *ids;
  int count;
  const float* ahead;  // weights to prefetch, with the block ids in `next`
  const int32_t* next;
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
    const float* w = t.weights + t.ids[e] * int64_t(B * B);
    const float* ahead = t.ahead + t.next[e] * int64_t(B * B);
    // Not unrolled: with two steps in one body GCC moves the sums between registers.
#pragma GCC unroll 1
    for (int c = 0; c < B; ++c) {
      __builtin_prefetch(ahead + c * M);
      Float<L> xs[V];
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) xs[v] = LoadVec<DType::kFloat32, L>(x + c * kWidth + v * L);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const float scalar = kTransposed ? w[m * B + c] : w[c * B + m];
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

// The rows or columns [o0, o1) of a block of weights to float32, times its gate.
template <int L, DType D>
void ConvertBlock(const Element<D>* w, int bsize, int o0, int o1, bool transposed, float gate, float* out) {
  const int r0 = transposed ? o0 : 0, r1 = transposed ? o1 : bsize;
  const int c0 = transposed ? 0 : o0, c1 = transposed ? bsize : o1;
  for (int r = r0; r < r1; ++r) {
    int c = c0;
    for (; c + L <= c1; c += L)
      StoreVec<DType::kFloat32, L>(out + r * bsize + c, LoadVec<D, L>(w + r * bsize + c) * gate);
    for (; c < c1; ++c) out[r * bsize + c] = LoadOne<D>(w + r * bsize + c) * gate;
  }
}

template <int L, int B>
void RunColumnOf(const Column& column) {
  constexpr int kMost = kReduction / 8;
  static const int32_t kInOrder[kMost] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19};
  constexpr int b = B, area = B * B, most = kReduction / B > 1 ? kReduction / B : 1;
  const int vectors = column.width / L, outputs = TileOutputs<L>(vectors);
  const bool direct = column.dtype == DType::kFloat32 && !column.gate;
  int32_t in[kMost];
  Tile tile;
  tile.panel = column.panel;
  tile.add = false;
  for (int e = 0; e < column.count || !tile.add;) {
    const float* weights;
    if (direct) {
      tile.in = column.in + e;
      tile.ids = column.ids + e;
      tile.count = column.count - e < most ? column.count - e : most;
      tile.next = tile.ids + tile.count;
      weights = static_cast<const float*>(column.weights);
      e += tile.count;
    } else {
      tile.count = 0;
      for (; e < column.count && tile.count < most; ++e) {
        const int64_t id = column.ids[e];
        const float gate = column.gate ? column.gate[id] : 1.f;
        if (gate == 0.f) continue;
        ForDType(column.dtype, [&](auto dtype) {
          constexpr DType D = decltype(dtype)::value;
          ConvertBlock<L, D>(static_cast<const Element<D>*>(column.weights) + id * area, b, column.o0, column.o1,
                             column.transposed, gate, column.scratch + tile.count * area);
        });
        in[tile.count++] = column.in[e];
      }
      tile.in = in;
      tile.ids = tile.next = kInOrder;
      weights = column.scratch;
    }
    for (int o = column.o0; o < column.o1; o += outputs) {
      tile.weights = weights + (column.transposed ? o * b : o);
      tile.ahead = weights + o * b;
      tile.out = column.out + int64_t(o - column.o0) * column.width;
      if (column.transposed)
        RunTile<L, B, true>(tile, vectors);
      else
        RunTile<L, B, false>(tile, vectors);
    }
    tile.add = true;
  }
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
    const float* x = column.panel + column.in[e] * b;
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
  for (int v = 0; v < V; ++v) StoreVec<DType::kFloat32, L>(column.out + (o - column.o0) + v * L, sum[0][v] + sum[1][v]);
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
    const float* x = column.panel + column.in[e] * b;
    const Element<D>* w = static_cast<const Element<D>*>(column.weights) + id * b * b + o * b;
    for (int64_t c = 0; c < b; c += L) {
      const Float<L> xs = LoadVec<DType::kFloat32, L>(x + c) * gate;
#pragma GCC unroll 16
      for (int m = 0; m < L; ++m) sum[m] += LoadVec<D, L>(w + m * b + c) * xs;
    }
  }
  StoreVec<DType::kFloat32, L>(column.out + (o - column.o0), RowSums<L>(sum));
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
