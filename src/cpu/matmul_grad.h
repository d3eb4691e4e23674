// Weight gradient: see matmul_kernels.h. Included by each instruction set's file.
#pragma once

#include "cpu/matmul_kernels.h"
#include "cpu/vector.h"

namespace blocksparse {
namespace cpu {
namespace {

// Batch entries that a piece is worked on at a time: x, dy and the sums stay in the first-level cache.
constexpr int64_t kGradBatch = 96;

// sums [M][V * L] (+)= x[:, M]^T dy[:, V * L] over n batch entries, rows of x and dy S apart.
template <int L, int S, int M, int V>
void GradTile(const float* x, const float* dy, int64_t n, float* sums, int ld, bool add) {
  Float<L> sum[M][V];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
      sum[m][v] = add ? LoadVec<DType::kFloat32, L>(sums + m * int64_t(ld) + v * L) : Float<L>{};
#pragma GCC unroll 2
  for (int64_t i = 0; i < n; ++i) {
    Float<L> ys[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) ys[v] = LoadVec<DType::kFloat32, L>(dy + i * S + v * L);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[m][v] += ys[v] * x[i * S + m];
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) StoreVec<DType::kFloat32, L>(sums + m * int64_t(ld) + v * L, sum[m][v]);
}

template <int L, int S>
void GradPieceOf(const float* x, const float* dy, int64_t n, float* sums, int ld, bool add) {
  constexpr int kLanes = L < S ? L : S, V = S / kLanes > 1 ? 2 : 1;
  // Rows of sums that fit the registers (16, or 32 with AVX-512), in tiles of equal height or one less.
  constexpr int kMost = L == 16 ? (V == 2 ? 11 : 16) : (V == 2 ? 6 : 8);
  constexpr int kTiles = (S + kMost - 1) / kMost, kRows = S / kTiles, kTall = S % kTiles;
  for (int64_t n0 = 0; n0 == 0 || n0 < n; n0 += kGradBatch) {
    const int64_t some = n - n0 < kGradBatch ? n - n0 : kGradBatch;
    const float *xs = x + n0 * S, *ys = dy + n0 * S;
    for (int k = 0; k < S; k += V * kLanes) {
      int c = 0;
      if constexpr (kTall > 0)
        for (int t = 0; t < kTall; ++t, c += kRows + 1)
          GradTile<kLanes, S, kRows + 1, V>(xs + c, ys + k, some, sums + c * int64_t(ld) + k, ld, add || n0 > 0);
      for (; c < S; c += kRows)
        GradTile<kLanes, S, kRows, V>(xs + c, ys + k, some, sums + c * int64_t(ld) + k, ld, add || n0 > 0);
    }
  }
}

template <int L>
void GradPiece(const float* x, const float* dy, int64_t n, int piece, float* sums, int ld, bool add) {
  if (piece == 8) return GradPieceOf<L, 8>(x, dy, n, sums, ld, add);
  if (piece == 16) return GradPieceOf<L, 16>(x, dy, n, sums, ld, add);
  return GradPieceOf<L, 32>(x, dy, n, sums, ld, add);
}

template <int L, DType D>
void PackPiecesOf(const Activations& a, int64_t n0, int64_t count, int64_t f0, int64_t f1, int piece, int64_t stride,
                  float* pieces) {
  const Element<D>* x = static_cast<const Element<D>*>(a.data);
  constexpr int kLanes = L < 8 ? L : 8;  // the smallest piece
  if (a.axis == 1) {  // some rows at a time, so that what one piece leaves of a cache line is there for the next
    for (int64_t n = 0; n < count; n += kLanes)
      for (int64_t f = f0; f < f1; f += piece) {
        float* out = pieces + (f - f0) * stride;
        for (int64_t i = n; i < n + kLanes && i < count; ++i)
          for (int c = 0; c < piece; c += kLanes)
            StoreVec<DType::kFloat32, kLanes>(out + i * piece + c,
                                              LoadVec<D, kLanes>(x + (n0 + i) * a.features + f + c));
      }
    return;
  }
  for (int64_t f = f0; f < f1; f += piece) {
    float* out = pieces + (f - f0) * stride;
    for (int c = 0; c < piece; c += kLanes) {
      int64_t n = 0;
      for (; n + kLanes <= count; n += kLanes) {
        Float<kLanes> rows[kLanes];
#pragma GCC unroll 8
        for (int i = 0; i < kLanes; ++i) rows[i] = LoadVec<D, kLanes>(x + (f + c + i) * a.n + n0 + n);
        Transpose<kLanes>(rows);
#pragma GCC unroll 8
        for (int i = 0; i < kLanes; ++i) StoreVec<DType::kFloat32, kLanes>(out + (n + i) * piece + c, rows[i]);
      }
      for (; n < count; ++n)
        for (int i = 0; i < kLanes; ++i) out[n * piece + c + i] = LoadOne<D>(x + (f + c + i) * a.n + n0 + n);
    }
  }
}

template <int L>
void PackPieces(const Activations& a, int64_t n0, int64_t count, int64_t f0, int64_t f1, int piece, int64_t stride,
                float* pieces) {
  ForDType(a.dtype,
           [&](auto dtype) { PackPiecesOf<L, decltype(dtype)::value>(a, n0, count, f0, f1, piece, stride, pieces); });
}

template <int L>
void Finish(const float* sums, float scale, const float* addend, int64_t count, void* out, DType dtype) {
  ForDType(dtype, [&](auto constant) {
    constexpr DType D = decltype(constant)::value;
    Element<D>* y = static_cast<Element<D>*>(out);
    int64_t i = 0;
    for (; i + L <= count; i += L) {
      Float<L> sum = LoadVec<DType::kFloat32, L>(sums + i) * scale;
      if (addend) sum += LoadVec<DType::kFloat32, L>(addend + i);
      StoreVec<D, L>(y + i, sum);
    }
    for (; i < count; ++i) StoreOne<D>(y + i, sums[i] * scale + (addend ? addend[i] : 0.f));
  });
}

template <int L>
float Dot(const float* a, const void* b, int64_t count, DType dtype) {
  float total = 0.f;
  ForDType(dtype, [&](auto constant) {
    constexpr DType D = decltype(constant)::value;
    const Element<D>* w = static_cast<const Element<D>*>(b);
    Float<L> sum[4] = {};
    for (int64_t i = 0; i < count; i += 4 * L)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[j] += LoadVec<DType::kFloat32, L>(a + i + j * L) * LoadVec<D, L>(w + i + j * L);
    sum[0] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    for (int i = 0; i < L; ++i) total += sum[0][i];
  });
  return total;
}

}  // namespace
}  // namespace cpu
}  // namespace blocksparse
