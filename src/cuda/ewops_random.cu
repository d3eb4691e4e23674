// Dropout and concrete gates on the GPU.
#include "cuda/check.h"
#include "cuda/vector.cuh"
#include "kernels/ewops.h"
#include "kernels/philox.h"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 256;  // elements a warp makes the mask of at once: one Philox block and one byte a lane
constexpr int kTiles = 1;   // a warp takes

// Not 0 where a half of a random word equals the threshold's high half.
__device__ __forceinline__ uint32_t Ties(const philox::Block& random, philox::Threshold threshold) {
  const uint32_t both = threshold.high << 16 | threshold.high;
  uint32_t ties = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t equal = random.word[i] ^ both;
    ties |= (equal - 0x00010001u) & ~equal & 0x80008000u;
  }
  return ties;
}

// Calls use(2 i, keep) and use(2 i + 1, keep) for the halves of each word, by the high half of the threshold alone, which
// lies between 0 and 2^16. A half-word in the upper half of a word compares like the half-word alone.
template <class Use>
__device__ __forceinline__ void CompareHalves(const philox::Block& random, philox::Threshold threshold,
                                              const Use& use) {
  const uint32_t limit = threshold.high << 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    use(2 * i, random.word[i] << 16 < limit);
    use(2 * i + 1, random.word[i] < limit);
  }
}

// The mask of elements 8 * block to 8 * block + 7, for any threshold.
__device__ __forceinline__ uint32_t MaskByte(const DropoutProblem& p, const philox::Block& random, bool tied,
                                             philox::Threshold threshold, uint64_t block) {
  if (threshold.high == 0x10000) return 0xff;
  uint32_t keep = 0;
  CompareHalves(random, threshold, [&](int i, bool kept) {
    if (kept) keep |= 1u << i;
  });
  if (tied) {
    const philox::Block low = philox::Random(p.seed[0], p.seed[1], block, philox::kLow);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (philox::HalfWord(random, i) == threshold.high && philox::HalfWord(low, i) < threshold.low) keep |= 1u << i;
  }
  return keep;
}

// kApply false: the mask alone. N elements move at once: 16 bytes, or one.
template <typename T, int N, bool kApply>
__global__ void __launch_bounds__(kThreads) Generate(DropoutProblem p, philox::Threshold threshold, float scale) {
  const int lane = threadIdx.x % 32;
  const int64_t warp = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const T* x = static_cast<const T*>(p.x);
  T* y = static_cast<T*>(p.y);
  const int64_t mask_bytes = (p.n + 31) / 32 * 4;
  constexpr int kPacks = 8 / N;  // of a lane in a tile
  Pack<T, N> loaded[kTiles][kPacks];
  if constexpr (kApply) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        const int64_t e = (warp * kTiles + tile) * kTile + (j * 32 + lane) * N;
        if (e + N <= p.n) loaded[tile][j] = LoadPack<T, N>(x + e);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int64_t first = (warp * kTiles + tile) * kTile;
    if (first >= p.n) return;
    const int64_t begin = first + 8 * lane;
    auto* mask = reinterpret_cast<uint8_t*>(p.mask) + begin / 8;
    const philox::Block random = philox::Random(p.seed[0], p.seed[1], uint64_t(begin) / 8, philox::kHigh);
    const bool tied = threshold.low != 0 && Ties(random, threshold) != 0;  // one element in 65536
    if constexpr (kApply && N == 8) {
      // A pack whose bits are this lane's own: the comparisons choose between x and 0 right away.
      if (begin + 8 <= p.n && !tied && 0 < threshold.high && threshold.high < 0x10000) {
        float v[N];
        Widen(loaded[tile][0], v);
        uint32_t keep = 0;
        CompareHalves(random, threshold, [&](int i, bool kept) {
          if (kept) keep |= 1u << i;
          v[i] = kept ? scale * v[i] : 0.f;
        });
        StorePack(y + begin, v);
        *mask = uint8_t(keep);
        continue;
      }
    }
    uint32_t byte = MaskByte(p, random, tied, threshold, uint64_t(begin) / 8);
    if (begin + 8 > p.n) byte &= begin < p.n ? (1u << (p.n - begin)) - 1 : 0u;
    if (begin / 8 < mask_bytes) *mask = uint8_t(byte);
    if constexpr (kApply) {
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        // The lane that made the bits of this pack has them at this place.
        const int place = (j * 32 + lane) * N;
        const uint32_t bits = N == 8 ? byte : __shfl_sync(0xffffffff, byte, place / 8) >> place % 8;
        const int64_t e = first + place;
        if (e + N <= p.n) {
          float v[N];
          Widen(loaded[tile][j], v);
#pragma unroll
          for (int k = 0; k < N; ++k) v[k] = bits >> k & 1 ? scale * v[k] : 0.f;
          StorePack(y + e, v);
        } else {
          for (int k = 0; e + k < p.n; ++k) y[e + k] = FromFloat<T>(bits >> k & 1 ? scale * ToFloat(x[e + k]) : 0.f);
        }
      }
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) Apply(DropoutProblem p, float scale) {
  constexpr int kPacks = 1;
  const T* x = static_cast<const T*>(p.x);
  T* y = static_cast<T*>(p.y);
  const auto* mask = reinterpret_cast<const uint8_t*>(p.mask);
  const int64_t packs = p.n / N, first = int64_t(blockIdx.x) * (kThreads * kPacks) + threadIdx.x;
  Pack<T, N> loaded[kPacks];
  uint32_t bits[kPacks];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int64_t e = (first + u * kThreads) * N;
    if (first + u * kThreads >= packs) break;
    loaded[u] = LoadPack<T, N>(x + e);
    bits[u] = uint32_t(mask[e / 8]) >> e % 8;
  }
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    if (first + u * kThreads >= packs) break;
    float v[N];
    Widen(loaded[u], v);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = bits[u] >> k & 1 ? scale * v[k] : 0.f;
    StorePack(y + (first + u * kThreads) * N, v);
  }
  const int64_t e = packs * N + threadIdx.x;
  if (N > 1 && blockIdx.x == 0 && e < p.n) y[e] = FromFloat<T>(mask[e / 8] >> e % 8 & 1 ? scale * ToFloat(x[e]) : 0.f);
}

template <typename T, typename Index>
__global__ void __launch_bounds__(kThreads) ApplyBroadcast(const __grid_constant__ DropoutProblem p, float scale) {
  const int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= p.n) return;
  Index rest = Index(e);
  int64_t bit = 0;
  for (int d = p.rank - 1; d >= 0; --d) {
    const Index dim = Index(p.dims[d]), quotient = rest / dim;
    bit += int64_t(rest - quotient * dim) * p.stride[d];
    rest = quotient;
  }
  const bool keep = p.mask[bit >> 5] >> (bit & 31) & 1;
  static_cast<T*>(p.y)[e] = FromFloat<T>(keep ? scale * ToFloat(static_cast<const T*>(p.x)[e]) : 0.f);
}

__global__ void __launch_bounds__(kThreads) ConcreteGates(ConcreteGateProblem p) {
  const int64_t block = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (4 * block >= p.n) return;
  const philox::Block random = philox::Random(p.seed[0], p.seed[1], uint64_t(block), philox::kConcrete);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int64_t i = 4 * block + k;
    if (i >= p.n) return;
    const float u = philox::Uniform(random.word[k]) * (1.f - 2.f * p.epsilon) + p.epsilon;
    const float s = Math::Sigmoid((logf(u) - logf(1.f - u) + p.x[i]) * p.inverse_temperature);
    p.concrete[i] = s;
    p.gate[i] = fminf(fmaxf(s * (p.high - p.low) + p.low, 0.f), 1.f);
  }
}

}  // namespace

Status Run(const DropoutProblem& p, Stream stream) {
  if (p.n == 0) return {};
  const float scale = 1.f / p.keep_prob;
  const bool aligned = Aligned({p.x, p.y});
  const unsigned tiles = unsigned(CeilDiv(p.n, int64_t(kTile) * kTiles * (kThreads / 32)));
  const philox::Threshold threshold = philox::MakeThreshold(p.keep_prob);
  if (p.generate && p.x == nullptr) {
    Generate<float, 4, false><<<tiles, kThreads, 0, stream>>>(p, threshold, scale);
    BLOCKSPARSE_CUDA_LAUNCHED();
    return {};
  }
  WithType(p.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int N = kPerVector<T>;
    if (p.generate) {
      if (aligned)
        Generate<T, N, true><<<tiles, kThreads, 0, stream>>>(p, threshold, scale);
      else
        Generate<T, 1, true><<<tiles, kThreads, 0, stream>>>(p, threshold, scale);
    } else if (p.rank > 0) {
      const unsigned blocks = unsigned(CeilDiv(p.n, kThreads));
      if (p.n <= UINT32_MAX)
        ApplyBroadcast<T, uint32_t><<<blocks, kThreads, 0, stream>>>(p, scale);
      else
        ApplyBroadcast<T, uint64_t><<<blocks, kThreads, 0, stream>>>(p, scale);
    } else {
      const int per_thread = aligned ? N : 1;
      const unsigned blocks = unsigned(CeilDiv(p.n, int64_t(per_thread) * kThreads));
      if (aligned)
        Apply<T, N><<<blocks, kThreads, 0, stream>>>(p, scale);
      else
        Apply<T, 1><<<blocks, kThreads, 0, stream>>>(p, scale);
    }
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

Status Run(const ConcreteGateProblem& p, Stream stream) {
  if (p.n == 0) return {};
  ConcreteGates<<<unsigned(CeilDiv(p.n, 4 * kThreads)), kThreads, 0, stream>>>(p);
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace cuda
}  // namespace blocksparse
