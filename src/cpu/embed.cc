// Embedding lookup on the host. The gradient sorts the places of indices by counting, then sums row by row.
#include "kernels/embed.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cpu/embed_kernels.h"
#include "cpu/isa.h"

namespace blocksparse {
namespace cpu {
namespace {

constexpr int64_t kGrain = 32768;  // elements a task works on
constexpr int64_t kColumns = 256;  // of a row, that a task takes: one row may have most of the work

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The row of a place, or -1.
template <class Body>
void WithIndex(const EmbeddingProblem& p, const Body& body) {
  auto call = [&](auto type) {
    using T = decltype(type);
    const T* index = static_cast<const T*>(p.index);
    const uint64_t rows = uint64_t(p.rows);
    // As an unsigned number a negative index is too large.
    body([index, rows](int64_t n) { return uint64_t(int64_t(index[n])) < rows ? int64_t(index[n]) : int64_t(-1); });
  };
  switch (p.index_bytes) {
    case 1: return p.index_signed ? call(int8_t()) : call(uint8_t());
    case 2: return p.index_signed ? call(int16_t()) : call(uint16_t());
    case 4: return p.index_signed ? call(int32_t()) : call(uint32_t());
    default: return p.index_signed ? call(int64_t()) : call(uint64_t());
  }
}

void Lookup(const EmbeddingProblem& p, ThreadPool* pool) {
  const int64_t row = p.width * SizeOf(p.dtype), grain = std::max<int64_t>(1, 4 * kGrain / row);
  const char* x = static_cast<const char*>(p.x);
  char* y = static_cast<char*>(p.y);
  WithIndex(p, [&](auto index) {
    pool->ForEach(CeilDiv(p.count, grain), grain * (row / 8 + 4), [&](int64_t task, int) {
      for (int64_t n = task * grain, end = std::min(p.count, n + grain); n < end; ++n) {
        const int64_t r = index(n);
        if (r < 0)
          std::memset(y + n * row, 0, row);
        else
          std::memcpy(y + n * row, x + r * row, row);
      }
    });
  });
}

}  // namespace

int64_t WorkspaceBytes(const EmbeddingProblem& p) {
  return p.gradient ? (p.rows + 1 + p.count) * int64_t(sizeof(uint32_t)) : 0;
}

Status Run(const EmbeddingProblem& p, void* workspace, ThreadPool* pool) {
  if (p.width == 0) return {};
  ExpectWrites(p.y, (p.gradient ? p.rows : p.count) * p.width * SizeOf(p.dtype));
  if (!p.gradient) {
    Lookup(p, pool);
    return {};
  }
  if (p.count >= EmbeddingProblem::kMaxGradient || p.rows >= EmbeddingProblem::kMaxGradient)
    return Status::Unimplemented("the gradient of an embedding takes fewer than 2^32 - 1 indices and rows, got " +
                                 std::to_string(p.count) + " and " + std::to_string(p.rows));
  Isa isa;
  BLOCKSPARSE_RETURN_IF_ERROR(CurrentIsa(&isa));
  const EmbedKernels* kernels = isa == Isa::kAvx512 ? EmbedKernelsAvx512()
                                : isa == Isa::kAvx2 ? EmbedKernelsAvx2()
                                                    : EmbedKernelsBase();
  // places[end[r - 1]] to places[end[r]] are the places of row r, ascending: counts, then their sums, then, while places
  // are filled in, the next free slot of each row.
  uint32_t *slot = static_cast<uint32_t*>(workspace), *places = slot + p.rows + 1;
  std::fill(slot, slot + p.rows + 1, 0u);
  WithIndex(p, [&](auto index) {
    for (int64_t n = 0; n < p.count; ++n)
      if (const int64_t r = index(n); r >= 0) ++slot[r + 1];
    for (int64_t r = 0; r < p.rows; ++r) slot[r + 1] += slot[r];
    for (int64_t n = 0; n < p.count; ++n)
      if (const int64_t r = index(n); r >= 0) places[slot[r]++] = uint32_t(n);
  });
  const uint32_t* end = slot;
  const int64_t columns = std::min(p.width, kColumns), pieces = CeilDiv(p.width, columns);
  // Tasks are runs of rows with about the same work: a row costs as much as each of its terms.
  const int64_t terms = p.rows > 0 ? int64_t(end[p.rows - 1]) : 0, work = terms + p.rows;
  const int64_t grain = std::max<int64_t>(1, kGrain / columns), tasks = CeilDiv(work, grain);
  // The first row that begins at this much work or later.
  auto row_at = [&](int64_t at) {
    int64_t low = 0, high = p.rows;
    while (low < high) {
      const int64_t r = (low + high) / 2;
      (r == 0 ? 0 : int64_t(end[r - 1]) + r) < at ? low = r + 1 : high = r;
    }
    return low;
  };
  const int64_t row_bytes = p.width * SizeOf(p.dtype);
  pool->ForEach(tasks * pieces, grain * columns / 4, [&](int64_t task, int) {
    KeepSubnormals keep;
    const int64_t k0 = task % pieces * columns, k1 = std::min(p.width, k0 + columns);
    const int64_t first = task / pieces;
    for (int64_t r = row_at(first * grain), last = row_at((first + 1) * grain); r < last; ++r) {
      const int64_t begin = r == 0 ? 0 : end[r - 1];
      char* y = static_cast<char*>(p.y) + r * row_bytes;
      if (begin == int64_t(end[r]))
        std::memset(y + k0 * SizeOf(p.dtype), 0, (k1 - k0) * SizeOf(p.dtype));
      else
        kernels->sum_rows(p.dtype, p.x, p.width, places + begin, int64_t(end[r]) - begin, k0, k1, y);
    }
  });
  return {};
}

}  // namespace cpu
}  // namespace blocksparse
