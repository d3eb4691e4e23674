#include <algorithm>
#include <cmath>
#include <string>

#include "cuda/arch/sm90_tensor_map.h"
#include "cuda/check.h"
#include "cuda/convert.cuh"
#include "cuda/matmul_sm90_float_grad.h"
#include "cuda/matmul_sm90_mend.h"

namespace blocksparse::cuda::sm90 {
namespace {

int64_t Align(int64_t bytes) { return (bytes + 1023) / 1024 * 1024; }

// Lines of a prepared operand begin at multiples of 16 bytes.
int64_t Pitch(int64_t n) { return (n + 7) / 8 * 8; }

// How items share the multiprocessors: whole rounds of one item each, then the rest in parts, so that the last round is
// full too; and where things lie in scratch.
struct Layout {
  int items, whole, split, total_steps;
  int64_t partial, operands, bytes;  // flags come first
};

Layout LayoutOf(const MatmulProblem& p, bool exact, const MatmulPlan& plan, const Chip& chip) {
  const int tokens = FloatGradTokens(exact, p.bsize), sms = chip.multiprocessors;
  Layout s{int(plan.numbers[0]), 0, 1, 0, 1024, 0, 0};
  int64_t operand_bytes = 0;
  for (int i = 0; i < p.pairs; ++i) {
    s.total_steps += int((p.n[i] + tokens - 1) / tokens);
    operand_bytes += Align(Pitch(p.n[i]) * p.C() * Planes(exact) * PieceBytes(exact)) +
                     Align(Pitch(p.n[i]) * p.K() * Planes(exact) * PieceBytes(exact));
  }
  s.whole = s.items / sms * sms;
  const int rest = s.items - s.whole;
  // In microseconds: 54 kB arrive at a multiprocessor in each, or 0.7 MFLOP are done; partial sums are written and read at
  // 3 TB/s by a second kernel, which takes 8 to begin with.
  const int64_t blocks = int64_t(FloatGradSlots(exact, p.bsize)) * (p.bsize == 32 ? 2 : 1);
  const int64_t item_bytes = blocks * p.bsize * p.bsize * 4;
  const double tiles = p.bsize == 128 ? 3 : exact ? (p.bsize == 64 ? 7 : 17) : p.bsize == 64 ? 10 : 30;
  const double step = std::max(tiles * tokens * p.bsize * Planes(exact) * PieceBytes(exact) / 54e3,
                               exact ? 2.0 * blocks * p.bsize * p.bsize * tokens / 0.7e6 : 0.0);
  const double round = s.total_steps * step;
  double best = round;
  for (int split = 2; rest > 0 && split <= 8 && s.total_steps >= 8 * split; ++split) {
    const double us =
        double((rest * split + sms - 1) / sms) / split * round + 8 + 2.0 * rest * split * item_bytes / 3e6;
    if (us < best) best = us, s.split = split;
  }
  if (s.split == 1) s.whole = s.items;
  s.operands = s.partial + Align((s.items - s.whole) * s.split * item_bytes);
  s.bytes = s.operands + operand_bytes;
  return s;
}

// Adds the parts of the items that were split, in order: two elements a thread; blockIdx.x names one of the blocks of an
// item, blockIdx.y 512 of its elements.
__global__ void __launch_bounds__(256) SumParts(int bsize, int blocks, const __grid_constant__ WeightGradParams p) {
  const int halves = bsize == 32 ? 2 : 1;  // blocks a slot
  const int rest = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const int32_t* words = p.item + int64_t(p.whole + rest) * WeightGradPlan::kItemWords;
  const int id = words[WeightGradPlan::kSlots + block / halves * 4 + 2 + block % halves];
  if (id < 0) return;
  const int64_t size = int64_t(bsize) * bsize, stride = blocks * size, e = (blockIdx.y * 256 + threadIdx.x) * 2;
  const float* partial = p.partial + int64_t(rest) * p.split * stride + block * size + e;
  for (int i = 0; i < 2; ++i) {
    float sum = partial[i];
    for (int part = 1; part < p.split; ++part) sum += partial[part * stride + i];
    const int64_t at = id * size + e + i;
    if (p.addend != nullptr) sum += p.addend[at];
    if (p.out_dtype == DType::kFloat32)
      static_cast<float*>(p.out)[at] = sum;
    else if (p.out_dtype == DType::kFloat16)
      static_cast<__half*>(p.out)[at] = FromFloat<__half>(sum);
    else
      static_cast<__nv_bfloat16*>(p.out)[at] = FromFloat<__nv_bfloat16>(sum);
  }
}

}  // namespace

bool FloatGradPays(const MatmulProblem& p, const Chip& chip) {
  const bool exact = !p.tf32;
  const int i = p.bsize == 128 ? 2 : p.bsize == 64 ? 1 : 0;
  // Flops in a microsecond: the portable kernel's, this one's.
  constexpr double kPortable[2][3] = {{50e6, 80e6, 100e6}, {30e6, 32e6, 32e6}};
  constexpr double kHere[2][3] = {{95e6, 190e6, 265e6}, {55e6, 90e6, 105e6}};
  double N = 0;
  for (int pair = 0; pair < p.pairs; ++pair) N += double(p.n[pair]);
  const double flops = 2.0 * p.blocks * p.bsize * p.bsize * N;
  const double prepared = N * (p.C() + p.K()) * (4 + Planes(exact) * PieceBytes(exact)) / 3.5e6;
  const double slots = FloatGradSlots(exact, p.bsize) * (p.bsize == 32 ? 2 : 1);
  const double full = std::min(1.0, p.blocks / slots / chip.multiprocessors);  // of the multiprocessors
  return 15 + 4 * p.pairs + prepared + flops / (kHere[exact][i] * std::max(full, 0.01)) <
         5 + flops / kPortable[exact][i];
}

Status PlanFloatGrad(const MatmulProblem& p, bool exact, const LayoutTable& table, MatmulPlan* plan) {
  BLOCKSPARSE_RETURN_IF_ERROR(
      PlanWeightGrad(table, 0, p.bsize, FloatGradSlots(exact, p.bsize), FloatGradMaxTiles(exact, p.bsize), plan));
  plan->numbers.push_back(int64_t(plan->words.size()));
  if (exact) plan->words.insert(plan->words.end(), table.update, table.update + 2 * int64_t(p.blocks));
  return {};
}

int64_t FloatGradWorkspaceBytes(const MatmulProblem& p, bool exact, const MatmulPlan& plan, const Chip& chip) {
  return LayoutOf(p, exact, plan, chip).bytes;
}

Status RunFloatGrad(const MatmulProblem& p, bool exact, const MatmulPlan& plan, const int32_t* words, void* workspace,
                    const Chip& chip, Stream stream) {
  const Layout s = LayoutOf(p, exact, plan, chip);
  char* scratch = static_cast<char*>(workspace);
  uint32_t* flags = reinterpret_cast<uint32_t*>(scratch);  // tiny, odd
  BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(flags, 0, 2 * sizeof(uint32_t), stream));
  FloatGradParams f;
  WeightGradParams& w = f.base;
  const int tokens = FloatGradTokens(exact, p.bsize), planes = Planes(exact);
  const DType piece = exact ? DType::kBFloat16 : DType::kFloat32;
  w.pairs = w.total_steps = 0;
  char* to = scratch + s.operands;
  for (int i = 0; i < p.pairs; ++i) {
    const int64_t N = p.n[i], pitch = Pitch(N);
    if (N == 0) continue;
    for (int side = 0; side < 2; ++side) {
      const int64_t features = side ? p.K() : p.C();
      const float* from = static_cast<const float*>(side ? p.b[i] : p.a[i]);
      const bool turned = p.axis == 1;
      BLOCKSPARSE_CUDA_CHECK(PrepareFloat(exact, turned, from, to, 1, turned ? N : features, turned ? features : N,
                                          pitch, 0, flags, stream));
      BLOCKSPARSE_RETURN_IF_ERROR(
          MakeTensorMap(side ? &w.dy[w.pairs] : &w.x[w.pairs], piece, to, planes * features, pitch, p.bsize, tokens));
      (side ? f.dy_plane : f.x_plane)[w.pairs] = int(features);
      to += Align(pitch * features * planes * PieceBytes(exact));
    }
    w.steps[w.pairs++] = w.total_steps;
    w.total_steps += int((N + tokens - 1) / tokens);
  }
  w.item = words;
  w.items = s.items, w.whole = s.whole, w.split = s.split;
  w.partial = reinterpret_cast<float*>(scratch + s.partial);
  w.gate = p.gate, w.addend = p.addend, w.out = p.out, w.out_dtype = p.out_dtype;
  f.odd = flags + 1;
  const int units = s.whole + (s.items - s.whole) * s.split, grid = std::min(units, chip.multiprocessors);
  auto launch = p.bsize == 128  ? (exact ? LaunchFloatGrad<128, true> : LaunchFloatGrad<128, false>)
                : p.bsize == 64 ? (exact ? LaunchFloatGrad<64, true> : LaunchFloatGrad<64, false>)
                                : (exact ? LaunchFloatGrad<32, true> : LaunchFloatGrad<32, false>);
  BLOCKSPARSE_CUDA_CHECK(launch(f, grid, stream));
  if (s.whole < s.items) {
    const int blocks = FloatGradSlots(exact, p.bsize) * (p.bsize == 32 ? 2 : 1);
    SumParts<<<dim3((s.items - s.whole) * blocks, p.bsize * p.bsize / 512), 256, 0, stream>>>(p.bsize, blocks, w);
    BLOCKSPARSE_CUDA_LAUNCHED();
  }
  return exact ? MendWeightGrad(p, words + plan.numbers[1], flags, stream) : Status();
}

}  // namespace blocksparse::cuda::sm90
