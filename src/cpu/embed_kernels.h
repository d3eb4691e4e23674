// The inner loop of the embedding's gradient, compiled once per instruction set; embed.cc sorts, and cuts into parts.
#pragma once

#include <cstdint>

#include "kernels/embed.h"

namespace blocksparse {
namespace cpu {

struct EmbedKernels {
  const char* name;
  // y[k] = the sum of x[places[n] * width + k] over n in [0, count), for k in [k0, k1), in float32, rounded once.
  void (*sum_rows)(DType dtype, const void* x, int64_t width, const uint32_t* places, int64_t count, int64_t k0,
                   int64_t k1, void* y);
};

// Null where this build has no such kernels.
const EmbedKernels* EmbedKernelsBase();
const EmbedKernels* EmbedKernelsAvx2();
const EmbedKernels* EmbedKernelsAvx512();

}  // namespace cpu
}  // namespace blocksparse
