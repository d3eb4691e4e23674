// Launching the float32 products (matmul_sm90_float.cuh) and what prepares their operands; one instantiation a file.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/matmul.h"

namespace blocksparse::cuda::sm90 {

Status PlanFloat(const MatmulProblem& problem, const LayoutTable& table, MatmulPlan* plan);
int64_t FloatWorkspaceBytes(const MatmulProblem& problem, bool exact);
Status RunFloat(const MatmulProblem& problem, bool exact, const MatmulPlan& plan, const int32_t* words, void* workspace,
                const Chip& chip, Stream stream);
// Whether the portable kernel is expected to be slower.
bool FloatPays(const MatmulProblem& problem, const Chip& chip);

// Operands as the kernels read them: contiguous along the reduction, each element one TF32 number (4 bytes), or three
// bfloat16 whose sum it is, in three planes [planes][rows][pitch].
constexpr int Planes(bool exact) { return exact ? 3 : 1; }
constexpr int PieceBytes(bool exact) { return exact ? 2 : 4; }

// From `count` matrices [rows, columns] to [planes][count][rows][pitch], or transposed to [planes][count][columns][pitch];
// zeros up to the pitch. *tiny becomes 1 where an element is too small to split without loss.
// size: the matrices are blocks of this size, or 0. Columns and pitch are multiples of 4, and pointers of 16 bytes.
cudaError_t PrepareFloat(bool exact, bool transpose, const float* from, void* to, int64_t count, int64_t rows,
                         int64_t columns, int64_t pitch, int size, uint32_t* tiny, cudaStream_t stream);

struct FloatParams {
  CUtensorMap x, w, y;
  const int32_t* group;  // [groups][UnionPlan::kGroupWords]
  const int32_t* stage;  // [stages][UnionPlan::kStageWords]
  int groups, heavy;     // the first `heavy` groups come first over the whole batch
  int row_tiles, band;   // of the whole batch; of a band
  int x_plane, w_plane;  // rows of a plane
  bool axis0;
  uint32_t* counter;  // zero at launch, hands out tiles; null: tile t goes to thread block t modulo the grid
  uint32_t* odd;      // becomes 1 where a result is to be mended
};

// Warpgroups that multiply. A third one hides what the others wait for, where registers allow.
constexpr int FloatGroups(bool exact, int bsize) { return exact && bsize == 32 ? 3 : 2; }
// Batch entries of a tile.
constexpr int FloatRows(bool exact, int bsize) { return FloatGroups(exact, bsize) * (exact ? 64 : 128); }
// Features of one step through shared memory: rows of 128 bytes where the ring still holds several steps.
constexpr int FloatStep(bool exact, int bsize) {
  if (!exact) return bsize < 32 ? bsize : 32;
  return bsize == 128 ? 32 : bsize;
}

template <int kB, bool kExact>
cudaError_t LaunchFloat(const FloatParams& p, int grid, cudaStream_t stream);

}  // namespace blocksparse::cuda::sm90
