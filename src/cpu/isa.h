// Which instruction sets this CPU has, found once. BLOCKSPARSE_CPU_ISA = base, avx2 or avx512 asks for less than the best,
// amx for bfloat16 on AMX tiles, which is taken only where it is asked for: it takes subnormals for zero.
#pragma once

#include "kernels/common.h"

namespace blocksparse {
namespace cpu {

enum class Isa { kBase, kAvx2, kAvx512 };

// The best that this CPU can run, or the one asked for; what is asked for and missing gives an error.
Status CurrentIsa(Isa* isa);

// Whether AMX was asked for, this CPU has its tiles for bfloat16, and the system lets the process use them, for which it
// is asked once.
bool HasAmx();

// Sizes of the second and the last level's cache, for the cost models. What the system does not tell is guessed.
int64_t SecondCacheBytes();
int64_t LastCacheBytes();

// Tells the system that a large piece of memory is about to be written as a whole, so that it comes in large pages.
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
