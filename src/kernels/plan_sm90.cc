#include "kernels/plan_sm90.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace blocksparse {
namespace {

// For each output block column: its input blocks, ascending, and their ids.
struct Columns {
  int outputs, inputs;
  const int32_t *ptr, *input, *id;
};

Columns ColumnsOf(const LayoutTable& t, Product product) {
  return product == Product::kForward ? Columns{t.KB, t.CB, t.column_ptr, t.column_c, t.column_w}
                                      : Columns{t.CB, t.KB, t.row_ptr, t.row_k, t.row_w};
}

// Groups of up to `size` units of `width` adjacent columns that share many input blocks. Greedy: the longest unit left
// starts a group, then whichever of the next `kWindow` overlaps its union most. Linear in the units for a given window.
std::vector<std::vector<int>> Cluster(const Columns& c, int width, int size) {
  constexpr int kWindow = 384;
  const int units = (c.outputs + width - 1) / width, words = (c.inputs + 63) / 64;
  std::vector<uint64_t> sets(int64_t(units) * words, 0);
  std::vector<int> length(units), order(units);
  for (int u = 0; u < units; ++u) {
    const int last = std::min(c.outputs, (u + 1) * width);
    for (int i = c.ptr[u * width]; i < c.ptr[last]; ++i)
      sets[int64_t(u) * words + c.input[i] / 64] |= 1ull << c.input[i] % 64;
    length[u] = c.ptr[last] - c.ptr[u * width];
  }
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return length[a] > length[b]; });

  std::vector<std::vector<int>> groups;
  std::vector<int> pool;  // candidates in order
  int next = 0;
  std::vector<uint64_t> joined(words);
  while (next < units || !pool.empty()) {
    while (next < units && int(pool.size()) < kWindow) pool.push_back(order[next++]);
    groups.push_back({pool.front()});
    std::copy_n(&sets[int64_t(pool.front()) * words], words, joined.begin());
    pool.erase(pool.begin());
    while (int(groups.back().size()) < size && !pool.empty()) {
      int best = 0, most = -1;
      for (int i = 0; i < int(pool.size()); ++i) {
        const uint64_t* s = &sets[int64_t(pool[i]) * words];
        int shared = 0;
        for (int w = 0; w < words; ++w) shared += __builtin_popcountll(s[w] & joined[w]);
        if (shared > most) most = shared, best = i;
      }
      const int unit = pool[best];
      for (int w = 0; w < words; ++w) joined[w] |= sets[int64_t(unit) * words + w];
      groups.back().push_back(unit);
      pool.erase(pool.begin() + best);
    }
    std::sort(groups.back().begin(), groups.back().end());
  }
  return groups;
}

}  // namespace

Status PlanUnion(const LayoutTable& table, Product product, int axis, int bsize, MatmulPlan* plan) {
  const Columns c = ColumnsOf(table, product);
  const int width = bsize == 32 ? 2 : 1;  // columns to 64 output features, the store's unit
  const int per_group = UnionPlan::Columns(bsize) / width;
  std::vector<std::vector<int>> groups = Cluster(c, width, per_group);

  struct Group {
    std::vector<int32_t> stages;
    std::vector<int> units;
  };
  std::vector<Group> built(groups.size());
  std::vector<std::pair<int, int>> visits;  // input block, position among the group's columns
  int64_t total = 0, longest = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    built[g].units = groups[g];
    std::vector<int32_t>& out = built[g].stages;
    struct Visit {
      int input, column, id;
    };
    std::vector<Visit> all;
    for (size_t u = 0; u < groups[g].size(); ++u)
      for (int j = 0; j < width; ++j) {
        const int k = groups[g][u] * width + j;
        if (k >= c.outputs) break;
        for (int i = c.ptr[k]; i < c.ptr[k + 1]; ++i) all.push_back({c.input[i], int(u) * width + j, c.id[i]});
      }
    std::sort(all.begin(), all.end(), [](const Visit& a, const Visit& b) {
      return a.input != b.input ? a.input < b.input : a.column < b.column;
    });

    // Runs of one input block each.
    struct Run {
      size_t begin, end;
    };
    std::vector<Run> runs;
    for (size_t i = 0; i < all.size();) {
      size_t e = i;
      while (e < all.size() && all[e].input == all[i].input) ++e;
      runs.push_back({i, e});
      i = e;
    }
    auto emit = [&](const Run* first, const Run* second, int boxes, int half) {
      int32_t words[UnionPlan::kStageWords] = {};
      int pieces = 0;
      auto unit = [&](const Run& r, int u) {
        for (size_t i = r.begin; i < r.end; ++i) {
          words[0] |= 1 << (all[i].column + 8 * u);
          words[3 + pieces++] = bsize == 128 ? 2 * all[i].id + half : all[i].id;
        }
        words[1 + u] = all[r.begin].input * bsize + half * 64;
      };
      unit(*first, 0);
      if (second != nullptr) unit(*second, 1);
      words[0] |= pieces << 16 | boxes << 24;
      out.insert(out.end(), words, words + UnionPlan::kStageWords);
    };
    if (bsize == 32) {
      const Run* waiting = nullptr;
      for (size_t r = 0; r < runs.size(); ++r) {
        const int input = all[runs[r].begin].input;
        const bool wide =
            axis == 1 && input % 2 == 0 && r + 1 < runs.size() && all[runs[r + 1].begin].input == input + 1;
        if (wide) {
          emit(&runs[r], &runs[r + 1], 1, 0);
          ++r;
        } else if (waiting != nullptr) {
          emit(waiting, &runs[r], 2, 0);
          waiting = nullptr;
        } else {
          waiting = &runs[r];
        }
      }
      if (waiting != nullptr) emit(waiting, nullptr, 0, 0);
    } else {
      for (const Run& r : runs)
        for (int half = 0; half < std::max(1, bsize / 64); ++half) emit(&r, nullptr, 0, half);
    }
    total += out.size();
    longest = std::max<int64_t>(longest, out.size());
  }

  std::stable_sort(built.begin(), built.end(),
                   [](const Group& a, const Group& b) { return a.stages.size() > b.stages.size(); });
  const double mean = double(total) / std::max<size_t>(1, built.size());
  int64_t heavy = 0;
  while (heavy < int64_t(built.size()) && built[heavy].stages.size() > 1.5 * mean) ++heavy;

  const int64_t begin = (int64_t(built.size()) * UnionPlan::kGroupWords + 31) / 32 * 32;
  plan->words.assign(begin, 0);
  plan->words.reserve(begin + total + 2 * UnionPlan::kStageWords);
  for (size_t g = 0; g < built.size(); ++g) {
    int32_t* w = &plan->words[g * UnionPlan::kGroupWords];
    w[0] = int32_t((plan->words.size() - begin) / UnionPlan::kStageWords);
    w[1] = int32_t(built[g].stages.size() / UnionPlan::kStageWords);
    std::fill(w + 2, w + 8, -1);
    int piece = 2;
    for (int u : built[g].units)
      for (int f = 0; f < width * bsize; f += 64) w[piece++] = u * width * bsize + f;
    plan->words.insert(plan->words.end(), built[g].stages.begin(), built[g].stages.end());
  }
  // The kernel reads stages two at a time.
  plan->words.insert(plan->words.end(), UnionPlan::kStageWords, 0);
  plan->numbers = {int64_t(built.size()), heavy, begin, total / UnionPlan::kStageWords, longest > 1.2 * mean};
  return {};
}

}  // namespace blocksparse
