// Random bits from a counter: Philox4x32-7 (J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
// Seven rounds are the fewest that pass all of TestU01's BigCrush there; at ten, dropout of 16-bit tensors would be bound
// by arithmetic.
// What element e gets depends on the seed and on e alone, so every backend, chip and split of the work agrees.
//
// Dropout: the 32 random bits of element e are two halves. The high one is half-word e % 8 (low half of word 0 first) of
// the block with counter (e / 8, kHigh), the low one the same half-word of (e / 8, kLow). The low half matters only where
// the high half equals the threshold's, once in 65536 elements, so one block serves eight elements.
// Concrete gates: element e gets word e % 4 of the block with counter (e / 4, kConcrete).
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define BLOCKSPARSE_PHILOX __device__ __forceinline__
#else
#define BLOCKSPARSE_PHILOX inline __attribute__((always_inline))
#endif

namespace blocksparse {
namespace philox {

enum Stream : uint32_t { kHigh = 0, kLow = 1, kConcrete = 2 };

constexpr int kRounds = 7;
constexpr uint32_t kMultiply0 = 0xD2511F53, kMultiply1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;  // added to the key each round

struct Block {
  uint32_t word[4];
};

BLOCKSPARSE_PHILOX Block Random(uint32_t key0, uint32_t key1, uint64_t counter, uint32_t stream) {
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = stream, c3 = 0;
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = uint64_t(kMultiply0) * c0, p1 = uint64_t(kMultiply1) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ key0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ key1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

BLOCKSPARSE_PHILOX uint32_t HalfWord(const Block& block, int i) { return block.word[i / 2] >> (i % 2 * 16) & 0xffff; }

// Kept where the 32 bits, as a number, are less than the threshold; 2^32 keeps all.
struct Threshold {
  uint32_t high, low;  // the threshold is high * 2^16 + low; high is at most 2^16
};

inline Threshold MakeThreshold(float keep_prob) {
  // keep_prob * 2^32 is exact in double; u < t is u < ceil(t) for whole u.
  const double exact = double(keep_prob) * 4294967296.0;
  uint64_t whole = uint64_t(exact);
  whole += double(whole) < exact;
  return {uint32_t(whole >> 16), uint32_t(whole & 0xffff)};
}

// Uniform in [0, 1), 24 bits.
BLOCKSPARSE_PHILOX float Uniform(uint32_t word) { return float(word >> 8) * 0x1p-24f; }

}  // namespace philox
}  // namespace blocksparse
