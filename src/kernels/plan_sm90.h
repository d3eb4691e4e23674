// A layout as the Hopper kernels read it.
#pragma once

#include <vector>

#include "kernels/matmul.h"

namespace blocksparse {

// Union tiles (src/cuda/matmul_sm90_union.cuh). words: groups [groups][kGroupWords], then stages [stages][kStageWords].
//
//   group: first stage, stages, first feature of each 64-wide piece of output (-1: none)
//   stage: masks (unit 0 in bits 0-7, unit 1 in bits 8-15; bit j: output block j of the group; blocks of 16 have one unit
//          and 12 bits), number of weight pieces
//          in bits 16-20, boxes in bits 24-25 (0: one unit; 1: two adjacent ones in one box; 2: two boxes);
//          first feature of unit 0, of unit 1; weight pieces: block ids (blocks of 128: 2 id + half); last: group
//
// numbers: groups, heavy groups (the first ones, much longer than the mean), word where stages begin, stages.
struct UnionPlan {
  static constexpr int kGroupWords = 8, kStageWords = 16;
  static constexpr int kRows = 256;  // batch entries of a tile
  static constexpr int Columns(int bsize) { return bsize == 128 ? 1 : bsize == 64 ? 3 : bsize == 32 ? 6 : 12; }
  static constexpr int GatedColumns(int bsize) { return 128 / bsize; }
};

// Weight gradient (src/cuda/matmul_sm90_weight_grad.cuh). An item is a set of blocks whose sums one thread block holds, chosen
// so that they share tiles of activations and gradients. words: items [items][kItemWords], by column:
//
//   tiles of x, tiles of dy, feature of each tile (x first); from kSlots on, for each slot: tile of x, tile of dy, block
//   ids of its upper and lower half (-1: none); blocks of 32 have two halves, tiles `upper` and `lower` = upper | x << 8
//
// numbers: items.
struct WeightGradPlan {
  static constexpr int kItemWords = 160, kTiles = 2, kSlots = 64;
  static constexpr int Slots(int bsize) { return bsize == 128 ? 2 : bsize == 64 ? 12 : 24; }
  static constexpr int MaxTiles(int bsize) { return bsize == 128 ? 4 : bsize == 64 ? 13 : 44; }
};

// Rounds (src/cuda/matmul_sm90_rounds.cuh), blocks of 16. words: groups [groups][kGroupWords], then stages
// [stages][kStageWords].
//
//   group: first stage, stages, first feature of each 64-wide piece of output (-1: none)
//   stage: new slabs (bits 0-3), rounds (4-7), weights (from 8); first feature of each new slab; slabs of the tile done with
//          after this stage; 16-bit entries [rounds][kColumns]: slabs back from the newest (bits 0-3), unit of 16 within
//          the slab (4-5), weight of this stage (from 6), or 0xffff; from kIds on, block ids of the weights
//
// numbers: groups, word where stages begin, heavy groups (the first ones, much longer than the mean).
struct RoundsPlan {
  static constexpr int kColumns = 24, kRounds = 3;
  static constexpr int kRows = 128;  // batch entries of a tile
  static constexpr int kGroupWords = 8, kStageWords = 128, kIds = 40;
  static constexpr int kWindow = 6;  // slabs in use at once; the kernel's ring has more, to load ahead
};

// A layout in blocks `factor` times as wide and high, each of which holds at least one of the given blocks (CB and KB are
// multiples of the factor).
struct MergedLayout {
  std::vector<int32_t> words;  // its table, but for the fingerprint
  std::vector<int32_t> parts;  // [blocks][factor][factor] ids of the given blocks, by rows; -1: absent
};

MergedLayout MergeBlocks(const LayoutTable& table, int factor);

Status PlanRounds(const LayoutTable& table, Product product, MatmulPlan* plan);

Status PlanWeightGrad(const LayoutTable& table, int axis, int bsize, MatmulPlan* plan);
// The same with another number of slots and tiles.
Status PlanWeightGrad(const LayoutTable& table, int axis, int bsize, int slots, int max_tiles, MatmulPlan* plan);

// `columns`: output blocks of a group.
Status PlanUnion(const LayoutTable& table, Product product, int axis, int bsize, int columns, MatmulPlan* plan);

}  // namespace blocksparse
