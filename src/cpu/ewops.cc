// Elementwise operators on the host: cuts problems into parts for the threads, by shape alone.
#include "kernels/ewops.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "cpu/ewops_kernels.h"
#include "cpu/isa.h"
#include "kernels/ewops_formulas.h"

namespace blocksparse {
namespace cpu {
namespace {

constexpr int64_t kGrain = 16384;  // elements a task works on

Status Kernels(const EwopsKernels** kernels) {
  Isa isa;
  BLOCKSPARSE_RETURN_IF_ERROR(CurrentIsa(&isa));
  *kernels = isa == Isa::kAvx512 ? EwopsKernelsAvx512() : isa == Isa::kAvx2 ? EwopsKernelsAvx2() : EwopsKernelsBase();
  return {};
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// body(begin, end) for pieces of [0, n) of at most `grain`.
template <class Body>
void ForRange(ThreadPool* pool, int64_t n, int64_t grain, double nanoseconds, const Body& body) {
  pool->ForEach(CeilDiv(n, grain), int64_t(double(std::min(n, grain)) * nanoseconds) + 1, [&](int64_t task, int) {
    KeepSubnormals keep;
    body(task * grain, std::min(n, (task + 1) * grain));
  });
}

// Nanoseconds an element takes one thread where it comes from the cache (AVX2, 3.2 GHz).
double MapCost(const EwProblem& p) {
  const double moved = p.gradient ? (IsBinary(p.op) ? 0.32 : 0.2) : 0.1;
  if (p.gradient && GradientFromOutput(p.op)) return moved;
  switch (p.op) {
    case EwOp::kAdd:
    case EwOp::kSub:
    case EwOp::kMul:
    case EwOp::kMaximum:
    case EwOp::kMinimum:
    case EwOp::kNeg:
    case EwOp::kSqr:
    case EwOp::kRelu:
    case EwOp::kFilter: return moved;
    case EwOp::kDiv:
    case EwOp::kRcp:
    case EwOp::kSqrt: return moved + 0.25;
    default: return 0.6;
  }
}

// How the sums of a channel problem are cut: the outer dimension in `outers` chunks, inner in `inners`, and channels in
// groups where each channel is contiguous. Partial sums are [outers * inners][channels] each.
struct ChannelParts {
  int64_t outers, inners, groups, outer, inner, group;

  explicit ChannelParts(const ChannelProblem& p) {
    inners = p.inner > 1 ? CeilDiv(p.inner, 2 * kGrain) : 1;
    inner = CeilDiv(p.inner, inners);
    outers = std::max<int64_t>(1, std::min({p.outer, int64_t(64), p.outer * p.channels * inner / kGrain}));
    while (outers & (outers - 1)) outers &= outers - 1;  // a power of two: few parts are shared evenly
    outer = CeilDiv(p.outer, outers);
    outers = outer > 0 ? CeilDiv(p.outer, outer) : 1;
    group = p.inner > 1 ? std::max<int64_t>(1, std::min(p.channels, kGrain / std::max<int64_t>(1, outer * inner)))
                        : std::max<int64_t>(1, p.channels);
    groups = CeilDiv(p.channels, group);
  }
  int64_t partials() const { return outers * inners; }
};

}  // namespace

Status Run(const EwProblem& p, ThreadPool* pool) {
  const EwopsKernels* kernels;
  BLOCKSPARSE_RETURN_IF_ERROR(Kernels(&kernels));
  for (void* out : p.out) ExpectWrites(out, p.n * SizeOf(p.dtype));
  ForRange(pool, p.n, kGrain, MapCost(p), [&](int64_t begin, int64_t end) { kernels->map(p, begin, end); });
  return {};
}

Status Run(const CastProblem& p, ThreadPool* pool) {
  const EwopsKernels* kernels;
  BLOCKSPARSE_RETURN_IF_ERROR(Kernels(&kernels));
  ExpectWrites(p.y, p.n * SizeOf(p.to));
  ForRange(pool, p.n, kGrain, 0.1, [&](int64_t begin, int64_t end) { kernels->cast(p, begin, end); });
  return {};
}

Status Run(const AddNProblem& p, ThreadPool* pool) {
  const EwopsKernels* kernels;
  BLOCKSPARSE_RETURN_IF_ERROR(Kernels(&kernels));
  ExpectWrites(p.y, p.n * SizeOf(p.dtype));
  ForRange(pool, p.n, kGrain, 0.1 * p.count + 0.1, [&](int64_t begin, int64_t end) { kernels->add_n(p, begin, end); });
  return {};
}

int64_t WorkspaceBytes(const ChannelProblem& p) {
  if (!p.gradient) return 0;
  const ChannelParts parts(p);
  const int sums = (p.dbias != nullptr) + (p.dgain != nullptr);
  return parts.partials() > 1 ? sums * parts.partials() * p.channels * int64_t(sizeof(float)) : 0;
}

Status Run(const ChannelProblem& p, void* workspace, ThreadPool* pool) {
  const EwopsKernels* kernels;
  BLOCKSPARSE_RETURN_IF_ERROR(Kernels(&kernels));
  const int64_t C = p.channels;
  if (C == 0) return {};
  const double cost = p.act == Activation::kFastGelu ? 0.8 : 0.2;
  for (void* out : {p.y, p.dx}) ExpectWrites(out, p.outer * C * p.inner * SizeOf(p.dtype));
  if (!p.gradient && p.inner == 1) {
    ForRange(pool, p.outer, std::max<int64_t>(1, kGrain / C), cost * double(C),
             [&](int64_t begin, int64_t end) { kernels->channel(p, begin, end, 0, C, 0, 1, nullptr, nullptr); });
    return {};
  }
  const ChannelParts parts(p);
  const int64_t P = parts.partials();
  float *bias_sums = p.dbias, *gain_sums = p.dgain;
  if (P > 1) {
    float* partial = static_cast<float*>(workspace);
    if (p.dbias) bias_sums = partial, partial += P * C;
    if (p.dgain) gain_sums = partial;
  }
  const int64_t elements = std::min(parts.group, C) * std::max<int64_t>(1, parts.outer) * parts.inner;
  pool->ForEach(P * parts.groups, int64_t(cost * double(elements)) + 1, [&](int64_t task, int) {
    KeepSubnormals keep;
    const int64_t part = task / parts.groups, group = task % parts.groups;
    const int64_t o = part / parts.inners * parts.outer, i = part % parts.inners * parts.inner, c = group * parts.group;
    kernels->channel(p, o, std::min(p.outer, o + parts.outer), c, std::min(C, c + parts.group), i,
                     std::min(p.inner, i + parts.inner), bias_sums ? bias_sums + part * C : nullptr,
                     gain_sums ? gain_sums + part * C : nullptr);
  });
  if (P == 1 || !p.gradient) return {};
  ForRange(pool, C, 1024, 0.2 * double(P), [&](int64_t begin, int64_t end) {
    for (int which = 0; which < 2; ++which) {
      const float* partial = which == 0 ? bias_sums : gain_sums;
      float* sum = which == 0 ? p.dbias : p.dgain;
      if (!sum) continue;
      std::copy(partial + begin, partial + end, sum + begin);
      for (int64_t part = 1; part < P; ++part)
        for (int64_t c = begin; c < end; ++c) sum[c] += partial[part * C + c];
    }
  });
  return {};
}

Status Run(const DropoutProblem& p, ThreadPool* pool) {
  const EwopsKernels* kernels;
  BLOCKSPARSE_RETURN_IF_ERROR(Kernels(&kernels));
  ExpectWrites(p.y, p.n * SizeOf(p.dtype));
  ForRange(pool, p.n, kGrain, 1.0, [&](int64_t begin, int64_t end) { kernels->dropout(p, begin, end); });
  return {};
}

Status Run(const ConcreteGateProblem& p, ThreadPool* pool) {
  const EwopsKernels* kernels;
  BLOCKSPARSE_RETURN_IF_ERROR(Kernels(&kernels));
  ForRange(pool, p.n, kGrain / 4, 8.0, [&](int64_t begin, int64_t end) { kernels->concrete_gate(p, begin, end); });
  return {};
}

Status Run(const FancyGatherProblem& p, ThreadPool* pool) {
  const int64_t row = p.inner * p.element_bytes, matrix = p.dim * row,
                grain = CeilDiv(4 * kGrain, p.gradient ? matrix : row);
  const char* x = static_cast<const char*>(p.x);
  char* y = static_cast<char*>(p.y);
  if (row == 0) return {};
  ExpectWrites(p.y, p.outer * (p.gradient ? matrix : row));
  ForRange(pool, p.outer, grain, 0.1 * double(p.gradient ? matrix : row) + 2, [&](int64_t begin, int64_t end) {
    if (p.gradient) std::memset(y + begin * matrix, 0, (end - begin) * matrix);
    for (int64_t o = begin; o < end; ++o) {
      const int64_t d = std::max(p.index[o], 0);
      if (p.gradient && d < p.dim)
        std::memcpy(y + o * matrix + d * row, x + o * row, row);
      else if (!p.gradient && d < p.dim)
        std::memcpy(y + o * row, x + o * matrix + d * row, row);
      else if (!p.gradient)
        std::memset(y + o * row, 0, row);
    }
  });
  return {};
}

namespace {

template <class T>
void ScatterMax(const ReduceMaxProblem& p, int64_t begin, int64_t end) {
  const T* dy = static_cast<const T*>(p.x);
  T* dx = static_cast<T*>(p.y);
  for (int64_t o = begin; o < end; ++o)
    for (int64_t i = 0; i < p.inner; ++i)
      dx[(o * p.dim + p.argmax[o * p.inner + i]) * p.inner + i] = dy[o * p.inner + i];
}

}  // namespace

Status Run(const ReduceMaxProblem& p, ThreadPool* pool) {
  const EwopsKernels* kernels;
  BLOCKSPARSE_RETURN_IF_ERROR(Kernels(&kernels));
  if (p.inner == 0) return {};
  const int64_t matrix = p.dim * p.inner;
  if (p.gradient) {
    ExpectWrites(p.y, p.outer * matrix * SizeOf(p.dtype));
    ForRange(pool, p.outer, CeilDiv(kGrain, matrix), 0.3 * double(matrix), [&](int64_t begin, int64_t end) {
      const int64_t bytes = matrix * SizeOf(p.dtype);
      std::memset(static_cast<char*>(p.y) + begin * bytes, 0, (end - begin) * bytes);
      p.dtype == DType::kFloat32 ? ScatterMax<uint32_t>(p, begin, end) : ScatterMax<uint16_t>(p, begin, end);
    });
    return {};
  }
  // One wide matrix is cut along its columns, many small ones by count.
  const int64_t columns = p.inner == 1 ? 1 : std::min(p.inner, std::max<int64_t>(256, kGrain / p.dim / 256 * 256));
  const int64_t pieces = CeilDiv(p.inner, columns), grain = CeilDiv(kGrain, p.dim * columns);
  pool->ForEach(CeilDiv(p.outer, grain) * pieces, grain * p.dim * columns / 8, [&](int64_t task, int) {
    KeepSubnormals keep;
    const int64_t begin = task / pieces * grain, i = task % pieces * columns;
    kernels->reduce_max(p, begin, std::min(p.outer, begin + grain), i, std::min(p.inner, i + columns));
  });
  return {};
}

}  // namespace cpu
}  // namespace blocksparse
