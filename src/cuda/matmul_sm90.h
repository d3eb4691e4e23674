// The block-sparse product on Hopper's own instructions. What it does not support goes to the portable kernels.
#pragma once

#include "kernels/matmul.h"

namespace blocksparse::cuda::sm90 {

// Families of this file's kernels, apart from those of the portable ones.
enum Family : int {
  kUnion = 100,
  kWeightGrad,
  kRounds,
  kMerged,
  kFloatTf32,
  kFloatExact,
  kFloatGradTf32,
  kFloatGradExact,
  kGatedUnion,
  kStrips,
  kFamilies
};
constexpr bool IsFamily(int family) { return family >= kUnion && family < kFamilies; }

bool Supports(const MatmulProblem& problem, const Chip& chip);
// Whether this very choice has been checked on a device, as the kernel stands, and is expected to be faster than the
// portable kernel. The others run where BLOCKSPARSE_CUDA_PATH asks for sm90.
bool Checked(const MatmulProblem& problem, const MatmulChoice& choice, const Chip& chip);
MatmulChoice Choose(const MatmulProblem& problem, const LayoutTable& table, const Chip& chip);
Status Plan(const MatmulProblem& problem, const LayoutTable& table, const MatmulChoice& choice, MatmulPlan* plan);
int64_t WorkspaceBytes(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan,
                       const Chip& chip);
Status Run(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan, const int32_t* words,
           void* workspace, const Chip& chip, Stream stream);

}  // namespace blocksparse::cuda::sm90
