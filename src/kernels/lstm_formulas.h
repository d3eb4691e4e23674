// The formulas of the LSTM cell (S. Hochreiter, J. Schmidhuber, 1997; with the forget gate of F. Gers et al., 1999), once
// for both backends. M is a backend's arithmetic: M::V is a float or a vector of floats.
#pragma once

#include "kernels/ewops_formulas.h"
#include "kernels/lstm.h"

namespace blocksparse {

template <class M>
struct LstmFormulas {
  using V = typename M::V;
  struct Next {
    V c, h;
  };
  struct Grads {
    V c, i, u, f, o;
  };

  // f has its bias.
  BLOCKSPARSE_FORMULA static Next Forward(V c, V i, V u, V f, V o) {
    const V next = M::Sigmoid(f) * c + M::Sigmoid(i) * M::Tanh(u);
    return {next, M::Sigmoid(o) * M::Tanh(next)};
  }

  BLOCKSPARSE_FORMULA static Grads Backward(V c, V i, V u, V f, V o, V dc_next, V dh_next) {
    const V si = M::Sigmoid(i), tu = M::Tanh(u), sf = M::Sigmoid(f), so = M::Sigmoid(o);
    const V tc = M::Tanh(sf * c + si * tu);
    const V d = dc_next + dh_next * so * (1.f - tc * tc);
    return {d * sf, d * tu * (si * (1.f - si)), d * si * (1.f - tu * tu), d * c * (sf * (1.f - sf)),
            dh_next * tc * (so * (1.f - so))};
  }
};

}  // namespace blocksparse
