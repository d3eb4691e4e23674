// What the kernels of normalization share.
#pragma once

#include <cstring>
#include <string>

#include "cuda/check.h"
#include "cuda/vector.cuh"
#include "kernels/norms.h"

namespace blocksparse {
namespace cuda {

// Kernels of one way to do a layer norm. A gradient's sums go to `parts` rows of partial sums, [parts, channels] each for
// dgain and dbias, or straight to their places where parts is 1.
struct LayerFamily {
  bool fits = false;
  int64_t parts = 1;
};

// Features in sequence (inner 1), held on the chip between the passes.
LayerFamily ChooseRows(const LayerNormProblem& problem, const Chip& chip);
Status RunRows(const LayerNormProblem& problem, float* dgain, float* dbias, const Chip& chip, Stream stream);

// Features at a stride, held on the chip by clusters of thread blocks.
LayerFamily ChooseColumns(const LayerNormProblem& problem, const Chip& chip);
Status RunColumns(const LayerNormProblem& problem, float* dgain, float* dbias, const Chip& chip, Stream stream);

// Elements up to which a tensor is small: one launch, whatever it costs in reads from the cache.
constexpr int64_t kSmallTensor = 1 << 18;

// LayerNormProblem::channels, for the device too.
__host__ __device__ __forceinline__ int64_t Channels(const LayerNormProblem& p) { return p.segments * p.features; }

inline int64_t PowerOf2AtLeast(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

struct Statistics {
  float mean, residual, rstd;

  __device__ __forceinline__ float Normalize(float x) const { return ((x - mean) - residual) * rstd; }
};

// From a shift near the mean, and the means of x - shift and of its square.
__device__ __forceinline__ void FinishMoments(float shift, float off, float square, float* mean, float* residual,
                                              float* variance) {
  *mean = shift + off;
  const float part = *mean - shift;  // what the sum above lost (O. Møller, D. E. Knuth)
  *residual = (shift - (*mean - part)) + (off - part);
  *variance = fmaxf(square - off * off, 0.f);
}

__device__ __forceinline__ Statistics FinishStatistics(float shift, float off, float square, float epsilon) {
  Statistics stats;
  float variance;
  FinishMoments(shift, off, square, &stats.mean, &stats.residual, &variance);
  // fmaxf drops a NaN, which has to reach the output.
  stats.rstd = rsqrtf((square == square ? variance : square) + epsilon);
  return stats;
}

// dy, or 0 where a relu's input was not positive.
__device__ __forceinline__ float BeforeRelu(bool relu, float dy, float xhat, float gain, float bias) {
  return relu && !(xhat * gain + bias > 0.f) ? 0.f : dy;
}

__device__ __forceinline__ float Relu(bool relu, float x) { return relu && x < 0.f ? 0.f : x; }

// The sum over a warp, the same bits in every lane.
__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) x += __shfl_xor_sync(0xffffffff, x, half);
  return x;
}

template <typename T>
__device__ __forceinline__ Pack<T, kPerVector<T>> AsPack(uint4 bits) {
  Pack<T, kPerVector<T>> pack;
  memcpy(&pack, &bits, 16);
  return pack;
}

// Streams through: read once, so not worth a place in L1, which the gains keep.
template <typename T>
__device__ __forceinline__ Pack<T, kPerVector<T>> LoadOnce(const T* p) {
  uint4 bits;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
      : "l"(p));
  return AsPack<T>(bits);
}

// From shared memory, in one instruction: taken by element it would be one for each.
template <typename T>
__device__ __forceinline__ Pack<T, kPerVector<T>> LoadShared(const void* p) {
  const uint4 bits = *static_cast<const uint4*>(p);
  return AsPack<T>(bits);
}

// StorePack of 16 bytes, in one instruction whatever the compiler can tell of p.
template <typename T>
__device__ __forceinline__ void StoreVector(T* p, const float (&x)[kPerVector<T>]) {
  __align__(16) T rounded[kPerVector<T>];
  StorePack(rounded, x);
  uint4 bits;
  memcpy(&bits, rounded, 16);
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
}

// 16 or 8 bytes from global to shared memory, both aligned, without a register in between.
template <int kBytes = 16>
__device__ __forceinline__ void CopyAsync(void* shared, const void* global) {
  const unsigned to = unsigned(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kBytes) : "memory");
}
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the newest `kPending` groups of this thread's copies are there.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cuda
}  // namespace blocksparse
