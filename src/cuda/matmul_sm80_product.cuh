// The portable forward product and input gradient.
#pragma once

#include "cuda/check.h"
#include "cuda/matmul_sm80.cuh"

namespace blocksparse {
namespace cuda {
namespace sm80 {

// The blocks of one thread block whose gate is not 0, in order.
template <int kCapacity>
struct BlockList {
  int inner[kCapacity], id[kCapacity];
  float gate[kCapacity];
  int count;
};

// Fills the list and pads it to whole stages with blocks of gate 0 (id -1: nothing is read for them).
template <int kCapacity>
__device__ void ReadList(const ProductArgs& p, const Item& item, int pad, BlockList<kCapacity>& list) {
  const int length = item.end - item.begin;
  for (int i = threadIdx.x; i < length; i += blockDim.x) {
    const int id = p.ids[item.begin + i];
    list.inner[i] = p.inner[item.begin + i];
    list.id[i] = id;
    list.gate[i] = p.gates ? p.gates[id] : 1.f;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int count = length;
    if (p.gates) {  // close up, 32 entries at a time: a write never passes what is still to be read
      count = 0;
      for (int first = 0; first < length; first += 32) {
        const int i = first + threadIdx.x;
        const bool in = i < length;
        const int inner = in ? list.inner[i] : 0, id = in ? list.id[i] : 0;
        const float gate = in ? list.gate[i] : 0.f;
        const uint32_t alive = __ballot_sync(~0u, gate != 0.f);
        const int to = count + __popc(alive & ((1u << threadIdx.x) - 1));
        if (gate != 0.f) list.inner[to] = inner, list.id[to] = id, list.gate[to] = gate;
        __syncwarp();
        count += __popc(alive);
      }
    }
    if (threadIdx.x == 0) {
      list.count = count;
      for (; count % pad; ++count) list.inner[count] = 0, list.id[count] = -1, list.gate[count] = 0.f;
    }
  }
  __syncthreads();
}

// Copies a stage in vectors of 16 bytes. What a thread copies lies at the same place of every stage.
template <typename T, int B, int kAxis>
class ProductLoader {
 public:
  using S = Tile<T, B>;

  __device__ ProductLoader(const ProductArgs& p, const BlockList<S::kList>& list, int64_t row0, int col0)
      : inner_(SharedAddress(list.inner)) {
    // L, feature axis 1: 8 vectors of a batch entry's features; axis 0: vectors of one feature's batch entries.
    constexpr int kPerLine = kAxis == 1 ? 8 : S::kRows / S::kVector;
    const int line = threadIdx.x / kPerLine, vector = threadIdx.x % kPerLine;
    left_to_ = kAxis == 1 ? S::DepthOffset(line, vector * 16) : S::RowsOffset(line, vector * 16);
    left_block_ = (kAxis == 1 ? vector * S::kVector : line) / B;
    pitch_ = (kAxis == 1 ? p.in : p.n) * kSize;
    const int rows = int(min(p.n - row0, int64_t(S::kRows)));
    if (kAxis == 1) {
      left_ = static_cast<const char*>(p.x) + (row0 + line) * pitch_ + vector * S::kVector % B * kSize;
      left_valid_ = rows - line;
    } else {
      left_ = static_cast<const char*>(p.x) + line % B * pitch_ + (row0 + vector * S::kVector) * kSize;
      left_valid_ = rows - vector * S::kVector;
    }
    // R: forward, output features side by side; input gradient, input features: W as it lies.
    right_ = static_cast<const char*>(p.w);
    if (p.forward) {
      constexpr int kPerRight = S::kCols / S::kVector, kLines = S::kThreads / kPerRight;
      const int depth = threadIdx.x / kPerRight, offset = threadIdx.x % kPerRight * S::kVector;
      right_to_ = S::kLeftBytes + S::ColsOffset(depth, offset * kSize);
      right_step_ = kLines * S::kColsLine;
      right_block_ = depth / B, right_block_step_ = kLines / B;
      right_ += (depth % B * B + col0 + offset) * kSize;
      right_from_step_ = kLines % B * B * kSize;
      right_skip_ = B * kSize;
    } else {
      const int line = threadIdx.x / 8, depth = threadIdx.x % 8 * S::kVector;
      right_to_ = S::kLeftBytes + S::DepthOffset(line, depth * kSize);
      right_step_ = S::kThreads / 8 * S::kDepthLine;
      right_block_ = depth / B, right_block_step_ = 0;
      right_ += ((col0 + line) * B + depth % B) * kSize;
      right_from_step_ = S::kThreads / 8 * B * kSize;
      right_skip_ = kSize;
    }
    Keep(inner_), Keep(left_), Keep(right_), Keep(pitch_), Keep(left_to_), Keep(right_to_), Keep(left_valid_);
    Keep(left_block_), Keep(right_step_), Keep(right_block_), Keep(right_from_step_);
  }

  __device__ void Load(int stage, uint32_t to, int part, bool more) {
    constexpr bool kWhole = B >= S::kDepth;  // a stage is of one block, which is never absent
    constexpr int kLines = kAxis == 1 ? S::kThreads / 8 : S::kThreads * S::kVector / S::kRows;
    if (part == 0) {
      first_ = inner_ + stage / S::kStagesPerBlock * S::kBlocksPerStage * 4;
      const int skip = stage % S::kStagesPerBlock * S::kDepth;
      if (kAxis == 1 || kWhole) {
        const uint32_t entry = first_ + (kWhole ? 0 : left_block_ * 4);
        left_now_ = left_ + (int64_t(int(LoadShared4(entry))) * B + skip) * (kAxis == 1 ? kSize : pitch_);
        left_present_ = more && (kWhole || Id(entry) >= 0) ? left_valid_ : 0;
      }
      right_now_ = right_ + skip * right_skip_;
      if (kWhole) right_now_ += int64_t(Id(first_)) * (B * B * kSize);
    }
#pragma unroll
    for (int i = 0; i < S::kLeftVectors; ++i) {
      if (i * S::kSteps / S::kLeftVectors != part) continue;
      if (kAxis == 1) {
        CopyAsync16(to + left_to_ + i * kLines * S::kDepthLine, left_now_, left_present_ > i * kLines);
        left_now_ += kLines * pitch_;
      } else if (kWhole) {
        CopyAsync16(to + left_to_ + i * kLines * S::kRowsLine, left_now_, left_present_ > 0);
        left_now_ += kLines * pitch_;
      } else {  // so many features at once are fewer than a block's, or as many
        const uint32_t entry = first_ + i * kLines / B * 4;
        CopyAsync16(to + left_to_ + i * kLines * S::kRowsLine,
                    left_ + (int64_t(int(LoadShared4(entry))) * B + i * kLines % B) * pitch_,
                    more && left_valid_ > 0 && Id(entry) >= 0);
      }
    }
#pragma unroll
    for (int i = 0; i < S::kRightVectors; ++i) {
      if (i * S::kSteps / S::kRightVectors != part) continue;
      if (B * 8 < S::kThreads && threadIdx.x >= B * 8) continue;
      if (kWhole) {
        CopyAsync16(to + right_to_ + i * right_step_, right_now_, more);
        right_now_ += right_from_step_;
      } else {
        const int id = Id(first_ + (right_block_ + i * right_block_step_) * 4);
        CopyAsync16(to + right_to_ + i * right_step_, right_now_ + int64_t(id) * (B * B * kSize) + i * right_from_step_,
                    id >= 0);
      }
    }
  }

 private:
  static constexpr int kSize = int(sizeof(T));
  static constexpr int kAxis0Lines = S::kThreads * S::kVector / S::kRows;
  static_assert(kAxis == 1 || B % kAxis0Lines == 0, "a thread block loads whole blocks' features, or equal parts");

  __device__ int Id(uint32_t entry) const { return int(LoadShared4(entry + 4 * S::kList)); }

  uint32_t inner_;  // of the list in shared memory; the ids follow
  const char *left_, *right_;
  int64_t pitch_;
  uint32_t left_to_, right_to_;
  int left_valid_, left_block_;
  int right_step_, right_block_, right_block_step_, right_from_step_, right_skip_;
  // of the stage being loaded
  uint32_t first_ = 0;
  const char *left_now_ = nullptr, *right_now_ = nullptr;
  int left_present_ = 0;
};

// The same where an operand's addresses allow no such vectors.
template <typename T, int B, int kAxis>
__device__ inline void LoadNarrow(const ProductArgs& p, const BlockList<Tile<T, B>::kList>& list, int stage,
                                  int64_t row0, int col0, uint32_t to) {
  using S = Tile<T, B>;
  const T* x = static_cast<const T*>(p.x);
  const T* w = static_cast<const T*>(p.w);
  constexpr int kSize = int(sizeof(T));
  const int first = stage / S::kStagesPerBlock * S::kBlocksPerStage, skip = stage % S::kStagesPerBlock * S::kDepth;
#pragma unroll 1
  for (int i = threadIdx.x; i < S::kRows * 8; i += S::kThreads) {
    constexpr int kPerLine = kAxis == 1 ? 8 : S::kRows / S::kVector;
    const int line = i / kPerLine, offset = i % kPerLine * S::kVector;
    const int row = kAxis == 1 ? line : offset, depth = kAxis == 1 ? offset : line;
    const int entry = first + depth / B;
    const int64_t feature = int64_t(list.inner[entry]) * B + skip + depth % B, left = p.n - row0 - row;
    const int valid = list.id[entry] < 0 || left <= 0 ? 0 : kAxis == 1 ? 16 : int(min(left * kSize, int64_t(16)));
    const T* from = x + (kAxis == 1 ? (row0 + row) * p.in + feature : feature * p.n + row0 + row);
    CopyNarrow(to + (kAxis == 1 ? S::DepthOffset(line, offset * kSize) : S::RowsOffset(line, offset * kSize)),
               valid > 0 ? from : x, valid, p.x_width);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < S::kCols * 8; i += S::kThreads) {
    int block, line, offset;  // block of the stage; line of the block and element of that line
    uint32_t at = to + S::kLeftBytes;
    if (p.forward) {
      constexpr int kPerLine = S::kCols / S::kVector;
      const int depth = i / kPerLine, col = i % kPerLine * S::kVector;
      block = depth / B, line = skip + depth % B, offset = col0 + col;
      at += S::ColsOffset(depth, col * kSize);
    } else {
      const int depth = i % 8 * S::kVector;
      block = depth / B, line = col0 + i / 8, offset = skip + depth % B;
      at += S::DepthOffset(i / 8, depth * kSize);
    }
    const int id = list.id[first + block];
    CopyNarrow(at, id >= 0 ? w + (int64_t(id) * B + line) * B + offset : w, id >= 0 ? 16 : 0, p.w_width);
  }
}

// y's [rows, b] tile of 16-bit elements goes through shared memory, so that it is written in whole vectors.
template <typename T, int B, int kAxis>
__device__ inline void StoreTile(const ProductArgs& p, const Sums<T, B>& sums, int warp_row, int warp_col, int64_t row0,
                                 int64_t feature0, char* shared) {
  using S = Tile<T, B>;
  constexpr int kInner = kAxis == 1 ? S::kCols : S::kRows, kOuter = kAxis == 1 ? S::kRows : S::kCols;
  constexpr int kLine = kInner + 8;
  static_assert(kOuter * kLine * sizeof(T) <= 2 * S::kStageBytes, "the tile must fit two stages");
  T* tile = reinterpret_cast<T*>(shared);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  __syncthreads();
#pragma unroll
  for (int m = 0; m < S::kM; ++m)
#pragma unroll
    for (int n = 0; n < S::kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp_row + m * 16 + i / 2 * 8 + g, col = warp_col + n * 8 + 2 * t + i % 2;
        tile[kAxis == 1 ? row * kLine + col : col * kLine + row] = FromFloat<T>(sums.part[m][n][i] + sums.sum[m][n][i]);
      }
  __syncthreads();
  T* y = static_cast<T*>(p.y);
  const int64_t rows = min(p.n - row0, int64_t(S::kRows));
  constexpr int kPerLine = kInner / S::kVector;
  for (int i = threadIdx.x; i < kOuter * kPerLine; i += S::kThreads) {
    const int line = i / kPerLine, offset = i % kPerLine * S::kVector;
    const T* from = tile + line * kLine + offset;
    const int64_t left = kAxis == 1 ? (line < rows ? S::kVector : 0) : rows - offset;
    T* to = y + (kAxis == 1 ? (row0 + line) * p.out + feature0 + offset : (feature0 + line) * p.n + row0 + offset);
    if (left >= S::kVector && p.y_width == 16)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    else
      for (int e = 0; e < S::kVector && e < left; ++e) to[e] = from[e];
  }
}

// Sums in float32 go out as they are: to y, or to a slot of the partial sums.
template <typename T, int B, int kAxis>
__device__ inline void StoreSums(float* y, const Sums<T, B>& sums, int warp_row, int warp_col, int64_t row0, int64_t n,
                                 int64_t feature0, int64_t features) {
  using S = Tile<T, B>;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < S::kM; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = row0 + warp_row + m * 16 + i / 2 * 8 + g;
      if (row >= n) continue;
#pragma unroll
      for (int f = 0; f < S::kN; ++f) {
        const int64_t feature = feature0 + warp_col + f * 8 + 2 * t + i % 2;
        y[kAxis == 1 ? row * features + feature : feature * n + row] = sums.part[m][f][i] + sums.sum[m][f][i];
      }
    }
}

template <typename T, int B, int kAxis>
__global__ void __launch_bounds__(Tile<T, B>::kThreads) ProductKernel(const __grid_constant__ ProductArgs p) {
  using S = Tile<T, B>;
  extern __shared__ __align__(1024) char shared[];
  auto& list = *reinterpret_cast<BlockList<S::kList>*>(shared + p.stages * S::kStageBytes);
  // All output blocks of the same batch entries run together, so that x comes from memory once.
  const uint32_t across = uint32_t(p.item_count) * S::kHalves, unit = blockIdx.x % across;
  const Item item = p.items[unit / S::kHalves];
  const int col0 = unit % S::kHalves * S::kCols;
  const int64_t row0 = p.first_row + int64_t(blockIdx.x / across) * S::kRows;
  ReadList(p, item, S::kBlocksPerStage, list);

  const Share<T, B, kAxis == 0> at(p.forward);
  Sums<T, B> sums;
  sums.Clear();
  ProductLoader<T, B, kAxis> loader(p, list, row0, col0);
  const bool aligned = p.x_width == 16 && p.w_width == 16, gated = p.gates != nullptr;
  const int count = (list.count + S::kBlocksPerStage - 1) / S::kBlocksPerStage * S::kStagesPerBlock;
  RunStages(
      count, p.stages, {aligned && !gated && !p.exact, p.exact, gated, false}, at, SharedAddress(shared), sums,
      [&](int stage, uint32_t to, int part, bool more) {
        if (aligned)
          loader.Load(stage, to, part, more);
        else if (part == 0)
          LoadNarrow<T, B, kAxis>(p, list, stage, row0, col0, to);
      },
      [&](int stage) { return list.gate + stage / S::kStagesPerBlock * S::kBlocksPerStage; });

  if (item.slot >= 0)
    StoreSums<T, B, kAxis>(p.partial + int64_t(item.slot) * p.n * B, sums, at.row, at.col, row0, p.n, col0, B);
  else if constexpr (S::kFloat)
    StoreSums<T, B, kAxis>(static_cast<float*>(p.y), sums, at.row, at.col, row0, p.n, int64_t(item.out) * B + col0,
                           p.out);
  else
    StoreTile<T, B, kAxis>(p, sums, at.row, at.col, row0, int64_t(item.out) * B + col0, shared);
}

template <typename T, int B, int kAxis>
Status LaunchProductKernel(int64_t tiles, ProductArgs p, const Chip& chip, Stream stream) {
  using S = Tile<T, B>;
  constexpr int kListBytes = sizeof(BlockList<S::kList>);
  p.stages = StageCount(S::kStageBytes, kListBytes, chip);
  const int bytes = p.stages * S::kStageBytes + kListBytes;
  BLOCKSPARSE_CUDA_CHECK(
      cudaFuncSetAttribute(ProductKernel<T, B, kAxis>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  // A grid has at most 2^31 - 1 thread blocks.
  const int64_t across = int64_t(p.item_count) * S::kHalves, at_once = INT32_MAX / across;
  for (int64_t done = 0; done < tiles; done += at_once) {
    p.first_row = done * S::kRows;
    ProductKernel<T, B, kAxis><<<int(min(at_once, tiles - done) * across), S::kThreads, bytes, stream>>>(p);
    BLOCKSPARSE_CUDA_LAUNCHED();
  }
  return {};
}

template <int B>
Status LaunchProduct(DType dtype, int axis, int64_t tiles, ProductArgs args, const Chip& chip, Stream stream) {
  return WithType(dtype, [&](auto type) {
    using T = decltype(type);
    return axis == 0 ? LaunchProductKernel<T, B, 0>(tiles, args, chip, stream)
                     : LaunchProductKernel<T, B, 1>(tiles, args, chip, stream);
  });
}

}  // namespace sm80
}  // namespace cuda
}  // namespace blocksparse
