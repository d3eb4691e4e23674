// Forward and input gradient in bfloat16 on AMX tiles, blocks of 32 and more, no gates.
//
// Activations are packed to rows [features / 32][32 batch entries][32 features], weights, 32 outputs at a time, to
// [features / 2][outputs][2], as TDPBF16PS wants its operands; 2 x 2 tiles of 16 x 16 sums stay in the tile registers
// over a whole block column. Sums leave as [outputs / 16][32 batch entries][16 outputs].
//
// The instruction takes subnormal bfloat16 numbers for zero, whatever the mode of the thread: they are the one thing
// these kernels do not keep.
#include "cpu/matmul_kernels.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>

#include "cpu/vector.h"
#endif

namespace blocksparse {
namespace cpu {

#if defined(__AMX_BF16__)
namespace {

constexpr int kRows = 32;        // batch entries of a panel
constexpr int kStrip = 32;       // outputs whose weights are packed together
constexpr int kFeatures = 1024;  // features whose weights are packed together
static_assert(kStrip * kFeatures * 2 <= kColumnScratch * 4, "packed weights must fit the scratch");

// Words of 16 elements of each of two rows, the first row's in the low halves.
inline Float<16> Interleave(const uint16_t* low, const uint16_t* high) {
  using V = Vec<16>;
  const auto wide = [](const uint16_t* p) {
    return __builtin_convertvector(*reinterpret_cast<const V::Short*>(p), V::Word);
  };
  return reinterpret_cast<Float<16>>(wide(low) | wide(high) << 16);
}

void PackRows(const Activations& a, int64_t n0, int count, int64_t f0, int64_t f1, int width, float* panel) {
  const uint16_t* x = static_cast<const uint16_t*>(a.data);
  uint16_t* rows = reinterpret_cast<uint16_t*>(panel - f0 * width) + f0 * kRows;  // f0 is a multiple of 32
  if (a.axis == 1) {
    for (int r = 0; r < kRows; ++r) {  // rows past the batch are computed and dropped: any entry will do
      const uint16_t* row = x + (n0 + (r < count ? r : count - 1)) * a.features;
      for (int64_t f = f0; f < f1; f += 32) std::memcpy(rows + (f - f0) * kRows + r * 32, row + f, 64);
    }
    return;
  }
  for (int64_t f = f0; f < f1; f += 32, rows += kRows * 32) {
    int r = 0;
    for (; r + 16 <= count; r += 16) {  // pairs of features are transposed together
      Float<16> pairs[16];
      for (int i = 0; i < 16; ++i) {
        const uint16_t* even = x + (f + 2 * i) * a.n + n0 + r;
        pairs[i] = Interleave(even, even + a.n);
      }
      Transpose<16>(pairs);
      for (int i = 0; i < 16; ++i) std::memcpy(rows + (r + i) * 32, &pairs[i], 64);
    }
    for (; r < kRows; ++r)
      for (int c = 0; c < 32; ++c) rows[r * 32 + c] = x[(f + c) * a.n + n0 + (r < count ? r : count - 1)];
  }
}

void UnpackTiles(const float* sums, int, const Activations& a, int64_t n0, int count, int64_t f0, int64_t f1) {
  constexpr DType D = DType::kBFloat16;
  constexpr int kTile = kRows * 16;
  uint16_t* y = static_cast<uint16_t*>(a.data);
  if (a.axis == 1) {
    // Whole cache lines where there are two tiles: rows of the output often fall on one set of the first-level cache.
    for (int64_t f = f0; f < f1; f += 32, sums += 2 * kTile)
      for (int r = 0; r < count; ++r)
        for (int64_t half = f; half < f1 && half < f + 32; half += 16)
          StoreVec<D, 16>(y + (n0 + r) * a.features + half,
                          LoadVec<DType::kFloat32, 16>(sums + (half - f) / 16 * kTile + r * 16));
    return;
  }
  for (int64_t f = f0; f < f1; f += 16, sums += kTile) {
    int r = 0;
    for (; r + 16 <= count; r += 16) {
      Float<16> rows[16];
      for (int i = 0; i < 16; ++i) rows[i] = LoadVec<DType::kFloat32, 16>(sums + (r + i) * 16);
      Transpose<16>(rows);
      for (int c = 0; c < 16; ++c) StoreVec<D, 16>(y + (f + c) * a.n + n0 + r, rows[c]);
    }
    for (; r < count; ++r)
      for (int c = 0; c < 16; ++c) y[(f + c) * a.n + n0 + r] = FloatToBFloat16(sums[r * 16 + c]);
  }
}

// Outputs [o, o + width) of a block to [b / 2][width][2]; width is 16 or 32.
void PackWeights(const uint16_t* w, int b, int o, int width, bool transposed, uint16_t* out) {
  if (transposed) {  // pairs of features lie side by side: a transpose of 32-bit pairs
    for (int half = 0; half < width; half += 16)
      for (int c = 0; c < b; c += 32) {
        Float<16> pairs[16];
        for (int i = 0; i < 16; ++i)
          pairs[i] = LoadVec<DType::kFloat32, 16>(reinterpret_cast<const float*>(w + (o + half + i) * b + c));
        Transpose<16>(pairs);
        for (int i = 0; i < 16; ++i)
          StoreVec<DType::kFloat32, 16>(reinterpret_cast<float*>(out + ((c / 2 + i) * width + half) * 2), pairs[i]);
      }
    return;
  }
  if (width == 16) {
    for (int c = 0; c < b; c += 2) {
      const Float<16> both = Interleave(w + c * b + o, w + (c + 1) * b + o);
      std::memcpy(out + c * 16, &both, sizeof both);
    }
    return;
  }
  alignas(64) uint16_t low[32], high[32];
  for (int i = 0; i < 32; ++i) low[i] = uint16_t(i / 2 + i % 2 * 32), high[i] = uint16_t(low[i] + 16);
  const __m512i first = _mm512_load_si512(low), second = _mm512_load_si512(high);
  for (int c = 0; c < b; c += 2) {
    const __m512i even = _mm512_loadu_si512(w + c * b + o), odd = _mm512_loadu_si512(w + (c + 1) * b + o);
    _mm512_storeu_si512(out + c * 32, _mm512_permutex2var_epi16(even, first, odd));
    _mm512_storeu_si512(out + c * 32 + 32, _mm512_permutex2var_epi16(even, second, odd));
  }
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 32 batch entries x 32 (or 16) outputs over the packed blocks; sums of earlier blocks are added to.
void RunTiles(const uint16_t* panel, const int32_t* in, int count, int b, const uint16_t* weights, bool add, bool wide,
              float* out) {
  constexpr int kTileFloats = 16 * 16;
  float* second = out + kRows * 16;  // outputs 16 to 31
  if (add) {
    _tile_loadd(0, out, 64);
    _tile_loadd(1, out + kTileFloats, 64);
    if (wide) {
      _tile_loadd(2, second, 64);
      _tile_loadd(3, second + kTileFloats, 64);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const int row = wide ? 128 : 64;  // bytes of a pair of features
  for (int e = 0; e < count; ++e)
    for (int c = 0; c < b; c += 32, weights += 16 * row / 2) {
      const uint16_t* x = panel + (int64_t(in[e]) * b + c) * kRows;
      _tile_loadd(4, x, 64);
      _tile_loadd(5, x + 16 * 32, 64);
      _tile_loadd(6, weights, row);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if (!wide) continue;
      _tile_loadd(7, weights + 32, row);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + kTileFloats, 64);
  if (!wide) return;
  _tile_stored(2, second, 64);
  _tile_stored(3, second + kTileFloats, 64);
}

// Entries [e0, e0 + count) of a column, outputs [o, o + width), one block after the other.
void PackEntries(const Column& column, int e0, int count, int o, int width, uint16_t* out) {
  const int b = column.bsize;
  for (int e = e0; e < e0 + count; ++e, out += b * width)
    PackWeights(static_cast<const uint16_t*>(column.weights) + int64_t(column.ids[e]) * b * b, b, o, width,
                column.transposed, out);
}

void PackColumn(const Column& column, void* packed) {
  uint16_t* out = static_cast<uint16_t*>(packed);
  for (int o = column.o0; o < column.o1; o += kStrip) {
    const int width = std::min(kStrip, column.o1 - o);
    PackEntries(column, 0, column.count, o, width, out);
    out += int64_t(column.count) * column.bsize * width;
  }
}

void RunColumn(const Column& column) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const int b = column.bsize, most = column.packed ? std::max(column.count, 1) : kFeatures / b;
  const uint16_t* packed = static_cast<const uint16_t*>(column.packed);
  uint16_t* scratch = reinterpret_cast<uint16_t*>(column.scratch);
  for (int o = column.o0; o < column.o1; o += kStrip) {
    const int width = std::min(kStrip, column.o1 - o);
    for (int e = 0; e == 0 || e < column.count; e += most) {
      const int count = std::min(column.count - e, most);
      if (!column.packed) PackEntries(column, e, count, o, width, scratch);
      for (int p = 0; p < column.panels; ++p)
        RunTiles(reinterpret_cast<const uint16_t*>(column.panel[p]), column.in + e, count, b,
                 column.packed ? packed : scratch, e > 0, width == kStrip, column.out[p] + (o - column.o0) * kRows);
    }
    if (packed) packed += int64_t(column.count) * b * width;
  }
  _tile_release();
}

}  // namespace

const MatmulKernels* MatmulKernelsAmx() {
  static const MatmulKernels kernels = {"amx",   kRows,      PackRows, UnpackTiles, RunColumn, nullptr,
                                        nullptr, PackColumn, nullptr,  nullptr,     nullptr,   nullptr};
  return &kernels;
}

#else

const MatmulKernels* MatmulKernelsAmx() { return nullptr; }

#endif

}  // namespace cpu
}  // namespace blocksparse
