// The portable products: what is chosen, planned and launched. The kernels are in matmul_sm80_product.cuh and
// matmul_sm80_weight_grad.cuh.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include "cuda/check.h"
#include "cuda/matmul_sm80.cuh"
#include "cuda/matmul_sm80.h"

namespace blocksparse {
namespace cuda {
namespace sm80 {

extern template Status LaunchProduct<8>(DType, int, int64_t, ProductArgs, const Chip&, Stream);
extern template Status LaunchProduct<16>(DType, int, int64_t, ProductArgs, const Chip&, Stream);
extern template Status LaunchProduct<32>(DType, int, int64_t, ProductArgs, const Chip&, Stream);
extern template Status LaunchProduct<64>(DType, int, int64_t, ProductArgs, const Chip&, Stream);
extern template Status LaunchProduct<128>(DType, int, int64_t, ProductArgs, const Chip&, Stream);
extern template Status LaunchWeightGrad<8>(DType, int, int, int, const WeightGradArgs&, const Chip&, Stream);
extern template Status LaunchWeightGrad<16>(DType, int, int, int, const WeightGradArgs&, const Chip&, Stream);
extern template Status LaunchWeightGrad<32>(DType, int, int, int, const WeightGradArgs&, const Chip&, Stream);
extern template Status LaunchWeightGrad<64>(DType, int, int, int, const WeightGradArgs&, const Chip&, Stream);
extern template Status LaunchWeightGrad<128>(DType, int, int, int, const WeightGradArgs&, const Chip&, Stream);

namespace {

constexpr int kRows = 128, kThreads = 256;

// A family of forward products and input gradients is a limit to the length of a list, in stages: longer ones are cut,
// and their partial sums added by a second kernel. 0: no limit but the list's place in shared memory.
constexpr int kStageLimits[] = {0, 64, 32, 16, 8, 4, 2};

int Depth(DType dtype) { return 128 / int(SizeOf(dtype)); }
int ListCapacity(int b) { return b == 8 ? 1024 : b == 16 ? 512 : b == 32 ? 256 : 128; }

int Columns(int b) { return std::min(b, 64); }  // of one thread block

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int BlockLimit(int family, int b, DType dtype) {
  const int stages = kStageLimits[family], capacity = ListCapacity(b);
  return stages == 0 ? capacity : std::clamp(stages * Depth(dtype) / b, 1, capacity);
}

// ---- cost model, in microseconds -----------------------------------------------------------------------------------

struct Rates {
  int resident;  // thread blocks of one multiprocessor
  double stage;  // one stage of each of them, side by side
  double fixed;  // a thread block's start and end
};

constexpr double kLaunch = 3, kMemoryBytes = 2.5e6;  // a launch; bytes per microsecond of streaming float32 sums

Rates RatesOf(const MatmulProblem& p) {
  // Per multiprocessor and microsecond: 64 KB arrive from L2; 3 MFLOP of 16-bit mma.sync with its operand loads; a
  // third of that in TF32, a tenth in float32.
  constexpr double kBytes = 64e3, kFlops = 3e6;
  const double rate = p.dtype != DType::kFloat32 ? 1 : p.tf32 ? 1.0 / 3 : 0.1;
  const int cols = Columns(p.bsize);
  const double bytes = 128.0 * (kRows + cols), flops = 2.0 * kRows * cols * Depth(p.dtype);
  Rates rates;
  rates.resident = p.bsize <= 32 ? 3 : 2;
  rates.stage = rates.resident * std::max(bytes / kBytes, flops / (kFlops * rate));
  rates.fixed = 2;
  return rates;
}

// Time of equal pieces of work and one longest, on a chip that takes `slots` at once.
double Makespan(double pieces, double piece, double longest, double slots) {
  if (pieces <= slots) return std::max(piece, longest);
  return std::max(pieces * piece / slots + 0.5 * piece, longest);
}

int ChooseProductFamily(const MatmulProblem& p, const LayoutTable& t, const Chip& chip) {
  const bool forward = p.product == Product::kForward;
  const Rates rates = RatesOf(p);
  const double lists = std::max(1, forward ? t.nonempty_columns : t.nonempty_rows);
  const double mean = t.blocks / lists, longest = forward ? t.longest_column : t.longest_row;
  const double tiles = double(std::max<int64_t>(1, CeilDiv(p.n[0], kRows)));
  const double slots = double(chip.multiprocessors) * rates.resident;
  const double stages_per_block = double(p.bsize) / Depth(p.dtype);
  int best = 0;
  double best_time = 0;
  for (int family = 0; family < int(std::size(kStageLimits)); ++family) {
    const double limit = BlockLimit(family, p.bsize, p.dtype);
    const double parts = std::ceil(mean / limit), longest_parts = std::ceil(longest / limit);
    const double piece = rates.fixed + rates.stage * std::ceil(mean / parts * stages_per_block);
    const double longest_piece = rates.fixed + rates.stage * std::ceil(longest / longest_parts * stages_per_block);
    double time = Makespan(lists * parts * tiles * (p.bsize / Columns(p.bsize)), piece, longest_piece, slots);
    const double slots_summed = (parts > 1 ? lists * parts : 0) + (longest_parts > 1 ? longest_parts : 0);
    if (slots_summed > 0) time += kLaunch + 8.0 * slots_summed * p.n[0] * p.bsize / kMemoryBytes;
    if (family == 0 || time < best_time) best = family, best_time = time;
  }
  return best;
}

int64_t StageSum(const MatmulProblem& p) {
  int64_t stages = 0;
  for (int i = 0; i < p.pairs; ++i) stages += CeilDiv(p.n[i], Depth(p.dtype));
  return stages;
}

int ChooseWeightGradParts(const MatmulProblem& p, const LayoutTable& t, const Chip& chip) {
  const Rates rates = RatesOf(p);
  const double columns = std::max(1, t.nonempty_columns), stages = double(StageSum(p));
  const double groups = columns * std::ceil(t.blocks / columns / (kRows / p.bsize)) * (p.bsize / Columns(p.bsize));
  const double slots = double(chip.multiprocessors) * rates.resident;
  int best = 1;
  double best_time = 0;
  for (int parts = 1; parts == 1 || (parts <= 64 && 2 * parts <= stages); parts *= 2) {
    const double piece = rates.fixed + rates.stage * std::ceil(stages / parts);
    double time = Makespan(groups * parts, piece, piece, slots);
    if (parts > 1) time += kLaunch + 8.0 * parts * t.blocks * p.bsize * p.bsize / kMemoryBytes;
    if (parts == 1 || time < best_time) best = parts, best_time = time;
  }
  return best;
}

// ---- small kernels
// ---------------------------------------------------------------------------------------------------

struct Split {
  int32_t out, slot, parts;
};

// y of the lists that were cut: their partial sums added in order. Feature axis 0: a block's lines are one run of y.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    SumSlots(const Split* splits, int64_t jobs, int64_t jobs_per_split, const float* partial, int64_t area, int b,
             int axis, int64_t n, int64_t out, T* y) {
  for (int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    const Split split = splits[job / jobs_per_split];
    const int64_t e = job % jobs_per_split * kThreads + threadIdx.x;
    if (e >= area) continue;
    const float* from = partial + split.slot * area + e;
    float sum = 0.f;
    for (int i = 0; i < split.parts; ++i) sum += from[i * area];
    y[axis == 1 ? e / b * out + int64_t(split.out) * b + e % b : int64_t(split.out) * b * n + e] = FromFloat<T>(sum);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    SumParts(const float* partial, int parts, int64_t elements, const float* addend, T* out) {
  const int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= elements) return;
  float sum = 0.f;
  for (int i = 0; i < parts; ++i) sum += partial[i * elements + e];
  out[e] = FromFloat<T>(addend ? sum + addend[e] : sum);
}

struct PairChunk {
  Pair pairs[kInlinePairs];
};

// Through kernel arguments, so that the caller's arrays are free on return and a captured graph keeps them.
__global__ void WritePairs(const __grid_constant__ PairChunk chunk, int count, Pair* to) {
  if (threadIdx.x < count) to[threadIdx.x] = chunk.pairs[threadIdx.x];
}

// The widest access, in bytes, that a pointer and the distance between its rows allow.
int Width(const void* pointer, int64_t row_bytes) {
  const uint64_t bits = reinterpret_cast<uint64_t>(pointer) | uint64_t(row_bytes) | 16;
  return int(bits & -bits);
}

int64_t PairBytes(const MatmulProblem& p) {
  return p.pairs > kInlinePairs ? CeilDiv(p.pairs * int64_t(sizeof(Pair)), 256) * 256 : 0;
}

// ---- plans
// -----------------------------------------------------------------------------------------------------------

template <typename Record>
int64_t Append(std::vector<int32_t>* words, const std::vector<Record>& records) {
  const int64_t at = int64_t(words->size());
  const auto* first = reinterpret_cast<const int32_t*>(records.data());
  words->insert(words->end(), first, first + records.size() * (sizeof(Record) / sizeof(int32_t)));
  return at;
}

int64_t AppendList(std::vector<int32_t>* words, const int32_t* list, int64_t length) {
  const int64_t at = int64_t(words->size());
  words->insert(words->end(), list, list + length);
  return at;
}

// numbers of a plan
enum { kCount, kRecords, kInner, kIds, kSplits, kSplitCount, kSlots };

void PlanProduct(const MatmulProblem& p, const LayoutTable& t, int family, MatmulPlan* plan) {
  const bool forward = p.product == Product::kForward;
  const int outs = forward ? t.KB : t.CB, limit = BlockLimit(family, p.bsize, p.dtype);
  const int32_t* ptr = forward ? t.column_ptr : t.row_ptr;
  std::vector<Item> items;
  std::vector<Split> splits;
  int32_t slots = 0;
  for (int o = 0; o < outs; ++o) {
    const int length = ptr[o + 1] - ptr[o], parts = std::max(1, int(CeilDiv(length, limit)));
    if (parts > 1) splits.push_back({o, slots, parts});
    for (int i = 0; i < parts; ++i)
      items.push_back({o, ptr[o] + int(int64_t(length) * i / parts), ptr[o] + int(int64_t(length) * (i + 1) / parts),
                       parts > 1 ? slots++ : -1});
  }
  // Longest first: what starts last is short, and the thread blocks end together.
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.end - a.begin > b.end - b.begin; });
  plan->numbers.resize(kSlots + 1);
  plan->numbers[kCount] = int64_t(items.size());
  plan->numbers[kRecords] = Append(&plan->words, items);
  plan->numbers[kInner] = AppendList(&plan->words, forward ? t.column_c : t.row_k, t.blocks);
  plan->numbers[kIds] = AppendList(&plan->words, forward ? t.column_w : t.row_w, t.blocks);
  plan->numbers[kSplits] = Append(&plan->words, splits);
  plan->numbers[kSplitCount] = int64_t(splits.size());
  plan->numbers[kSlots] = slots;
}

void PlanWeightGrad(const MatmulProblem& p, const LayoutTable& t, MatmulPlan* plan) {
  const int size = kRows / p.bsize;
  std::vector<Group> groups;
  for (int k = 0; k < t.KB; ++k)
    for (int first = t.column_ptr[k]; first < t.column_ptr[k + 1]; first += size)
      groups.push_back({k, first, std::min(size, t.column_ptr[k + 1] - first)});
  plan->numbers.resize(kIds + 1);
  plan->numbers[kCount] = int64_t(groups.size());
  plan->numbers[kRecords] = Append(&plan->words, groups);
  plan->numbers[kInner] = AppendList(&plan->words, t.column_c, t.blocks);
  plan->numbers[kIds] = AppendList(&plan->words, t.column_w, t.blocks);
}

// ---- runs
// ------------------------------------------------------------------------------------------------------------

Status RunProduct(const MatmulProblem& p, const MatmulPlan& plan, const int32_t* words, void* workspace,
                  const Chip& chip, Stream stream) {
  if (p.n[0] == 0) return {};
  const int64_t size = SizeOf(p.dtype);
  ProductArgs args = {};
  args.items = reinterpret_cast<const Item*>(words + plan.numbers[kRecords]);
  args.item_count = int(plan.numbers[kCount]);
  args.inner = words + plan.numbers[kInner];
  args.ids = words + plan.numbers[kIds];
  args.x = p.a[0], args.w = p.b[0], args.gates = p.gate, args.y = p.out;
  args.partial = static_cast<float*>(workspace);
  args.forward = p.product == Product::kForward;
  args.n = p.n[0], args.in = args.forward ? p.C() : p.K(), args.out = args.forward ? p.K() : p.C();
  args.x_width = Width(args.x, (p.axis == 1 ? args.in : args.n) * size);
  args.y_width = Width(args.y, (p.axis == 1 ? args.out : args.n) * size);
  args.w_width = Width(args.w, 16);
  args.exact = p.dtype == DType::kFloat32 && !p.tf32;
  const auto launch = p.bsize == 8    ? LaunchProduct<8>
                      : p.bsize == 16 ? LaunchProduct<16>
                      : p.bsize == 32 ? LaunchProduct<32>
                      : p.bsize == 64 ? LaunchProduct<64>
                                      : LaunchProduct<128>;
  BLOCKSPARSE_RETURN_IF_ERROR(launch(p.dtype, p.axis, CeilDiv(args.n, kRows), args, chip, stream));

  if (plan.numbers[kSplitCount] == 0) return {};
  const int64_t area = args.n * p.bsize, per_split = CeilDiv(area, kThreads);
  const int64_t jobs = per_split * plan.numbers[kSplitCount];
  WithType(p.dtype, [&](auto type) {
    SumSlots<<<int(std::min<int64_t>(jobs, INT32_MAX)), kThreads, 0, stream>>>(
        reinterpret_cast<const Split*>(words + plan.numbers[kSplits]), jobs, per_split, args.partial, area, p.bsize,
        p.axis, args.n, args.out, static_cast<decltype(type)*>(p.out));
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

Status RunWeightGrad(const MatmulProblem& p, const MatmulPlan& plan, int parts, const int32_t* words, void* workspace,
                     const Chip& chip, Stream stream) {
  const int64_t size = SizeOf(p.dtype);
  WeightGradArgs args = {};
  args.x_width = args.dy_width = 16;
  for (int i = 0; i < p.pairs; ++i) {
    if (p.n[i] == 0) continue;
    args.x_width = std::min(args.x_width, Width(p.a[i], (p.axis == 1 ? p.C() : p.n[i]) * size));
    args.dy_width = std::min(args.dy_width, Width(p.b[i], (p.axis == 1 ? p.K() : p.n[i]) * size));
  }
  if (p.pairs > kInlinePairs) {
    Pair* pairs = static_cast<Pair*>(workspace);
    for (int first = 0; first < p.pairs; first += kInlinePairs) {
      PairChunk chunk;
      const int count = std::min(kInlinePairs, p.pairs - first);
      for (int i = 0; i < count; ++i) chunk.pairs[i] = {p.a[first + i], p.b[first + i], p.n[first + i]};
      WritePairs<<<1, kInlinePairs, 0, stream>>>(chunk, count, pairs + first);
      BLOCKSPARSE_CUDA_LAUNCHED();
    }
    args.pairs = pairs;
  } else {
    for (int i = 0; i < p.pairs; ++i) args.inline_pairs[i] = {p.a[i], p.b[i], p.n[i]};
  }
  args.pair_count = p.pairs;
  args.groups = reinterpret_cast<const Group*>(words + plan.numbers[kRecords]);
  args.rows = words + plan.numbers[kInner];
  args.ids = words + plan.numbers[kIds];
  args.gates = p.gate, args.addend = p.addend, args.out = p.out, args.out_dtype = p.out_dtype;
  args.elements = int64_t(p.blocks) * p.bsize * p.bsize;
  args.stage_count = StageSum(p);
  args.stages_per_part = std::max<int64_t>(1, CeilDiv(args.stage_count, parts));
  if (parts > 1) args.partial = reinterpret_cast<float*>(static_cast<char*>(workspace) + PairBytes(p));
  args.C = p.C(), args.K = p.K();
  args.exact = p.dtype == DType::kFloat32 && !p.tf32;
  // The matrix instructions' own additions cut rather than round: results kept in float32 are worth better ones.
  args.move = p.dtype != DType::kFloat32 && p.out_dtype == DType::kFloat32;
  const auto launch = p.bsize == 8    ? LaunchWeightGrad<8>
                      : p.bsize == 16 ? LaunchWeightGrad<16>
                      : p.bsize == 32 ? LaunchWeightGrad<32>
                      : p.bsize == 64 ? LaunchWeightGrad<64>
                                      : LaunchWeightGrad<128>;
  BLOCKSPARSE_RETURN_IF_ERROR(launch(p.dtype, p.axis, int(plan.numbers[kCount]), parts, args, chip, stream));

  if (parts == 1) return {};
  WithType(p.out_dtype, [&](auto type) {
    SumParts<<<int(CeilDiv(args.elements, kThreads)), kThreads, 0, stream>>>(
        args.partial, parts, args.elements, p.addend, static_cast<decltype(type)*>(p.out));
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace

MatmulChoice Choose(const MatmulProblem& p, const LayoutTable& t, const Chip& chip) {
  MatmulChoice choice;
  choice.tile = kRows;
  choice.name = p.dtype != DType::kFloat32 ? "sm80 16-bit" : p.tf32 ? "sm80 TF32" : "sm80 float32";
  if (p.product == Product::kWeightGrad) {
    choice.split = ChooseWeightGradParts(p, t, chip);
  } else {
    choice.family = ChooseProductFamily(p, t, chip);
    choice.split = int(CeilDiv(p.product == Product::kForward ? t.longest_column : t.longest_row,
                               BlockLimit(choice.family, p.bsize, p.dtype)));
  }
  return choice;
}

Status Plan(const MatmulProblem& p, const LayoutTable& t, const MatmulChoice& choice, MatmulPlan* plan) {
  plan->family = choice.family;
  plan->words.clear();
  plan->numbers.clear();
  if (p.product == Product::kWeightGrad)
    PlanWeightGrad(p, t, plan);
  else
    PlanProduct(p, t, choice.family, plan);
  return {};
}

int64_t WorkspaceBytes(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, const Chip&) {
  if (p.product != Product::kWeightGrad) return plan.numbers[kSlots] * p.n[0] * p.bsize * 4;
  return PairBytes(p) + (choice.split > 1 ? choice.split * int64_t(p.blocks) * p.bsize * p.bsize * 4 : 0);
}

Status Run(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, const int32_t* words,
           void* workspace, const Chip& chip, Stream stream) {
  if (p.product != Product::kWeightGrad) return RunProduct(p, plan, words, workspace, chip, stream);
  return RunWeightGrad(p, plan, choice.split, words, workspace, chip, stream);
}

}  // namespace sm80
}  // namespace cuda
}  // namespace blocksparse
