// The inner loops of normalization, compiled once per instruction set. norms.cc cuts problems into parts and gives them
// to threads.
#pragma once

#include <cstdint>

#include "kernels/norms.h"

namespace blocksparse {
namespace cpu {

// Count, mean and sum of squared distances from the mean.
struct Moments {
  double count = 0, mean = 0, squares = 0;
};

// Of both sets together (T. F. Chan, G. H. Golub, R. J. LeVeque, 1979). Static: files compiled for different instruction
// sets must not share a function.
static inline Moments Merge(const Moments& a, const Moments& b) {
  const double count = a.count + b.count, delta = b.mean - a.mean;
  if (count == 0) return a;
  const double share = b.count / count;
  return {count, a.mean + delta * share, a.squares + b.squares + delta * delta * (a.count * share)};
}

struct ChannelSums {
  double dgain = 0, dbias = 0;
};

struct NormsKernels {
  const char* name;
  // Columns of inner that layer_columns takes at once.
  int columns;
  // inner 1: outer [o0, o1) of segment s. A gradient's sums over these are written to dgain and dbias, [channels].
  void (*layer_rows)(const LayerNormProblem& problem, int64_t s, int64_t o0, int64_t o1, float* dgain, float* dbias);
  // Columns [i0, i1) of inner, at most `columns`, of outer index o of segment s. A gradient's sums over these are added
  // to dgain and dbias, [channels]. `scratch` has features * columns floats, a gradient's twice as many.
  void (*layer_columns)(const LayerNormProblem& problem, int64_t s, int64_t o, int64_t i0, int64_t i1, float* dgain,
                        float* dbias, float* scratch);
  // Outer [o0, o1) of channel c.
  Moments (*batch_moments)(const BatchNormProblem& problem, int64_t c, int64_t o0, int64_t o1);
  ChannelSums (*batch_sums)(const BatchNormProblem& problem, int64_t c, int64_t o0, int64_t o1);
  // y of outer [o0, o1) of channel c, or dx from the channel's sums in dgain and dbias.
  void (*batch_apply)(const BatchNormProblem& problem, int64_t c, int64_t o0, int64_t o1);
};

// Null where this build has no such kernels.
const NormsKernels* NormsKernelsBase();
const NormsKernels* NormsKernelsAvx2();
const NormsKernels* NormsKernelsAvx512();

}  // namespace cpu
}  // namespace blocksparse
