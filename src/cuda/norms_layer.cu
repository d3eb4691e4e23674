// Layer norm on the GPU: the choice of kernels, and those for any shape and alignment.
#include <algorithm>

#include "cuda/norms.cuh"
#include "cuda/sum_parts.h"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// Sums of each column over the height of a block of [height][width] threads, width dividing 32; `sums` has
// 2 * blockDim.x floats.
__device__ __forceinline__ void ColumnSums(float& a, float& b, int width, float* sums) {
  for (int apart = 16; apart >= width; apart /= 2) {
    a += __shfl_xor_sync(0xffffffff, a, apart);
    b += __shfl_xor_sync(0xffffffff, b, apart);
  }
  const int lane = threadIdx.x % 32, column = threadIdx.x % width;
  float* other = sums + blockDim.x;
  __syncthreads();
  if (lane < width) sums[threadIdx.x / 32 * width + lane] = a, other[threadIdx.x / 32 * width + lane] = b;
  __syncthreads();
  a = b = 0.f;
  for (int warp = 0; warp < blockDim.x / 32; ++warp)
    a += sums[warp * width + column], b += other[warp * width + column];
}

// A tile of `width` columns of inner, of one outer index of one segment. What was read stays in the cache, we hope.
template <typename T>
__device__ void Tile(const LayerNormProblem& p, unsigned unit, int width, unsigned tiles, float* shared) {
  const unsigned segments = unsigned(p.segments);
  const int64_t F = p.features, i = int64_t(unit % tiles) * width + threadIdx.x % width;
  const int64_t s = unit / tiles % segments, o = unit / tiles / segments;
  const int height = blockDim.x / width, y0 = threadIdx.x / width;
  const int64_t first = (o * Channels(p) + s * F) * p.inner + i, row = (s * p.outer + o) * p.inner + i;
  const bool inside = i < p.inner;
  const float *gain = p.gain + s * F, *bias = p.bias + s * F;
  const T* x = static_cast<const T*>(p.x) + first;
  const float inverse = 1.f / float(F);
  const int64_t begin = inside ? y0 : F;
  float a = 0.f, b = 0.f;
  if (!p.gradient) {
#pragma unroll 4
    for (int64_t f = begin; f < F; f += height) a += ToFloat(x[f * p.inner]);
    ColumnSums(a, b, width, shared);
    const float shift = a * inverse;
    a = b = 0.f;
#pragma unroll 4
    for (int64_t f = begin; f < F; f += height) {
      const float d = ToFloat(x[f * p.inner]) - shift;
      a += d;
      b += d * d;
    }
    ColumnSums(a, b, width, shared);
    const Statistics stats = FinishStatistics(shift, a * inverse, b * inverse, p.epsilon);
    if (inside && y0 == 0) p.mean[row] = stats.mean, p.residual[row] = stats.residual, p.rstd[row] = stats.rstd;
    T* y = static_cast<T*>(p.y) + first;
#pragma unroll 4
    for (int64_t f = begin; f < F; f += height)
      y[f * p.inner] = FromFloat<T>(Relu(p.relu, stats.Normalize(ToFloat(x[f * p.inner])) * gain[f] + bias[f]));
    return;
  }
  const T* dy = static_cast<const T*>(p.dy) + first;
  Statistics stats = {};
  if (inside) stats = {p.mean[row], p.residual[row], p.rstd[row]};
#pragma unroll 4
  for (int64_t f = begin; f < F; f += height) {
    const float v = stats.Normalize(ToFloat(x[f * p.inner]));
    const float d = BeforeRelu(p.relu, ToFloat(dy[f * p.inner]), v, gain[f], bias[f]) * gain[f];
    a += d;
    b += d * v;
  }
  ColumnSums(a, b, width, shared);
  const float mean = a * inverse, slope = b * inverse;
  T* dx = static_cast<T*>(p.dx) + first;
#pragma unroll 4
  for (int64_t f = begin; f < F; f += height) {
    const float v = stats.Normalize(ToFloat(x[f * p.inner]));
    const float d = BeforeRelu(p.relu, ToFloat(dy[f * p.inner]), v, gain[f], bias[f]) * gain[f];
    dx[f * p.inner] = FromFloat<T>(((d - mean) - v * slope) * stats.rstd);
  }
}

// How sums over all but the channels are laid out: `lanes` threads take `wide` neighbours in inner of each of
// lanes / wide channels, and the others of a block further positions in turn, `run` of them to each of `parts`.
struct Sums {
  int lanes, wide;
  int64_t chunks, positions, run, parts, blocks;

  Sums(const LayerNormProblem& p, bool small) {
    lanes = small ? 8 : 32;  // a small tensor is spread over more blocks
    wide = int(std::min<int64_t>(lanes, PowerOf2AtLeast(p.inner)));
    chunks = CeilDiv(p.inner, wide);
    positions = p.outer * chunks;
    blocks = CeilDiv(Channels(p), lanes / wide);
    const int64_t wanted = small ? 1 : std::min(CeilDiv(2048, blocks), positions / (8 * kThreads / lanes));
    run = CeilDiv(positions, std::max<int64_t>(1, wanted));
    parts = CeilDiv(positions, run);
  }
};

// dgain and dbias of lanes / wide channels over one part.
template <typename T>
__device__ void ChannelSums(const LayerNormProblem& p, const Sums& sums, int64_t block, float* dgain, float* dbias,
                            float* shared) {
  const int lanes = sums.lanes, wide = sums.wide, lane = threadIdx.x % lanes, row = threadIdx.x / lanes;
  const int rows = kThreads / lanes;
  const int64_t channel = block % sums.blocks * (lanes / wide) + lane / wide, part = block / sums.blocks;
  const int64_t s = channel / p.features, end = min(sums.positions, (part + 1) * sums.run);
  float a = 0.f, b = 0.f;
  if (channel < Channels(p)) {
    const float gain = p.gain[channel], bias = p.bias[channel];
#pragma unroll 8
    for (int64_t q = part * sums.run + row; q < end; q += rows) {
      const int64_t o = sums.chunks == 1 ? q : q / sums.chunks, i = (q - o * sums.chunks) * wide + lane % wide;
      if (i >= p.inner) continue;
      const int64_t at_row = (s * p.outer + o) * p.inner + i, at = (o * Channels(p) + channel) * p.inner + i;
      const Statistics stats = {p.mean[at_row], p.residual[at_row], p.rstd[at_row]};
      const float v = stats.Normalize(ToFloat(static_cast<const T*>(p.x)[at]));
      const float t = BeforeRelu(p.relu, ToFloat(static_cast<const T*>(p.dy)[at]), v, gain, bias);
      a += t * v;
      b += t;
    }
  }
  for (int half = wide / 2; half > 0; half /= 2) {
    a += __shfl_xor_sync(0xffffffff, a, half);
    b += __shfl_xor_sync(0xffffffff, b, half);
  }
  ColumnSums(a, b, lanes, shared);
  if (row > 0 || lane % wide > 0 || channel >= Channels(p)) return;
  dgain[part * Channels(p) + channel] = a;
  dbias[part * Channels(p) + channel] = b;
}

// A gradient's two halves need nothing of each other: the first `units` blocks make dx, the others dgain and dbias.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    AnyLayerNorm(LayerNormProblem p, int width, unsigned tiles, unsigned units, Sums sums, float* dgain, float* dbias) {
  __shared__ float shared[2 * kThreads];
  if (blockIdx.x < units)
    Tile<T>(p, blockIdx.x, width, tiles, shared);
  else
    ChannelSums<T>(p, sums, blockIdx.x - units, dgain, dbias, shared);
}

enum class Family { kAny, kRows, kColumns };

Family Choose(const LayerNormProblem& p, const Chip& chip, LayerFamily* layer) {
  *layer = p.inner == 1 ? ChooseRows(p, chip) : ChooseColumns(p, chip);
  if (layer->fits) return p.inner == 1 ? Family::kRows : Family::kColumns;
  layer->parts = p.gradient ? Sums(p, p.rows() * p.features <= kSmallTensor).parts : 1;
  return Family::kAny;
}

bool Empty(const LayerNormProblem& p) { return p.rows() == 0 || p.features == 0; }

Status RunAny(const LayerNormProblem& p, float* dgain, float* dbias, Stream stream) {
  // A small tensor is spread over more blocks.
  const bool small = p.rows() * p.features <= kSmallTensor;
  const int width = int(std::min<int64_t>(small ? 8 : 32, PowerOf2AtLeast(p.inner)));
  const int height =
      int(std::min<int64_t>(kThreads / width, PowerOf2AtLeast(std::max<int64_t>(p.features, 32 / width))));
  const int64_t tiles = CeilDiv(p.inner, width), units = p.outer * p.segments * tiles;
  const Sums sums(p, small);
  const int64_t blocks = units + (p.gradient ? sums.blocks * sums.parts : 0);
  if (blocks > INT32_MAX || p.segments > INT32_MAX)
    return Status::Invalid("a layer norm of " + std::to_string(units) + " tiles is too large");
  const int threads = p.gradient ? kThreads : width * height;
  WithType(p.dtype, [&](auto type) {
    AnyLayerNorm<decltype(type)>
        <<<unsigned(blocks), threads, 0, stream>>>(p, width, unsigned(tiles), unsigned(units), sums, dgain, dbias);
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace

int64_t WorkspaceBytes(const LayerNormProblem& p, const Chip& chip) {
  if (Empty(p)) return 0;
  LayerFamily family;
  Choose(p, chip, &family);
  return family.parts > 1 ? 2 * family.parts * Channels(p) * int64_t(sizeof(float)) : 0;
}

Status Run(const LayerNormProblem& p, void* workspace, const Chip& chip, Stream stream) {
  const int64_t C = Channels(p);
  if (Empty(p)) {
    if (!p.gradient || C == 0) return {};
    BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(p.dgain, 0, C * sizeof(float), stream));
    BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(p.dbias, 0, C * sizeof(float), stream));
    return {};
  }
  LayerFamily layer;
  const Family family = Choose(p, chip, &layer);
  float *dgain = p.dgain, *dbias = p.dbias;
  if (p.gradient && layer.parts > 1) {
    dgain = static_cast<float*>(workspace);
    dbias = dgain + layer.parts * C;
  }
  BLOCKSPARSE_RETURN_IF_ERROR(family == Family::kRows      ? RunRows(p, dgain, dbias, chip, stream)
                              : family == Family::kColumns ? RunColumns(p, dgain, dbias, chip, stream)
                                                           : RunAny(p, dgain, dbias, stream));
  return p.gradient && layer.parts > 1 ? SumParts(dgain, p.dgain, dbias, p.dbias, layer.parts, C, stream) : Status();
}

}  // namespace cuda
}  // namespace blocksparse
