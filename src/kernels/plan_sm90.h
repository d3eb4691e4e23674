// A layout as the Hopper kernels read it.
#pragma once

#include "kernels/matmul.h"

namespace blocksparse {

// Union tiles (src/cuda/matmul_sm90_union.cuh). words: groups [groups][kGroupWords], then stages [stages][kStageWords].
//
//   group: first stage, stages, first feature of each 64-wide piece of output (-1: none)
//   stage: masks (unit 0 in bits 0-7, unit 1 in bits 8-15; bit j: output block j of the group), number of weight pieces
//          in bits 16-20, boxes in bits 24-25 (0: one unit; 1: two adjacent ones in one box; 2: two boxes);
//          first feature of unit 0, of unit 1; weight pieces: block ids (blocks of 128: 2 id + half)
//
// numbers: groups, heavy groups, word where stages begin, stages, 1 where groups differ much in length.
struct UnionPlan {
  static constexpr int kGroupWords = 8, kStageWords = 16;
  static constexpr int Columns(int bsize) { return bsize == 128 ? 1 : bsize == 64 ? 3 : 6; }
};

Status PlanUnion(const LayoutTable& table, Product product, int axis, int bsize, MatmulPlan* plan);

}  // namespace blocksparse
