// Launching the kernel of rounds (matmul_sm90_rounds.cuh); one instantiation a file.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace blocksparse::cuda::sm90 {

struct RoundsParams {
  CUtensorMap x, y;
  const void* w;
  const int32_t* group;  // [groups][RoundsPlan::kGroupWords]
  const int32_t* stage;  // [stages][RoundsPlan::kStageWords]
  int groups, row_tiles;
  int heavy;          // the first groups, which come first over the whole batch
  uint32_t* counter;  // zero at launch, hands out tiles; null: tile t goes to thread block t
};

template <bool kHalf>
cudaError_t LaunchRounds(bool axis0, bool transposed, const RoundsParams& p, int grid, cudaStream_t stream);

}  // namespace blocksparse::cuda::sm90
