#include <algorithm>
#include <string>

#include "cuda/arch/sm90_tensor_map.h"
#include "cuda/matmul_sm90.h"
#include "cuda/matmul_sm90_union.h"
#include "kernels/plan_sm90.h"

namespace blocksparse::cuda::sm90 {
namespace {

Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return Status::Internal(std::string(what) + ": " + cudaGetErrorString(error));
}

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

Status RunUnion(const MatmulProblem& p, const MatmulPlan& plan, const int32_t* words, void* workspace, const Chip& chip,
                cudaStream_t stream) {
  const int64_t N = p.n[0];
  const bool transposed = p.product == Product::kInputGrad;
  const int64_t in = transposed ? p.K() : p.C(), out = transposed ? p.C() : p.K();
  const int unit = std::min(p.bsize, 64);
  UnionParams u;
  if (p.axis == 1) {
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.x, p.dtype, p.a[0], N, in, 256, unit));
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.x_wide, p.dtype, p.a[0], N, in, 256, 64));
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.y, p.dtype, p.out, N, out, 128, 64));
  } else {
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.x, p.dtype, p.a[0], in, N, unit, 64));
    u.x_wide = u.x;
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.y, p.dtype, p.out, out, N, 64, 64));
  }
  const int weight_rows = p.bsize == 128 && !transposed ? 64 : p.bsize;
  BLOCKSPARSE_RETURN_IF_ERROR(
      MakeTensorMap(&u.w, p.dtype, p.b[0], int64_t(p.blocks) * p.bsize, p.bsize, weight_rows, unit));
  u.group = words;
  u.stage = words + plan.numbers[2];
  u.groups = int(plan.numbers[0]);
  u.heavy = int(plan.numbers[1]);
  u.row_tiles = int((N + 255) / 256);
  u.counter = nullptr;
  const int64_t tiles = int64_t(u.groups) * u.row_tiles;
  if (tiles > INT32_MAX) return Status::Unimplemented("batch too large for one launch: " + std::to_string(N));
  if (tiles > chip.multiprocessors) {
    u.counter = static_cast<uint32_t*>(workspace);
    BLOCKSPARSE_RETURN_IF_ERROR(FromCuda(cudaMemsetAsync(u.counter, 0, sizeof(uint32_t), stream), "cudaMemsetAsync"));
  }
  const int grid = int(std::min<int64_t>(tiles, chip.multiprocessors));
  const bool half = p.dtype == DType::kFloat16, axis0 = p.axis == 0;
  auto launch = p.bsize == 128  ? (half ? LaunchUnion<128, true> : LaunchUnion<128, false>)
                : p.bsize == 64 ? (half ? LaunchUnion<64, true> : LaunchUnion<64, false>)
                                : (half ? LaunchUnion<32, true> : LaunchUnion<32, false>);
  return FromCuda(launch(axis0, transposed, u, grid, stream), "union-tile product");
}

}  // namespace

bool Supports(const MatmulProblem& p, const Chip& chip) {
  if (chip.compute_capability != 90 || p.dtype == DType::kFloat32 || p.gate != nullptr) return false;
  if (p.product == Product::kWeightGrad) return false;
  if (p.bsize < 32) return false;
  // The copy engine wants bases and rows in multiples of 16 bytes.
  if (!Aligned(p.a[0]) || !Aligned(p.b[0]) || !Aligned(p.out)) return false;
  if (p.axis == 0 && p.n[0] % 8 != 0) return false;
  return p.n[0] < INT32_MAX - 256 && int64_t(p.blocks) * p.bsize < INT32_MAX;
}

MatmulChoice Choose(const MatmulProblem&, const LayoutTable&, const Chip&) {
  MatmulChoice choice;
  choice.family = kUnion;
  choice.tile = 256;
  choice.name = "sm90 union tiles";
  return choice;
}

Status Plan(const MatmulProblem& p, const LayoutTable& table, const MatmulChoice& choice, MatmulPlan* plan) {
  plan->family = choice.family;
  return PlanUnion(table, p.product, p.axis, p.bsize, plan);
}

int64_t WorkspaceBytes(const MatmulProblem&, const MatmulChoice&, const MatmulPlan&, const Chip&) { return 256; }

Status Run(const MatmulProblem& p, const MatmulChoice&, const MatmulPlan& plan, const int32_t* words, void* workspace,
           const Chip& chip, Stream stream) {
  if (p.n[0] == 0) return {};
  if (p.blocks == 0) {
    const int64_t out = p.n[0] * (p.product == Product::kForward ? p.K() : p.C());
    return FromCuda(cudaMemsetAsync(p.out, 0, out * SizeOf(p.dtype), stream), "cudaMemsetAsync");
  }
  return RunUnion(p, plan, words, workspace, chip, stream);
}

}  // namespace blocksparse::cuda::sm90
