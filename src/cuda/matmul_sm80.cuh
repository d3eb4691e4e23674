// What the portable kernels share: the tile, its way through shared memory, and the product of one stage.
//
// Every product is a sum over stages of a small dense one, [128, kDepth] x [kDepth, b]:
//
//                    128 rows                       depth                           b columns (blocks of 128: half)
//   forward          batch entries                  input features, listed blocks   output features of one block
//   input gradient   the same with the layout's rows and columns exchanged
//   weight gradient  input features, 128/b blocks   batch entries                   output features of their column
//
// A stage's left operand L and right operand R lie in shared memory as they come from memory, so either index may be
// the contiguous one; the matrix loads transpose where needed.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/arch/sm80.cuh"
#include "cuda/convert.cuh"
#include "kernels/matmul.h"

namespace blocksparse {
namespace cuda {
namespace sm80 {

template <typename T, int B>
struct Tile {
  static constexpr bool kFloat = std::is_same<T, float>::value;
  static constexpr int kRows = 128;
  static constexpr int kDepth = 128 / int(sizeof(T));  // 128 bytes: what one row of L needs to fill whole sectors
  static constexpr int kVector = 16 / int(sizeof(T));  // elements of one asynchronous copy
  // Blocks of 128 are done in halves: two thread blocks of 4 warps on a multiprocessor, one of which computes while the
  // other starts or ends, are faster than one of 8, though L is read twice.
  static constexpr int kCols = B < 64 ? B : 64, kHalves = B / kCols;
  // A warp's share: 32 x b while b is small; 64 x 32 where that reads fewer fragments per product.
  static constexpr int kWarpRows = kCols <= 32 ? 32 : 64;
  static constexpr int kWarpCols = kCols <= 32 ? kCols : 32;
  static constexpr int kWarpsDown = kRows / kWarpRows;
  static constexpr int kWarpsAcross = kCols / kWarpCols;
  static constexpr int kThreads = 32 * kWarpsDown * kWarpsAcross;
  static constexpr int kM = kWarpRows / 16, kN = kWarpCols / 8;  // fragments of a warp's share

  // Bytes from line to line in shared memory. The 8 lines that a matrix load takes 16 bytes of must lie in different
  // banks. 16-bit lines are swizzled for that: padding them, so that what one warp copies straddles the rows of banks,
  // cost blocks of 32 and 64 a third and a fifth of their speed. float32 and R's short lines (B < 32) are padded.
  static constexpr bool kSwizzled = !kFloat, kColsSwizzled = kSwizzled && B >= 32;
  static constexpr int kDepthLine = kFloat ? 128 + 16 : 128;                    // depth contiguous
  static constexpr int kRowsLine = kRows * int(sizeof(T)) + (kFloat ? 32 : 0);  // L, rows contiguous
  // R, columns contiguous
  static constexpr int kColsLine = kCols * int(sizeof(T)) + (B == 8 || kColsSwizzled ? 0 : kFloat ? 32 : 16);
  static constexpr int kLeftBytes = kRows * kDepthLine;  // at least kDepth * kRowsLine
  static constexpr int kRightBytes = kCols * kDepthLine > kDepth* kColsLine ? kCols* kDepthLine : kDepth* kColsLine;
  static constexpr int kStageBytes = kLeftBytes + kRightBytes;
  static_assert(kDepth * kRowsLine <= kLeftBytes, "L does not fit its place");
  static_assert(kFloat || (kLeftBytes % 1024 == 0 && kStageBytes % 1024 == 0), "a swizzle repeats after 1024 bytes");

  // Byte offsets in L or R of a 16-byte vector.
  __device__ static uint32_t DepthOffset(int line, int byte) { return Swizzle<kDepthLine, kSwizzled>(line, byte); }
  __device__ static uint32_t RowsOffset(int line, int byte) { return Swizzle<kRowsLine, kSwizzled>(line, byte); }
  __device__ static uint32_t ColsOffset(int line, int byte) { return Swizzle<kColsLine, kColsSwizzled>(line, byte); }

  template <int kLine, bool kSwizzle>
  __device__ static uint32_t Swizzle(int line, int byte) {
    const uint32_t offset = line * kLine + byte;
    return kSwizzle ? offset ^ (offset >> (kLine == 256 ? 8 : 7) & 7) << 4 : offset;
  }

  // Blocks one thread block may have on its list. 1024 blocks of 8 are 8192 features; longer columns are split.
  static constexpr int kList = B == 8 ? 1024 : B == 16 ? 512 : B == 32 ? 256 : 128;
  // Blocks side by side in a stage, or stages of one block.
  static constexpr int kBlocksPerStage = B < kDepth ? kDepth / B : 1;
  static constexpr int kStagesPerBlock = B < kDepth ? 1 : B / kDepth;

  // The products of a stage are made in steps of one instruction's depth; the next stage is loaded part by part between
  // them, so that neither waits for the other's instructions.
  static constexpr int kStepDepth = kFloat ? 8 : 16;
  static constexpr int kSteps = kDepth / kStepDepth;
  static constexpr int kLeftVectors = kRows * 8 / kThreads;                    // a thread's 16-byte copies of L
  static constexpr int kRightVectors = (kCols * 8 + kThreads - 1) / kThreads;  // and of R
};

// Stages in flight: four where two thread blocks still fit a multiprocessor of 228 KB, or one is all there can be.
inline int StageCount(int stage_bytes, int other_bytes, const Chip& chip) {
  int stages = stage_bytes < 24 * 1024 ? 3 : 4;
  while (stages > 2 && stages * stage_bytes + other_bytes > chip.shared_memory) --stages;
  return stages;
}

__device__ inline void WaitForStage(int stages) {
  if (stages == 4)
    CopyAsyncWait<2>();
  else if (stages == 3)
    CopyAsyncWait<1>();
  else
    CopyAsyncWait<0>();
}

// 16 bytes to shared memory, of which the first `valid` come from `from` and the rest are zeros, where no more than
// `width` < 16 bytes at a time can be read.
__device__ inline void CopyNarrow(uint32_t to, const void* from, int valid, int width) {
  const char* bytes = static_cast<const char*>(from);
  if (width == 8) {
    for (int i = 0; i < 16; i += 8) CopyAsync8(to + i, valid > i ? bytes + i : bytes, min(max(valid - i, 0), 8));
  } else if (width == 4) {
    for (int i = 0; i < 16; i += 4) CopyAsync4(to + i, valid > i ? bytes + i : bytes, min(max(valid - i, 0), 4));
  } else if (width == 2) {
    for (int i = 0; i < 16; i += 2)
      StoreShared2(to + i, valid > i ? *reinterpret_cast<const uint16_t*>(bytes + i) : uint16_t(0));
  } else {
    CopyAsync16(to, bytes, valid > 0);  // the other operand is the narrow one
  }
}

// One warp's sums. `part` is what the matrix instructions add to. Where sums must be finer than theirs (gates, float32
// results), it is moved to `sum` at the end of each block or stage, by a rounded addition.
template <typename T, int B>
struct Sums {
  using S = Tile<T, B>;
  float part[S::kM][S::kN][4];
  float sum[S::kM][S::kN][4];

  __device__ void Clear() {
#pragma unroll
    for (int m = 0; m < S::kM; ++m)
#pragma unroll
      for (int n = 0; n < S::kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) part[m][n][i] = sum[m][n][i] = 0.f;
  }
  __device__ void Move(float scale) {
#pragma unroll
    for (int m = 0; m < S::kM; ++m)
#pragma unroll
      for (int n = 0; n < S::kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[m][n][i] = fmaf(scale, part[m][n][i], sum[m][n][i]);
          part[m][n][i] = 0.f;
        }
  }
};

// Where a thread stands in its warp's share and where its fragments begin.
template <typename T, int B, bool kRowsContiguous>
struct Share {
  using S = Tile<T, B>;
  int row, col;          // of the warp's share
  bool cols_contiguous;  // R's contiguous index
  uint32_t left, right;  // byte offsets into L and R
  // What changes of the offset per 16 (float32: 8) of depth and per 8 columns: bits within a swizzled line, or bytes.
  int right_step, right_next, right_step_bits = 0, right_next_bits = 0;

  __device__ explicit Share(bool cols) : cols_contiguous(cols) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row = warp % S::kWarpsDown * S::kWarpRows;
    col = warp / S::kWarpsDown * S::kWarpCols;
    if (S::kFloat) {
      const int g = lane / 4, t = lane % 4;
      left = kRowsContiguous ? t * S::kRowsLine + (row + g) * 4 : (row + g) * S::kDepthLine + t * 4;
      right = cols ? t * S::kColsLine + (col + g) * 4 : (col + g) * S::kDepthLine + t * 4;
      right_step = cols ? 8 * S::kColsLine : 32;
      right_next = cols ? 32 : 8 * S::kDepthLine;
    } else {
      const int line = lane % 8, second = lane / 8 % 2, third = lane / 16;
      left = kRowsContiguous ? S::RowsOffset(line + 8 * third, (row + 8 * second) * 2)
                             : S::DepthOffset(row + line + 8 * second, third * 16);
      const int next = S::kN == 1 ? 0 : 8 * third;
      right =
          cols ? S::ColsOffset(line + 8 * second, (col + next) * 2) : S::DepthOffset(col + line + next, second * 16);
      right_step = cols ? 16 * S::kColsLine : 0, right_step_bits = cols ? 0 : 32;
      right_next = cols ? 0 : 8 * S::kDepthLine, right_next_bits = cols ? 16 : 0;
    }
  }
};

// The operands of one step, as the matrix instructions want them; float32 not yet rounded.
template <typename T, int B, bool kRowsContiguous>
struct Fragments {
  using S = Tile<T, B>;
  uint32_t a[S::kM][4], b[S::kN][2];

  __device__ void Load(const Share<T, B, kRowsContiguous>& at, uint32_t stage, int step) {
    const uint32_t right = stage + S::kLeftBytes + (at.right ^ step * at.right_step_bits) + step * at.right_step;
    constexpr int kStepBytes = S::kStepDepth * kDepthBytes;
    const uint32_t left =
        stage + (S::kSwizzled && !kRowsContiguous ? at.left ^ step * kStepBytes : at.left + step * kStepBytes);
    if constexpr (S::kFloat) {
#pragma unroll
      for (int n = 0; n < S::kN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) b[n][i] = LoadShared4(right + n * at.right_next + i * (at.right_step / 2));
#pragma unroll
      for (int m = 0; m < S::kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[m][i] = LoadShared4(left + i / 2 * 4 * kDepthBytes + (m * 16 + i % 2 * 8) * kRowBytes);
    } else {
      if constexpr (S::kN == 1) {
        LoadMatrix2(b[0], right, at.cols_contiguous);
      } else {
#pragma unroll
        for (int n = 0; n < S::kN; n += 2) {
          uint32_t two[4];
          LoadMatrix4(two, (right ^ n * at.right_next_bits) + n * at.right_next, at.cols_contiguous);
          b[n][0] = two[0], b[n][1] = two[1], b[n + 1][0] = two[2], b[n + 1][1] = two[3];
        }
      }
#pragma unroll
      for (int m = 0; m < S::kM; ++m)
        LoadMatrix4(a[m], kRowsContiguous ? left ^ m * 16 * kRowBytes : left + m * 16 * kRowBytes, kRowsContiguous);
    }
  }

  static constexpr int kRowBytes = kRowsContiguous ? int(sizeof(T)) : S::kDepthLine;
  static constexpr int kDepthBytes = kRowsContiguous ? S::kRowsLine : int(sizeof(T));
};

template <typename T, int B, bool kRowsContiguous>
__device__ inline void MultiplyStep(const Fragments<T, B, kRowsContiguous>& f, Sums<T, B>& sums) {
  using S = Tile<T, B>;
  if constexpr (S::kFloat) {
    uint32_t b[S::kN][2];
#pragma unroll
    for (int n = 0; n < S::kN; ++n) b[n][0] = RoundTf32(f.b[n][0]), b[n][1] = RoundTf32(f.b[n][1]);
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
      const uint32_t a[4] = {RoundTf32(f.a[m][0]), RoundTf32(f.a[m][1]), RoundTf32(f.a[m][2]), RoundTf32(f.a[m][3])};
#pragma unroll
      for (int n = 0; n < S::kN; ++n) MmaTf32(sums.part[m][n], a, b[n]);
    }
  } else {
#pragma unroll
    for (int m = 0; m < S::kM; ++m)
#pragma unroll
      for (int n = 0; n < S::kN; ++n) Mma16(sums.part[m][n], f.a[m], f.b[n], T());
  }
}

// One step of 16-bit blocks of 8: of the two that share it, each has a gate of its own.
template <typename T, bool kRowsContiguous>
__device__ inline void MultiplyStepOfTwo(const Fragments<T, 8, kRowsContiguous>& f, const float* gates,
                                         Sums<T, 8>& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int m = 0; m < Tile<T, 8>::kM; ++m)
      Mma8(sums.part[m][0], f.a[m][2 * half], f.a[m][2 * half + 1], f.b[0][half], T());
    sums.Move(gates[half]);
  }
}

// A stage in float32 arithmetic, with the sums where the matrix instructions have them: a thread's rows are 8 apart,
// its columns in pairs. (Three TF32 products of split operands are faster and lose more than float32 does where terms
// are few: the matrix instructions cut what they add.)
template <int B, bool kRowsContiguous>
__device__ inline void MultiplyStageFloat32(const Share<float, B, kRowsContiguous>& at, uint32_t stage,
                                            const float* gates, Sums<float, B>& sums) {
  using S = Tile<float, B>;
  constexpr int kBlock = B < S::kDepth ? B : S::kDepth;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint32_t left = stage + (at.row + g) * (kRowsContiguous ? 4 : S::kDepthLine);
  uint32_t right = stage + S::kLeftBytes + (at.col + 2 * t) * (at.cols_contiguous ? 4 : S::kDepthLine);
#pragma unroll 1
  for (int k = 0; k < S::kDepth; k += 4) {
    float a[2 * S::kM][4], b[2 * S::kN][4];  // of four products in a row
#pragma unroll
    for (int m = 0; m < 2 * S::kM; ++m) {
      if (kRowsContiguous) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = __uint_as_float(LoadShared4(left + i * S::kRowsLine + m * 32));
      } else {
        const float4 four = LoadShared16(left + m * 8 * S::kDepthLine);
        a[m][0] = four.x, a[m][1] = four.y, a[m][2] = four.z, a[m][3] = four.w;
      }
    }
    if (at.cols_contiguous) {
#pragma unroll
      for (int n = 0; n < S::kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 two = LoadShared8(right + i * S::kColsLine + n * 32);
          b[2 * n][i] = two.x, b[2 * n + 1][i] = two.y;
        }
    } else {
#pragma unroll
      for (int n = 0; n < 2 * S::kN; ++n) {
        const float4 four = LoadShared16(right + (n / 2 * 8 + n % 2) * S::kDepthLine);
        b[n][0] = four.x, b[n][1] = four.y, b[n][2] = four.z, b[n][3] = four.w;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int m = 0; m < S::kM; ++m)
#pragma unroll
        for (int n = 0; n < S::kN; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            sums.part[m][n][e] = fmaf(a[2 * m + e / 2][i], b[2 * n + e % 2][i], sums.part[m][n][e]);
    left += kRowsContiguous ? 4 * S::kRowsLine : 16;
    right += at.cols_contiguous ? 4 * S::kColsLine : 16;
    if (gates && (k + 4) % kBlock == 0) sums.Move(gates[k / kBlock]);
  }
}

// How a thread block's stages are summed.
struct Mode {
  bool plain;  // no gates, whole vectors, and not `exact`: what is worth the most
  bool exact;  // float32 arithmetic
  bool gated;
  bool move;  // move the sums at the end of each stage
};

// All stages of a thread block. `load(stage, to, part, more)` starts the copies of one part of a stage, or of zeros,
// and `gates_of(stage)` points to the gates of a stage's blocks in shared memory.
template <typename T, int B, bool kRowsContiguous, typename Load, typename GatesOf>
__device__ inline void RunStages(int64_t count, int stages, const Mode& mode, const Share<T, B, kRowsContiguous>& at,
                                 uint32_t shared, Sums<T, B>& sums, Load load, GatesOf gates_of) {
  using S = Tile<T, B>;
  if (count == 0) return;
  for (int s = 0; s < stages - 1; ++s) {
    if (s < count)
#pragma unroll
      for (int part = 0; part < S::kSteps; ++part) load(s, shared + s * S::kStageBytes, part, true);
    CopyAsyncCommit();
  }
  uint32_t from = shared, to = shared + (stages - 1) * S::kStageBytes;
  const uint32_t end = shared + stages * S::kStageBytes;
  auto following = [&](uint32_t slot) { return slot + S::kStageBytes == end ? shared : slot + S::kStageBytes; };

  if (mode.plain) {
    // One run of instructions per stage, without a branch: the copies of a later stage, and the operands of the next
    // step, are on their way while the matrix instructions of this one run.
    Fragments<T, B, kRowsContiguous> f[2];
    WaitForStage(stages);
    __syncthreads();
    f[0].Load(at, from, 0);
    for (int64_t s = 0; s < count; ++s) {
      const int64_t next = s + stages - 1;
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        load(min(next, count - 1), to, step, next < count);
        if (step < S::kSteps - 1) {
          f[(step + 1) % 2].Load(at, from, step + 1);
        } else {
          CopyAsyncCommit();
          WaitForStage(stages);
          __syncthreads();  // the next stage has arrived for all, and all have read this one: it is overwritten next
          from = following(from), to = following(to);
          f[0].Load(at, from, 0);
        }
        MultiplyStep(f[step % 2], sums);
      }
      if (mode.move) sums.Move(1.f);
    }
    CopyAsyncWait<0>();
    return;
  }

  for (int64_t s = 0; s < count; ++s) {
    WaitForStage(stages);
    __syncthreads();
    if (s + stages - 1 < count)
#pragma unroll
      for (int part = 0; part < S::kSteps; ++part) load(s + stages - 1, to, part, true);
    CopyAsyncCommit();
    const float* gates = mode.gated ? gates_of(s) : nullptr;
    if (S::kFloat && mode.exact) {
      if constexpr (S::kFloat) MultiplyStageFloat32(at, from, gates, sums);
    } else {
      constexpr int kBlock = B < S::kDepth ? B : S::kDepth;
#pragma unroll 1
      for (int step = 0; step < S::kSteps; ++step) {
        Fragments<T, B, kRowsContiguous> f;
        f.Load(at, from, step);
        if constexpr (B == 8 && !S::kFloat) {
          if (gates) {
            MultiplyStepOfTwo(f, gates + 2 * step, sums);
            continue;
          }
        }
        MultiplyStep(f, sums);
        if (gates && (step + 1) * S::kStepDepth % kBlock == 0) sums.Move(gates[step * S::kStepDepth / kBlock]);
      }
      if (mode.move) sums.Move(1.f);
    }
    from = following(from), to = following(to);
  }
}

// ---- launches -------------------------------------------------------------------------------------------------------

// A thread block's work in a forward product or an input gradient: one output block's list, or a part of it.
struct Item {
  int32_t out, begin, end;
  int32_t slot;  // where its partial sums go, or -1: it is the whole list
};

struct ProductArgs {
  const Item* items;
  int item_count;
  const int32_t* inner;  // the lists: input block and weight block
  const int32_t* ids;
  const void* x;
  const void* w;
  const float* gates;
  void* y;
  float* partial;  // [slots, n, b], feature axis 0: [slots, b, n]
  int64_t n, in, out, first_row;
  int x_width, w_width, y_width;  // widest access each allows
  bool forward, exact;
  int stages;
};

struct Pair {
  const void* x;
  const void* dy;
  int64_t n;
};

// The blocks of one thread block in a weight gradient: neighbours in one column's list.
struct Group {
  int32_t column, begin, count;
};

constexpr int kInlinePairs = 32;

struct WeightGradArgs {
  Pair inline_pairs[kInlinePairs];
  const Pair* pairs;  // where they do not fit
  int pair_count;
  const Group* groups;
  const int32_t* rows;  // the column lists: input block and weight block
  const int32_t* ids;
  const float* gates;
  const float* addend;
  void* out;
  DType out_dtype;
  float* partial;       // [parts, blocks, b, b]
  int64_t elements;     // blocks * b * b
  int64_t stage_count;  // over all pairs
  int64_t stages_per_part;
  int64_t C, K;
  int x_width, dy_width;
  bool exact, move;
  int stages;
};

// One instantiation per block size, each in a file of its own.
template <int B>
Status LaunchProduct(DType dtype, int axis, int64_t tiles, ProductArgs args, const Chip& chip, Stream stream);
template <int B>
Status LaunchWeightGrad(DType dtype, int axis, int groups, int parts, const WeightGradArgs& args, const Chip& chip,
                        Stream stream);

}  // namespace sm80
}  // namespace cuda
}  // namespace blocksparse
