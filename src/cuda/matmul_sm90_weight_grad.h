// Launching the weight gradient's kernels (matmul_sm90_weight_grad.cuh); one instantiation a file.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common.h"

namespace blocksparse::cuda::sm90 {

// Batch entries a step. Short steps leave room for several stages; on axis 0 they are the length of the copied rows.
constexpr int WeightGradTokens(int bsize, int axis) { return bsize == 32 || (bsize == 64 && axis == 1) ? 32 : 64; }

struct WeightGradParams {
  static constexpr int kMaxPairs = 16;
  CUtensorMap x[kMaxPairs], dy[kMaxPairs];
  int steps[kMaxPairs];  // of each pair, before it: the pair's first step
  int pairs, total_steps;
  const int32_t* item;  // [items][WeightGradPlan::kItemWords]
  int items, whole;     // the first `whole` items take one thread block each, the rest `split` parts each
  int split;
  float* partial;  // [items - whole][split][blocks of an item][b, b]
  const float *gate, *addend;
  void* out;
  DType out_dtype;
};

template <int kB, bool kHalf>
cudaError_t LaunchWeightGrad(bool axis0, const WeightGradParams& p, int grid, cudaStream_t stream);
// Adds the parts of the items that were split, in order.
cudaError_t FinishWeightGrad(int bsize, const WeightGradParams& p, cudaStream_t stream);

}  // namespace blocksparse::cuda::sm90
