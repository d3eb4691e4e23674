// Arrays of any length in vectors of L floats, with what is left at the end. Unnamed namespace: see cpu/vector.h.
#pragma once

#include "cpu/vector.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

// A function that loops over vectors: all that it calls goes into its body. A formula that is called for each vector loads
// its constants each time, at half the speed.
#define BLOCKSPARSE_LOOPS __attribute__((flatten))

namespace blocksparse {
namespace cpu {
namespace {

template <DType D>
inline const Element<D>* In(const void* data) {
  return static_cast<const Element<D>*>(data);
}
template <DType D>
inline Element<D>* Out(void* data) {
  return static_cast<Element<D>*>(data);
}

// The first `count` < L elements, and zeros after them.
template <DType D, int L>
inline Float<L> LoadPart(const Element<D>* p, int count) {
  Element<D> part[L] = {};
  for (int i = 0; i < count; ++i) part[i] = p[i];
  return LoadVec<D, L>(part);
}
template <DType D, int L>
inline void StorePart(Element<D>* p, Float<L> x, int count) {
  Element<D> part[L];
  StoreVec<D, L>(part, x);
  for (int i = 0; i < count; ++i) p[i] = part[i];
}

// body(i, count) for pieces of L elements and one of what is left; `count` is the constant L but in the last. kUnroll pieces
// are one body of the loop: where a piece is a few instructions, counting takes as long.
template <int L, int kUnroll = 1, class Body>
inline void ForPieces(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
  if constexpr (kUnroll > 1) {
    for (; i + kUnroll * L <= end; i += kUnroll * L)
#pragma GCC unroll 8
      for (int j = 0; j < kUnroll; ++j) body(i + j * L, std::integral_constant<int, L>());
  }
  for (; i + L <= end; i += L) body(i, std::integral_constant<int, L>());
  if (i < end) body(i, int(end - i));
}
template <DType D, int L>
inline Float<L> LoadPiece(const Element<D>* p, std::integral_constant<int, L>) {
  return LoadVec<D, L>(p);
}
template <DType D, int L>
inline Float<L> LoadPiece(const Element<D>* p, int count) {
  return LoadPart<D, L>(p, count);
}
template <DType D, int L>
inline void StorePiece(Element<D>* p, Float<L> x, std::integral_constant<int, L>) {
  StoreVec<D, L>(p, x);
}
template <DType D, int L>
inline void StorePiece(Element<D>* p, Float<L> x, int count) {
  StorePart<D, L>(p, x, count);
}

// Past the caches, which a large result would only pass through: saves reading what is about to be overwritten. `p` is
// aligned to the vector's size; ended by StreamEnd.
template <DType D, int L>
inline void StreamVec(Element<D>* p, Float<L> x) {
#if defined(__SSE2__)
  alignas(64) Element<D> bytes[L];
  StoreVec<D, L>(bytes, x);
  auto* to = reinterpret_cast<char*>(p);
  const auto* from = reinterpret_cast<const char*>(bytes);
  constexpr int kBytes = L * int(sizeof(Element<D>));
#if defined(__AVX__)
  if constexpr (kBytes % 32 == 0) {
    for (int i = 0; i < kBytes; i += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), *reinterpret_cast<const __m256i*>(from + i));
    return;
  }
#endif
  if constexpr (kBytes % 16 == 0) {
    for (int i = 0; i < kBytes; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), *reinterpret_cast<const __m128i*>(from + i));
    return;
  }
#endif
  StoreVec<D, L>(p, x);
}
inline void StreamEnd() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace cpu
}  // namespace blocksparse
