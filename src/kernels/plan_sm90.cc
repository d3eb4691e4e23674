#include "kernels/plan_sm90.h"

#include <algorithm>
#include <array>
#include <cstdint>
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

Status PlanUnion(const LayoutTable& table, Product product, int axis, int bsize, int columns, MatmulPlan* plan) {
  const Columns c = ColumnsOf(table, product);
  const int width = std::max(1, 64 / bsize);  // columns to 64 output features, the store's unit
  const int per_group = columns / width;
  std::vector<std::vector<int>> groups = Cluster(c, width, per_group);

  struct Group {
    std::vector<int32_t> stages;
    std::vector<int> units;
  };
  std::vector<Group> built(groups.size());
  int64_t total = 0;
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
    for (size_t i = UnionPlan::kStageWords - 1; i < built[g].stages.size(); i += UnionPlan::kStageWords)
      built[g].stages[i] = int32_t(g);
    plan->words.insert(plan->words.end(), built[g].stages.begin(), built[g].stages.end());
  }
  // The kernel reads stages two at a time.
  plan->words.insert(plan->words.end(), UnionPlan::kStageWords, 0);
  plan->numbers = {int64_t(built.size()), heavy, begin, total / UnionPlan::kStageWords};
  return {};
}

Status PlanRounds(const LayoutTable& table, Product product, MatmulPlan* plan) {
  using P = RoundsPlan;
  constexpr int kUnits = 4, kLook = 64;  // blocks a slab; slabs looked at for the next one
  const Columns c = ColumnsOf(table, product);
  const std::vector<std::vector<int>> groups = Cluster(c, kUnits, P::kColumns / kUnits);
  const int slabs = (c.inputs + kUnits - 1) / kUnits;

  const int64_t begin = (int64_t(groups.size()) * P::kGroupWords + 31) / 32 * 32;
  plan->words.assign(begin, 0);
  struct Block {
    int column, unit, id;
  };
  struct Waiting {
    int slab, unit, id;  // slab: in the order of loading
  };
  std::vector<std::vector<Block>> of(slabs);
  std::vector<std::array<uint8_t, P::kColumns>> counts(slabs);
  std::vector<int> left;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (int s = 0; s < slabs; ++s) of[s].clear(), counts[s].fill(0);
    for (size_t u = 0; u < groups[g].size(); ++u)
      for (int j = 0; j < kUnits; ++j) {
        const int k = groups[g][u] * kUnits + j, column = int(u) * kUnits + j;
        if (k >= c.outputs) break;
        for (int i = c.ptr[k]; i < c.ptr[k + 1]; ++i) {
          of[c.input[i] / kUnits].push_back({column, c.input[i] % kUnits, c.id[i]});
          ++counts[c.input[i] / kUnits][column];
        }
      }
    left.clear();
    for (int s = 0; s < slabs; ++s)
      if (!of[s].empty()) left.push_back(s);

    const int64_t first = (int64_t(plan->words.size()) - begin) / P::kStageWords;
    std::array<std::vector<Waiting>, P::kColumns> waiting;
    std::array<size_t, P::kColumns> done{};
    std::array<int, P::kColumns> backlog{};
    int loaded = 0;
    bool some = true;
    while (!left.empty() || some) {
      int fresh[2], fresh_count = 0;
      while (fresh_count < 2 && !left.empty()) {
        // The slab that leaves the columns' backlogs most even.
        int best = 0, least = INT32_MAX;
        for (int i = 0; i < std::min<int>(kLook, left.size()); ++i) {
          const auto& n = counts[left[i]];
          int squares = 0;
          for (int j = 0; j < P::kColumns; ++j) squares += (backlog[j] + n[j]) * (backlog[j] + n[j]);
          if (squares < least) least = squares, best = i;
        }
        const int s = left[best];
        left.erase(left.begin() + best);
        for (const Block& b : of[s]) {
          waiting[b.column].push_back({loaded, b.unit, b.id});
          ++backlog[b.column];
        }
        fresh[fresh_count++] = s;
        ++loaded;
      }
      // Rounds in which every column has work, and those that free slabs in time.
      int rounds = INT32_MAX, due = 0;
      for (int j = 0; j < P::kColumns; ++j) {
        rounds = std::min(rounds, backlog[j]);
        int overdue = left.empty() ? backlog[j] : 0;
        for (size_t i = done[j];
             !left.empty() && i < waiting[j].size() && waiting[j][i].slab < loaded - (P::kWindow - 2); ++i)
          ++overdue;
        due = std::max(due, overdue);
      }
      rounds = std::max(rounds, due);
      do {
        const int now = std::min(rounds, P::kRounds);
        rounds -= now;
        const size_t at = plan->words.size();
        plan->words.insert(plan->words.end(), P::kStageWords, 0);
        int32_t* w = &plan->words[at];
        uint16_t* entries = reinterpret_cast<uint16_t*>(w + 4);
        int weights = 0;
        for (int r = 0; r < now; ++r)
          for (int j = 0; j < P::kColumns; ++j) {
            uint16_t& entry = entries[r * P::kColumns + j];
            entry = 0xffff;
            if (backlog[j] == 0) continue;
            const Waiting& b = waiting[j][done[j]++];
            --backlog[j];
            entry = uint16_t((loaded - 1 - b.slab) | b.unit << 4 | weights << 6);
            w[P::kIds + weights++] = b.id;
          }
        int oldest = loaded;
        for (int j = 0; j < P::kColumns; ++j)
          if (backlog[j] > 0) oldest = std::min(oldest, waiting[j][done[j]].slab);
        w[0] = fresh_count | now << 4 | weights << 8;
        for (int f = 0; f < fresh_count; ++f) w[1 + f] = fresh[f] * kUnits * 16;
        w[3] = oldest;
        fresh_count = 0;
      } while (rounds > 0);
      some = false;
      for (int j = 0; j < P::kColumns; ++j) some |= backlog[j] > 0;
    }
    int32_t* w = &plan->words[g * P::kGroupWords];
    w[0] = int32_t(first);
    w[1] = int32_t((int64_t(plan->words.size()) - begin) / P::kStageWords - first);
    std::fill(w + 2, w + 8, -1);
    for (size_t u = 0; u < groups[g].size(); ++u) w[2 + u] = groups[g][u] * kUnits * 16;
  }
  const int64_t stages = (int64_t(plan->words.size()) - begin) / P::kStageWords;
  int64_t heavy = 0;  // groups come longest first
  while (heavy < int64_t(groups.size()) &&
         plan->words[heavy * P::kGroupWords + 1] * int64_t(groups.size()) > 1.5 * stages)
    ++heavy;
  plan->numbers = {int64_t(groups.size()), begin, heavy};
  return {};
}

Status PlanWeightGrad(const LayoutTable& table, int axis, int bsize, MatmulPlan* plan) {
  return PlanWeightGrad(table, axis, bsize, WeightGradPlan::Slots(bsize), WeightGradPlan::MaxTiles(bsize), plan);
}

Status PlanWeightGrad(const LayoutTable& table, int axis, int bsize, int slots, int max_tiles, MatmulPlan* plan) {
  using P = WeightGradPlan;
  // Columns looked at for company: near ones, so that thread blocks that run together read the same tiles.
  const int window = bsize == 128 ? 3 : 96;
  const int halves = bsize == 32 ? 2 : 1;         // blocks a slot
  const bool stacked = halves == 2 && axis == 0;  // the blocks of a slot must lie in adjacent tiles
  const int max_columns = bsize == 128 ? 2 : bsize == 64 ? 4 : 8;
  const int words = (table.CB + 63) / 64;
  std::vector<uint64_t> left(int64_t(table.KB) * words, 0);
  std::vector<int> count(table.KB);
  for (int k = 0; k < table.KB; ++k) {
    for (int i = table.column_ptr[k]; i < table.column_ptr[k + 1]; ++i)
      left[int64_t(k) * words + table.column_c[i] / 64] |= 1ull << table.column_c[i] % 64;
    count[k] = table.column_ptr[k + 1] - table.column_ptr[k];
  }
  auto set = [&](int k) { return &left[int64_t(k) * words]; };
  auto id = [&](int c, int k) {
    const int32_t *first = table.column_c + table.column_ptr[k], *last = table.column_c + table.column_ptr[k + 1];
    return table.column_w[table.column_ptr[k] + (std::lower_bound(first, last, c) - first)];
  };

  struct Item {
    std::vector<int> rows, columns;
    std::vector<std::vector<int>> taken;  // for each column: tiles of its rows
    int tiles() const { return int(rows.size() + columns.size()); }
  };
  std::vector<Item> items;
  std::vector<int> open;  // columns with blocks left, ascending, of the window
  int next = 0;
  std::vector<uint64_t> joined(words);
  std::vector<int> times(table.CB, 0), seen;
  for (;;) {
    open.erase(std::remove_if(open.begin(), open.end(), [&](int k) { return count[k] == 0; }), open.end());
    while (next < table.KB && int(open.size()) < window) {
      if (count[next] > 0) open.push_back(next);
      ++next;
    }
    if (open.empty()) break;
    Item item;
    if (stacked) {
      // Pairs of rows that the first column shares with another serve both; then pairs of each column's own rows. Small
      // sets only lose by sharing (exact float32: 43 instead of 48 TFLOP/s).
      item.columns.push_back(open[0]);
      if (slots > 8) {
        int partner = -1, most = 1;
        for (size_t o = 1; o < open.size(); ++o) {
          int overlap = 0;
          for (int w = 0; w < words; ++w) overlap += __builtin_popcountll(set(open[o])[w] & set(open[0])[w]);
          if (overlap > most) most = overlap, partner = open[o];
        }
        if (partner >= 0) item.columns.push_back(partner);
      }
      item.taken.resize(item.columns.size());
      int used = 0;
      // Takes up to two rows of `from`, ascending, for columns [first, last); false where there are not even `least`.
      auto take = [&](const uint64_t* from, size_t first, size_t last, int least) {
        int rows[2], found = 0;
        const int room = std::min(2, max_tiles - item.tiles());
        if (used + int(last - first) > slots || room < least) return false;
        for (int w = 0; w < words && found < room; ++w)
          for (uint64_t bits = from[w]; bits != 0 && found < room; bits &= bits - 1)
            rows[found++] = w * 64 + __builtin_ctzll(bits);
        if (found < least) return false;
        for (size_t q = first; q < last; ++q)
          for (int i = 0; i < found; ++i) {
            item.taken[q].push_back(int(item.rows.size()) + i);
            set(item.columns[q])[rows[i] / 64] &= ~(1ull << rows[i] % 64);
            --count[item.columns[q]];
          }
        item.rows.insert(item.rows.end(), rows, rows + found);
        used += int(last - first);
        return true;
      };
      auto shared = [&] {
        for (int w = 0; w < words; ++w) joined[w] = set(item.columns[0])[w] & set(item.columns[1])[w];
        return joined.data();
      };
      while (item.columns.size() == 2 && take(shared(), 0, 2, 2)) {
      }
      auto own = [&](size_t q) {
        while (take(set(item.columns[q]), q, q + 1, 1)) {
        }
      };
      for (size_t q = 0; q < item.columns.size(); ++q) own(q);
      if (item.taken.back().empty()) item.columns.pop_back(), item.taken.pop_back();
      // And of more columns while there is room.
      for (size_t o = 0; o < open.size() && used < slots && item.tiles() + 2 < max_tiles; ++o)
        if (count[open[o]] > 0) {
          item.columns.push_back(open[o]);
          item.taken.emplace_back();
          own(item.columns.size() - 1);
        }
    } else {
      // Columns that share rows with the first one and with each other, until shared rows fill the slots.
      std::vector<int> columns{open[0]};
      std::copy_n(set(open[0]), words, joined.begin());
      seen.clear();
      int total = 0;
      auto join = [&](int k) {
        for (int w = 0; w < words; ++w)
          for (uint64_t bits = set(k)[w]; bits != 0; bits &= bits - 1) {
            const int c = w * 64 + __builtin_ctzll(bits);
            if (times[c]++ == 0) seen.push_back(c);
          }
        total += count[k];
      };
      join(open[0]);
      while (int(columns.size()) < max_columns) {
        int shared = 0;
        for (int c : seen) shared += times[c] > 1 ? times[c] : 0;
        if (shared >= slots * halves) break;
        int best = -1, most = -1;
        for (int k : open) {
          if (std::find(columns.begin(), columns.end(), k) != columns.end()) continue;
          int overlap = 0;
          for (int w = 0; w < words; ++w) overlap += __builtin_popcountll(set(k)[w] & joined[w]);
          if (overlap > most) most = overlap, best = k;
        }
        if (best < 0 || (most < 2 && total >= slots * halves)) break;
        columns.push_back(best);
        join(best);
        for (int w = 0; w < words; ++w) joined[w] |= set(best)[w];
      }
      std::stable_sort(seen.begin(), seen.end(), [&](int a, int b) { return times[a] > times[b]; });
      std::vector<std::vector<int>> rows_of(columns.size());
      int used = 0, used_columns = 0;
      for (int c : seen) {
        bool some = false;
        for (size_t q = 0; q < columns.size(); ++q) {
          uint64_t& bits = set(columns[q])[c / 64];
          if (!(bits >> c % 64 & 1)) continue;
          const bool fresh = rows_of[q].empty(), opens_slot = rows_of[q].size() % halves == 0;
          if (opens_slot && used == slots) continue;
          if (int(item.rows.size()) + !some + used_columns + fresh > max_tiles) continue;
          if (!some) item.rows.push_back(c);
          some = true;
          used += opens_slot;
          used_columns += fresh;
          rows_of[q].push_back(int(item.rows.size()) - 1);
          bits &= ~(1ull << c % 64);
          --count[columns[q]];
        }
      }
      for (int c : seen) times[c] = 0;
      for (size_t q = 0; q < columns.size(); ++q)
        if (!rows_of[q].empty()) {
          item.columns.push_back(columns[q]);
          item.taken.push_back(rows_of[q]);
        }
    }
    items.push_back(std::move(item));
  }
  plan->words.assign(int64_t(items.size()) * P::kItemWords, 0);
  for (size_t i = 0; i < items.size(); ++i) {
    const Item& item = items[i];
    int32_t* w = &plan->words[i * P::kItemWords];
    w[0] = int32_t(item.rows.size());
    w[1] = int32_t(item.columns.size());
    for (int t = 0; t < item.tiles(); ++t)
      w[P::kTiles + t] = bsize * (t < w[0] ? item.rows[t] : item.columns[t - w[0]]);
    int slot = 0;
    for (size_t q = 0; q < item.columns.size(); ++q)
      for (size_t r = 0; r < item.taken[q].size(); r += halves) {
        int32_t* s = w + P::kSlots + 4 * slot++;
        const int upper = item.taken[q][r], k = item.columns[q];
        const bool pair = halves == 2 && r + 1 < item.taken[q].size();
        const int lower = pair ? item.taken[q][r + 1] : upper;
        s[0] = upper | lower << 8;
        s[1] = w[0] + int(q);
        s[2] = id(item.rows[upper], k);
        s[3] = pair ? id(item.rows[lower], k) : -1;
      }
    for (; slot < slots; ++slot) {
      int32_t* s = w + P::kSlots + 4 * slot;
      s[0] = 0, s[1] = w[0], s[2] = s[3] = -1;
    }
  }
  plan->numbers = {int64_t(items.size())};
  return {};
}

}  // namespace blocksparse
