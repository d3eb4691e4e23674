// The LSTM gates on the host: cuts problems into parts for the threads, by shape alone.
#include "kernels/lstm.h"

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/lstm_kernels.h"
#include "kernels/ewops.h"

namespace blocksparse {
namespace cpu {
namespace {

constexpr int64_t kGrain = 8192;  // elements a task works on

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows in `parts` chunks of `rows`, columns in `pieces` of `columns`. Where a bias has a gradient each chunk has sums of
// its own, so that there are not too many of them.
struct Parts {
  int64_t parts, rows, pieces, columns;

  explicit Parts(const LstmGatesProblem& p) {
    columns = std::max<int64_t>(1, std::min(p.width, kGrain));
    pieces = CeilDiv(p.width, columns);
    parts = std::max<int64_t>(1, CeilDiv(p.rows * columns, kGrain));
    if (p.dbias) parts = std::min<int64_t>(parts, 32);
    rows = std::max<int64_t>(1, CeilDiv(p.rows, parts));
    parts = std::max<int64_t>(1, CeilDiv(p.rows, rows));
  }
};

// The sum of the chunks' sums.
ChannelProblem SumOfParts(const LstmGatesProblem& p, int64_t parts, const float* partial) {
  ChannelProblem sum;
  sum.gradient = true;
  sum.outer = parts;
  sum.channels = 4 * p.width;
  sum.dy = partial;
  sum.dbias = p.dbias;
  return sum;
}

int64_t PartialBytes(const LstmGatesProblem& p, int64_t parts) {
  return p.dbias && parts > 1 ? parts * 4 * p.width * int64_t(sizeof(float)) : 0;
}

}  // namespace

int64_t WorkspaceBytes(const LstmGatesProblem& p) {
  const Parts cut(p);
  const int64_t partial = PartialBytes(p, cut.parts);
  return partial > 0 ? partial + WorkspaceBytes(SumOfParts(p, cut.parts, nullptr)) : 0;
}

Status Run(const LstmGatesProblem& p, void* workspace, ThreadPool* pool) {
  Isa isa;
  BLOCKSPARSE_RETURN_IF_ERROR(CurrentIsa(&isa));
  const LstmKernels* kernels = isa == Isa::kAvx512 ? LstmKernelsAvx512()
                               : isa == Isa::kAvx2 ? LstmKernelsAvx2()
                                                   : LstmKernelsBase();
  const int64_t bytes = p.rows * p.width * SizeOf(p.dtype);
  for (void* out : {p.c_next, p.h_next, p.dc}) ExpectWrites(out, bytes);
  for (int g = 0; g < 4; ++g)
    if (p.stride == p.width || g == 0) ExpectWrites(p.dgate[g], p.stride == p.width ? bytes : 4 * bytes);
  const Parts cut(p);
  const int64_t partial_bytes = PartialBytes(p, cut.parts);
  float* partial = partial_bytes > 0 ? static_cast<float*>(workspace) : p.dbias;
  pool->ForEach(cut.parts * cut.pieces, 4 * std::min(cut.rows, p.rows) * cut.columns, [&](int64_t task, int) {
    KeepSubnormals keep;
    const int64_t part = task / cut.pieces, r = part * cut.rows, k = task % cut.pieces * cut.columns;
    kernels->gates(p, r, std::min(p.rows, r + cut.rows), k, std::min(p.width, k + cut.columns),
                   partial ? partial + part * 4 * p.width : nullptr);
  });
  if (partial_bytes == 0) return {};
  return Run(SumOfParts(p, cut.parts, partial), static_cast<char*>(workspace) + partial_bytes, pool);
}

}  // namespace cpu
}  // namespace blocksparse
