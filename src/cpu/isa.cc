#include "cpu/isa.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
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

std::string Wish() {
  const char* wish = std::getenv("BLOCKSPARSE_CPU_ISA");
  return wish ? wish : "";
}

// Tiles for bfloat16, and leave of the system to use them.
bool FindAmx() {
#if defined(__x86_64__) && defined(SYS_arch_prctl)
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24;
  if (!HasAvx512() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) ||
      (edx & (kBFloat16 | kTile)) != (kBFloat16 | kTile))
    return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

std::pair<Isa, Status> Find() {
  const std::string name = Wish();
  if (name.empty()) return {HasAvx512() ? Isa::kAvx512 : HasAvx2() ? Isa::kAvx2 : Isa::kBase, {}};
  if (name == "base") return {Isa::kBase, {}};
  if (name == "avx2" && HasAvx2()) return {Isa::kAvx2, {}};
  if ((name == "avx512" && HasAvx512()) || (name == "amx" && FindAmx())) return {Isa::kAvx512, {}};
  return {Isa::kBase,
          Status::Invalid("BLOCKSPARSE_CPU_ISA is '" + name + "'; this CPU allows base" + (HasAvx2() ? ", avx2" : "") +
                          (HasAvx512() ? ", avx512" : "") + (FindAmx() ? ", amx" : ""))};
}

}  // namespace

bool HasAmx() {
  static const bool found = (Wish().empty() || Wish() == "amx") && FindAmx();
  return found;
}

Status CurrentIsa(Isa* isa) {
  static const std::pair<Isa, Status> found = Find();
  *isa = found.first;
  return found.second;
}

int64_t SecondCacheBytes() {
  static const int64_t bytes = [] {
#if defined(_SC_LEVEL2_CACHE_SIZE)
    if (const int64_t told = sysconf(_SC_LEVEL2_CACHE_SIZE); told > 0) return told;
#endif
    return int64_t(1) << 20;
  }();
  return bytes;
}

int64_t LastCacheBytes() {
  static const int64_t bytes = [] {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    if (const int64_t told = sysconf(_SC_LEVEL3_CACHE_SIZE); told > 0) return told;
#endif
    return int64_t(16) << 20;
  }();
  return bytes;
}

void ExpectWrites([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = uintptr_t(2) << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes)) & ~(kHuge - 1);
  // Advice alone: where the system cannot follow it, nothing changes.
  if (data && bytes >= 2 * int64_t(kHuge) && end > begin)
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
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
