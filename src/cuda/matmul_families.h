// The kernel families behind cuda::ChooseMatmul and its fellows. Families 0 to 99 are sm80's, 100 and up sm90's.
#pragma once

#include "kernels/matmul.h"

namespace blocksparse {
namespace cuda {

// mma.sync and cp.async: every combination, on every chip of compute capability 8.0 and newer.
namespace sm80 {
MatmulChoice Choose(const MatmulProblem& problem, const LayoutTable& table, const Chip& chip);
Status Plan(const MatmulProblem& problem, const LayoutTable& table, const MatmulChoice& choice, MatmulPlan* plan);
int64_t WorkspaceBytes(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan,
                       const Chip& chip);
Status Run(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan, const int32_t* words,
           void* workspace, const Chip& chip, Stream stream);
}  // namespace sm80

// wgmma and TMA: Hopper alone, and only what Supports says.
namespace sm90 {
constexpr int kFirstFamily = 100;
bool Supports(const MatmulProblem& problem, const Chip& chip);
MatmulChoice Choose(const MatmulProblem& problem, const LayoutTable& table, const Chip& chip);
Status Plan(const MatmulProblem& problem, const LayoutTable& table, const MatmulChoice& choice, MatmulPlan* plan);
int64_t WorkspaceBytes(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan,
                       const Chip& chip);
Status Run(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan, const int32_t* words,
           void* workspace, const Chip& chip, Stream stream);
}  // namespace sm90

}  // namespace cuda
}  // namespace blocksparse
