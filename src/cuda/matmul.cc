// Which family of kernels runs a product, and the way to it.
#include "kernels/matmul.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda/matmul_sm80.h"
#include "cuda/matmul_sm90.h"

namespace blocksparse::cuda {

// Native kernels where they support the problem and have been checked on a device. BLOCKSPARSE_CUDA_PATH=sm80 takes the
// portable ones on any chip, sm90 all native ones, to test and to compare; BLOCKSPARSE_PRINT_CHOICE=1 tells what was taken.
MatmulChoice ChooseMatmul(const MatmulProblem& problem, const LayoutTable& table, const Chip& chip) {
  const char* wish = std::getenv("BLOCKSPARSE_CUDA_PATH");
  const std::string path = wish ? wish : "";
  bool native = path != "sm80" && sm90::Supports(problem, chip);
  MatmulChoice choice;
  if (native) {
    choice = sm90::Choose(problem, table, chip);
    native = path == "sm90" || sm90::Checked(problem, choice, chip);
  }
  if (!native) choice = sm80::Choose(problem, table, chip);
  const char* print = std::getenv("BLOCKSPARSE_PRINT_CHOICE");
  if (print != nullptr && std::string(print) == "1")
    std::fprintf(stderr, "blocksparse: product %d, axis %d, blocks of %d, N %lld: %s, family %d, split %d\n",
                 int(problem.product), problem.axis, problem.bsize, static_cast<long long>(problem.n[0]), choice.name,
                 choice.family, choice.split);
  return choice;
}

Status PlanMatmul(const MatmulProblem& problem, const LayoutTable& table, const MatmulChoice& choice,
                  MatmulPlan* plan) {
  if (sm90::IsFamily(choice.family)) return sm90::Plan(problem, table, choice, plan);
  return sm80::Plan(problem, table, choice, plan);
}

int64_t MatmulWorkspaceBytes(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan,
                             const Chip& chip) {
  if (sm90::IsFamily(choice.family)) return sm90::WorkspaceBytes(problem, choice, plan, chip);
  return sm80::WorkspaceBytes(problem, choice, plan, chip);
}

Status RunMatmul(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan, const int32_t* words,
                 void* workspace, const Chip& chip, Stream stream) {
  if (sm90::IsFamily(choice.family)) return sm90::Run(problem, choice, plan, words, workspace, chip, stream);
  return sm80::Run(problem, choice, plan, words, workspace, chip, stream);
}

}  // namespace blocksparse::cuda
