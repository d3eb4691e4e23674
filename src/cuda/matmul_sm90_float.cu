#include <algorithm>
#include <cmath>
#include <string>

#include "cuda/arch/sm90_tensor_map.h"
#include "cuda/check.h"
#include "cuda/matmul_sm90_float.h"
#include "cuda/matmul_sm90_mend.h"
#include "kernels/plan_sm90.h"

namespace blocksparse::cuda::sm90 {
namespace {

int64_t Align(int64_t bytes) { return (bytes + 1023) / 1024 * 1024; }

// Scratch: counter of tiles and flags, x, W.
struct Scratch {
  static constexpr int64_t kFlags = 1024;
  int64_t w, bytes;
};

Scratch ScratchOf(const MatmulProblem& p, bool exact) {
  const int64_t in = p.product == Product::kForward ? p.C() : p.K(), piece = Planes(exact) * PieceBytes(exact);
  Scratch s;
  s.w = Scratch::kFlags + Align(p.n[0] * in * piece);
  s.bytes = s.w + Align(int64_t(p.blocks) * p.bsize * p.bsize * piece);
  return s;
}

}  // namespace

bool FloatPays(const MatmulProblem& p, const Chip& chip) {
  const bool exact = !p.tf32, forward = p.product == Product::kForward;
  const int i = p.bsize == 128 ? 3 : p.bsize == 64 ? 2 : p.bsize == 32 ? 1 : 0;
  // Flops in a microsecond: the portable kernel's, this one's when the chip is full.
  constexpr double kPortable[2][4] = {{30e6, 60e6, 90e6, 116e6}, {0, 30e6, 32e6, 32e6}};
  constexpr double kHere[2][4] = {{65e6, 125e6, 195e6, 230e6}, {0, 50e6, 90e6, 100e6}};
  const double N = double(p.n[0]), elements = double(p.blocks) * p.bsize * p.bsize,
               in = double(forward ? p.C() : p.K());
  const int per_group = UnionPlan::Columns(p.bsize), rows = FloatRows(exact, p.bsize), sms = chip.multiprocessors;
  const double tiles = double(((forward ? p.KB : p.CB) + per_group - 1) / per_group) * std::ceil(N / rows);
  const double waves = std::ceil(tiles / sms) * sms / std::max(1.0, tiles);  // of a chip whose tiles are all full
  const double flops = 2 * elements * std::ceil(N / rows) * rows;
  const double prepared = (N * in + elements) * (4 + 2 * Planes(exact) * PieceBytes(exact)) / 4e6;
  return 15 + prepared + waves * flops / kHere[exact][i] < 5 + 2 * elements * N / kPortable[exact][i];
}

Status PlanFloat(const MatmulProblem& p, const LayoutTable& table, MatmulPlan* plan) {
  BLOCKSPARSE_RETURN_IF_ERROR(PlanUnion(table, p.product, 0, p.bsize, UnionPlan::Columns(p.bsize), plan));
  const bool forward = p.product == Product::kForward;
  const int32_t *ptr = forward ? table.column_ptr : table.row_ptr, *c = forward ? table.column_c : table.row_k,
                *w = forward ? table.column_w : table.row_w;
  plan->numbers.push_back(int64_t(plan->words.size()));
  plan->words.insert(plan->words.end(), ptr, ptr + (forward ? p.KB : p.CB) + 1);
  plan->words.insert(plan->words.end(), c, c + p.blocks);
  plan->words.insert(plan->words.end(), w, w + p.blocks);
  return {};
}

int64_t FloatWorkspaceBytes(const MatmulProblem& p, bool exact) { return ScratchOf(p, exact).bytes; }

Status RunFloat(const MatmulProblem& p, bool exact, const MatmulPlan& plan, const int32_t* words, void* workspace,
                const Chip& chip, Stream stream) {
  const int64_t N = p.n[0];
  const bool forward = p.product == Product::kForward;
  const int64_t in = forward ? p.C() : p.K(), out = forward ? p.K() : p.C();
  const Scratch s = ScratchOf(p, exact);
  char* scratch = static_cast<char*>(workspace);
  uint32_t* flags = reinterpret_cast<uint32_t*>(scratch);  // counter, tiny, odd
  BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(flags, 0, 3 * sizeof(uint32_t), stream));
  const bool turned = p.axis == 0;
  BLOCKSPARSE_CUDA_CHECK(PrepareFloat(exact, turned, static_cast<const float*>(p.a[0]), scratch + Scratch::kFlags, 1,
                                      turned ? in : N, turned ? N : in, in, 0, flags + 1, stream));
  BLOCKSPARSE_CUDA_CHECK(PrepareFloat(exact, forward, static_cast<const float*>(p.b[0]), scratch + s.w, p.blocks,
                                      p.bsize, p.bsize, p.bsize, p.bsize, flags + 1, stream));

  FloatParams f;
  const DType piece = exact ? DType::kBFloat16 : DType::kFloat32;
  const int planes = Planes(exact), step = FloatStep(exact, p.bsize), rows = FloatRows(exact, p.bsize);
  const int64_t weight_rows = int64_t(p.blocks) * p.bsize;
  if (planes * std::max(N, weight_rows) + rows > INT32_MAX)
    return Status::Unimplemented("too much for one launch: batch " + std::to_string(N) + ", blocks " +
                                 std::to_string(p.blocks));
  BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&f.x, piece, scratch + Scratch::kFlags, planes * N, in, rows, step));
  BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&f.w, piece, scratch + s.w, planes * weight_rows, p.bsize, p.bsize, step));
  if (p.axis == 1)
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&f.y, DType::kFloat32, p.out, N, out, rows, 32));
  else
    BLOCKSPARSE_RETURN_IF_ERROR(MakeTensorMap(&f.y, DType::kFloat32, p.out, out, N, 32, 32));
  f.group = words;
  f.stage = words + plan.numbers[2];
  f.groups = int(plan.numbers[0]);
  f.heavy = int(plan.numbers[1]);
  f.row_tiles = int((N + rows - 1) / rows);
  f.band = exact ? 4 : 2;  // of 1 to 6 the best
  f.x_plane = int(N), f.w_plane = int(weight_rows);
  f.odd = flags + 2;
  const int64_t tiles = int64_t(f.groups) * f.row_tiles;
  if (tiles > INT32_MAX) return Status::Unimplemented("batch too large for one launch: " + std::to_string(N));
  f.counter = tiles > chip.multiprocessors ? flags : nullptr;
  const int grid = int(std::min<int64_t>(tiles, chip.multiprocessors));
  f.axis0 = turned;
  auto launch = p.bsize == 128  ? (exact ? LaunchFloat<128, true> : LaunchFloat<128, false>)
                : p.bsize == 64 ? (exact ? LaunchFloat<64, true> : LaunchFloat<64, false>)
                : p.bsize == 32 ? (exact ? LaunchFloat<32, true> : LaunchFloat<32, false>)
                                : LaunchFloat<16, false>;
  BLOCKSPARSE_CUDA_CHECK(launch(f, grid, stream));
  return exact ? MendProduct(p, words + plan.numbers.back(), flags + 1, stream) : Status();
}

}  // namespace blocksparse::cuda::sm90
