// Partial sums that meet in order: the second launch of the kernels that cut a sum over many thread blocks.
#pragma once

#include "kernels/common.h"

namespace blocksparse {
namespace cuda {

// sum[c] = partial[0][c] + partial[1][c] + ... of two arrays [parts, channels]; a null sum is left out. May start while
// the kernel before it in the stream still runs, and waits for that one's results.
Status SumParts(const float* partial0, float* sum0, const float* partial1, float* sum1, int64_t parts, int64_t channels,
                Stream stream);

}  // namespace cuda
}  // namespace blocksparse
