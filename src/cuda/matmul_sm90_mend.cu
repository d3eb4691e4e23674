#include <algorithm>
#include <cmath>

#include "cuda/check.h"
#include "cuda/convert.cuh"
#include "cuda/matmul_sm90_mend.h"

namespace blocksparse::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

// Which elements to compute anew.
struct Wrong {
  bool none = false, zeros = false;
  float low = 0.f;

  __device__ explicit Wrong(const uint32_t* flags) {
    if (flags == nullptr) return;
    zeros = flags[0] != 0;
    none = !zeros && flags[1] == 0;
    low = zeros ? 0x1p-60f : 0x1p-100f;
  }
  __device__ bool operator()(float x) const {
    x = fabsf(x);
    return !(x < INFINITY) || (x < low && (zeros || x > 0.f));
  }
};

struct MendArgs {
  const void *x, *w;
  void* y;
  const int32_t *ptr, *input, *id;
  const uint32_t* flags;
  int64_t n, in, out;
  int axis, b;
  bool forward;
};

// One element, by a whole warp.
template <typename T>
__device__ float Compute(const MendArgs& p, int64_t row, int64_t feature) {
  const T *x = static_cast<const T*>(p.x), *w = static_cast<const T*>(p.w);
  const int block = int(feature / p.b), within = int(feature % p.b), first = p.ptr[block];
  const int terms = (p.ptr[block + 1] - first) * p.b;
  float sum = 0.f;
  for (int t = threadIdx.x & 31; t < terms; t += 32) {
    const int at = first + t / p.b, r = t % p.b;
    const int64_t c = int64_t(p.input[at]) * p.b + r, base = int64_t(p.id[at]) * p.b * p.b;
    const float a = ToFloat(x[p.axis == 1 ? row * p.in + c : c * p.n + row]);
    sum = fmaf(a, ToFloat(w[base + (p.forward ? r * p.b + within : within * p.b + r)]), sum);
  }
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) Mend(const MendArgs p) {
  constexpr int kVector = 16 / int(sizeof(T));
  T* y = static_cast<T*>(p.y);
  const Wrong is_wrong(p.flags);
  if (is_wrong.none) return;
  const int64_t count = p.n * p.out, step = int64_t(gridDim.x) * kThreads * kVector;
  // A warp stays together: what one thread finds, all compute.
  for (int64_t base = (int64_t(blockIdx.x) * kThreads + threadIdx.x / 32 * 32) * kVector; base < count; base += step) {
    const int64_t first = base + (threadIdx.x & 31) * kVector;
    T v[kVector];
    if (first + kVector <= count)
      *reinterpret_cast<uint4*>(v) = *reinterpret_cast<const uint4*>(y + first);
    else
      for (int i = 0; i < kVector; ++i) v[i] = first + i < count ? y[first + i] : FromFloat<T>(1.f);
    uint32_t wrong = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (is_wrong(ToFloat(v[i]))) wrong |= 1u << i;
    for (uint32_t lanes = __ballot_sync(~0u, wrong != 0); lanes != 0; lanes &= lanes - 1) {
      const int lane = __ffs(lanes) - 1;
      for (uint32_t bits = __shfl_sync(~0u, wrong, lane); bits != 0; bits &= bits - 1) {
        const int64_t e = base + lane * kVector + __ffs(bits) - 1;
        const float sum = p.axis == 1 ? Compute<T>(p, e / p.out, e % p.out) : Compute<T>(p, e % p.n, e / p.n);
        if ((threadIdx.x & 31) == lane && e < count) y[e] = FromFloat<T>(sum);
      }
    }
  }
}

constexpr int kPairs = 16;

struct MendGradArgs {
  const float *x[kPairs], *dy[kPairs];
  int64_t n[kPairs];
  int pairs, axis, b;
  int64_t C, K, elements;
  const int32_t* update;
  const float *gate, *addend;
  const uint32_t* flags;
};

// A warp 32 elements at a time.
template <typename T>
__global__ void __launch_bounds__(kThreads) MendGrad(const __grid_constant__ MendGradArgs p, T* out) {
  const Wrong is_wrong(p.flags);
  if (is_wrong.none) return;
  const int lane = threadIdx.x & 31;
  for (int64_t base = int64_t(blockIdx.x) * kThreads + threadIdx.x / 32 * 32; base < p.elements;
       base += int64_t(gridDim.x) * kThreads) {
    const float found = ToFloat(out[base + lane]);
    const int id = int(base / (p.b * p.b));  // of all 32: blocks have at least 1024 elements
    if (p.gate != nullptr && p.gate[id] == 0.f) continue;
    const float add = p.addend == nullptr ? 0.f : p.addend[base + lane];
    for (uint32_t lanes = __ballot_sync(~0u, is_wrong(found)); lanes != 0; lanes &= lanes - 1) {
      const int which = __ffs(lanes) - 1, within = int((base + which) % (p.b * p.b));
      const int64_t c = int64_t(p.update[2 * id]) * p.b + within / p.b,
                    k = int64_t(p.update[2 * id + 1]) * p.b + within % p.b;
      float sum = 0.f;
      for (int pair = 0; pair < p.pairs; ++pair)
        for (int64_t n = lane; n < p.n[pair]; n += 32)
          sum = p.axis == 1 ? fmaf(p.x[pair][n * p.C + c], p.dy[pair][n * p.K + k], sum)
                            : fmaf(p.x[pair][c * p.n[pair] + n], p.dy[pair][k * p.n[pair] + n], sum);
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if (lane == which) out[base + lane] = FromFloat<T>(sum + add);
    }
  }
}

}  // namespace

Status MendWeightGrad(const MatmulProblem& problem, const int32_t* update, const uint32_t* flags, Stream stream) {
  MendGradArgs p;
  p.pairs = problem.pairs, p.axis = problem.axis, p.b = problem.bsize;
  for (int i = 0; i < p.pairs; ++i) {
    p.x[i] = static_cast<const float*>(problem.a[i]), p.dy[i] = static_cast<const float*>(problem.b[i]);
    p.n[i] = problem.n[i];
  }
  p.C = problem.C(), p.K = problem.K(), p.elements = int64_t(problem.blocks) * p.b * p.b;
  p.update = update, p.gate = problem.gate, p.addend = problem.addend, p.flags = flags;
  const int grid = int(std::min<int64_t>((p.elements + kThreads - 1) / kThreads, 132 * 8));
  WithType(problem.out_dtype, [&](auto type) {
    using T = decltype(type);
    MendGrad<T><<<grid, kThreads, 0, stream>>>(p, static_cast<T*>(problem.out));
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

Status MendProduct(const MatmulProblem& problem, const int32_t* lists, const uint32_t* flags, Stream stream) {
  const bool forward = problem.product == Product::kForward;
  MendArgs p;
  p.x = problem.a[0], p.w = problem.b[0], p.y = problem.out;
  p.n = problem.n[0];
  p.in = forward ? problem.C() : problem.K(), p.out = forward ? problem.K() : problem.C();
  p.ptr = lists, p.input = lists + (forward ? problem.KB : problem.CB) + 1, p.id = p.input + problem.blocks;
  p.flags = flags;
  p.axis = problem.axis, p.b = problem.bsize, p.forward = forward;
  const int64_t vectors = (p.n * p.out * SizeOf(problem.dtype) + 15) / 16;
  const int grid = int(std::min<int64_t>((vectors + kThreads - 1) / kThreads, 132 * 16));
  WithType(problem.dtype, [&](auto type) { Mend<decltype(type)><<<grid, kThreads, 0, stream>>>(p); });
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace blocksparse::cuda::sm90
