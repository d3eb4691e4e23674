// The portable weight gradient.
#pragma once

#include "cuda/check.h"
#include "cuda/matmul_sm80.cuh"

namespace blocksparse {
namespace cuda {
namespace sm80 {

// A position in the concatenated batches, in steps of kDepth entries; every pair begins a stage of its own.
template <int kDepth>
struct Cursor {
  int pair = -1;
  int64_t first = 0;  // batch entry
  Pair now = {nullptr, nullptr, 0};

  __device__ Cursor(const WeightGradArgs& p, int64_t stage) {
    int64_t here = 0;  // stages of `now`
    do {
      stage -= here;
      if (++pair == p.pair_count) return;
      now = p.pairs ? p.pairs[pair] : p.inline_pairs[pair];
      here = (now.n + kDepth - 1) / kDepth;
    } while (stage >= here);
    first = stage * kDepth;
  }
  __device__ void Advance(const WeightGradArgs& p) {
    first += kDepth;
    while (first >= now.n && ++pair < p.pair_count) {
      now = p.pairs ? p.pairs[pair] : p.inline_pairs[pair];
      first = 0;
    }
  }
};

template <int B>
struct GroupBlocks {
  static constexpr int kCount = Tile<float, B>::kRows / B;
  int row[kCount];  // input block, or -1: absent, or its gate is 0
  int id[kCount];
};

// Copies a stage in vectors of 16 bytes. What a thread copies lies at the same place of every stage.
template <typename T, int B, int kAxis>
class WeightGradLoader {
 public:
  using S = Tile<T, B>;

  __device__ WeightGradLoader(const WeightGradArgs& p, const GroupBlocks<B>& blocks, int64_t col0)
      : rows_(SharedAddress(blocks.row)), C_(p.C * kSize), K_(p.K * kSize) {
    // Feature axis 1: vectors of one batch entry's features; axis 0: 8 vectors of a feature's batch entries.
    constexpr int kPerLeft = kAxis == 1 ? S::kRows / S::kVector : 8, kPerRight = kAxis == 1 ? S::kCols / S::kVector : 8;
    left_line_ = threadIdx.x / kPerLeft, right_line_ = threadIdx.x / kPerRight;
    const int left_offset = threadIdx.x % kPerLeft * S::kVector, right_offset = threadIdx.x % kPerRight * S::kVector;
    const int left_byte = left_offset * kSize, right_byte = right_offset * kSize;
    left_to_ = kAxis == 1 ? S::RowsOffset(left_line_, left_byte) : S::DepthOffset(left_line_, left_byte);
    right_to_ =
        S::kLeftBytes + (kAxis == 1 ? S::ColsOffset(right_line_, right_byte) : S::DepthOffset(right_line_, right_byte));
    if (kAxis == 1) {
      const int block = blocks.row[left_offset / B];
      present_ = block >= 0;
      left_ = (int64_t(block) * B + left_offset % B) * kSize;
      right_ = (col0 + right_offset) * kSize;
    } else {
      left_ = left_offset;  // as right_offset
      right_ = col0 + right_line_;
    }
    Keep(rows_), Keep(C_), Keep(K_), Keep(left_line_), Keep(right_line_), Keep(left_to_), Keep(right_to_);
    Keep(present_), Keep(left_), Keep(right_);
  }

  __device__ void Load(const Pair& pair, int64_t first, uint32_t to, int part, bool more) {
    constexpr int kLeftLines = kAxis == 1 ? S::kThreads * S::kVector / S::kRows : S::kThreads / 8;
    constexpr int kRightLines = kAxis == 1 ? S::kThreads * S::kVector / S::kCols : S::kThreads / 8;
    if (part == 0) {
      valid_ = more ? int(min(pair.n - first, int64_t(S::kDepth))) : 0;
      if (kAxis == 1) {
        left_now_ = static_cast<const char*>(pair.x) + (first + left_line_) * C_ + left_;
        right_now_ = static_cast<const char*>(pair.dy) + (first + right_line_) * K_ + right_;
      } else {
        pitch_ = pair.n * kSize;
        valid_ -= int(left_);
        left_now_ = static_cast<const char*>(pair.x) + (first + left_) * kSize;
        right_now_ = static_cast<const char*>(pair.dy) + (first + left_) * kSize + right_ * pitch_;
      }
    }
#pragma unroll
    for (int i = 0; i < S::kLeftVectors; ++i) {
      if (i * S::kSteps / S::kLeftVectors != part) continue;
      if (kAxis == 1) {
        CopyAsync16(to + left_to_ + i * kLeftLines * S::kRowsLine, left_now_,
                    present_ && valid_ - left_line_ > i * kLeftLines);
        left_now_ += kLeftLines * C_;
      } else {
        const int row = left_line_ + i * kLeftLines, block = int(LoadShared4(rows_ + row / B * 4));
        CopyAsync16(to + left_to_ + i * kLeftLines * S::kDepthLine, left_now_ + (int64_t(block) * B + row % B) * pitch_,
                    block >= 0 && valid_ > 0);
      }
    }
#pragma unroll
    for (int i = 0; i < S::kRightVectors; ++i) {
      if (i * S::kSteps / S::kRightVectors != part) continue;
      if (B * 8 < S::kThreads && threadIdx.x >= B * 8) continue;
      if (kAxis == 1) {
        CopyAsync16(to + right_to_ + i * kRightLines * S::kColsLine, right_now_,
                    valid_ - right_line_ > i * kRightLines);
        right_now_ += kRightLines * K_;
      } else {
        CopyAsync16(to + right_to_ + i * kRightLines * S::kDepthLine, right_now_, valid_ > 0);
        right_now_ += kRightLines * pitch_;
      }
    }
  }

 private:
  static constexpr int kSize = int(sizeof(T));

  uint32_t rows_;  // of the group's blocks in shared memory
  int64_t C_, K_;
  int left_line_, right_line_, present_ = 0;
  int64_t left_, right_;  // bytes from a batch entry's begin; axis 0: batch entry within a stage, feature of dy
  uint32_t left_to_, right_to_;
  // of the stage being loaded
  int valid_ = 0;
  int64_t pitch_ = 0;
  const char *left_now_ = nullptr, *right_now_ = nullptr;
};

// The same where an operand's addresses allow no such vectors.
template <typename T, int B, int kAxis>
__device__ inline void LoadNarrow(const WeightGradArgs& p, const GroupBlocks<B>& blocks, int64_t col0, const Pair& pair,
                                  int64_t first, uint32_t to) {
  using S = Tile<T, B>;
  constexpr int kSize = int(sizeof(T));
  const T* x = static_cast<const T*>(pair.x);
  const T* dy = static_cast<const T*>(pair.dy);
#pragma unroll 1
  for (int i = threadIdx.x; i < (S::kRows + S::kCols) * 8; i += S::kThreads) {
    const bool right = i >= S::kRows * 8;
    const int v = right ? i - S::kRows * 8 : i;
    const int per_line = kAxis == 0 ? 8 : (right ? S::kCols : S::kRows) / S::kVector;
    const int line = v / per_line, offset = v % per_line * S::kVector;
    const int row = kAxis == 0 ? line : offset, depth = kAxis == 0 ? offset : line;  // row of L, or column of R
    const int block = right ? 0 : blocks.row[row / B];
    const int64_t feature = right ? col0 + row : int64_t(block) * B + row % B, left = pair.n - first - depth;
    const int valid = block < 0 || left <= 0 ? 0 : kAxis == 1 ? 16 : int(min(left * kSize, int64_t(16)));
    const T* from = right ? dy : x;
    if (valid > 0)
      from += kAxis == 1 ? (first + depth) * (right ? p.K : p.C) + feature : feature * pair.n + first + depth;
    const uint32_t at = kAxis == 0 ? S::DepthOffset(line, offset * kSize)
                        : right    ? S::ColsOffset(line, offset * kSize)
                                   : S::RowsOffset(line, offset * kSize);
    CopyNarrow(to + (right ? S::kLeftBytes : 0) + at, from, valid, right ? p.dy_width : p.x_width);
  }
}

__device__ inline void StoreAs(DType dtype, void* out, int64_t i, float value) {
  if (dtype == DType::kFloat32)
    static_cast<float*>(out)[i] = value;
  else if (dtype == DType::kFloat16)
    static_cast<__half*>(out)[i] = FromFloat<__half>(value);
  else
    static_cast<__nv_bfloat16*>(out)[i] = FromFloat<__nv_bfloat16>(value);
}

template <typename T, int B, int kAxis>
__global__ void __launch_bounds__(Tile<T, B>::kThreads) WeightGradKernel(const __grid_constant__ WeightGradArgs p) {
  using S = Tile<T, B>;
  extern __shared__ __align__(1024) char shared[];
  auto& blocks = *reinterpret_cast<GroupBlocks<B>*>(shared + p.stages * S::kStageBytes);
  const Group group = p.groups[blockIdx.x / S::kHalves];
  const int col0 = blockIdx.x % S::kHalves * S::kCols;
  bool alive = false;
  if (threadIdx.x < GroupBlocks<B>::kCount) {
    const int i = threadIdx.x;
    const int id = i < group.count ? p.ids[group.begin + i] : -1;
    alive = id >= 0 && (p.gates == nullptr || p.gates[id] != 0.f);
    blocks.id[i] = id;
    blocks.row[i] = alive ? p.rows[group.begin + i] : -1;
  }
  const bool any = __syncthreads_or(alive);

  const Share<T, B, kAxis == 1> at(kAxis == 1);
  Sums<T, B> sums;
  sums.Clear();
  const int64_t begin = blockIdx.y * p.stages_per_part;
  const int64_t count = any ? min(p.stages_per_part, p.stage_count - begin) : 0;
  if (count > 0) {
    WeightGradLoader<T, B, kAxis> loader(p, blocks, group.column * int64_t(B) + col0);
    const bool aligned = p.x_width == 16 && p.dy_width == 16;
    Cursor<S::kDepth> cursor(p, begin);
    RunStages(
        count, p.stages, {aligned && !p.exact, p.exact, false, p.move}, at, SharedAddress(shared), sums,
        [&](int64_t, uint32_t to, int part, bool more) {
          if (aligned)
            loader.Load(cursor.now, cursor.first, to, part, more);
          else if (part == 0)
            LoadNarrow<T, B, kAxis>(p, blocks, group.column * int64_t(B) + col0, cursor.now, cursor.first, to);
          if (part == S::kSteps - 1) cursor.Advance(p);
        },
        [](int64_t) -> const float* { return nullptr; });
  }

  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < S::kM; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = at.row + m * 16 + i / 2 * 8 + g, id = blocks.id[row / B];
      if (id < 0) continue;
      const bool dead = blocks.row[row / B] < 0;
#pragma unroll
      for (int n = 0; n < S::kN; ++n) {
        const int64_t e = (int64_t(id) * B + row % B) * B + col0 + at.col + n * 8 + 2 * t + i % 2;
        const float sum = dead ? 0.f : sums.part[m][n][i] + sums.sum[m][n][i];
        if (p.partial)
          p.partial[blockIdx.y * p.elements + e] = sum;
        else
          StoreAs(p.out_dtype, p.out, e, p.addend ? sum + p.addend[e] : sum);
      }
    }
}

template <typename T, int B, int kAxis>
Status LaunchWeightGradKernel(int groups, int parts, WeightGradArgs p, const Chip& chip, Stream stream) {
  using S = Tile<T, B>;
  constexpr int kOther = sizeof(GroupBlocks<B>);
  p.stages = StageCount(S::kStageBytes, kOther, chip);
  const int bytes = p.stages * S::kStageBytes + kOther;
  BLOCKSPARSE_CUDA_CHECK(
      cudaFuncSetAttribute(WeightGradKernel<T, B, kAxis>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  WeightGradKernel<T, B, kAxis><<<dim3(groups * S::kHalves, parts), S::kThreads, bytes, stream>>>(p);
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

template <int B>
Status LaunchWeightGrad(DType dtype, int axis, int groups, int parts, const WeightGradArgs& args, const Chip& chip,
                        Stream stream) {
  return WithType(dtype, [&](auto type) {
    using T = decltype(type);
    return axis == 0 ? LaunchWeightGradKernel<T, B, 0>(groups, parts, args, chip, stream)
                     : LaunchWeightGradKernel<T, B, 1>(groups, parts, args, chip, stream);
  });
}

}  // namespace sm80
}  // namespace cuda
}  // namespace blocksparse
