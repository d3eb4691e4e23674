#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "cuda/arch/sm90_tensor_map.h"
#include "cuda/matmul_sm90.h"
#include "cuda/matmul_sm90_float.h"
#include "cuda/matmul_sm90_float_grad.h"
#include "cuda/matmul_sm90_merged.h"
#include "cuda/matmul_sm90_rounds.h"
#include "cuda/matmul_sm90_small.h"
#include "cuda/matmul_sm90_strips.h"
#include "cuda/matmul_sm90_union.h"
#include "cuda/matmul_sm90_weight_grad.h"
#include "kernels/plan_sm90.h"
#include "kernels/plan_strips.h"

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

// A piece of a block: 64 input features by its output features.
Status MakeWeightMap(CUtensorMap* map, const MatmulProblem& p) {
  const bool halves = p.bsize == 128 && p.product == Product::kForward;
  return MakeTensorMap(map, p.dtype, p.b[0], int64_t(p.blocks) * p.bsize, p.bsize, halves ? 64 : p.bsize,
                       std::min(p.bsize, 64), halves ? 2 : 0);
}

template <bool kGated>
auto PickUnion(int bsize, bool half) {
  return bsize == 128  ? (half ? LaunchUnion<128, true, kGated> : LaunchUnion<128, false, kGated>)
         : bsize == 64 ? (half ? LaunchUnion<64, true, kGated> : LaunchUnion<64, false, kGated>)
                       : (half ? LaunchUnion<32, true, kGated> : LaunchUnion<32, false, kGated>);
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
  BLOCKSPARSE_RETURN_IF_ERROR(MakeWeightMap(&u.w, p));
  u.group = words;
  u.stage = words + plan.numbers[2];
  u.groups = int(plan.numbers[0]);
  u.heavy = int(plan.numbers[1]);
  u.row_tiles = int((N + rows - 1) / rows);
  // Blocks of 128: several row tiles side by side read each weight from memory once for all of them.
  u.together = p.bsize == 128 ? 4 : 1;
  const int64_t tiles = int64_t(u.groups) * u.row_tiles;
  if (tiles > INT32_MAX) return Status::Unimplemented("batch too large for one launch: " + std::to_string(N));
  BLOCKSPARSE_RETURN_IF_ERROR(TileCounter(tiles, workspace, chip, stream, &u.counter));
  const int grid = int(std::min<int64_t>(tiles, chip.multiprocessors));
  const bool half = p.dtype == DType::kFloat16, axis0 = p.axis == 0;
  u.gate = p.gate;
  auto launch = PickUnion<false>(p.bsize, half);
  if (p.gate != nullptr) launch = PickUnion<true>(p.bsize, half);
  return FromCuda(launch(axis0, transposed, u, grid, stream), "union-tile product");
}

// Sizes of a small batch's tiles and their share among thread blocks, of a few stages at least.
SmallParams SmallSizes(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, const Chip& chip) {
  SmallParams s;
  s.batch = int(p.n[0]);
  s.features = int(p.product == Product::kInputGrad ? p.C() : p.K());
  s.groups = int(plan.numbers[0]);
  s.stages = int(plan.numbers[3]);
  s.rows = int(choice.tile);
  s.box_rows = std::min(64, (s.batch + 7) / 8 * 8);
  s.row_tiles = (s.batch + s.rows - 1) / s.rows;
  s.blocks = int(std::clamp<int64_t>(int64_t(s.row_tiles) * s.stages / 4, 1, chip.multiprocessors));
  return s;
}

// Never the same again in this process, and not what memory happens to hold.
uint64_t Ticket() {
  static std::atomic<uint64_t> next{std::random_device{}() * 0x9e3779b97f4a7c15ull ^ std::random_device{}()};
  return next += 0x9e3779b97f4a7c15ull;
}

int64_t SmallBytes(const MatmulProblem& p, const SmallParams& s) {
  const int64_t tile = int64_t(s.rows) * UnionPlan::Columns(p.bsize) * p.bsize * 4;
  return (s.blocks + int64_t(s.row_tiles) * s.groups) * (tile + 8 * sizeof(uint64_t));
}

Status RunSmall(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, const int32_t* words,
                void* workspace, const Chip& chip, cudaStream_t stream) {
  const int64_t N = p.n[0];
  const bool transposed = p.product == Product::kInputGrad;
  const int unit = p.bsize == 32 ? 32 : 64;
  SmallParams s = SmallSizes(p, choice, plan, chip);
  const int64_t in = transposed ? p.K() : p.C();
  if (p.axis == 1) {
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&s.x, p.dtype, p.a[0], N, in, s.box_rows, unit));
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&s.x_wide, p.dtype, p.a[0], N, in, s.box_rows, 64));
  } else {
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&s.x, p.dtype, p.a[0], in, N, unit, 64));
    s.x_wide = s.x;
  }
  BLOCKSPARSE_RETURN_IF_ERROR(MakeWeightMap(&s.w, p));
  s.group = words;
  s.stage = words + plan.numbers[2];
  s.y = p.out;
  s.partial = static_cast<float*>(workspace);
  s.flags = reinterpret_cast<uint64_t*>(static_cast<char*>(workspace) + SmallBytes(p, s)) -
            (s.blocks + int64_t(s.row_tiles) * s.groups) * 8;
  s.ticket = Ticket();
  const bool half = p.dtype == DType::kFloat16;
  auto launch = p.bsize == 128  ? (half ? LaunchSmall<128, true> : LaunchSmall<128, false>)
                : p.bsize == 64 ? (half ? LaunchSmall<64, true> : LaunchSmall<64, false>)
                                : (half ? LaunchSmall<32, true> : LaunchSmall<32, false>);
  return FromCuda(launch(p.axis == 0, transposed, s, stream), "product of a small batch");
}

Status RunStrips(const MatmulProblem& p, const MatmulPlan& plan, const int32_t* words, cudaStream_t stream) {
  const bool transposed = p.product == Product::kInputGrad;
  const int64_t N = p.n[0], in = transposed ? p.K() : p.C();
  StripParams s;
  s.batch = int(N);
  s.box_rows = (s.batch + 7) / 8 * 8;
  if (p.axis == 1)
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&s.x, p.dtype, p.a[0], N, in, s.box_rows, 64));
  else
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&s.x, p.dtype, p.a[0], in, N, 64, 64));
  s.weights = p.b[0];
  s.lines = words;
  s.y = p.out;
  s.features = int(transposed ? p.C() : p.K());
  s.clusters = int(plan.numbers[0]);
  s.parts = int(plan.numbers[1]);
  s.slabs = int(plan.numbers[2]);
  const bool half = p.dtype == DType::kFloat16;
  auto launch = p.bsize == 64   ? (half ? LaunchStrips<64, true> : LaunchStrips<64, false>)
                : p.bsize == 32 ? (half ? LaunchStrips<32, true> : LaunchStrips<32, false>)
                : p.bsize == 16 ? (half ? LaunchStrips<16, true> : LaunchStrips<16, false>)
                                : (half ? LaunchStrips<8, true> : LaunchStrips<8, false>);
  return FromCuda(launch(p.axis == 0, transposed, s, stream), "product of a small batch in strips");
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

int64_t Steps(const MatmulProblem& p, int64_t n) {
  const int tokens = WeightGradTokens(p.bsize, p.axis);
  return (n + tokens - 1) / tokens;
}

// How a weight gradient's items share the multiprocessors (see WeightGradParams).
struct WeightGradSchedule {
  int items, whole, helpers, own;
  int64_t flag_bytes, partial_bytes;
};

WeightGradSchedule ScheduleWeightGrad(const MatmulProblem& p, const MatmulPlan& plan, const Chip& chip) {
  WeightGradSchedule s{int(plan.numbers[0]), 0, 0, 0, 0, 0};
  int64_t steps = 0;
  for (int i = 0; i < p.pairs; ++i) steps += Steps(p, p.n[i]);
  s.whole = s.items / chip.multiprocessors * chip.multiprocessors;
  s.own = int(steps);
  const int64_t rest = s.items - s.whole;
  // In microseconds: 54 kB arrive at a multiprocessor in each, be it tiles or a helper's sums; a few for the wait.
  const double tiles = p.bsize == 128 ? 3 : p.bsize == 64 ? 10 : 30;
  const double step = tiles * WeightGradTokens(p.bsize, p.axis) * p.bsize * 2 / 54e3;
  const int64_t item_bytes = int64_t(WeightGradPlan::Slots(p.bsize)) * (p.bsize == 32 ? 2 : 1) * p.bsize * p.bsize * 4;
  double best = steps * step;
  for (int64_t helpers = 1; rest > 0 && helpers <= chip.multiprocessors - rest; ++helpers) {
    const int64_t own = (rest * steps + rest + helpers - 1) / (rest + helpers), parts = (helpers + rest - 1) / rest + 1;
    const double us = own * step + 4 + double(parts * item_bytes) / 54e3;
    if (own < steps && us < best) best = us, s.helpers = int(helpers), s.own = int(own);
  }
  if (s.helpers > 0) {
    s.flag_bytes = ((s.helpers + rest) * 4 + 255) / 256 * 256;
    s.partial_bytes = (s.helpers + rest) * item_bytes;
  }
  return s;
}

int64_t WeightGradBytes(const MatmulProblem& p, const MatmulPlan& plan, const Chip& chip) {
  const WeightGradSchedule s = ScheduleWeightGrad(p, plan, chip);
  return s.flag_bytes + s.partial_bytes;
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
      const int chunks = p.bsize == 128 ? 2 : 0;
      BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&w.x[w.pairs], p.dtype, p.a[i], N, p.C(), tokens, width, chunks));
      BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&w.dy[w.pairs], p.dtype, p.b[i], N, p.K(), tokens, width, chunks));
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
  w.helpers = s.helpers;
  w.own = s.own;
  w.done = static_cast<uint32_t*>(workspace);
  w.partial = reinterpret_cast<float*>(static_cast<char*>(workspace) + s.flag_bytes);
  if (s.helpers > 0)
    BLOCKSPARSE_RETURN_IF_ERROR(FromCuda(cudaMemsetAsync(w.done, 0, s.flag_bytes, stream), "cudaMemsetAsync"));
  w.gate = p.gate;
  w.addend = p.addend;
  w.out = p.out;
  w.out_dtype = p.out_dtype;
  const int grid = s.whole > 0 ? chip.multiprocessors : s.items + s.helpers;
  const bool half = p.dtype == DType::kFloat16, axis0 = p.axis == 0;
  auto launch = p.bsize == 128  ? (half ? LaunchWeightGrad<128, true> : LaunchWeightGrad<128, false>)
                : p.bsize == 64 ? (half ? LaunchWeightGrad<64, true> : LaunchWeightGrad<64, false>)
                                : (half ? LaunchWeightGrad<32, true> : LaunchWeightGrad<32, false>);
  return FromCuda(launch(axis0, w, grid, stream), "weight gradient");
}

// Whether a small batch goes in strips. Blocks of 128, and of 64 in batches over 16, are faster in the union plan's tiles,
// since pieces of 16 x 16 read each activation once for 16 outputs.
bool StripsServe(const MatmulProblem& p) {
  if (p.dtype == DType::kFloat32 || p.product == Product::kWeightGrad || p.gate != nullptr) return false;
  const int64_t inputs = p.product == Product::kForward ? p.C() : p.K();
  return p.n[0] <= (p.bsize <= 32   ? StripParams::kRows
                    : p.bsize == 64 ? 16
                                    : 0) &&
         inputs <= StripPlan::kMaxInputs && int64_t(p.blocks) * p.bsize * p.bsize / 16 <= INT32_MAX;
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
  if (weight_grad) return p.pairs <= WeightGradParams::kMaxPairs && Aligned(p.addend) && (p.bsize >= 32 || CanMerge(p));
  if (p.dtype == DType::kFloat32) return p.gate == nullptr;
  if (p.bsize <= 16) return p.gate == nullptr && (StripsServe(p) || CanMerge(p));
  return p.gate == nullptr || p.n[0] > 128;
}

bool Checked(const MatmulProblem& p, const MatmulChoice& choice, const Chip& chip) {
  const bool plain = p.gate == nullptr && p.addend == nullptr;
  switch (choice.family) {
    case kFloatTf32:
    case kFloatExact: return FloatPays(p, chip);
    case kFloatGradTf32:
    case kFloatGradExact: return plain && FloatGradPays(p, chip);
  }
  if (choice.family == kMerged) {
    // Blocks of 8 and 16 need batches that fill the chip.
    const int64_t outputs = p.product == Product::kInputGrad ? p.C() : p.K();
    int64_t total = 0;
    for (int i = 0; i < p.pairs; ++i) total += p.n[i];
    return plain &&
           total * (outputs / (16 * RoundsPlan::kColumns) + 1) >= int64_t(RoundsPlan::kRows) * chip.multiprocessors / 2;
  }
  if (choice.family == kStrips && p.bsize <= 16) {
    // In microseconds: the weights at 3 TB/s; the portable kernels go by blocks, and take few rows as they take 48.
    const double weights = double(p.blocks) * p.bsize * p.bsize;
    const double flops = 2.0 * double(std::max<int64_t>(48, p.n[0])) * weights;
    return 9 + 2 * weights / 3e6 < 5 + flops / (p.bsize == 16 ? 39e6 : 13.5e6);
  }
  return true;
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
  } else if (StripsServe(p)) {
    choice.family = kStrips;
    choice.name = "sm90 small batch in strips";
  } else if (p.bsize <= 16) {
    choice.family = kMerged;  // or rounds: the plan decides
    choice.name =
        p.bsize == 16 && p.product != Product::kWeightGrad ? "sm90 rounds or merged blocks" : "sm90 merged blocks";
  } else if (p.product == Product::kWeightGrad) {
    choice.family = kWeightGrad;
    choice.name = "sm90 sets of blocks";
  } else if (p.gate != nullptr) {
    choice.family = kGatedUnion;
    choice.tile = UnionPlan::kRows;
    choice.name = "sm90 union tiles with gates";
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
    // Tiles of 64 or 128 rows, work shared evenly: bound by what arrives, by weights from memory at 4 TB/s, once for each
    // tile of rows, or by the branch around each block; some microseconds for the sums of parts. Two pipelines read the
    // weights each for itself where they have rows of their own.
    const int rows = N <= 64 ? 64 : 128;
    const int64_t row_tiles = (N + rows - 1) / rows;
    const double box = p.axis == 1 ? std::min<int64_t>(64, (N + 7) / 8 * 8) : 64;
    const double all = double(row_tiles) * groups, pipelines = rows / 64;
    const double arrive = all * pipelines * (box * reads + weights) / kRate / sms, memory = all * weights / 4e6;
    const double branches = double(row_tiles) * p.blocks * pipelines * std::max(1, p.bsize / 64) * 0.13 / (2 * sms);
    const double small = 9 + std::max({arrive, memory, branches});
    choice.family = kUnion;
    if (small < large) {
      choice.tile = rows;
      choice.name = "sm90 small batch";
    } else {
      choice.tile = UnionPlan::kRows;
      choice.name = "sm90 union tiles";
    }
    std::snprintf(why, sizeof(why), "; expected %.0f us in tiles of 256, %.0f us in tiles of %d shared evenly", large,
                  small, rows);
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
  if (choice.family == kStrips) return PlanStrips(table, p.product, p.bsize, plan);
  if (choice.family == kRounds) return PlanRounds(table, p.product, plan);
  const bool gated = choice.family == kGatedUnion;
  const int columns = gated ? UnionPlan::GatedColumns(p.bsize) : UnionPlan::Columns(p.bsize);
  return PlanUnion(table, p.product, p.axis, p.bsize, columns, plan);
}

int64_t WorkspaceBytes(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, const Chip& chip) {
  if (choice.family == kFloatTf32 || choice.family == kFloatExact)
    return FloatWorkspaceBytes(p, choice.family == kFloatExact);
  if (choice.family == kFloatGradTf32 || choice.family == kFloatGradExact)
    return FloatGradWorkspaceBytes(p, choice.family == kFloatGradExact, plan, chip);
  if (choice.family == kMerged) return MergedWorkspaceBytes(p, plan, chip);
  if (choice.family == kWeightGrad) return WeightGradBytes(p, plan, chip);
  if (choice.family == kStrips) return 0;
  if (choice.family != kRounds && choice.tile < UnionPlan::kRows)
    return SmallBytes(p, SmallSizes(p, choice, plan, chip));
  return sizeof(uint32_t);
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
  if (choice.family == kStrips) return RunStrips(p, plan, words, stream);
  if (choice.family == kRounds) return RunRounds(p, plan, words, workspace, chip, stream);
  if (choice.tile < UnionPlan::kRows) return RunSmall(p, choice, plan, words, workspace, chip, stream);
  return RunUnion(p, plan, words, workspace, chip, stream);
}

}  // namespace blocksparse::cuda::sm90
