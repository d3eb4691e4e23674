// Launching the float32 weight gradient (matmul_sm90_float_grad.cuh); one instantiation a file.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/matmul_sm90_float.h"
#include "cuda/matmul_sm90_weight_grad.h"
#include "kernels/plan_sm90.h"

namespace blocksparse::cuda::sm90 {

Status PlanFloatGrad(const MatmulProblem& problem, bool exact, const LayoutTable& table, MatmulPlan* plan);
int64_t FloatGradWorkspaceBytes(const MatmulProblem& problem, bool exact, const MatmulPlan& plan, const Chip& chip);
Status RunFloatGrad(const MatmulProblem& problem, bool exact, const MatmulPlan& plan, const int32_t* words,
                    void* workspace, const Chip& chip, Stream stream);
bool FloatGradPays(const MatmulProblem& problem, const Chip& chip);

// Slots of a set of blocks: exact sums need registers for a slot's part as well.
constexpr int FloatGradSlots(bool exact, int bsize) {
  return !exact ? WeightGradPlan::Slots(bsize) : bsize == 128 ? 2 : 8;
}
constexpr int FloatGradMaxTiles(bool exact, int bsize) {
  return !exact ? WeightGradPlan::MaxTiles(bsize) : bsize == 128 ? 4 : bsize == 64 ? 9 : 18;
}
// Batch entries a step: lines of 128 bytes, or of 64 where the ring would not hold two steps.
constexpr int FloatGradTokens(bool exact, int bsize) { return !exact && bsize == 32 ? 16 : 32; }

struct FloatGradParams {
  WeightGradParams base;
  int x_plane[WeightGradParams::kMaxPairs];  // rows of a plane, of each pair that is not empty
  int dy_plane[WeightGradParams::kMaxPairs];
  uint32_t* odd;
};

template <int kB, bool kExact>
cudaError_t LaunchFloatGrad(const FloatGradParams& p, int grid, cudaStream_t stream);

}  // namespace blocksparse::cuda::sm90
