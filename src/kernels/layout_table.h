// A view of the int32 table that blocksparse/layout.py builds for a layout: the only thing about a layout that crosses
// from Python. Format, in words of 32 bits:
//
//   header [16]   version, CB, KB, blocks, fingerprint [4], longest column, longest row, non-empty columns,
//                 non-empty rows, 0, 0, 0, 0
//   column_ptr [KB+1]   column_c [blocks]   column_w [blocks]     blocks of output column k, ascending c
//   row_ptr [CB+1]      row_k [blocks]      row_w [blocks]        blocks of input row c, ascending k
//   update [blocks][2]  (c, k) of block w
#pragma once

#include <array>
#include <cstdint>

#include "kernels/common.h"

namespace blocksparse {

struct LayoutTable {
  static constexpr int32_t kVersion = 1;
  static constexpr int64_t kHeaderWords = 16;
  static constexpr int64_t Words(int64_t CB, int64_t KB, int64_t blocks) {
    return kHeaderWords + CB + KB + 2 + 6 * blocks;
  }

  int CB = 0, KB = 0, blocks = 0;
  std::array<uint32_t, 4> fingerprint{};
  int longest_column = 0, longest_row = 0, nonempty_columns = 0, nonempty_rows = 0;
  const int32_t *column_ptr = nullptr, *column_c = nullptr, *column_w = nullptr;
  const int32_t *row_ptr = nullptr, *row_k = nullptr, *row_w = nullptr;
  const int32_t* update = nullptr;

  // Reads the header and checks the length: constant time, done at every call.
  static Status Parse(const int32_t* words, int64_t count, LayoutTable* table);
  // Checks every index, the statistics and the fingerprint: linear time, done once before a plan is made, so that
  // kernels need no bounds checks.
  Status Validate() const;
};

// 128 bits that depend on (CB, KB) and the update list in order; layout.py computes the same.
std::array<uint32_t, 4> Fingerprint(int CB, int KB, int blocks, const int32_t* update);

}  // namespace blocksparse
