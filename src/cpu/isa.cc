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

std::pair<const MatmulKernels*, Status> Find() {
  const MatmulKernels* avx2 = HasAvx2() ? MatmulKernelsAvx2() : nullptr;
  const MatmulKernels* avx512 = HasAvx512() ? MatmulKernelsAvx512() : nullptr;
  const char* wish = std::getenv("BLOCKSPARSE_CPU_ISA");
  const std::string name = wish ? wish : "";
  if (name.empty()) return {avx512 ? avx512 : avx2 ? avx2 : MatmulKernelsBase(), {}};
  if (name == "base") return {MatmulKernelsBase(), {}};
  if (name == "avx2" && avx2) return {avx2, {}};
  if (name == "avx512" && avx512) return {avx512, {}};
  return {nullptr, Status::Invalid("BLOCKSPARSE_CPU_ISA is '" + name + "'; this CPU allows base" +
                                   (avx2 ? ", avx2" : "") + (avx512 ? ", avx512" : ""))};
}

}  // namespace

Status CurrentKernels(const MatmulKernels** kernels) {
  static const std::pair<const MatmulKernels*, Status> found = Find();
  *kernels = found.first;
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
