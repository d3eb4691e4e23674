// Launching the kernel for small batches (matmul_sm90_small.cuh); one instantiation a file.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace blocksparse::cuda::sm90 {

struct SmallParams {
  CUtensorMap x, x_wide, w;
  const int32_t* group;  // [groups][UnionPlan::kGroupWords]
  const int32_t* stage;  // [stages][UnionPlan::kStageWords]
  void* y;
  int batch, features;  // of y
  int groups, row_tiles;
  int split;  // parts of a tile's stages, one thread block each, in one cluster
};

template <int kB, bool kHalf>
cudaError_t LaunchSmall(bool axis0, bool transposed, const SmallParams& p, cudaStream_t stream);

}  // namespace blocksparse::cuda::sm90
