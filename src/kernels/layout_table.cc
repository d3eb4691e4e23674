#include "kernels/layout_table.h"

#include <algorithm>
#include <string>
#include <vector>

namespace blocksparse {
namespace {

uint64_t Mix(uint64_t z) {  // the finalizer of SplitMix64 (Steele, Lea, Flood 2014)
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

Status Bad(const std::string& what) { return Status::Invalid("layout table: " + what); }

// One direction's lists: every block once, under the column (row) that the update list gives it, ascending.
Status CheckLists(const char* name, const LayoutTable& t, bool columns, int longest, int nonempty) {
  const int outer = columns ? t.KB : t.CB;
  const int32_t* ptr = columns ? t.column_ptr : t.row_ptr;
  const int32_t* inner = columns ? t.column_c : t.row_k;
  const int32_t* ids = columns ? t.column_w : t.row_w;
  if (ptr[0] != 0 || ptr[outer] != t.blocks)
    return Bad(std::string(name) + " offsets must run from 0 to " + std::to_string(t.blocks) + ", got " +
               std::to_string(ptr[0]) + " to " + std::to_string(ptr[outer]));
  int seen_longest = 0, seen_nonempty = 0;
  for (int o = 0; o < outer; ++o) {
    if (ptr[o + 1] < ptr[o] || ptr[o + 1] > t.blocks)
      return Bad(std::string(name) + " offset " + std::to_string(o + 1) + " is " + std::to_string(ptr[o + 1]) +
                 ", before the one it follows or past the end");
    const int length = ptr[o + 1] - ptr[o];
    seen_longest = std::max(seen_longest, length);
    seen_nonempty += length > 0;
    for (int i = ptr[o]; i < ptr[o + 1]; ++i) {
      const int w = ids[i];
      if (w < 0 || w >= t.blocks)
        return Bad(std::string(name) + " entry " + std::to_string(i) + " names block " + std::to_string(w) +
                   ", allowed are 0 to " + std::to_string(t.blocks - 1));
      if (t.update[2 * w + (columns ? 0 : 1)] != inner[i] || t.update[2 * w + (columns ? 1 : 0)] != o ||
          (i > ptr[o] && inner[i] <= inner[i - 1]))
        return Bad(std::string(name) + " entry " + std::to_string(i) + " disagrees with the update list");
    }
  }
  if (seen_longest != longest || seen_nonempty != nonempty)
    return Bad(std::string("header statistics disagree with the ") + name + " lists");
  return {};
}

}  // namespace

std::array<uint32_t, 4> Fingerprint(int CB, int KB, int blocks, const int32_t* update) {
  std::array<uint32_t, 4> out;
  const uint64_t seeds[2] = {0x243f6a8885a308d3u, 0x13198a2e03707344u};  // digits of pi
  for (int s = 0; s < 2; ++s) {
    uint64_t sum = Mix((uint64_t(uint32_t(CB)) << 32 | uint32_t(KB)) + seeds[s]);
    for (int64_t w = 0; w < blocks; ++w) {
      const uint64_t pair = uint64_t(uint32_t(update[2 * w])) << 32 | uint32_t(update[2 * w + 1]);
      sum += Mix((pair ^ seeds[s]) + uint64_t(w + 1) * 0x9e3779b97f4a7c15u);
    }
    sum = Mix(sum);
    out[2 * s] = uint32_t(sum);
    out[2 * s + 1] = uint32_t(sum >> 32);
  }
  return out;
}

Status LayoutTable::Parse(const int32_t* words, int64_t count, LayoutTable* t) {
  if (count < kHeaderWords)
    return Bad("got " + std::to_string(count) + " words, the header alone has " + std::to_string(kHeaderWords));
  if (words[0] != kVersion)
    return Bad("got version " + std::to_string(words[0]) + ", this library reads version " + std::to_string(kVersion));
  t->CB = words[1], t->KB = words[2], t->blocks = words[3];
  if (t->CB < 1 || t->KB < 1 || t->blocks < 1 || int64_t(t->blocks) > int64_t(t->CB) * t->KB)
    return Bad("got CB " + std::to_string(t->CB) + ", KB " + std::to_string(t->KB) + ", blocks " +
               std::to_string(t->blocks) + "; allowed are CB and KB of at least 1 and 1 to CB*KB blocks");
  if (count != Words(t->CB, t->KB, t->blocks))
    return Bad("got " + std::to_string(count) + " words, its header asks for " +
               std::to_string(Words(t->CB, t->KB, t->blocks)));
  for (int i = 0; i < 4; ++i) t->fingerprint[i] = uint32_t(words[4 + i]);
  t->longest_column = words[8], t->longest_row = words[9];
  t->nonempty_columns = words[10], t->nonempty_rows = words[11];
  const int32_t* next = words + kHeaderWords;
  auto take = [&next](int64_t length) { return std::exchange(next, next + length); };
  t->column_ptr = take(t->KB + 1), t->column_c = take(t->blocks), t->column_w = take(t->blocks);
  t->row_ptr = take(t->CB + 1), t->row_k = take(t->blocks), t->row_w = take(t->blocks);
  t->update = take(2 * int64_t(t->blocks));
  return {};
}

Status LayoutTable::Validate() const {
  for (int w = 0; w < blocks; ++w)
    if (update[2 * w] < 0 || update[2 * w] >= CB || update[2 * w + 1] < 0 || update[2 * w + 1] >= KB)
      return Bad("block " + std::to_string(w) + " lies at (" + std::to_string(update[2 * w]) + ", " +
                 std::to_string(update[2 * w + 1]) + "), outside " + std::to_string(CB) + " x " + std::to_string(KB));
  BLOCKSPARSE_RETURN_IF_ERROR(CheckLists("column", *this, true, longest_column, nonempty_columns));
  BLOCKSPARSE_RETURN_IF_ERROR(CheckLists("row", *this, false, longest_row, nonempty_rows));
  if (fingerprint != Fingerprint(CB, KB, blocks, update)) return Bad("the fingerprint does not match the content");
  return {};
}

}  // namespace blocksparse
