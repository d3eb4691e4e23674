// Dropout and concrete gates on vectors of L floats. Unnamed namespace: see cpu/vector.h.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/ewops_loops.h"
#include "kernels/philox.h"

namespace blocksparse {
namespace cpu {
namespace {

// L / 2 blocks of Philox at once: 64-bit lanes that hold 32-bit words.
template <int L>
struct VecPhilox {
  static constexpr int kBlocks = L / 2;
  using Wide = typename Vec<L>::Wide;

  static inline Wide Multiply(Wide a, uint32_t b) {  // of the low halves
#if defined(__AVX512F__)
    if constexpr (L == 16)
      return reinterpret_cast<Wide>(_mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), _mm512_set1_epi64(b)));
#endif
#if defined(__AVX2__)
    if constexpr (L == 8)
      return reinterpret_cast<Wide>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), _mm256_set1_epi64x(b)));
#endif
#if defined(__SSE2__)
    if constexpr (L == 4)
      return reinterpret_cast<Wide>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), _mm_set1_epi64x(b)));
#endif
    return (a & 0xffffffffull) * uint64_t(b);
  }

  // Blocks counter, counter + 1, ... in order, four words each.
  static inline void Random(const uint32_t* seed, uint64_t counter, uint32_t stream, uint32_t* words) {
    constexpr uint64_t kLow = 0xffffffffull;
    Wide lane = {};
    for (int i = 0; i < kBlocks; ++i) lane[i] = counter + i;
    Wide c0 = lane & kLow, c1 = lane >> 32, c2 = Wide{} + uint64_t(stream), c3 = {};
    uint32_t key0 = seed[0], key1 = seed[1];
#pragma GCC unroll 7
    for (int round = 0; round < philox::kRounds; ++round) {
      const Wide p0 = Multiply(c0, philox::kMultiply0), p1 = Multiply(c2, philox::kMultiply1);
      c0 = (p1 >> 32) ^ c1 ^ uint64_t(key0);
      c2 = (p0 >> 32) ^ c3 ^ uint64_t(key1);
      c1 = p1 & kLow;
      c3 = p0 & kLow;
      key0 += philox::kWeyl0;
      key1 += philox::kWeyl1;
    }
    const Wide low = c0 | c1 << 32, high = c2 | c3 << 32;
    for (int i = 0; i < kBlocks; ++i) {
      const uint64_t block[2] = {low[i], high[i]};
      std::memcpy(words + 4 * i, block, sizeof block);
    }
  }
};

constexpr int kDropoutPiece = 2048;  // elements whose random half-words are made at once

// The mask of elements [begin, begin + kDropoutPiece), those past n included.
template <int L>
inline void MakeMask(const DropoutProblem& p, philox::Threshold threshold, int64_t begin, uint32_t* mask) {
  using Random = VecPhilox<L>;
  uint32_t words[kDropoutPiece / 2];
  for (int i = 0; i < kDropoutPiece / 8; i += Random::kBlocks)
    Random::Random(p.seed, uint64_t(begin) / 8 + i, philox::kHigh, words + 4 * i);
  uint16_t halves[kDropoutPiece];
  std::memcpy(halves, words, sizeof halves);
  uint8_t keep[kDropoutPiece];
  unsigned ties = 0;
  for (int i = 0; i < kDropoutPiece; ++i) {
    keep[i] = halves[i] < threshold.high;
    ties += halves[i] == threshold.high;
  }
  if (ties != 0 && threshold.low != 0) {
    for (int i = 0; i < kDropoutPiece; ++i) {
      if (halves[i] != threshold.high) continue;
      const auto block = philox::Random(p.seed[0], p.seed[1], uint64_t(begin + i) / 8, philox::kLow);
      keep[i] = philox::HalfWord(block, i % 8) < threshold.low;
    }
  }
  for (int w = 0; w < kDropoutPiece / 32; ++w) {
    uint32_t word = 0;
    for (int b = 0; b < 4; ++b) {
      // Byte k of `eight`, 0 or 1, lands in bit 56 + k of the product; nothing else reaches these bits.
      uint64_t eight;
      std::memcpy(&eight, keep + 32 * w + 8 * b, 8);
      word |= uint32_t(eight * 0x0102040810204080ull >> 56) << 8 * b;
    }
    mask[w] = word;
  }
}

template <int L>
inline Float<L> Kept(Float<L> x, uint32_t bits) {
  using Int = typename Vec<L>::Int;
  Int bit;
  for (int i = 0; i < L; ++i) bit[i] = 1 << i;
  return ((Int{} + int32_t(bits)) & bit) != 0 ? x : Float<L>{};
}

template <DType D, int L>
void ApplyMask(const DropoutProblem& p, float scale, int64_t begin, int64_t end, const uint32_t* mask) {
  const Element<D>* x = In<D>(p.x);
  Element<D>* y = Out<D>(p.y);
  ForPieces<L>(begin, end, [&](int64_t i, auto count) {
    const uint32_t bits = mask[(i - begin) / 32] >> (i - begin) % 32;
    StorePiece<D, L>(y + i, Kept<L>(scale * LoadPiece<D, L>(x + i, count), bits), count);
  });
}

// Row by row of the innermost dimension, along which the mask's bits are one or follow each other.
template <DType D>
void ApplyBroadcast(const DropoutProblem& p, float scale, int64_t begin, int64_t end) {
  const Element<D>* x = In<D>(p.x);
  Element<D>* y = Out<D>(p.y);
  int64_t index[DropoutProblem::kMaxRank], bit = 0, rest = begin;
  for (int d = p.rank - 1; d >= 0; --d) {
    index[d] = rest % p.dims[d];
    rest /= p.dims[d];
    bit += index[d] * p.stride[d];
  }
  const int last = p.rank - 1;
  for (int64_t e = begin; e < end;) {
    const int64_t run = std::min(end - e, p.dims[last] - index[last]), step = p.stride[last];
    for (int64_t i = 0; i < run; ++i) {
      const int64_t b = bit + i * step;
      StoreOne<D>(y + e + i, p.mask[b >> 5] >> (b & 31) & 1 ? scale * LoadOne<D>(x + e + i) : 0.f);
    }
    e += run;
    index[last] += run;
    bit += run * step;
    for (int d = last; d > 0 && index[d] == p.dims[d]; --d) {
      bit += p.stride[d - 1] - index[d] * p.stride[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

template <int L>
BLOCKSPARSE_LOOPS void Dropout(const DropoutProblem& p, int64_t begin, int64_t end) {
  const float scale = 1.f / p.keep_prob;
  ForDType(p.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    if (p.rank > 0) return ApplyBroadcast<D>(p, scale, begin, end);
    if (!p.generate) return ApplyMask<D, L>(p, scale, begin, end, p.mask + begin / 32);
    const philox::Threshold threshold = philox::MakeThreshold(p.keep_prob);
    for (int64_t e = begin; e < end; e += kDropoutPiece) {
      const int64_t stop = std::min<int64_t>(end, e + kDropoutPiece), words = (stop - e + 31) / 32;
      uint32_t mask[kDropoutPiece / 32];
      MakeMask<L>(p, threshold, e, mask);
      if (stop % 32 != 0) mask[words - 1] &= (1u << stop % 32) - 1;
      std::copy(mask, mask + words, p.mask + e / 32);
      if (p.x) ApplyMask<D, L>(p, scale, e, stop, mask);
    }
  });
}

template <int L>
BLOCKSPARSE_LOOPS void ConcreteGate(const ConcreteGateProblem& p, int64_t begin, int64_t end) {
  using M = Math<L>;
  using V = Float<L>;
  constexpr DType F = DType::kFloat32;
  ForPieces<L>(begin, end, [&](int64_t i, auto count) {
    float uniform[L];
    for (int k = 0; k < L; k += 4) {  // pieces start at multiples of 4
      const auto block = philox::Random(p.seed[0], p.seed[1], uint64_t(i + k) / 4, philox::kConcrete);
      for (int j = 0; j < 4; ++j) uniform[k + j] = philox::Uniform(block.word[j]);
    }
    const V u = LoadVec<F, L>(uniform) * (1.f - 2.f * p.epsilon) + p.epsilon;
    const V noise = M::Log(u) - M::Log(1.f - u);
    const V s = M::Sigmoid((noise + LoadPiece<F, L>(p.x + i, count)) * p.inverse_temperature);
    StorePiece<F, L>(p.concrete + i, s, count);
    StorePiece<F, L>(p.gate + i, M::Clamp(s * (p.high - p.low) + p.low, 0.f, 1.f), count);
  });
}

}  // namespace
}  // namespace cpu
}  // namespace blocksparse
