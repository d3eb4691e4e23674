#include <algorithm>
#include <string>

#include "cuda/arch/sm90_tensor_map.h"
#include "cuda/matmul_sm90.h"
#include "cuda/matmul_sm90_rounds.h"
#include "cuda/matmul_sm90_union.h"
#include "cuda/matmul_sm90_weight_grad.h"
#include "kernels/plan_sm90.h"

namespace blocksparse::cuda::sm90 {
namespace {

Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return Status::Internal(std::string(what) + ": " + cudaGetErrorString(error));
}

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Where there are more tiles than thread blocks, a counter hands them out: tiles differ in length.
Status TileCounter(int64_t tiles, void* workspace, const Chip& chip, cudaStream_t stream, uint32_t** counter) {
  *counter = nullptr;
  if (tiles <= chip.multiprocessors) return {};
  *counter = static_cast<uint32_t*>(workspace);
  return FromCuda(cudaMemsetAsync(*counter, 0, sizeof(uint32_t), stream), "cudaMemsetAsync");
}

Status RunUnion(const MatmulProblem& p, const MatmulPlan& plan, const int32_t* words, void* workspace, const Chip& chip,
                cudaStream_t stream) {
  const int64_t N = p.n[0];
  const bool transposed = p.product == Product::kInputGrad;
  const int64_t in = transposed ? p.K() : p.C(), out = transposed ? p.C() : p.K();
  const int unit = std::min(p.bsize, 64);
  UnionParams u;
  u.chunked = p.axis == 0 && N % 64 == 0;
  const int chunks = u.chunked ? 4 : 0;
  if (p.axis == 1) {
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.x, p.dtype, p.a[0], N, in, 256, unit));
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.x_wide, p.dtype, p.a[0], N, in, 256, 64));
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.y, p.dtype, p.out, N, out, 256, 64));
  } else {
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.x, p.dtype, p.a[0], in, N, unit, 64, chunks));
    u.x_wide = u.x;
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.y, p.dtype, p.out, out, N, 64, 64, chunks));
  }
  const int weight_rows = p.bsize == 128 && !transposed ? 64 : p.bsize;
  BLOCKSPARSE_RETURN_IF_ERROR(
      MakeTensorMap(&u.w, p.dtype, p.b[0], int64_t(p.blocks) * p.bsize, p.bsize, weight_rows, unit));
  u.group = words;
  u.stage = words + plan.numbers[2];
  u.groups = int(plan.numbers[0]);
  u.heavy = int(plan.numbers[1]);
  u.row_tiles = int((N + 255) / 256);
  const int64_t tiles = int64_t(u.groups) * u.row_tiles;
  if (tiles > INT32_MAX) return Status::Unimplemented("batch too large for one launch: " + std::to_string(N));
  BLOCKSPARSE_RETURN_IF_ERROR(TileCounter(tiles, workspace, chip, stream, &u.counter));
  const int grid = int(std::min<int64_t>(tiles, chip.multiprocessors));
  const bool half = p.dtype == DType::kFloat16, axis0 = p.axis == 0;
  auto launch = p.bsize == 128  ? (half ? LaunchUnion<128, true> : LaunchUnion<128, false>)
                : p.bsize == 64 ? (half ? LaunchUnion<64, true> : LaunchUnion<64, false>)
                                : (half ? LaunchUnion<32, true> : LaunchUnion<32, false>);
  return FromCuda(launch(axis0, transposed, u, grid, stream), "union-tile product");
}

Status RunRounds(const MatmulProblem& p, const MatmulPlan& plan, const int32_t* words, void* workspace, const Chip& chip,
                 cudaStream_t stream) {
  const int64_t N = p.n[0];
  const bool transposed = p.product == Product::kInputGrad;
  const int64_t in = transposed ? p.K() : p.C(), out = transposed ? p.C() : p.K();
  RoundsParams r;
  if (p.axis == 1) {
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&r.x, p.dtype, p.a[0], N, in, 128, 64));
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&r.y, p.dtype, p.out, N, out, 128, 64));
  } else {
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&r.x, p.dtype, p.a[0], in, N, 64, 64));
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&r.y, p.dtype, p.out, out, N, 64, 64));
  }
  r.w = p.b[0];
  r.group = words;
  r.stage = words + plan.numbers[1];
  r.groups = int(plan.numbers[0]);
  r.row_tiles = int((N + 127) / 128);
  const int64_t tiles = int64_t(r.groups) * r.row_tiles;
  if (tiles > INT32_MAX) return Status::Unimplemented("batch too large for one launch: " + std::to_string(N));
  BLOCKSPARSE_RETURN_IF_ERROR(TileCounter(tiles, workspace, chip, stream, &r.counter));
  const int grid = int(std::min<int64_t>(tiles, chip.multiprocessors));
  auto launch = p.dtype == DType::kFloat16 ? LaunchRounds<true> : LaunchRounds<false>;
  return FromCuda(launch(p.axis == 0, transposed, r, grid, stream), "product in rounds");
}

// How a weight gradient's items share the multiprocessors: whole rounds of one item each, then the rest in parts, so
// that the last round is full too.
struct WeightGradSchedule {
  int items, whole, split;
  int64_t partial_bytes;
};

int64_t Steps(const MatmulProblem& p, int64_t n) {
  const int tokens = WeightGradTokens(p.bsize, p.axis);
  return (n + tokens - 1) / tokens;
}

WeightGradSchedule ScheduleWeightGrad(const MatmulProblem& p, const MatmulPlan& plan, const Chip& chip) {
  WeightGradSchedule s{int(plan.numbers[0]), 0, 1, 0};
  int64_t steps = 0;
  for (int i = 0; i < p.pairs; ++i) steps += Steps(p, p.n[i]);
  s.whole = s.items / chip.multiprocessors * chip.multiprocessors;
  const int rest = s.items - s.whole, sms = chip.multiprocessors;
  // In rounds of whole items; each further part costs the writing and reading of the partial sums.
  double best = 0.97;
  for (int split = 2; rest > 0 && split <= 8 && steps >= 8 * split; ++split) {
    const double rounds = double((rest * split + sms - 1) / sms) / split + 0.03 * split;
    if (rounds < best) best = rounds, s.split = split;
  }
  if (s.split == 1) s.whole = s.items;
  const int64_t blocks = WeightGradPlan::Slots(p.bsize) * (p.bsize == 32 ? 2 : 1);
  s.partial_bytes = int64_t(s.items - s.whole) * s.split * blocks * p.bsize * p.bsize * sizeof(float);
  return s;
}

Status RunWeightGrad(const MatmulProblem& p, const MatmulPlan& plan, const int32_t* words, void* workspace, const Chip& chip,
                     cudaStream_t stream) {
  WeightGradParams w;
  const int tokens = WeightGradTokens(p.bsize, p.axis), width = std::min(p.bsize, 64);
  w.pairs = w.total_steps = 0;
  for (int i = 0; i < p.pairs; ++i) {
    const int64_t N = p.n[i];
    if (N == 0) continue;
    w.steps[w.pairs] = w.total_steps;
    if (p.axis == 1) {
      BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&w.x[w.pairs], p.dtype, p.a[i], N, p.C(), tokens, width));
      BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&w.dy[w.pairs], p.dtype, p.b[i], N, p.K(), tokens, width));
    } else {
      BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&w.x[w.pairs], p.dtype, p.a[i], p.C(), N, p.bsize, tokens));
      BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&w.dy[w.pairs], p.dtype, p.b[i], p.K(), N, p.bsize, tokens));
    }
    w.total_steps += int(Steps(p, N));
    ++w.pairs;
  }
  const WeightGradSchedule s = ScheduleWeightGrad(p, plan, chip);
  w.item = words;
  w.items = s.items;
  w.whole = s.whole;
  w.split = s.split;
  w.partial = static_cast<float*>(workspace);
  w.gate = p.gate;
  w.addend = p.addend;
  w.out = p.out;
  w.out_dtype = p.out_dtype;
  const int units = s.whole + (s.items - s.whole) * s.split, grid = std::min(units, chip.multiprocessors);
  const bool half = p.dtype == DType::kFloat16, axis0 = p.axis == 0;
  auto launch = p.bsize == 128  ? (half ? LaunchWeightGrad<128, true> : LaunchWeightGrad<128, false>)
                : p.bsize == 64 ? (half ? LaunchWeightGrad<64, true> : LaunchWeightGrad<64, false>)
                                : (half ? LaunchWeightGrad<32, true> : LaunchWeightGrad<32, false>);
  BLOCKSPARSE_RETURN_IF_ERROR(FromCuda(launch(axis0, w, grid, stream), "weight gradient"));
  if (s.whole < s.items) return FromCuda(FinishWeightGrad(p.bsize, w, stream), "weight gradient, sum of parts");
  return {};
}

}  // namespace

bool Supports(const MatmulProblem& p, const Chip& chip) {
  if (chip.compute_capability != 90 || p.dtype == DType::kFloat32 || p.bsize < 16) return false;
  // The copy engine wants bases and rows in multiples of 16 bytes, and counts in 32 bits.
  const bool weight_grad = p.product == Product::kWeightGrad;
  int64_t total = 0;
  for (int i = 0; i < p.pairs; ++i) {
    if (!Aligned(p.a[i]) || !Aligned(p.b[i]) || (p.axis == 0 && p.n[i] % 8 != 0)) return false;
    total += p.n[i];
  }
  if (!Aligned(p.out) || total >= INT32_MAX - 4096 || int64_t(p.blocks) * p.bsize >= INT32_MAX) return false;
  if (weight_grad) return p.bsize >= 32 && p.pairs <= WeightGradParams::kMaxPairs && Aligned(p.addend);
  return p.gate == nullptr;
}

MatmulChoice Choose(const MatmulProblem& p, const LayoutTable&, const Chip&) {
  MatmulChoice choice;
  if (p.product == Product::kWeightGrad) {
    choice.family = kWeightGrad;
    choice.name = "sm90 sets of blocks";
  } else if (p.bsize == 16) {
    choice.family = kRounds;
    choice.tile = 128;
    choice.name = "sm90 rounds";
  } else {
    choice.family = kUnion;
    choice.tile = 256;
    choice.name = "sm90 union tiles";
  }
  return choice;
}

Status Plan(const MatmulProblem& p, const LayoutTable& table, const MatmulChoice& choice, MatmulPlan* plan) {
  plan->family = choice.family;
  if (choice.family == kWeightGrad) return PlanWeightGrad(table, p.axis, p.bsize, plan);
  if (choice.family == kRounds) return PlanRounds(table, p.product, plan);
  return PlanUnion(table, p.product, p.axis, p.bsize, plan);
}

int64_t WorkspaceBytes(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, const Chip& chip) {
  return choice.family == kWeightGrad ? ScheduleWeightGrad(p, plan, chip).partial_bytes : int64_t(sizeof(uint32_t));
}

Status Run(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, const int32_t* words, void* workspace,
           const Chip& chip, Stream stream) {
  if (choice.family == kWeightGrad) return p.blocks == 0 ? Status() : RunWeightGrad(p, plan, words, workspace, chip, stream);
  if (p.n[0] == 0) return {};
  if (p.blocks == 0) {
    const int64_t out = p.n[0] * (p.product == Product::kForward ? p.K() : p.C());
    return FromCuda(cudaMemsetAsync(p.out, 0, out * SizeOf(p.dtype), stream), "cudaMemsetAsync");
  }
  return choice.family == kRounds ? RunRounds(p, plan, words, workspace, chip, stream)
                                  : RunUnion(p, plan, words, workspace, chip, stream);
}

}  // namespace blocksparse::cuda::sm90
