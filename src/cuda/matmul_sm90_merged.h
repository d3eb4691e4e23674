// Products with small blocks by way of larger ones: neighbours go together into blocks of 16 to 128, zeros in between,
// in scratch memory, and the kernels for those do the rest.
#pragma once

#include "kernels/matmul.h"

namespace blocksparse::cuda::sm90 {

// Whether any larger block divides the features.
bool CanMerge(const MatmulProblem& problem);
// Decides on the size, blocks of 16 left as they are among the possibilities, from how full larger blocks would be.
Status PlanMerged(const MatmulProblem& problem, const LayoutTable& table, MatmulPlan* plan);
int64_t MergedWorkspaceBytes(const MatmulProblem& problem, const MatmulPlan& plan, const Chip& chip);
Status RunMerged(const MatmulProblem& problem, const MatmulPlan& plan, const int32_t* words, void* workspace,
                 const Chip& chip, Stream stream);

}  // namespace blocksparse::cuda::sm90
