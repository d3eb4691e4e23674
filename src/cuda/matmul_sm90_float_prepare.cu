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

// Stores four elements of `to` from e on, and their further pieces `plane` elements on each.
template <bool kExact>
__device__ __forceinline__ void Put(const float (&x)[4], void* to, int64_t e, int64_t plane, bool& tiny) {
  if constexpr (!kExact) {
    *reinterpret_cast<uint4*>(static_cast<uint32_t*>(to) + e) =
        make_uint4(RoundTf32(x[0]), RoundTf32(x[1]), RoundTf32(x[2]), RoundTf32(x[3]));
  } else {
    uint32_t pieces[3][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float size = fabsf(x[i]);
      tiny |= size < 0x1p-100f && size > 0.f;
      float left = x[i];
#pragma unroll
      for (int l = 0; l < 3; ++l) {
        pieces[l][i] = NearestBf16(left);
        left = size < __int_as_float(0x7f800000) ? left - __uint_as_float(pieces[l][i] << 16) : 0.f;
      }
    }
#pragma unroll
    for (int l = 0; l < 3; ++l)
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(to) + l * plane + e) =
          make_uint2(pieces[l][0] | pieces[l][1] << 16, pieces[l][2] | pieces[l][3] << 16);
  }
}

// Columns and pitch are multiples of four below.

// The same order: [lines][columns] to [planes][lines][pitch]. Four vectors a thread.
template <bool kExact>
__global__ void __launch_bounds__(kThreads)
    Convert(const float* from, void* to, int64_t lines, int64_t columns, int64_t pitch, uint32_t* tiny_flag) {
  constexpr int kVectors = 4;
  const int64_t total = lines * pitch;
  bool tiny = false;
  float4 v[kVectors];
  int64_t e = (int64_t(blockIdx.x) * kVectors * kThreads + threadIdx.x) * 4;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = e + i * kThreads * 4;
    v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (columns == pitch) {
      if (at < total) v[i] = *reinterpret_cast<const float4*>(from + at);
    } else if (at < total && at % pitch < columns) {
      v[i] = *reinterpret_cast<const float4*>(from + at / pitch * columns + at % pitch);
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float x[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
    if (e + i * kThreads * 4 < total) Put<kExact>(x, to, e + i * kThreads * 4, total, tiny);
  }
  if (kExact && tiny) *tiny_flag = 1;
}

// Turned: [count][rows][columns] to [planes][count][columns][pitch], in tiles of 64 x 64, or several whole matrices of
// kT x kT to a thread block.
template <bool kExact, int kT>
__global__ void __launch_bounds__(kThreads) Transpose(const float* from, void* to, int64_t count, int64_t rows,
                                                      int64_t columns, int64_t pitch, uint32_t* tiny_flag) {
  constexpr int kTiles = 64 * 64 / (kT * kT), kVectors = 64 * 64 / 4 / kThreads, kPerLine = kT / 4;
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
  float4 v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int e = i * kThreads + threadIdx.x, t = e / (kT * kPerLine), line = e / kPerLine % kT;
    const int64_t row = row0 + line, column = column0 + e % kPerLine * 4;
    v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (matrix0 + t < count && row < rows && column < columns)
      v[i] = *reinterpret_cast<const float4*>(from + ((matrix0 + t) * rows + row) * columns + column);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int e = i * kThreads + threadIdx.x;
    float* at = tile + e / kPerLine * (kT + 1) + e % kPerLine * 4;
    at[0] = v[i].x, at[1] = v[i].y, at[2] = v[i].z, at[3] = v[i].w;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int e = i * kThreads + threadIdx.x, t = e / (kT * kPerLine), line = e / kPerLine % kT, at = e % kPerLine * 4;
    const int64_t row = row0 + at, column = column0 + line;
    const float* in = tile + (t * kT + at) * (kT + 1) + line;
    const float x[4] = {in[0], in[kT + 1], in[2 * (kT + 1)], in[3 * (kT + 1)]};
    if (matrix0 + t < count && row < pitch && column < columns)
      Put<kExact>(x, to, ((matrix0 + t) * columns + column) * pitch + row, count * columns * pitch, tiny);
  }
  if (kExact && tiny) *tiny_flag = 1;
}

template <bool kExact>
cudaError_t Prepare(bool transpose, const float* from, void* to, int64_t count, int64_t rows, int64_t columns,
                    int64_t pitch, int size, uint32_t* tiny, cudaStream_t stream) {
  if (!transpose) {
    const int64_t grid = (count * rows * pitch + kThreads * 16 - 1) / (kThreads * 16);
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
