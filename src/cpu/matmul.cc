// Block-sparse matrix product on the host.
#include "kernels/matmul.h"

#include <algorithm>
#include <vector>

#include "cpu/convert.h"

namespace blocksparse {
namespace cpu {
namespace {

constexpr int kRows = 32;  // batch entries a task works on

float* Scratch(void* workspace, int worker, int64_t floats) {
  return static_cast<float*>(workspace) + int64_t(worker) * floats;
}

int64_t ScratchFloats(const MatmulProblem& p) { return int64_t(p.bsize) * (p.bsize + 2 * kRows); }

// One output block of kRows batch entries.
void ProductTask(const MatmulProblem& p, const MatmulPlan& plan, int64_t n0, int rows, int j, float* scratch) {
  const bool forward = p.product == Product::kForward;
  const int b = p.bsize;
  const int64_t in = forward ? p.C() : p.K(), out = forward ? p.K() : p.C(), n = p.n[0];
  const int32_t* ptr = plan.words.data() + plan.numbers[0];
  const int32_t* inner = plan.words.data() + plan.numbers[1];
  const int32_t* ids = plan.words.data() + plan.numbers[2];
  float *w = scratch, *x = w + b * b, *sum = x + kRows * b;
  std::fill(sum, sum + kRows * b, 0.f);
  for (int e = ptr[j]; e < ptr[j + 1]; ++e) {
    const float gate = p.gate ? p.gate[ids[e]] : 1.f;
    if (gate == 0.f) continue;
    for (int c = 0; c < b; ++c)
      for (int k = 0; k < b; ++k) {
        const int64_t i = int64_t(ids[e]) * b * b + (forward ? c * b + k : k * b + c);
        w[c * b + k] = gate * Load(p.b[0], i, p.dtype);
      }
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < b; ++c) {
        const int64_t f = int64_t(inner[e]) * b + c;
        x[r * b + c] = Load(p.a[0], p.axis == 1 ? (n0 + r) * in + f : f * n + n0 + r, p.dtype);
      }
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < b; ++c)
        for (int k = 0; k < b; ++k) sum[r * b + k] += x[r * b + c] * w[c * b + k];
  }
  for (int r = 0; r < rows; ++r)
    for (int k = 0; k < b; ++k) {
      const int64_t f = int64_t(j) * b + k;
      Store(p.out, p.axis == 1 ? (n0 + r) * out + f : f * n + n0 + r, p.dtype, sum[r * b + k]);
    }
}

void WeightGradTask(const MatmulProblem& p, const MatmulPlan& plan, int64_t w, float* scratch) {
  const int b = p.bsize;
  const int64_t C = p.C(), K = p.K(), c0 = int64_t(plan.words[2 * w]) * b, k0 = int64_t(plan.words[2 * w + 1]) * b;
  float *sum = scratch, *x = sum + b * b, *dy = x + b;
  std::fill(sum, sum + b * b, 0.f);
  const bool read = !p.gate || p.gate[w] != 0.f;
  for (int q = 0; q < p.pairs && read; ++q)
    for (int64_t n = 0; n < p.n[q]; ++n) {
      for (int i = 0; i < b; ++i) {
        x[i] = Load(p.a[q], p.axis == 1 ? n * C + c0 + i : (c0 + i) * p.n[q] + n, p.dtype);
        dy[i] = Load(p.b[q], p.axis == 1 ? n * K + k0 + i : (k0 + i) * p.n[q] + n, p.dtype);
      }
      for (int c = 0; c < b; ++c)
        for (int k = 0; k < b; ++k) sum[c * b + k] += x[c] * dy[k];
    }
  for (int64_t i = 0; i < b * b; ++i)
    Store(p.out, w * b * b + i, p.out_dtype, sum[i] + (p.addend ? p.addend[w * b * b + i] : 0.f));
}

}  // namespace

MatmulChoice ChooseMatmul(const MatmulProblem&, const LayoutTable&, int) {
  MatmulChoice choice;
  choice.tile = kRows;
  choice.name = "portable";
  return choice;
}

Status PlanMatmul(const MatmulProblem& p, const LayoutTable& t, const MatmulChoice& choice, MatmulPlan* plan) {
  plan->family = choice.family;
  plan->words.clear();
  plan->numbers.clear();
  auto append = [plan](const int32_t* list, int64_t length) {
    plan->numbers.push_back(int64_t(plan->words.size()));
    plan->words.insert(plan->words.end(), list, list + length);
  };
  if (p.product == Product::kForward) {
    append(t.column_ptr, t.KB + 1), append(t.column_c, t.blocks), append(t.column_w, t.blocks);
  } else if (p.product == Product::kInputGrad) {
    append(t.row_ptr, t.CB + 1), append(t.row_k, t.blocks), append(t.row_w, t.blocks);
  } else {
    append(t.update, 2 * int64_t(t.blocks));
  }
  return {};
}

int64_t MatmulWorkspaceBytes(const MatmulProblem& p, const MatmulChoice&, const MatmulPlan&, int threads) {
  return ScratchFloats(p) * threads * int64_t(sizeof(float));
}

Status RunMatmul(const MatmulProblem& p, const MatmulChoice&, const MatmulPlan& plan, void* workspace,
                 ThreadPool* pool) {
  const int64_t floats = ScratchFloats(p), area = int64_t(p.bsize) * p.bsize;
  if (p.product == Product::kWeightGrad) {
    int64_t n = 1;
    for (int q = 0; q < p.pairs; ++q) n += p.n[q];
    pool->ForEach(p.blocks, n * area / 8,
                  [&](int64_t task, int worker) { WeightGradTask(p, plan, task, Scratch(workspace, worker, floats)); });
    return {};
  }
  const int outputs = p.product == Product::kForward ? p.KB : p.CB;
  const int64_t n = p.n[0], parts = (n + kRows - 1) / kRows;
  if (parts == 0) return {};
  const int64_t blocks = (p.blocks + outputs - 1) / outputs;
  pool->ForEach(parts * outputs, std::min<int64_t>(n, kRows) * area * blocks / 8, [&](int64_t task, int worker) {
    const int64_t n0 = task / outputs * kRows;
    ProductTask(p, plan, n0, int(std::min<int64_t>(kRows, n - n0)), int(task % outputs),
                Scratch(workspace, worker, floats));
  });
  return {};
}

Status RunGateGrad(const GateGradProblem& p, ThreadPool* pool) {
  const int64_t area = int64_t(p.bsize) * p.bsize;
  pool->ForEach(p.blocks, area, [&](int64_t w, int) {
    const bool dead = p.gated && p.gate[w] == 0.f;
    float sum = 0.f;
    for (int64_t i = w * area; i < (w + 1) * area; ++i) {
      if (!dead) sum += p.dw[i] * Load(p.w, i, p.dtype);
      Store(p.dw_out, i, p.out_dtype, p.gate[w] * p.dw[i]);
    }
    p.dgate[w] = sum;
  });
  return {};
}

}  // namespace cpu
}  // namespace blocksparse
