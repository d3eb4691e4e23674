// The inner loops of the elementwise operators, compiled once per instruction set. Each does a part of a problem; ewops.cc
// cuts problems into parts and gives them to threads.
#pragma once

#include <cstdint>

#include "kernels/ewops.h"

namespace blocksparse {
namespace cpu {

struct EwopsKernels {
  const char* name;
  // Elements [begin, end).
  void (*map)(const EwProblem& problem, int64_t begin, int64_t end);
  void (*cast)(const CastProblem& problem, int64_t begin, int64_t end);
  void (*add_n)(const AddNProblem& problem, int64_t begin, int64_t end);
  void (*concrete_gate)(const ConcreteGateProblem& problem, int64_t begin, int64_t end);
  // Elements [begin, end); begin is a multiple of 32, and end too unless it is n.
  void (*dropout)(const DropoutProblem& problem, int64_t begin, int64_t end);
  // inner 1: rows [o0, o1). Else: elements [i0, i1) of channels [c0, c1) of [o0, o1). A gradient's sums over these go to
  // dbias[c] and dgain[c], which are [channels].
  void (*channel)(const ChannelProblem& problem, int64_t o0, int64_t o1, int64_t c0, int64_t c1, int64_t i0, int64_t i1,
                  float* dbias, float* dgain);
  // inner 1: rows [begin, end) of outer. Else: elements [i0, i1) of each.
  void (*reduce_max)(const ReduceMaxProblem& problem, int64_t begin, int64_t end, int64_t i0, int64_t i1);
};

// Null where this build has no such kernels.
const EwopsKernels* EwopsKernelsBase();
const EwopsKernels* EwopsKernelsAvx2();
const EwopsKernels* EwopsKernelsAvx512();

}  // namespace cpu
}  // namespace blocksparse
