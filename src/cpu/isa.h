// Which instruction sets this CPU has, found once. BLOCKSPARSE_CPU_ISA = base, avx2, avx512 or amx asks for one and what
// lies below it; without it the best is taken.
#pragma once

#include "kernels/common.h"

namespace blocksparse {
namespace cpu {

enum class Isa { kBase, kAvx2, kAvx512 };

// The best that this CPU can run, or the one asked for; what is asked for and missing gives an error.
Status CurrentIsa(Isa* isa);

// Whether this CPU has AMX tiles for bfloat16, nothing less was asked for, and the system lets the process use them, for
// which it is asked once.
bool HasAmx();

// Sizes of the second and the last level's cache, for the cost models. What the system does not tell is guessed.
int64_t SecondCacheBytes();
int64_t LastCacheBytes();

// Tells the system that a large piece of memory is about to be written as a whole, so that it comes in large pages. Null is
// no memory.
// Allocators take pieces of 32 MiB and more from the system at each call: in small pages, first touching them costs as
// much as computing what goes there. And what is read in no order, as packed activations are, misses fewer translations.
void ExpectWrites(void* data, int64_t bytes);

// Subnormals count while it lives, whatever mode the thread was in: thread pools of frameworks often flush them.
class KeepSubnormals {
 public:
  KeepSubnormals();
  ~KeepSubnormals();

 private:
  unsigned saved_ = 0;
};

}  // namespace cpu
}  // namespace blocksparse
