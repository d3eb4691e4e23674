// Launching the union-tile kernel (matmul_sm90_union.cuh); one instantiation a file.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace blocksparse::cuda::sm90 {

struct UnionParams {
  CUtensorMap x, x_wide, w, y;
  const int32_t* group;  // [groups][UnionPlan::kGroupWords]
  const int32_t* stage;  // [stages][UnionPlan::kStageWords]
  int groups, heavy;     // the first `heavy` groups come first over the whole batch
  int row_tiles;
  int together;       // row tiles that go over the groups side by side
  const float* gate;  // [blocks], where kGated
  bool chunked;       // axis 0: x and y are described in chunks of 64 batch entries
  uint32_t* counter;  // zero at launch, hands out tiles; null: tile t goes to thread block t modulo the grid
};

template <int kB, bool kHalf, bool kGated>
cudaError_t LaunchUnion(bool axis0, bool transposed, const UnionParams& p, int grid, cudaStream_t stream);

}  // namespace blocksparse::cuda::sm90
