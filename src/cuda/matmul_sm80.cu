// Block-sparse products on any chip: the plain form, one thread per output element.
#include <algorithm>
#include <vector>

#include "cuda/check.h"
#include "cuda/convert.cuh"
#include "cuda/matmul_families.h"

namespace blocksparse {
namespace cuda {
namespace sm80 {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void ProductKernel(const int32_t* ptr, const int32_t* inner, const int32_t* ids, const T* x, const T* w,
                              const float* gates, T* y, int64_t n, int64_t in, int64_t out, int b, int axis,
                              bool forward, int64_t total) {
  for (int64_t e = blockIdx.x * int64_t(kThreads) + threadIdx.x; e < total; e += int64_t(gridDim.x) * kThreads) {
    const int64_t row = axis == 1 ? e / out : e % n, feature = axis == 1 ? e % out : e / n;
    const int64_t j = feature / b, k = feature % b;
    float sum = 0.f;
    for (int i = ptr[j]; i < ptr[j + 1]; ++i) {
      const float gate = gates ? gates[ids[i]] : 1.f;
      if (gate == 0.f) continue;
      const T* block = w + int64_t(ids[i]) * b * b;
      float part = 0.f;
      for (int c = 0; c < b; ++c) {
        const int64_t f = int64_t(inner[i]) * b + c;
        part += ToFloat(x[axis == 1 ? row * in + f : f * n + row]) * ToFloat(block[forward ? c * b + k : k * b + c]);
      }
      sum += gate * part;
    }
    y[e] = FromFloat<T>(sum);
  }
}

// One pair at a time, the sums kept in float32 between launches.
template <typename T>
__global__ void WeightGradKernel(const int32_t* update, const T* x, const T* dy, const float* gates, float* sums,
                                 int64_t n, int64_t C, int64_t K, int b, int axis, int64_t total) {
  for (int64_t e = blockIdx.x * int64_t(kThreads) + threadIdx.x; e < total; e += int64_t(gridDim.x) * kThreads) {
    const int64_t w = e / (b * b), i = e / b % b, j = e % b;
    if (gates && gates[w] == 0.f) continue;
    const int64_t c = int64_t(update[2 * w]) * b + i, k = int64_t(update[2 * w + 1]) * b + j;
    float sum = sums[e];
    for (int64_t r = 0; r < n; ++r)
      sum += ToFloat(x[axis == 1 ? r * C + c : c * n + r]) * ToFloat(dy[axis == 1 ? r * K + k : k * n + r]);
    sums[e] = sum;
  }
}

template <typename Out>
__global__ void FinishKernel(const float* sums, const float* addend, Out* out, int64_t total) {
  for (int64_t e = blockIdx.x * int64_t(kThreads) + threadIdx.x; e < total; e += int64_t(gridDim.x) * kThreads)
    out[e] = FromFloat<Out>(sums[e] + (addend ? addend[e] : 0.f));
}

int Grid(int64_t total) { return int(std::min<int64_t>((total + kThreads - 1) / kThreads, 1 << 20)); }

}  // namespace

MatmulChoice Choose(const MatmulProblem&, const LayoutTable&, const Chip&) {
  MatmulChoice choice;
  choice.name = "plain";
  return choice;
}

Status Plan(const MatmulProblem& p, const LayoutTable& t, const MatmulChoice& choice, MatmulPlan* plan) {
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

int64_t WorkspaceBytes(const MatmulProblem& p, const MatmulChoice&, const MatmulPlan&, const Chip&) {
  return p.product == Product::kWeightGrad ? int64_t(p.blocks) * p.bsize * p.bsize * 4 : 0;
}

Status Run(const MatmulProblem& p, const MatmulChoice&, const MatmulPlan& plan, const int32_t* words, void* workspace,
           const Chip&, Stream stream) {
  const int64_t area = int64_t(p.bsize) * p.bsize;
  if (p.product != Product::kWeightGrad) {
    const bool forward = p.product == Product::kForward;
    const int64_t in = forward ? p.C() : p.K(), out = forward ? p.K() : p.C(), total = p.n[0] * out;
    if (total == 0) return {};
    WithType(p.dtype, [&](auto type) {
      using T = decltype(type);
      ProductKernel<<<Grid(total), kThreads, 0, stream>>>(words + plan.numbers[0], words + plan.numbers[1],
                                                          words + plan.numbers[2], static_cast<const T*>(p.a[0]),
                                                          static_cast<const T*>(p.b[0]), p.gate, static_cast<T*>(p.out),
                                                          p.n[0], in, out, p.bsize, p.axis, forward, total);
    });
    BLOCKSPARSE_CUDA_LAUNCHED();
    return {};
  }
  const int64_t total = p.blocks * area;
  float* sums = static_cast<float*>(workspace);
  BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(sums, 0, total * sizeof(float), stream));
  for (int i = 0; i < p.pairs; ++i) {
    if (p.n[i] == 0) continue;
    WithType(p.dtype, [&](auto type) {
      using T = decltype(type);
      WeightGradKernel<<<Grid(total), kThreads, 0, stream>>>(words, static_cast<const T*>(p.a[i]),
                                                             static_cast<const T*>(p.b[i]), p.gate, sums, p.n[i], p.C(),
                                                             p.K(), p.bsize, p.axis, total);
    });
    BLOCKSPARSE_CUDA_LAUNCHED();
  }
  WithType(p.out_dtype, [&](auto type) {
    using Out = decltype(type);
    FinishKernel<<<Grid(total), kThreads, 0, stream>>>(sums, p.addend, static_cast<Out*>(p.out), total);
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace sm80
}  // namespace cuda
}  // namespace blocksparse
