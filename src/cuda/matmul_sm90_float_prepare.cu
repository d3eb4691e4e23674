// Operands of the float32 products: rounded to TF32 or split into bfloat16 pieces, and turned where their reduction does
// not lie contiguous.
#include <algorithm>

#include "cuda/matmul_sm90_float.h"

namespace blocksparse::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ uint32_t RoundTf32(float x) {
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

// The nearest bfloat16, but none beyond the largest finite one for a finite number.
__device__ __forceinline__ uint32_t NearestBf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits >> 16 | ((bits & 0x7fffffu) != 0 ? 0x40u : 0u);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return (rounded & 0x7fffu) == 0x7f80u ? bits >> 16 : rounded;
}

// Stores one element of `to` at e, and its further pieces `plane` elements on each.
template <bool kExact>
__device__ __forceinline__ void Put(float x, void* to, int64_t e, int64_t plane, bool& tiny) {
  if constexpr (!kExact) {
    static_cast<uint32_t*>(to)[e] = RoundTf32(x);
  } else {
    uint16_t* pieces = static_cast<uint16_t*>(to) + e;
    const float size = fabsf(x);
    tiny |= size < 0x1p-100f && size > 0.f;
    uint32_t piece = NearestBf16(x);
    pieces[0] = uint16_t(piece);
    if (size < __int_as_float(0x7f800000)) {
      x -= __uint_as_float(piece << 16);
      piece = NearestBf16(x);
      x -= __uint_as_float(piece << 16);
      pieces[plane] = uint16_t(piece);
      pieces[2 * plane] = uint16_t(NearestBf16(x));
    } else {
      pieces[plane] = pieces[2 * plane] = 0;
    }
  }
}

// The same order: [lines][columns] to [planes][lines][pitch].
template <bool kExact>
__global__ void __launch_bounds__(kThreads)
    Convert(const float* from, void* to, int64_t lines, int64_t columns, int64_t pitch, uint32_t* tiny_flag) {
  const int64_t total = lines * pitch, step = int64_t(gridDim.x) * kThreads;
  bool tiny = false;
  if (columns == pitch) {
#pragma unroll 4
    for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < total; e += step)
      Put<kExact>(from[e], to, e, total, tiny);
  } else {
    for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < total; e += step) {
      const int64_t line = e / pitch, column = e % pitch;
      Put<kExact>(column < columns ? from[line * columns + column] : 0.f, to, e, total, tiny);
    }
  }
  if (kExact && tiny) *tiny_flag = 1;
}

// Turned: [count][rows][columns] to [planes][count][columns][pitch], in tiles of 64 x 64, or several whole matrices of
// kT x kT to a thread block.
template <bool kExact, int kT>
__global__ void __launch_bounds__(kThreads) Transpose(const float* from, void* to, int64_t count, int64_t rows,
                                                      int64_t columns, int64_t pitch, uint32_t* tiny_flag) {
  constexpr int kTiles = 64 * 64 / (kT * kT);
  __shared__ float tile[kTiles * kT * (kT + 1)];
  const int64_t first = int64_t(blockIdx.x) * kTiles;
  int64_t matrix0 = first, row0 = 0, column0 = 0;
  if constexpr (kTiles == 1) {  // else a matrix is one tile
    const int64_t across = (columns + kT - 1) / kT, down = (pitch + kT - 1) / kT;
    matrix0 = first / (across * down);
    row0 = first / across % down * kT;
    column0 = first % across * kT;
  }
  bool tiny = false;
  auto each = [&](auto&& body) {  // body(matrix, place of the tile, row and column in it)
#pragma unroll
    for (int i = 0; i < 64 * 64 / kThreads; ++i) {
      const int t = i * kThreads / (kT * kT), e = i * kThreads % (kT * kT) + threadIdx.x;
      if (matrix0 + t < count) body(matrix0 + t, t, e / kT, e % kT);
    }
  };
  each([&](int64_t matrix, int t, int line, int at) {
    const int64_t row = row0 + line, column = column0 + at;
    tile[(t * kT + line) * (kT + 1) + at] =
        row < rows && column < columns ? from[(matrix * rows + row) * columns + column] : 0.f;
  });
  __syncthreads();
  each([&](int64_t matrix, int t, int line, int at) {
    const int64_t row = row0 + at, column = column0 + line;
    if (row < pitch && column < columns)
      Put<kExact>(tile[(t * kT + at) * (kT + 1) + line], to, (matrix * columns + column) * pitch + row,
                  count * columns * pitch, tiny);
  });
  if (kExact && tiny) *tiny_flag = 1;
}

template <bool kExact>
cudaError_t Prepare(bool transpose, const float* from, void* to, int64_t count, int64_t rows, int64_t columns,
                    int64_t pitch, int size, uint32_t* tiny, cudaStream_t stream) {
  if (!transpose) {
    const int64_t grid = std::min<int64_t>((count * rows * pitch + kThreads * 4 - 1) / (kThreads * 4), 132 * 32);
    Convert<kExact><<<int(grid), kThreads, 0, stream>>>(from, to, count * rows, columns, pitch, tiny);
    return cudaGetLastError();
  }
  const int side = size == 16 || size == 32 ? size : 64;
  const int64_t tiles = count * ((columns + side - 1) / side) * ((pitch + side - 1) / side),
                per = 64 * 64 / (side * side);
  auto kernel = side == 16 ? Transpose<kExact, 16> : side == 32 ? Transpose<kExact, 32> : Transpose<kExact, 64>;
  kernel<<<int((tiles + per - 1) / per), kThreads, 0, stream>>>(from, to, count, rows, columns, pitch, tiny);
  return cudaGetLastError();
}

}  // namespace

cudaError_t PrepareFloat(bool exact, bool transpose, const float* from, void* to, int64_t count, int64_t rows,
                         int64_t columns, int64_t pitch, int size, uint32_t* tiny, cudaStream_t stream) {
  return exact ? Prepare<true>(transpose, from, to, count, rows, columns, pitch, size, tiny, stream)
               : Prepare<false>(transpose, from, to, count, rows, columns, pitch, size, tiny, stream);
}

}  // namespace blocksparse::cuda::sm90
