// Which family of kernels runs a product, and the way to it.
#include "kernels/matmul.h"

#include <cstdlib>
#include <string>

#include "cuda/matmul_families.h"

namespace blocksparse {
namespace cuda {

MatmulChoice ChooseMatmul(const MatmulProblem& problem, const LayoutTable& table, const Chip& chip) {
#if __has_include("cuda/matmul_sm90.h")
  // BLOCKSPARSE_CUDA_PATH=sm80 takes the portable kernels on a chip that has native ones: to test and to compare.
  const char* path = std::getenv("BLOCKSPARSE_CUDA_PATH");
  const bool portable = path != nullptr && std::string(path) == "sm80";
  if (!portable && sm90::Supports(problem, chip)) return sm90::Choose(problem, table, chip);
#endif
  return sm80::Choose(problem, table, chip);
}

Status PlanMatmul(const MatmulProblem& problem, const LayoutTable& table, const MatmulChoice& choice,
                  MatmulPlan* plan) {
#if __has_include("cuda/matmul_sm90.h")
  if (choice.family >= sm90::kFirstFamily) return sm90::Plan(problem, table, choice, plan);
#endif
  return sm80::Plan(problem, table, choice, plan);
}

int64_t MatmulWorkspaceBytes(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan,
                             const Chip& chip) {
#if __has_include("cuda/matmul_sm90.h")
  if (choice.family >= sm90::kFirstFamily) return sm90::WorkspaceBytes(problem, choice, plan, chip);
#endif
  return sm80::WorkspaceBytes(problem, choice, plan, chip);
}

Status RunMatmul(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan, const int32_t* words,
                 void* workspace, const Chip& chip, Stream stream) {
#if __has_include("cuda/matmul_sm90.h")
  if (choice.family >= sm90::kFirstFamily) return sm90::Run(problem, choice, plan, words, workspace, chip, stream);
#endif
  return sm80::Run(problem, choice, plan, words, workspace, chip, stream);
}

}  // namespace cuda
}  // namespace blocksparse
