// Launching the kernel for small batches (matmul_sm90_strips.cuh); one instantiation a file.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common.h"

namespace blocksparse::cuda::sm90 {

struct StripParams {
  static constexpr int kRows = 64;  // the largest batch
  CUtensorMap x;                    // boxes of 64 features by box_rows entries; axis 0: by 64 entries
  const void* weights;
  const int32_t* lines;  // see StripPlan
  void* y;
  int batch, box_rows;
  int features;  // of y
  int slabs;     // of x
  int clusters, parts;
};

template <int kB, bool kHalf>
cudaError_t LaunchStrips(bool axis0, bool transposed, const StripParams& p, cudaStream_t stream);

}  // namespace blocksparse::cuda::sm90
