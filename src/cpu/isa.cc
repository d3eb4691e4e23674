#include "cpu/isa.h"

#include <cstdlib>
#include <string>
#include <utility>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace blocksparse {
namespace cpu {
namespace {

bool HasAvx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // and with them F16C
#else
  return false;
#endif
}

bool HasAvx512() {
#if defined(__x86_64__)
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

std::pair<Isa, Status> Find() {
  const char* wish = std::getenv("BLOCKSPARSE_CPU_ISA");
  const std::string name = wish ? wish : "";
  if (name.empty()) return {HasAvx512() ? Isa::kAvx512 : HasAvx2() ? Isa::kAvx2 : Isa::kBase, {}};
  if (name == "base") return {Isa::kBase, {}};
  if (name == "avx2" && HasAvx2()) return {Isa::kAvx2, {}};
  if (name == "avx512" && HasAvx512()) return {Isa::kAvx512, {}};
  return {Isa::kBase, Status::Invalid("BLOCKSPARSE_CPU_ISA is '" + name + "'; this CPU allows base" +
                                      (HasAvx2() ? ", avx2" : "") + (HasAvx512() ? ", avx512" : ""))};
}

}  // namespace

Status CurrentIsa(Isa* isa) {
  static const std::pair<Isa, Status> found = Find();
  *isa = found.first;
  return found.second;
}

KeepSubnormals::KeepSubnormals() {
#if defined(__x86_64__)
  constexpr unsigned kFlushAndZero = 0x8040;
  saved_ = _mm_getcsr();
  _mm_setcsr(saved_ & ~kFlushAndZero);
#endif
}

KeepSubnormals::~KeepSubnormals() {
#if defined(__x86_64__)
  _mm_setcsr(saved_);
#endif
}

}  // namespace cpu
}  // namespace blocksparse
