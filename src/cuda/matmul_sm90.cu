#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda/arch/sm90_tensor_map.h"
#include "cuda/matmul_sm90.h"
#include "cuda/matmul_sm90_float.h"
#include "cuda/matmul_sm90_float_grad.h"
#include "cuda/matmul_sm90_merged.h"
#include "cuda/matmul_sm90_rounds.h"
#include "cuda/matmul_sm90_small.h"
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
  const int rows = UnionPlan::kRows, chunks = u.chunked ? rows / 64 : 0;
  if (p.axis == 1) {
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.x, p.dtype, p.a[0], N, in, rows, unit));
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.x_wide, p.dtype, p.a[0], N, in, rows, 64));
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&u.y, p.dtype, p.out, N, out, rows, 64));
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
  u.row_tiles = int((N + rows - 1) / rows);
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

Status RunSmall(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, const int32_t* words,
                cudaStream_t stream) {
  const int64_t N = p.n[0];
  const bool transposed = p.product == Product::kInputGrad;
  const int64_t in = transposed ? p.K() : p.C(), out = transposed ? p.C() : p.K();
  const int unit = std::min(p.bsize, 64);
  SmallParams s;
  if (p.axis == 1) {
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&s.x, p.dtype, p.a[0], N, in, 64, unit));
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&s.x_wide, p.dtype, p.a[0], N, in, 64, 64));
  } else {
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&s.x, p.dtype, p.a[0], in, N, unit, 64));
    s.x_wide = s.x;
  }
  const int weight_rows = p.bsize == 128 && !transposed ? 64 : p.bsize;
  BLOCKSPARSE_RETURN_IF_ERROR(
      MakeTensorMap(&s.w, p.dtype, p.b[0], int64_t(p.blocks) * p.bsize, p.bsize, weight_rows, unit));
  s.group = words;
  s.stage = words + plan.numbers[2];
  s.y = p.out;
  s.batch = int(N);
  s.features = int(out);
  s.groups = int(plan.numbers[0]);
  s.row_tiles = int((N + 63) / 64);
  s.split = choice.split;
  const bool half = p.dtype == DType::kFloat16;
  auto launch = p.bsize == 128  ? (half ? LaunchSmall<128, true> : LaunchSmall<128, false>)
                : p.bsize == 64 ? (half ? LaunchSmall<64, true> : LaunchSmall<64, false>)
                                : (half ? LaunchSmall<32, true> : LaunchSmall<32, false>);
  return FromCuda(launch(p.axis == 0, transposed, s, stream), "product of a small batch");
}

Status RunRounds(const MatmulProblem& p, const MatmulPlan& plan, const int32_t* words, void* workspace,
                 const Chip& chip, cudaStream_t stream) {
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
  r.heavy = int(plan.numbers[2]);
  r.row_tiles = int((N + RoundsPlan::kRows - 1) / RoundsPlan::kRows);
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
  // In microseconds: 54 kB arrive at a multiprocessor in each; the partial sums are written and read at 3 TB/s by a
  // second kernel, which takes 8 to begin with.
  const double tiles = p.bsize == 128 ? 3 : p.bsize == 64 ? 10 : 30;
  const double round = steps * tiles * WeightGradTokens(p.bsize, p.axis) * p.bsize * 2 / 54e3;
  const int64_t item_bytes = int64_t(WeightGradPlan::Slots(p.bsize)) * (p.bsize == 32 ? 2 : 1) * p.bsize * p.bsize * 4;
  double best = round;
  for (int split = 2; rest > 0 && split <= 8 && steps >= 8 * split; ++split) {
    const double us =
        double((rest * split + sms - 1) / sms) / split * round + 8 + 2.0 * rest * split * item_bytes / 3e6;
    if (us < best) best = us, s.split = split;
  }
  if (s.split == 1) s.whole = s.items;
  s.partial_bytes = (s.items - s.whole) * s.split * item_bytes;
  return s;
}

Status RunWeightGrad(const MatmulProblem& p, const MatmulPlan& plan, const int32_t* words, void* workspace,
                     const Chip& chip, cudaStream_t stream) {
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
  if (chip.compute_capability != 90) return false;
  if (p.dtype == DType::kFloat32 && p.bsize < (p.tf32 && p.product != Product::kWeightGrad ? 16 : 32)) return false;
  // The copy engine wants bases and rows in multiples of 16 bytes, and counts in 32 bits.
  const bool weight_grad = p.product == Product::kWeightGrad;
  int64_t total = 0;
  for (int i = 0; i < p.pairs; ++i) {
    if (!Aligned(p.a[i]) || !Aligned(p.b[i]) || (p.axis == 0 && p.n[i] % (16 / SizeOf(p.dtype)) != 0)) return false;
    total += p.n[i];
  }
  if (!Aligned(p.out) || total >= INT32_MAX - 4096 || int64_t(p.blocks) * p.bsize >= INT32_MAX) return false;
  if (p.dtype != DType::kFloat32 && p.bsize <= 16 && !CanMerge(p)) return false;
  if (weight_grad) return p.pairs <= WeightGradParams::kMaxPairs && Aligned(p.addend);
  return p.gate == nullptr;
}

bool Checked(const MatmulProblem& p, const MatmulChoice& choice, const Chip& chip) {
  const bool plain = p.gate == nullptr && p.addend == nullptr;
  switch (choice.family) {
    case kFloatTf32:
    case kFloatExact: return FloatPays(p, chip);
    case kFloatGradTf32:
    case kFloatGradExact: return plain && FloatGradPays(p, chip);
  }
  if (p.dtype != DType::kBFloat16) return false;
  if (choice.family == kMerged) {
    // Blocks of 8 and 16 need batches that fill the chip.
    const int64_t outputs = p.product == Product::kInputGrad ? p.C() : p.K();
    int64_t total = 0;
    for (int i = 0; i < p.pairs; ++i) total += p.n[i];
    return plain &&
           total * (outputs / (16 * RoundsPlan::kColumns) + 1) >= int64_t(RoundsPlan::kRows) * chip.multiprocessors / 2;
  }
  if (choice.family == kWeightGrad) return plain;
  return choice.family == kUnion && choice.tile == UnionPlan::kRows;
}

MatmulChoice Choose(const MatmulProblem& p, const LayoutTable& table, const Chip& chip) {
  MatmulChoice choice;
  char why[160] = "";
  if (p.dtype == DType::kFloat32 && p.product == Product::kWeightGrad) {
    choice.family = p.tf32 ? kFloatGradTf32 : kFloatGradExact;
    choice.name = p.tf32 ? "sm90 sets of blocks, tf32" : "sm90 sets of blocks, three bfloat16 to a float32";
  } else if (p.dtype == DType::kFloat32) {
    choice.family = p.tf32 ? kFloatTf32 : kFloatExact;
    choice.tile = FloatRows(!p.tf32, p.bsize);
    choice.name = p.tf32 ? "sm90 union tiles, tf32" : "sm90 union tiles, three bfloat16 to a float32";
  } else if (p.bsize <= 16) {
    choice.family = kMerged;  // or rounds: the plan decides
    choice.name =
        p.bsize == 16 && p.product != Product::kWeightGrad ? "sm90 rounds or merged blocks" : "sm90 merged blocks";
  } else if (p.product == Product::kWeightGrad) {
    choice.family = kWeightGrad;
    choice.name = "sm90 sets of blocks";
  } else {
    // Both ways of running the union plan are bound by what arrives at a multiprocessor, about 54 kB a microsecond.
    constexpr double kRate = 54e3;
    const int per_group = UnionPlan::Columns(p.bsize), sms = chip.multiprocessors;
    const bool transposed = p.product == Product::kInputGrad;
    const int64_t N = p.n[0], in = transposed ? p.K() : p.C(), outputs = transposed ? p.CB : p.KB;
    const int64_t groups = (outputs + per_group - 1) / per_group;
    const double density = double(p.blocks) / std::max<int64_t>(1, int64_t(p.CB) * p.KB);
    const double reads = in * (1 - std::pow(1 - density, per_group)) * 2;  // bytes of one batch entry a group reads
    const double weights = double(p.blocks) * p.bsize * p.bsize * 2 / std::max<int64_t>(1, groups);
    // Tiles of 256 rows: whole rounds of them, a few microseconds to fill and empty the pipeline.
    const int64_t large_tiles = groups * ((N + 255) / 256);
    const double large = 8 + double((large_tiles + sms - 1) / sms) * (256 * reads + weights) / kRate;
    // Tiles of 64 rows: split until every multiprocessor has work, in clusters of more than two only where each thread
    // block has a multiprocessor of its own (four to a cluster and two to a multiprocessor ran slower than half as many);
    // weights also cross from memory once, at 4 TB/s; the cluster's sum takes some microseconds.
    const int64_t small_tiles = groups * ((N + 63) / 64);
    int split = 1;
    // The forward product of blocks of 128 stays whole: its weights come in two chunks, whose stride shares a word with the
    // address, and split it has not been checked on a device yet.
    const int most = p.bsize == 128 && !transposed ? 1 : 8;
    while (split < most && small_tiles * split * 2 <= (split == 1 ? 2 : 1) * sms) split *= 2;
    const double busy = std::min<double>(sms, double(small_tiles) * split);
    const double small = 6 + std::max(small_tiles * (64 * reads + weights) / kRate / busy, groups * weights / 4e6);
    choice.family = kUnion;
    if (small < large) {
      choice.tile = 64;
      choice.split = split;
      choice.name = "sm90 small batch";
    } else {
      choice.tile = UnionPlan::kRows;
      choice.name = "sm90 union tiles";
    }
    std::snprintf(why, sizeof(why), "; expected %.0f us in tiles of 256, %.0f us in tiles of 64 split in %d", large,
                  small, split);
  }
  static const bool print = std::getenv("BLOCKSPARSE_PRINT_CHOICE") != nullptr;
  if (print)
    std::fprintf(stderr, "blocksparse: product %d, axis %d, blocks of %d, batch %lld: %s%s\n", int(p.product), p.axis,
                 p.bsize, static_cast<long long>(p.n[0]), choice.name, why);
  return choice;
}

Status Plan(const MatmulProblem& p, const LayoutTable& table, const MatmulChoice& choice, MatmulPlan* plan) {
  plan->family = choice.family;
  if (choice.family == kMerged) return PlanMerged(p, table, plan);
  if (choice.family == kFloatTf32 || choice.family == kFloatExact) return PlanFloat(p, table, plan);
  if (choice.family == kFloatGradTf32 || choice.family == kFloatGradExact)
    return PlanFloatGrad(p, choice.family == kFloatGradExact, table, plan);
  if (choice.family == kWeightGrad) return PlanWeightGrad(table, p.axis, p.bsize, plan);
  if (choice.family == kRounds) return PlanRounds(table, p.product, plan);
  return PlanUnion(table, p.product, p.axis, p.bsize, plan);
}

int64_t WorkspaceBytes(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, const Chip& chip) {
  if (choice.family == kFloatTf32 || choice.family == kFloatExact)
    return FloatWorkspaceBytes(p, choice.family == kFloatExact);
  if (choice.family == kFloatGradTf32 || choice.family == kFloatGradExact)
    return FloatGradWorkspaceBytes(p, choice.family == kFloatGradExact, plan, chip);
  if (choice.family == kMerged) return MergedWorkspaceBytes(p, plan, chip);
  return choice.family == kWeightGrad ? ScheduleWeightGrad(p, plan, chip).partial_bytes : int64_t(sizeof(uint32_t));
}

Status Run(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, const int32_t* words,
           void* workspace, const Chip& chip, Stream stream) {
  if (choice.family == kFloatGradTf32 || choice.family == kFloatGradExact)
    return p.blocks == 0 ? Status()
                         : RunFloatGrad(p, choice.family == kFloatGradExact, plan, words, workspace, chip, stream);
  if (choice.family == kMerged && p.product == Product::kWeightGrad)
    return p.blocks == 0 ? Status() : RunMerged(p, plan, words, workspace, chip, stream);
  if (choice.family == kWeightGrad)
    return p.blocks == 0 ? Status() : RunWeightGrad(p, plan, words, workspace, chip, stream);
  if (p.n[0] == 0) return {};
  if (p.blocks == 0) {
    const int64_t out = p.n[0] * (p.product == Product::kForward ? p.K() : p.C());
    return FromCuda(cudaMemsetAsync(p.out, 0, out * SizeOf(p.dtype), stream), "cudaMemsetAsync");
  }
  if (choice.family == kFloatTf32 || choice.family == kFloatExact)
    return RunFloat(p, choice.family == kFloatExact, plan, words, workspace, chip, stream);
  if (choice.family == kMerged) return RunMerged(p, plan, words, workspace, chip, stream);
  if (choice.family == kRounds) return RunRounds(p, plan, words, workspace, chip, stream);
  return choice.tile == 64 ? RunSmall(p, choice, plan, words, stream)
                           : RunUnion(p, plan, words, workspace, chip, stream);
}

}  // namespace blocksparse::cuda::sm90
