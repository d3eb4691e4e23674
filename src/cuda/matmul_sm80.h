// The portable kernel family behind cuda::ChooseMatmul and its fellows: mma.sync and cp.async, every combination, on
// every chip of compute capability 8.0 and newer. Its families are numbered 0 to 99; Hopper's are in matmul_sm90.h.
#pragma once

#include "kernels/matmul.h"

namespace blocksparse::cuda::sm80 {

MatmulChoice Choose(const MatmulProblem& problem, const LayoutTable& table, const Chip& chip);
Status Plan(const MatmulProblem& problem, const LayoutTable& table, const MatmulChoice& choice, MatmulPlan* plan);
int64_t WorkspaceBytes(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan,
                       const Chip& chip);
Status Run(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan, const int32_t* words,
           void* workspace, const Chip& chip, Stream stream);

}  // namespace blocksparse::cuda::sm80
