// Launching the weight gradient's kernels (matmul_sm90_weight_grad.cuh); one instantiation a file.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common.h"

namespace blocksparse::cuda::sm90 {

// Batch entries a step. Short steps leave room for several stages; on axis 0 they are the length of the copied rows.
constexpr int WeightGradTokens(int bsize, int axis) { return bsize == 32 || (bsize == 64 && axis == 1) ? 32 : 64; }

// Whole rounds first: item i goes to thread block i modulo the grid. The items left over, fewer than thread blocks, are
// cut along the batch: each has an owner, which takes its first `own` steps; the helpers share the other steps of all of
// them evenly, each one stretch. A helper leaves its sums in `partial`; the owner adds them to its own in order. Helpers
// are the first thread blocks, so that whoever waits does so for one that started earlier.
struct WeightGradParams {
  static constexpr int kMaxPairs = 16;
  CUtensorMap x[kMaxPairs], dy[kMaxPairs];
  int steps[kMaxPairs];  // of each pair, before it: the pair's first step
  int pairs, total_steps;
  const int32_t* item;  // [items][WeightGradPlan::kItemWords]
  int items, whole;     // whole: of the items, those of whole rounds
  int helpers, own;
  int split;       // in float32: instead, parts that the items left over are cut in
  float* partial;  // [helpers + items - whole] sums of an item: those of helper h for left-over item i at h + i
  uint32_t* done;  // for each, how many warps have stored theirs; zero at launch
  const float *gate, *addend;
  void* out;
  DType out_dtype;
};

template <int kB, bool kHalf>
cudaError_t LaunchWeightGrad(bool axis0, const WeightGradParams& p, int grid, cudaStream_t stream);

}  // namespace blocksparse::cuda::sm90
