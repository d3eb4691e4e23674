// Mending what a faster way of computing gets wrong: infinity and NaN where zeros were multiplied in or operands were
// split, and what is too small to split.
#pragma once

#include "kernels/matmul.h"

namespace blocksparse::cuda::sm90 {

// Computes the elements of a forward product or an input gradient that are not finite anew, from the blocks that are
// there. With `flags`, two words in device memory, only where flags[1] says that there are such elements, and then also
// those under 2^-100; where flags[0] says that operands were too small to split, also those under 2^-60 and zeros.
// lists: the pointers [outputs + 1], input blocks and ids of the output blocks' lists, in device memory.
Status MendProduct(const MatmulProblem& problem, const int32_t* lists, const uint32_t* flags, Stream stream);

// The same for a float32 weight gradient of at most 16 pairs. update: [blocks][2] row and column, in device memory.
Status MendWeightGrad(const MatmulProblem& problem, const int32_t* update, const uint32_t* flags, Stream stream);

}  // namespace blocksparse::cuda::sm90
