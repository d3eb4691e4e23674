// Launching the kernels for small batches (matmul_sm90_small.cuh for blocks of 32 and more, matmul_sm90_small_fill.cuh for
// smaller ones); one instantiation a file.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/common.h"

namespace blocksparse::cuda::sm90 {

struct SmallParams {
  CUtensorMap x, x_wide, w;
  const void *x_values, *weights;  // the same as x and w
  const int32_t* group;            // [groups][UnionPlan::kGroupWords]
  const int32_t* stage;            // [stages][UnionPlan::kStageWords], or as FillPlan says
  void* y;
  float* partial;  // [blocks + row_tiles * groups] sums of a tile: those of thread block i for tile t at i + t
  // For each of the same, a word for each of 8 warps. Sums of a tile: `ticket` once the warp's are there. Zero-filled tiles:
  // the first `blocks` of them, whether the warp found infinity or NaN in its share of x.
  uint64_t* flags;
  uint64_t ticket;              // another one for each launch
  int batch, inputs, features;  // batch entries, features of x and of y
  int groups, stages, row_tiles;
  int rows;      // batch entries of a tile: 64 or 128
  int box_rows;  // of them, those that one copy brings; axis 1
  int blocks;    // thread blocks
};

// Thread block i of `blocks` takes stages [SmallFirst(i), SmallFirst(i + 1)) of all row tiles, one after the other.
__host__ __device__ inline int SmallFirst(const SmallParams& p, int i) {
  return int(int64_t(p.row_tiles) * p.stages * i / p.blocks);
}

template <int kB, bool kHalf>
cudaError_t LaunchSmall(bool axis0, bool transposed, const SmallParams& p, cudaStream_t stream);
template <int kB, bool kHalf>
cudaError_t LaunchFill(bool axis0, bool transposed, const SmallParams& p, cudaStream_t stream);
// Adds the sums of each tile, in order.
template <int kB, bool kHalf>
cudaError_t FinishFill(bool axis0, bool transposed, const SmallParams& p, cudaStream_t stream);

}  // namespace blocksparse::cuda::sm90
