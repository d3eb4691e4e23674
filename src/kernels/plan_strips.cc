#include "kernels/plan_strips.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace blocksparse {

Status PlanStrips(const LayoutTable& table, Product product, int bsize, MatmulPlan* plan) {
  using P = StripPlan;
  const bool transposed = product == Product::kInputGrad;
  const struct {
    int outputs, inputs;
    const int32_t *ptr, *input, *id;  // for each output block column: its input blocks, ascending, and their ids
  } c = {transposed ? table.CB : table.KB, transposed ? table.KB : table.CB,
         transposed ? table.row_ptr : table.column_ptr, transposed ? table.row_k : table.column_c,
         transposed ? table.row_w : table.column_w};
  const int strips = (c.outputs * bsize + 15) / 16, slabs = int((int64_t(c.inputs) * bsize + P::kSlab - 1) / P::kSlab);
  // As many warps to a strip as there is room for.
  auto needed = [&](int parts) { return (strips + P::kWarps / parts - 1) / (P::kWarps / parts); };
  int parts = P::kWarps;
  while (parts > 1 && needed(parts) > P::kClusters) --parts;
  const int per_cluster = P::kWarps / parts, clusters = needed(parts);
  std::vector<std::vector<int32_t>> lists(int64_t(clusters) * 4 * P::kWarps);
  std::vector<int> rank(slabs), first(5);
  for (int q = 0; q <= 4; ++q) first[q] = slabs * q / 4;
  for (int q = 0; q < 4; ++q) std::fill(rank.begin() + first[q], rank.begin() + first[q + 1], q);
  for (int strip = 0; strip < strips; ++strip) {
    const int64_t cluster = strip / per_cluster, warp = strip % per_cluster * parts;
    int turn = 0;
    auto list = [&](int slab) -> std::vector<int32_t>& {
      return lists[(cluster * 4 + rank[slab]) * P::kWarps + warp + turn++ % parts];
    };
    if (bsize == 8) {
      int at[2], end[2];
      for (int t = 0; t < 2; ++t) {
        const int column = std::min(strip * 2 + t, c.outputs);
        at[t] = c.ptr[column];
        end[t] = c.ptr[std::min(column + 1, c.outputs)];
      }
      while (at[0] < end[0] || at[1] < end[1]) {
        int slab = INT32_MAX;
        for (int t = 0; t < 2; ++t)
          if (at[t] < end[t]) slab = std::min(slab, c.input[at[t]] * 8 / P::kSlab);
        for (int t = 0; t < 2; ++t)
          while (at[t] < end[t] && c.input[at[t]] * 8 / P::kSlab == slab) {
            std::vector<int32_t>& to = list(slab);
            uint32_t place = uint32_t(slab - first[rank[slab]]) << 25 | uint32_t(t) << 24;
            for (int i = 0; i < 4; ++i) {
              const bool some = at[t] < end[t] && c.input[at[t]] * 8 / P::kSlab == slab;
              to.push_back(some ? c.id[at[t]] : -1);
              place |= uint32_t(some ? c.input[at[t]] % (P::kSlab / 8) : 32) << 6 * i;
              at[t] += some;
            }
            to.push_back(int32_t(place));
          }
      }
    } else {
      const int column = strip * 16 / bsize, out = strip * 16 % bsize / 16;
      for (int i = c.ptr[column]; i < c.ptr[column + 1]; ++i)
        for (int in = 0; in < bsize / 16; ++in) {
          const int64_t feature = int64_t(c.input[i]) * bsize + in * 16, slab = feature / P::kSlab;
          const int64_t piece =
              int64_t(c.id[i]) * (bsize * bsize / 16) + (transposed ? out : in) * bsize + (transposed ? in : out);
          std::vector<int32_t>& to = list(int(slab));
          to.push_back(int32_t(piece));
          to.push_back(int32_t(uint32_t(slab - first[rank[slab]]) << 25 | uint32_t(feature % P::kSlab / 8)));
        }
    }
  }

  const int record = P::Blocks(bsize) + 1, in_line = P::InLine(bsize) * record;
  plan->words.assign(int64_t(lists.size()) * P::kLine, 0);
  for (size_t l = 0; l < lists.size(); ++l) {
    const std::vector<int32_t>& list = lists[l];
    plan->words[l * P::kLine] = int32_t(plan->words.size() / P::kLine);
    plan->words[l * P::kLine + 1] = int32_t(list.size() / record);
    for (size_t i = 0; i < list.size(); i += in_line) {
      int64_t to = int64_t(l) * P::kLine;
      if (i > 0) {
        to = int64_t(plan->words.size());
        plan->words.resize(to + P::kLine, 0);
      }
      std::copy(list.begin() + i, list.begin() + std::min(list.size(), i + in_line), plan->words.begin() + to + 2);
    }
  }
  plan->numbers = {clusters, parts, slabs};
  return {};
}

}  // namespace blocksparse
