// Arrays of any length in vectors of L floats, with what is left at the end. Unnamed namespace: see cpu/vector.h.
#pragma once

#include "cpu/vector.h"

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

// body(i, count) for pieces of L elements and one of what is left; `count` is the constant L but in the last.
template <int L, class Body>
inline void ForPieces(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
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

}  // namespace
}  // namespace cpu
}  // namespace blocksparse
