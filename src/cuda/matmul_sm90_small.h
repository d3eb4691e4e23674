// Launching the kernels for small batches of larger blocks (matmul_sm90_small.cuh); one instantiation a file.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/common.h"

namespace blocksparse::cuda::sm90 {

struct SmallParams {
  CUtensorMap x, x_wide, w;
  const int32_t* group;  // [groups][UnionPlan::kGroupWords]
  const int32_t* stage;  // [stages][UnionPlan::kStageWords]
  void* y;
  float* partial;  // [blocks + row_tiles * groups] sums of a tile: those of thread block i for tile t at i + t
  // For each of the same, a word for each of 8 warps: `ticket` once the warp's sums are there.
  uint64_t* flags;
  uint64_t ticket;      // another one for each launch
  int batch, features;  // batch entries, features of y
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

}  // namespace blocksparse::cuda::sm90
