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

// What a tile brings nearer on its way: of piece list[e] of `size` bytes, `step` bytes at each feature of entry e.
struct Ahead {
  const char* base;
  const int32_t* list;
  int64_t size, step;
  const char* At(int e) const { return base + list[e] * size; }
};

struct Tile {
  const float* panel;
  const int32_t* in;     // [count] input block of each entry
  const float* weights;  // [count * bsize][M]
  int count, bsize;
  Ahead next_panel, next_weights;
  float* out;
  bool add;
};

// The cache lines of some bytes; at most one where the step is 1.
template <int kStep>
inline void Prefetch(const char* from, int64_t bytes) {
  if constexpr (kStep == 1) {
    __builtin_prefetch(from, 0, 2);
  } else {
#pragma GCC unroll 1
    for (const char* const end = from + bytes; from < end; from += 64) __builtin_prefetch(from, 0, 2);
  }
}

// out [M][V * L] (+)= the M outputs' weights times the panel. Every sum runs over blocks and features in order, so that
// the bits depend neither on M nor on V nor on how often the sums were put aside. kStep features are one body of the loop:
// what is done beside the products costs dearly where another thread shares the core.
template <int L, int M, int V, int kStep>
void RunTile(const Tile& t) {
  constexpr int kWidth = V * L;
#pragma GCC unroll 1
  for (int i = 0; i < M * kWidth; i += 16) __builtin_prefetch(t.out + M * kWidth + i, 1, 3);  // the next tile's sums
  Float<L> sum[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v)
      sum[m][v] = t.add ? LoadVec<DType::kFloat32, L>(t.out + m * kWidth + v * L) : Float<L>{};
  const float* w = t.weights;
  const int64_t piece = int64_t(t.bsize) * kWidth;
  const int64_t panel_step = kStep * t.next_panel.step, weights_step = kStep * t.next_weights.step;
  for (int e = 0; e < t.count; ++e) {
    const float *x = t.panel + t.in[e] * piece, *const end = x + piece;
    const char *next_panel = t.next_panel.At(e), *next_weights = t.next_weights.At(e);
#pragma GCC unroll 1
    while (x < end) {
      Prefetch<kStep>(next_panel, panel_step);
      Prefetch<kStep>(next_weights, weights_step);
      next_panel += panel_step;
      next_weights += weights_step;
      // Not unrolled: with two features in one body GCC moves the sums between registers.
      const float* const stop = x + kStep * kWidth;
#pragma GCC unroll 1
      do {
        Float<L> xs[V];
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) xs[v] = LoadVec<DType::kFloat32, L>(x + v * L);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const float scalar = w[m];
#pragma GCC unroll 3
          for (int v = 0; v < V; ++v) sum[m][v] += xs[v] * scalar;
        }
        x += kWidth, w += M;
      } while (kStep > 1 && x < stop);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) StoreVec<DType::kFloat32, L>(t.out + m * kWidth + v * L, sum[m][v]);
}

template <int L, int M, int V>
void RunTile(const Tile& t) {
  // Of blocks of 8 the next panel is wanted at the rate of the features: spread evenly, 5 % faster than in bursts. So with
  // vectors of 16, whose products leave room beside them: 3 to 9 % faster on every block size.
  if (L < 16 && t.bsize > 8) return RunTile<L, M, V, 8>(t);
  return RunTile<L, M, V, 1>(t);
}

template <int L>
void RunTile(const Tile& t, int vectors) {
  if (vectors == 3) return RunTile<L, TileOutputs<L>(3), 3>(t);
  if (vectors == 2) return RunTile<L, TileOutputs<L>(2), 2>(t);
  return RunTile<L, TileOutputs<L>(1), 1>(t);
}

// The weights of two features, next to each other in the tile, or in the two tiles that share a vector of outputs.
template <int M, int L>
inline void StorePair(Float<L> first, Float<L> second, float* tile, int64_t stride) {
  static_assert(M >= L || 2 * M == L, "a vector holds the outputs of one tile or two");
  if constexpr (M < L) Exchange<M, L>(first, second, std::make_integer_sequence<int, L>());
  StoreVec<DType::kFloat32, L>(tile, first);
  StoreVec<DType::kFloat32, L>(tile + (M < L ? stride : M), second);
}

// Outputs [o0, o1) of a block, times its gate, to [outputs / M][features][M]: the M weights that one feature meets lie
// side by side whatever the block size, and a tile reads them as one stream. `stride` floats lie between tiles.
template <int L, int M, DType D>
void PackWeights(const Element<D>* w, int b, int o0, int o1, bool transposed, float gate, int64_t stride, float* out) {
  constexpr int kLanes = L < 8 ? L : 8;
  // Some features at a time: all rows of a large block would fall on few sets of the first-level cache.
  constexpr int kRows = 32;
  for (int c0 = 0; c0 < b; c0 += kRows)
    for (int o = o0; o < o1; o += kLanes) {
      float* tile = out + (o - o0) / M * stride + (o - o0) % M;
      for (int c = c0; c < b && c < c0 + kRows; c += kLanes) {
        float* to = tile + c * M;
        if (!transposed) {
          const Element<D>* from = w + c * b + o;
#pragma GCC unroll 4
          for (int i = 0; i < kLanes; i += 2, from += 2 * b)
            StorePair<M, kLanes>(LoadVec<D, kLanes>(from) * gate, LoadVec<D, kLanes>(from + b) * gate, to + i * M,
                                 stride);
          continue;
        }
        const Element<D>* from = w + o * b + c;
        Float<kLanes> rows[kLanes];
#pragma GCC unroll 8
        for (int i = 0; i < kLanes; ++i, from += b) rows[i] = LoadVec<D, kLanes>(from) * gate;
        Transpose<kLanes>(rows);
#pragma GCC unroll 4
        for (int i = 0; i < kLanes; i += 2) StorePair<M, kLanes>(rows[i], rows[i + 1], to + i * M, stride);
      }
    }
}

template <int L, int M>
void RunColumnOf(const Column& column) {
  const int b = column.bsize, most = kReduction / b > 1 ? kReduction / b : 1;
  const int64_t size = SizeOf(column.dtype), area = int64_t(b) * b, stride = int64_t(most) * b * M;
  int32_t in[kReduction / 8 + 1];
  Tile tile;
  tile.in = in;
  tile.bsize = b;
  tile.add = false;
  for (int e = 0; e < column.count || !tile.add;) {
    for (tile.count = 0; e < column.count && tile.count < most; ++e) {
      const int64_t id = column.ids[e];
      const float gate = column.gate ? column.gate[id] : 1.f;
      if (gate == 0.f) continue;
      ForDType(column.dtype, [&](auto dtype) {
        constexpr DType D = decltype(dtype)::value;
        PackWeights<L, M, D>(static_cast<const Element<D>*>(column.weights) + id * area, b, column.o0, column.o1,
                             column.transposed, gate, stride, column.scratch + int64_t(tile.count) * b * M);
      });
      in[tile.count++] = column.in[e];
    }
    // On the way to the second-level cache: while the first panel is worked on, the weights of the next round; all the
    // while, what this round needs of the next panel, or after the last one the next round of the first.
    for (int p = 0; p < column.panels; ++p) {
      const int next = p + 1 < column.panels ? p + 1 : 0;
      const int64_t next_size = int64_t(b) * column.width[next] * sizeof(float);
      tile.panel = column.panel[p];
      tile.out = column.out[p];
      for (int o = column.o0; o < column.o1; o += M, tile.out += M * column.width[p]) {
        const int64_t done = o - column.o0, all = column.o1 - column.o0;
        tile.weights = column.scratch + done / M * stride;
        tile.next_panel = {reinterpret_cast<const char*>(column.panel[next]) + next_size * done / all,
                           next > 0 ? in : column.in + e, next_size, next_size * M / (all * b)};
        tile.next_weights = {static_cast<const char*>(column.weights) + o * b * size, column.ids + e, area * size,
                             M * size};
        if (p > 0) tile.next_weights.size = tile.next_weights.step = 0;
        RunTile<L>(tile, column.width[p] / L);
      }
    }
    tile.add = true;
  }
}

template <int L>
void RunColumn(const Column& column) {
  constexpr int kOne = TileOutputs<L>(1), kMore = TileOutputs<L>(3);
  if (kOne == kMore || column.width[0] > L) return RunColumnOf<L, kMore>(column);
  return RunColumnOf<L, kOne>(column);
}

// As RunTile over a whole column, with float32 weights read where they lie: for vectors of 16, whose 32 registers hold so
// many sums that a weight is best used right away. Nothing is packed or put aside.
template <int L, int B, int M, int V, bool kTransposed>
void RunTileInPlace(const Column& column, int p, int o) {
  constexpr int kWidth = V * L, kPiece = B * kWidth, kArea = B * B;
  // What comes next is brought to the first-level cache a piece of a block ahead, weights of small blocks some blocks.
  constexpr int kSome = kTransposed || B < 32 ? B : 32, kAhead = B == 8 ? 6 : B == 16 ? 3 : 1;
  constexpr int kStep = kTransposed ? 1 : B;  // between the weights of two features
  Float<L> sum[M][V] = {};
  const float* weights = static_cast<const float*>(column.weights) + (kTransposed ? o * B : o);
  for (int e = 0; e < column.count; ++e) {
    const float *x = column.panel[p] + int64_t(column.in[e]) * kPiece, *w = weights + int64_t(column.ids[e]) * kArea;
    for (int c0 = 0; c0 < B; c0 += kSome, x += kSome * kWidth, w += kSome * kStep) {
      const bool last = c0 + kSome == B;
      const float* next_x = last ? column.panel[p] + int64_t(column.in[e + 1]) * kPiece : x + kSome * kWidth;
      const float* next_w = last ? weights + int64_t(column.ids[e + kAhead]) * kArea : w + kSome * kStep;
#pragma GCC unroll 4
      for (int c = 0; c < kSome; ++c) {
        if (kTransposed || B == M) {  // one piece of memory
          if (c % 2 == 0) __builtin_prefetch(next_w + c * M, 0, 3);
        } else {
          __builtin_prefetch(next_w + c * B, 0, 3);
        }
        Float<L> xs[V];
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) {
          xs[v] = LoadVec<DType::kFloat32, L>(x + c * kWidth + v * L);
          __builtin_prefetch(next_x + c * kWidth + v * L, 0, 3);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const float scalar = kTransposed ? w[m * B + c] : w[c * B + m];
#pragma GCC unroll 3
          for (int v = 0; v < V; ++v) sum[m][v] += xs[v] * scalar;
        }
      }
    }
  }
  float* out = column.out[p] + (o - column.o0) * kWidth;
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) StoreVec<DType::kFloat32, L>(out + m * kWidth + v * L, sum[m][v]);
}

template <int L, int B, int V>
void RunPanelInPlace(const Column& column, int p) {
  constexpr int M = 8;
  for (int o = column.o0; o < column.o1; o += M)
    column.transposed ? RunTileInPlace<L, B, M, V, true>(column, p, o)
                      : RunTileInPlace<L, B, M, V, false>(column, p, o);
}

template <int L, int B>
void RunColumnInPlaceOf(const Column& column) {
  for (int p = 0; p < column.panels; ++p) {
    const int vectors = column.width[p] / L;
    vectors == 3   ? RunPanelInPlace<L, B, 3>(column, p)
    : vectors == 2 ? RunPanelInPlace<L, B, 2>(column, p)
                   : RunPanelInPlace<L, B, 1>(column, p);
  }
}

template <int L>
void RunColumnInPlace(const Column& column) {
  if (column.bsize == 8) return RunColumnInPlaceOf<L, 8>(column);
  if (column.bsize == 16) return RunColumnInPlaceOf<L, 16>(column);
  if (column.bsize == 32) return RunColumnInPlaceOf<L, 32>(column);
  if (column.bsize == 64) return RunColumnInPlaceOf<L, 64>(column);
  return RunColumnInPlaceOf<L, 128>(column);
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

// Where features come first: rows ahead of the one that is copied.
constexpr int64_t kRowsAhead = 32;

template <int L, DType D>
void PackPanelOf(const Activations& a, int64_t n0, int count, int64_t f0, int64_t f1, int width, float* panel) {
  const Element<D>* x = static_cast<const Element<D>*>(a.data);
  panel -= f0 * width;
  if (a.axis == 0) {
    for (int64_t f = f0; f < f1; ++f) {
      const Element<D>* row = x + f * a.n + n0;
      int i = 0;
      for (; i + L <= count; i += L) {
        // Of each row a piece is read, so that nothing else fetches what follows.
        __builtin_prefetch(row + kRowsAhead * a.n + i, 0, 2);
        StoreVec<DType::kFloat32, L>(panel + f * width + i, LoadVec<D, L>(row + i));
      }
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

// Past the caches where a vector is a whole line of them, so that nothing is read that is about to be overwritten; ended
// by StreamEnd. Of rows that are written in pieces, since nothing else fetches them in time.
template <int L, DType D>
inline void StreamResult(Element<D>* to, Float<L> x) {
#if defined(__AVX512F__)
  if constexpr (L == 16 && D == DType::kFloat32) {
    if (reinterpret_cast<uintptr_t>(to) % 64 == 0) return _mm512_stream_ps(to, x);
  }
#endif
  StoreVec<D, L>(to, x);
}

inline void StreamEnd() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

template <int L, DType D>
void UnpackPanelOf(const float* sums, int width, const Activations& a, int64_t n0, int count, int64_t f0, int64_t f1) {
  Element<D>* y = static_cast<Element<D>*>(a.data);
  sums -= f0 * width;
  if (a.axis == 0) {
    for (int64_t f = f0; f < f1; ++f) {
      Element<D>* row = y + f * a.n + n0;
      int i = 0;
      for (; i + L <= count; i += L) StreamResult<L, D>(row + i, LoadVec<DType::kFloat32, L>(sums + f * width + i));
      for (; i < count; ++i) StoreOne<D>(row + i, sums[f * width + i]);
    }
    StreamEnd();
    return;
  }
  for (int r = 0; r < count; r += L) {
    int64_t f = f0;
    for (; f + L <= f1; f += L) {
      // Rows lie pages apart, so that nothing else fetches them.
      for (int i = r + L; i < r + 2 * L && i < count; ++i) __builtin_prefetch(y + (n0 + i) * a.features + f, 1, 2);
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
