#include <algorithm>
#include <vector>

#include "kernels/plan_sm90.h"

namespace blocksparse {

MergedLayout MergeBlocks(const LayoutTable& t, int factor) {
  const int CB = t.CB / factor, KB = t.KB / factor, area = factor * factor;
  MergedLayout merged;
  std::vector<int> column_ptr(KB + 1, 0), column_c, place(CB, -1), fresh;
  for (int k = 0; k < KB; ++k) {
    const int first = t.column_ptr[k * factor], last = t.column_ptr[(k + 1) * factor];
    fresh.clear();
    for (int i = first; i < last; ++i) {
      const int c = t.column_c[i] / factor;
      if (place[c] < column_ptr[k]) {  // of an earlier column
        place[c] = INT32_MAX;
        fresh.push_back(c);
      }
    }
    std::sort(fresh.begin(), fresh.end());
    for (int c : fresh) {
      place[c] = int(column_c.size());
      column_c.push_back(c);
    }
    column_ptr[k + 1] = int(column_c.size());
    merged.parts.resize(column_c.size() * area, -1);
    for (int j = 0; j < factor; ++j)
      for (int i = t.column_ptr[k * factor + j]; i < t.column_ptr[k * factor + j + 1]; ++i) {
        const int c = t.column_c[i];
        merged.parts[int64_t(place[c / factor]) * area + c % factor * factor + j] = t.column_w[i];
      }
  }

  // Ids in the order of the columns.
  const int blocks = int(column_c.size());
  merged.words.assign(LayoutTable::Words(CB, KB, blocks), 0);
  int32_t *to_column_ptr = &merged.words[LayoutTable::kHeaderWords], *to_column_c = to_column_ptr + KB + 1,
          *column_w = to_column_c + blocks, *row_ptr = column_w + blocks, *row_k = row_ptr + CB + 1,
          *row_w = row_k + blocks, *update = row_w + blocks;
  std::copy(column_ptr.begin(), column_ptr.end(), to_column_ptr);
  std::copy(column_c.begin(), column_c.end(), to_column_c);
  for (int c : column_c) ++row_ptr[c + 1];
  for (int c = 0; c < CB; ++c) row_ptr[c + 1] += row_ptr[c];
  std::vector<int> next(row_ptr, row_ptr + CB);
  int header[4] = {};  // longest column, longest row, columns and rows that are not empty
  for (int k = 0; k < KB; ++k) {
    for (int w = column_ptr[k]; w < column_ptr[k + 1]; ++w) {
      const int c = column_c[w], at = next[c]++;
      column_w[w] = w;
      row_k[at] = k, row_w[at] = w;
      update[2 * w] = c, update[2 * w + 1] = k;
    }
    header[0] = std::max(header[0], column_ptr[k + 1] - column_ptr[k]);
    header[2] += column_ptr[k + 1] > column_ptr[k];
  }
  for (int c = 0; c < CB; ++c) {
    header[1] = std::max(header[1], row_ptr[c + 1] - row_ptr[c]);
    header[3] += row_ptr[c + 1] > row_ptr[c];
  }
  merged.words[0] = LayoutTable::kVersion;
  merged.words[1] = CB, merged.words[2] = KB, merged.words[3] = blocks;
  std::copy(header, header + 4, &merged.words[8]);
  return merged;
}

}  // namespace blocksparse
