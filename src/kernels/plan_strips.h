// A layout as the Hopper kernel for small batches reads it.
#pragma once

#include "kernels/matmul.h"

namespace blocksparse {

// Strips of 16 output features for small batches (src/cuda/matmul_sm90_strips.cuh). A cluster of four thread blocks, a
// quarter of the input slabs each, has kWarps / parts strips; warp (strip, part) of each has a list of pieces of weights, by
// slab. words: the lists' first lines, [clusters][4][kWarps][kLine], then the other lines of each list.
//
//   line: number of the list's second line, pieces of the list (both only in the first line), then records of kBlocks + 1
//         words: blocks of 8: ids of four blocks of one column (-1: none); larger ones: where the piece of 16 x 16 begins in
//         the weights, by 16 elements. Last word: from bit 0, 6, ... on the 8 features (of the slab) that each is for (32:
//         none), bit 24: of a strip's two columns of 8 the second, from bit 25 the slab within the quarter
//
// numbers: clusters, parts, slabs.
struct StripPlan {
  static constexpr int kWarps = 26, kLine = 32;
  static constexpr int kSlab = 256;  // input features
  static constexpr int kMaxInputs = 4 * 127 * kSlab;
  static constexpr int kClusters = 30;  // that an H200 runs at once
  static constexpr int Blocks(int bsize) { return bsize == 8 ? 4 : 1; }
  static constexpr int InLine(int bsize) { return (kLine - 2) / (Blocks(bsize) + 1); }
};

Status PlanStrips(const LayoutTable& table, Product product, int bsize, MatmulPlan* plan);

}  // namespace blocksparse
