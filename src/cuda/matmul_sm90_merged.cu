#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda/check.h"
#include "cuda/convert.cuh"
#include "cuda/matmul_sm90.h"
#include "cuda/matmul_sm90_mend.h"
#include "cuda/matmul_sm90_merged.h"
#include "kernels/plan_sm90.h"

namespace blocksparse::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

// What the plan's numbers end with, after those of the larger blocks' plan.
enum { kBlocks, kSize, kFamily, kParts, kLists, kTrailing };

int64_t Number(const MatmulPlan& plan, int which) { return plan.numbers[plan.numbers.size() - kTrailing + which]; }

// TFLOP/s on the non-zeros of random layouts at densities of 5, 10, 25 and 100 % (bench/results/hopper_log.md), between
// them by the logarithm of the density.
double Rate(bool weight_grad, int b, double density) {
  constexpr double kAt[4] = {0.05, 0.1, 0.25, 1};
  constexpr double kProduct[4][4] = {
      {95, 149, 167, 143}, {237, 280, 365, 513}, {426, 496, 574, 693}, {537, 602, 688, 754}};
  constexpr double kWeightGrad[4][4] = {{0, 0, 0, 0}, {190, 208, 287, 350}, {400, 453, 547, 600}, {540, 573, 630, 650}};
  const double* rate = (weight_grad ? kWeightGrad : kProduct)[b == 128 ? 3 : b == 64 ? 2 : b == 32 ? 1 : 0];
  if (density <= kAt[0]) return rate[0] * density / kAt[0];
  int i = 0;
  while (i < 2 && density > kAt[i + 1]) ++i;
  return rate[i] + (rate[i + 1] - rate[i]) * std::log(density / kAt[i]) / std::log(kAt[i + 1] / kAt[i]);
}

// The problem in larger blocks; pointers to scratch are filled in by the caller.
MatmulProblem Larger(const MatmulProblem& p, const MatmulPlan& plan) {
  MatmulProblem q = p;
  q.bsize = int(Number(plan, kSize));
  q.CB = int(p.C() / q.bsize), q.KB = int(p.K() / q.bsize);
  q.blocks = int(Number(plan, kBlocks));
  return q;
}

MatmulChoice Inner(const MatmulPlan& plan) {
  MatmulChoice choice;
  choice.family = int(Number(plan, kFamily));
  choice.tile = choice.family == kUnion ? UnionPlan::kRows : choice.family == kRounds ? RoundsPlan::kRows : 0;
  return choice;
}

int64_t Align(int64_t bytes) { return (bytes + 1023) / 1024 * 1024; }

// Weight gradients of larger blocks hold what their parts round, add and select afterwards.
DType ScratchType(const MatmulProblem& p) {
  if (p.product != Product::kWeightGrad) return p.dtype;
  return p.out_dtype == p.dtype && p.addend == nullptr ? p.dtype : DType::kFloat32;
}

// Eight elements of 16 bits a thread: from the part they belong to, or zeros.
__global__ void __launch_bounds__(kThreads)
    Assemble(const int32_t* parts, int b, int size, int64_t vectors, const uint4* from, uint4* to) {
  const int64_t v = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (v >= vectors) return;
  const int row_vectors = size / 8, factor = size / b;
  const int64_t line = v / row_vectors;
  const int column = int(v % row_vectors) * 8, row = int(line % size);
  const int id = parts[(line / size * factor + row / b) * factor + column / b];
  to[v] = id < 0 ? make_uint4(0, 0, 0, 0) : from[(int64_t(id) * b * b + row % b * b + column % b) / 8];
}

// The weight gradient's blocks out of the larger ones, eight elements a thread.
template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) Extract(const int32_t* parts, int b, int size, int64_t vectors,
                                                    const From* from, const float* gate, const float* addend, To* to) {
  const int64_t v = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (v >= vectors) return;
  const int row_vectors = size / 8, factor = size / b;
  const int64_t line = v / row_vectors;
  const int column = int(v % row_vectors) * 8, row = int(line % size);
  const int id = parts[(line / size * factor + row / b) * factor + column / b];
  if (id < 0) return;
  const int64_t at = int64_t(id) * b * b + row % b * b + column % b;
  const bool open = gate == nullptr || gate[id] != 0.f;
  __align__(16) From in[8];
  __align__(16) To out[8];
#pragma unroll
  for (int i = 0; i < int(sizeof(in) / 16); ++i)
    reinterpret_cast<uint4*>(in)[i] = reinterpret_cast<const uint4*>(from + v * 8)[i];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float sum = open ? ToFloat(in[i]) : 0.f;
    out[i] = FromFloat<To>(addend == nullptr ? sum : sum + addend[at + i]);
  }
#pragma unroll
  for (int i = 0; i < int(sizeof(out) / 16); ++i)
    reinterpret_cast<uint4*>(to + at)[i] = reinterpret_cast<const uint4*>(out)[i];
}

}  // namespace

bool CanMerge(const MatmulProblem& p) {
  const int size = p.product == Product::kWeightGrad ? 32 : 16;
  return p.bsize <= 16 && p.C() % size == 0 && p.K() % size == 0 && int64_t(p.CB) * p.KB < INT32_MAX;
}

Status PlanMerged(const MatmulProblem& p, const LayoutTable& table, MatmulPlan* plan) {
  const bool weight_grad = p.product == Product::kWeightGrad;
  // Expected time for a batch of 4096: the products, and the zeros and weights that cross memory at 3.5 TB/s.
  constexpr double kBatch = 4096;
  MergedLayout best_layout;
  int best = 0;
  double least = 0;
  if (!weight_grad && p.bsize == 16) {
    const double density = double(p.blocks) / (double(p.CB) * p.KB);
    best = 16, least = 2 * kBatch * p.blocks * 256 / (Rate(false, 16, density) * 1e6);
  }
  for (int size = weight_grad ? 32 : 16; size <= 128; size *= 2) {
    if (size <= p.bsize || p.C() % size != 0 || p.K() % size != 0) continue;
    MergedLayout merged = MergeBlocks(table, size / p.bsize);
    const double blocks = merged.words[3], cells = double(p.C() / size) * double(p.K() / size);
    const double elements = blocks * size * size;
    if (blocks * size >= INT32_MAX) continue;
    // Weight gradients in blocks of 32 share no tiles on axis 0.
    const double share = weight_grad && size == 32 && p.axis == 0 ? 0.67 : 1;
    const double us =
        2 * kBatch * elements / (share * Rate(weight_grad, size, blocks / cells) * 1e6) + 5 + 2.5 * elements / 3.5e6;
    if (best == 0 || us < least) best = size, least = us, best_layout = std::move(merged);
  }
  if (best == 0) return Status::Internal("no larger block fits blocks of " + std::to_string(p.bsize));

  MatmulChoice inner;
  inner.family = weight_grad ? kWeightGrad : best == 16 ? kRounds : kUnion;
  LayoutTable larger = table;
  if (best > p.bsize)
    BLOCKSPARSE_RETURN_IF_ERROR(
        LayoutTable::Parse(best_layout.words.data(), int64_t(best_layout.words.size()), &larger));
  MatmulProblem q = p;
  q.bsize = best, q.CB = larger.CB, q.KB = larger.KB, q.blocks = larger.blocks;
  BLOCKSPARSE_RETURN_IF_ERROR(sm90::Plan(q, larger, inner, plan));
  plan->family = kMerged;
  const int64_t parts = int64_t(plan->words.size());
  int64_t lists = parts;
  if (best > p.bsize) {
    plan->words.insert(plan->words.end(), best_layout.parts.begin(), best_layout.parts.end());
    lists = int64_t(plan->words.size());
    if (!weight_grad) {
      const bool forward = p.product == Product::kForward;
      const int32_t *ptr = forward ? table.column_ptr : table.row_ptr, *c = forward ? table.column_c : table.row_k,
                    *w = forward ? table.column_w : table.row_w;
      plan->words.insert(plan->words.end(), ptr, ptr + (forward ? p.KB : p.CB) + 1);
      plan->words.insert(plan->words.end(), c, c + p.blocks);
      plan->words.insert(plan->words.end(), w, w + p.blocks);
    }
  }
  const int64_t trailing[kTrailing] = {larger.blocks, best, inner.family, parts, lists};
  plan->numbers.insert(plan->numbers.end(), trailing, trailing + kTrailing);
  if (const char* print = std::getenv("BLOCKSPARSE_PRINT_CHOICE"); print != nullptr && std::string(print) == "1")
    std::fprintf(stderr, "blocksparse: product %d, blocks of %d: %s of %d, %.0f %% of them zeros; expected %.0f us\n",
                 int(p.product), p.bsize, best > p.bsize ? "zero-filled to blocks" : "taken as blocks", best,
                 100 - 100.0 * p.blocks * p.bsize * p.bsize / std::max(1.0, double(larger.blocks) * best * best),
                 least);
  return {};
}

int64_t MergedWorkspaceBytes(const MatmulProblem& p, const MatmulPlan& plan, const Chip& chip) {
  MatmulProblem q = Larger(p, plan);
  q.out_dtype = p.product == Product::kWeightGrad ? ScratchType(p) : p.out_dtype;
  const int64_t inner = Align(sm90::WorkspaceBytes(q, Inner(plan), plan, chip));
  return q.bsize == p.bsize ? inner : inner + int64_t(q.blocks) * q.bsize * q.bsize * SizeOf(ScratchType(p));
}

Status RunMerged(const MatmulProblem& p, const MatmulPlan& plan, const int32_t* words, void* workspace,
                 const Chip& chip, Stream stream) {
  MatmulProblem q = Larger(p, plan);
  const MatmulChoice inner = Inner(plan);
  if (q.bsize == p.bsize) return sm90::Run(q, inner, plan, words, workspace, chip, stream);
  const bool weight_grad = p.product == Product::kWeightGrad;
  if (weight_grad) q.out_dtype = ScratchType(p), q.gate = nullptr, q.addend = nullptr;
  char* scratch = static_cast<char*>(workspace) + Align(sm90::WorkspaceBytes(q, inner, plan, chip));
  const int64_t vectors = int64_t(q.blocks) * q.bsize * q.bsize / 8;
  const int64_t grid = (vectors + kThreads - 1) / kThreads;
  const int32_t* parts = words + Number(plan, kParts);
  if (!weight_grad) {
    Assemble<<<int(grid), kThreads, 0, stream>>>(parts, p.bsize, q.bsize, vectors, static_cast<const uint4*>(p.b[0]),
                                                 reinterpret_cast<uint4*>(scratch));
    BLOCKSPARSE_CUDA_LAUNCHED();
    const void* w = scratch;
    q.b = &w;
    BLOCKSPARSE_RETURN_IF_ERROR(sm90::Run(q, inner, plan, words, workspace, chip, stream));
    return MendProduct(p, words + Number(plan, kLists), nullptr, stream);
  }
  q.out = scratch;
  BLOCKSPARSE_RETURN_IF_ERROR(sm90::Run(q, inner, plan, words, workspace, chip, stream));
  WithType(q.out_dtype, [&](auto from) {
    WithType(p.out_dtype, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      Extract<From, To><<<int(grid), kThreads, 0, stream>>>(parts, p.bsize, q.bsize, vectors,
                                                            reinterpret_cast<const From*>(scratch), p.gate, p.addend,
                                                            static_cast<To*>(p.out));
    });
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace blocksparse::cuda::sm90
