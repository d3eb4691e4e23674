// Loops over vectors of L floats. Unnamed namespace: see cpu/vector.h.
#pragma once

#include <algorithm>

#include "cpu/ewops_loops.h"
#include "cpu/lstm_kernels.h"
#include "cpu/math.h"
#include "kernels/lstm_formulas.h"

namespace blocksparse {
namespace cpu {
namespace {

template <int L>
BLOCKSPARSE_LOOPS void Gates(const LstmGatesProblem& p, int64_t r0, int64_t r1, int64_t k0, int64_t k1, float* dbias) {
  using V = Float<L>;
  using Formulas = LstmFormulas<Math<L>>;
  constexpr DType F = DType::kFloat32;
  if (dbias)
    for (int g = 0; g < 4; ++g) std::fill(dbias + g * p.width + k0, dbias + g * p.width + k1, 0.f);
  ForDType(p.dtype, [&](auto dtype) {
    constexpr DType D = decltype(dtype)::value;
    for (int64_t r = r0; r < r1; ++r) {
      const int64_t row = r * p.width, gate_row = r * p.stride;
      ForPieces<L>(k0, k1, [&](int64_t k, auto count) {
        const V c = LoadPiece<D, L>(In<D>(p.c) + row + k, count);
        V gate[4];
        for (int g = 0; g < 4; ++g) {
          gate[g] = LoadPiece<D, L>(In<D>(p.gate[g]) + gate_row + k, count);
          if (p.bias) gate[g] += LoadPiece<F, L>(p.bias + g * p.width + k, count);
        }
        gate[2] += p.forget_bias;
        if (!p.gradient) {
          const auto next = Formulas::Forward(c, gate[0], gate[1], gate[2], gate[3]);
          StorePiece<D, L>(Out<D>(p.c_next) + row + k, next.c, count);
          StorePiece<D, L>(Out<D>(p.h_next) + row + k, next.h, count);
          return;
        }
        const V dc = p.dc_next ? LoadPiece<D, L>(In<D>(p.dc_next) + row + k, count) : V{};
        const V dh = p.dh_next ? LoadPiece<D, L>(In<D>(p.dh_next) + row + k, count) : V{};
        const auto d = Formulas::Backward(c, gate[0], gate[1], gate[2], gate[3], dc, dh);
        StorePiece<D, L>(Out<D>(p.dc) + row + k, d.c, count);
        const V dgate[4] = {d.i, d.u, d.f, d.o};
        for (int g = 0; g < 4; ++g) {
          StorePiece<D, L>(Out<D>(p.dgate[g]) + gate_row + k, dgate[g], count);
          if (!dbias) continue;
          float* sum = dbias + g * p.width + k;
          StorePiece<F, L>(sum, LoadPiece<F, L>(sum, count) + dgate[g], count);
        }
      });
    }
  });
}

}  // namespace
}  // namespace cpu
}  // namespace blocksparse
