// Normalization on the host: cuts problems into parts for the threads. Where sums are cut, by shape alone; partial sums
// meet in order.
#include "kernels/norms.h"

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/norms_kernels.h"

namespace blocksparse {
namespace cpu {
namespace {

constexpr int64_t kGrain = 32768;      // elements a task works on
constexpr int64_t kGradGrain = 65536;  // the same where each part has sums of its own
constexpr int64_t kMostParts = 128;
constexpr double kNsPerElement = 0.5;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

Status Kernels(const NormsKernels** kernels) {
  Isa isa;
  BLOCKSPARSE_RETURN_IF_ERROR(CurrentIsa(&isa));
  *kernels = isa == Isa::kAvx512 ? NormsKernelsAvx512() : isa == Isa::kAvx2 ? NormsKernelsAvx2() : NormsKernelsBase();
  return {};
}

// A layer norm's work is units: outer indices, and where inner is more than 1 tiles of columns in each. `parts` runs of
// units, of each segment, are the tasks.
struct LayerParts {
  int64_t tiles, units, parts, run, scratch;

  LayerParts(const LayerNormProblem& p, const NormsKernels& kernels)
      : tiles(p.inner > 1 ? CeilDiv(p.inner, kernels.columns) : 1), units(p.outer * tiles) {
    const int64_t elements = p.outer * p.features * p.inner;  // of a segment
    const int64_t wanted = p.gradient ? std::min(kMostParts, elements / kGradGrain) : elements / kGrain;
    run = CeilDiv(std::max<int64_t>(1, units), std::max<int64_t>(1, std::min(units, wanted)));
    parts = CeilDiv(std::max<int64_t>(1, units), run);
    scratch = p.inner > 1 ? p.features * kernels.columns * (p.gradient ? 2 : 1) : 0;
  }
};

// sums[i] = partial[0][i] + partial[1][i] + ...
void AddParts(const float* partial, int64_t parts, int64_t n, float* sums, ThreadPool* pool) {
  constexpr int64_t kPiece = 1024;
  pool->ForEach(CeilDiv(n, kPiece), parts * kPiece / 8, [&](int64_t task, int) {
    KeepSubnormals keep;
    const int64_t begin = task * kPiece, end = std::min(n, begin + kPiece);
    std::copy(partial + begin, partial + end, sums + begin);
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t i = begin; i < end; ++i) sums[i] += partial[part * n + i];
  });
}

// Parts in which the outer dimension of a batch norm's channels is cut.
int64_t BatchParts(const BatchNormProblem& p) {
  constexpr int64_t kTasks = 32;
  return std::max<int64_t>(1, std::min(p.outer, CeilDiv(kTasks, std::max<int64_t>(1, p.channels))));
}

}  // namespace

int64_t WorkspaceBytes(const LayerNormProblem& p, int threads) {
  const NormsKernels* kernels;
  if (!Kernels(&kernels).ok()) return 0;  // Run says why
  const LayerParts parts(p, *kernels);
  const int64_t partials = p.gradient && parts.parts > 1 ? 2 * parts.parts * p.channels() : 0;
  return (partials + parts.scratch * threads) * int64_t(sizeof(float));
}

Status Run(const LayerNormProblem& p, void* workspace, ThreadPool* pool) {
  const NormsKernels* kernels;
  BLOCKSPARSE_RETURN_IF_ERROR(Kernels(&kernels));
  const int64_t C = p.channels();
  if (C == 0) return {};
  ExpectWrites(p.gradient ? p.dx : p.y, p.outer * C * p.inner * SizeOf(p.dtype));
  const LayerParts parts(p, *kernels);
  float *dgain = p.dgain, *dbias = p.dbias, *scratch = static_cast<float*>(workspace);
  if (p.gradient && parts.parts > 1) {
    dgain = scratch, dbias = dgain + parts.parts * C;
    scratch = dbias + parts.parts * C;
  }
  const double elements = double(p.outer) * double(p.features) * double(p.inner) / double(parts.parts);
  pool->ForEach(parts.parts * p.segments, int64_t(elements * kNsPerElement) + 1, [&](int64_t task, int worker) {
    KeepSubnormals keep;
    const int64_t part = task / p.segments, s = task % p.segments;
    const int64_t begin = part * parts.run, end = std::min(parts.units, begin + parts.run);
    float* gains = p.gradient ? dgain + part * C : nullptr;
    float* biases = p.gradient ? dbias + part * C : nullptr;
    if (p.inner == 1) return kernels->layer_rows(p, s, begin, end, gains, biases);
    if (p.gradient) {
      std::fill_n(gains + s * p.features, p.features, 0.f);
      std::fill_n(biases + s * p.features, p.features, 0.f);
    }
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t o = unit / parts.tiles, i = unit % parts.tiles * kernels->columns;
      kernels->layer_columns(p, s, o, i, std::min(p.inner, i + kernels->columns), gains, biases,
                             scratch + worker * parts.scratch);
    }
  });
  if (p.gradient && parts.parts > 1) {
    AddParts(dgain, parts.parts, C, p.dgain, pool);
    AddParts(dbias, parts.parts, C, p.dbias, pool);
  }
  return {};
}

int64_t WorkspaceBytes(const BatchNormProblem& p, int) {
  if (p.inference && !p.gradient) return 0;
  return BatchParts(p) * p.channels * int64_t(std::max(sizeof(Moments), sizeof(ChannelSums)));
}

Status Run(const BatchNormProblem& p, void* workspace, ThreadPool* pool) {
  const NormsKernels* kernels;
  BLOCKSPARSE_RETURN_IF_ERROR(Kernels(&kernels));
  const int64_t C = p.channels, parts = BatchParts(p), run = CeilDiv(p.outer, parts);
  if (C == 0) return {};
  ExpectWrites(p.gradient ? p.dx : p.y, p.outer * C * p.inner * SizeOf(p.dtype));
  const int64_t ns = int64_t(double(run) * double(p.inner) * kNsPerElement) + 1;
  const auto for_parts = [&](auto&& body) {
    pool->ForEach(C * parts, ns, [&](int64_t task, int) {
      KeepSubnormals keep;
      const int64_t part = task % parts;
      body(task, task / parts, std::min(p.outer, part * run), std::min(p.outer, (part + 1) * run));
    });
  };
  if (p.gradient) {
    auto* sums = static_cast<ChannelSums*>(workspace);
    for_parts([&](int64_t task, int64_t c, int64_t o0, int64_t o1) { sums[task] = kernels->batch_sums(p, c, o0, o1); });
    for (int64_t c = 0; c < C; ++c) {
      ChannelSums total;
      for (int64_t part = 0; part < parts; ++part) {
        total.dgain += sums[c * parts + part].dgain;
        total.dbias += sums[c * parts + part].dbias;
      }
      p.dgain[c] = float(total.dgain), p.dbias[c] = float(total.dbias);
    }
  } else if (!p.inference) {
    auto* moments = static_cast<Moments*>(workspace);
    for_parts(
        [&](int64_t task, int64_t c, int64_t o0, int64_t o1) { moments[task] = kernels->batch_moments(p, c, o0, o1); });
    for (int64_t c = 0; c < C; ++c) {
      Moments total;
      for (int64_t part = 0; part < parts; ++part) total = Merge(total, moments[c * parts + part]);
      p.mean[c] = float(total.mean), p.residual[c] = float(total.mean - double(p.mean[c]));
      p.variance[c] = total.count > 0 ? float(total.squares / total.count) : 0.f;
    }
  }
  for_parts([&](int64_t, int64_t c, int64_t o0, int64_t o1) { kernels->batch_apply(p, c, o0, o1); });
  return {};
}

}  // namespace cpu
}  // namespace blocksparse
