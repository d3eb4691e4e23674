// Layer norm over features in sequence: a row is read once and stays on the chip, in registers forward and in shared
// memory backward.
#include <algorithm>

#include "cuda/norms.cuh"

namespace blocksparse {
namespace cuda {
namespace {

// --------------------------------------------------------------------------------------------------------- forward

constexpr int kMaxGroup = 512;  // threads that share a row, forward

// Sums over a group: a warp, or where `scratch` is given the whole block; the same bits in every thread. `scratch` is
// shared memory for 32 floats, and not used again in this kernel.
template <int kCount>
__device__ __forceinline__ void GroupSum(float (&x)[kCount], float (*scratch)[32]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) x[k] = WarpSum(x[k]);
  if (!scratch) return;
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) scratch[k][threadIdx.x / 32] = x[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; ++k) x[k] = WarpSum(lane < blockDim.x / 32 ? scratch[k][lane] : 0.f);
}

// A group of threads to each row, P packs of 16 bytes to a thread.
template <typename T, int P>
__global__ void __launch_bounds__(kMaxGroup) RowsForward(LayerNormProblem p, int group, int64_t rows) {
  constexpr int N = kPerVector<T>;
  __shared__ float scratch[3][32];
  const int64_t F = p.features, row = int64_t(blockIdx.x) * (blockDim.x / group) + threadIdx.x / group;
  if (row >= rows) return;  // whole warps, and blocks of one group have a row
  const int t = threadIdx.x % group, packs = int(F / N);
  const int64_t s = row % p.segments, o = row / p.segments;
  const T* x = static_cast<const T*>(p.x) + row * F + t * N;
  Pack<T, N> loaded[P];
#pragma unroll
  for (int j = 0; j < P; ++j)
    if (t + j * group < packs) loaded[j] = LoadOnce<T>(x + j * group * N);

  const float inverse = 1.f / float(F);
  float v[P][N], sum[1] = {}, sums[2] = {};
#pragma unroll
  for (int j = 0; j < P; ++j) {
    if (t + j * group >= packs) break;
    Widen(loaded[j], v[j]);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[0] += v[j][i];
  }
  GroupSum(sum, group > 32 ? scratch : nullptr);
  const float shift = sum[0] * inverse;
#pragma unroll
  for (int j = 0; j < P; ++j) {
    if (t + j * group >= packs) break;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[j][i] -= shift;
      sums[0] += v[j][i];
      sums[1] += v[j][i] * v[j][i];
    }
  }
  GroupSum(sums, group > 32 ? scratch + 1 : nullptr);
  const float off = sums[0] * inverse;
  const Statistics stats = FinishStatistics(shift, off, sums[1] * inverse, p.epsilon);
  if (t == 0) {
    const int64_t at = s * p.outer + o;
    p.mean[at] = stats.mean, p.residual[at] = stats.residual, p.rstd[at] = stats.rstd;
  }
  const float rstd = stats.rstd, base = -off * rstd;  // x^ = (x - shift) rstd + base
  const float *gain = p.gain + s * F + t * N, *bias = p.bias + s * F + t * N;
  T* y = static_cast<T*>(p.y) + row * F + t * N;
#pragma unroll
  for (int j = 0; j < P; ++j) {
    if (t + j * group >= packs) break;
    float g[N], b[N];
    LoadFloats<N>(gain + j * group * N, g);
    LoadFloats<N>(bias + j * group * N, b);
#pragma unroll
    for (int i = 0; i < N; ++i) v[j][i] = Relu(p.relu, (v[j][i] * rstd + base) * g[i] + b[i]);
    StoreVector(y + j * group * N, v[j]);
  }
}

// -------------------------------------------------------------------------------------------------------- backward

constexpr int kThreads = 512;

// Pieces of x and dy on their way or being worked on, of 16 bytes for each thread and tensor: some more than the P of a
// row, so that 80 KB or more are always under way.
template <int P>
constexpr int kRingSize = P == 1   ? 6
                          : P == 2 ? 8
                          : P == 4 ? 10
                                   : 13;
template <int P>
constexpr int kRingBytes = kRingSize<P>* kThreads * 32;

// One thread block to a multiprocessor, so that there are few partial sums, with groups of threads that take a row each,
// one after another. Every thread reads back from shared memory only what it copied there itself.
template <typename T, int P, bool kRelu>
__global__ void __launch_bounds__(kThreads, 1)
    RowsBackward(LayerNormProblem p, int group, int64_t parts, float* dgain, float* dbias) {
  constexpr int N = kPerVector<T>, R = kRingSize<P>, kStep = kThreads * 32;
  constexpr bool kKeep = P * N <= 16;  // x^ and d stay in registers
  extern __shared__ __align__(16) char ring[];
  __shared__ float scratch[2][2][kThreads / 32];
  AllowKernelAfter();
  const int groups = kThreads / group, which = threadIdx.x / group, t = threadIdx.x % group;
  const int64_t F = p.features, s = blockIdx.x % p.segments, part = blockIdx.x / p.segments;
  const int64_t first = part * groups + which, stride = parts * groups;  // rows
  const int64_t row_step = p.segments * F;
  const int packs = int(F / N);
  const T *x = static_cast<const T*>(p.x) + s * F + t * N, *dy = static_cast<const T*>(p.dy) + s * F + t * N;
  T* dx = static_cast<T*>(p.dx) + s * F + t * N;
  const float *gain = p.gain + s * F + t * N, *bias = p.bias + s * F + t * N;
  const float *means = p.mean + s * p.outer, *residuals = p.residual + s * p.outer, *rstds = p.rstd + s * p.outer;
  char* mine = ring + threadIdx.x * 16;

  const auto issue = [&](int64_t o, int j, char* slot) {
    if (o < p.outer && t + j * group < packs) {
      CopyAsync(slot, x + o * row_step + j * group * N);
      CopyAsync(slot + kThreads * 16, dy + o * row_step + j * group * N);
    }
    CommitCopies();
  };
#pragma unroll
  for (int c = 0; c < R; ++c) issue(first + c / P * stride, c % P, mine + c * kStep);

  float gain_sums[P * N] = {}, bias_sums[P * N] = {};
  const float inverse = 1.f / float(F);
  Statistics stats = {}, next = {};
  if (first < p.outer) next = {means[first], residuals[first], rstds[first]};
  int slot = 0, parity = 0;
  for (int64_t o = first; o < p.outer; o += stride, parity ^= 1) {
    stats = next;
    if (o + stride < p.outer) next = {means[o + stride], residuals[o + stride], rstds[o + stride]};
    const float rstd = stats.rstd, base = -stats.residual * rstd;  // x^ = (x - mean) rstd + base
    float a = 0.f, b = 0.f;
    float kept_x[kKeep ? P * N : 1], kept_d[kKeep ? P * N : 1];
    const auto each = [&](int j, const char* at, auto&& body) {  // body(i, x^, t, d) for the elements of one pack
      float v[N], d[N], g[N], c[N] = {};
      Widen(LoadShared<T>(at), v);
      Widen(LoadShared<T>(at + kThreads * 16), d);
      LoadFloats<N>(gain + j * group * N, g);
      if (kRelu) LoadFloats<N>(bias + j * group * N, c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float xhat = (v[i] - stats.mean) * rstd + base, dt = BeforeRelu(kRelu, d[i], xhat, g[i], c[i]);
        body(i, xhat, dt, dt * g[i]);
      }
    };
    const auto place = [&](int j) { return mine + (slot + j < R ? slot + j : slot + j - R) * kStep; };
    const auto pass1 = [&](int j) {
      if (t + j * group < packs)
        each(j, place(j), [&](int i, float xhat, float dt, float d) {
          a += d;
          b += d * xhat;
          gain_sums[j * N + i] += dt * xhat;
          bias_sums[j * N + i] += dt;
          if constexpr (kKeep) kept_x[j * N + i] = xhat, kept_d[j * N + i] = d;
        });
      if constexpr (kKeep) issue(o + (j + R) / P * stride, (j + R) % P, place(j));
    };
    // The wait needs a constant, so no loop. Where a piece's place is given to a new one at once, one more is under way.
    constexpr int kStay = kKeep ? 0 : 1;
    if constexpr (P > 0) WaitForCopies<R - 1>(), pass1(0);
    if constexpr (P > 1) WaitForCopies<R - 1 - kStay>(), pass1(1);
    if constexpr (P > 2) WaitForCopies<R - 1 - 2 * kStay>(), pass1(2), WaitForCopies<R - 1 - 3 * kStay>(), pass1(3);
    if constexpr (P > 4) WaitForCopies<R - 1 - 4 * kStay>(), pass1(4), WaitForCopies<R - 1 - 5 * kStay>(), pass1(5);
    if constexpr (P > 4) WaitForCopies<R - 1 - 6 * kStay>(), pass1(6), WaitForCopies<R - 1 - 7 * kStay>(), pass1(7);
    a = WarpSum(a), b = WarpSum(b);
    if (group > 32) {
      // Two sets of scratch in turn: who writes one has passed the barrier that all came to after reading it.
      const int lane = threadIdx.x % 32, warps = group / 32;
      if (lane == 0) scratch[parity][0][threadIdx.x / 32] = a, scratch[parity][1][threadIdx.x / 32] = b;
      asm volatile("bar.sync %0, %1;" ::"r"(which + 1), "r"(group) : "memory");
      a = WarpSum(lane < warps ? scratch[parity][0][which * warps + lane] : 0.f);
      b = WarpSum(lane < warps ? scratch[parity][1][which * warps + lane] : 0.f);
    }
    const float mean = -a * inverse * rstd, slope = -b * inverse * rstd;
    T* to = dx + o * row_step;
#pragma unroll
    for (int j = 0; j < P; ++j) {
      if (t + j * group < packs) {
        float out[N];
        if constexpr (kKeep) {
#pragma unroll
          for (int i = 0; i < N; ++i) out[i] = kept_d[j * N + i] * rstd + (kept_x[j * N + i] * slope + mean);
        } else {
          each(j, place(j), [&](int i, float xhat, float, float d) { out[i] = d * rstd + (xhat * slope + mean); });
        }
        StoreVector(to + j * group * N, out);
      }
      if constexpr (!kKeep) issue(o + (j + R) / P * stride, (j + R) % P, place(j));
    }
    slot += P % R;
    if (slot >= R) slot -= R;
  }

  // The groups' sums meet in order.
  WaitForCopies<0>();
  float* sums = reinterpret_cast<float*>(ring);
  for (int pass = 0; pass < 2; ++pass) {
    float* out = (pass == 0 ? dgain : dbias) + part * Channels(p) + s * F;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < P; ++j) {
      if (t + j * group >= packs) break;
#pragma unroll
      for (int i = 0; i < N; ++i)
        sums[which * F + (t + j * group) * N + i] = pass == 0 ? gain_sums[j * N + i] : bias_sums[j * N + i];
    }
    __syncthreads();
    for (int64_t f = threadIdx.x; f < F; f += kThreads) {
      float sum = sums[f];
      for (int k = 1; k < groups; ++k) sum += sums[k * F + f];
      out[f] = sum;
    }
  }
}

// Threads to a row, and packs to a thread.
struct Shape {
  int group = 0, packs = 0;
};

Shape ForwardShape(const LayerNormProblem& p) {
  const int64_t packs = p.features / (16 / SizeOf(p.dtype));
  for (int most : {4, 8})
    for (int group = 32; group <= kMaxGroup; group *= 2)
      if (CeilDiv(packs, group) <= most) return {group, int(PowerOf2AtLeast(CeilDiv(packs, group)))};
  return {};
}

Shape BackwardShape(const LayerNormProblem& p, const Chip& chip) {
  const int per_pack = int(16 / SizeOf(p.dtype));
  const int64_t packs = p.features / per_pack;
  // Sums take 2 * packs * per_pack registers: with 32 there is room to keep the row, 64 are the most. Two groups or
  // more, if that can be, so that one works while another waits for its sum.
  for (int most : {16 / per_pack, 32 / per_pack})
    for (int threads : {kThreads / 2, kThreads})
      for (int group = 32; group <= threads; group *= 2)
        if (CeilDiv(packs, group) <= most) {
          const int count = int(PowerOf2AtLeast(CeilDiv(packs, group)));
          const int bytes = count == 1   ? kRingBytes<1>
                            : count == 2 ? kRingBytes<2>
                            : count == 4 ? kRingBytes<4>
                                         : kRingBytes<8>;
          constexpr int kStatic = 1024;
          return bytes + kStatic <= chip.shared_memory ? Shape{group, count} : Shape{};
        }
  return {};
}

template <typename Kernel>
Status AllowShared(Kernel kernel, int bytes) {
  BLOCKSPARSE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  return {};
}

template <typename T, int P, bool kRelu>
Status LaunchBackward(const LayerNormProblem& p, int group, int64_t parts, float* dgain, float* dbias, Stream stream) {
  if constexpr (P * kPerVector<T> <= 32) {
    BLOCKSPARSE_RETURN_IF_ERROR(AllowShared(RowsBackward<T, P, kRelu>, kRingBytes<P>));
    RowsBackward<T, P, kRelu>
        <<<unsigned(parts * p.segments), kThreads, kRingBytes<P>, stream>>>(p, group, parts, dgain, dbias);
  }
  return {};
}

// Calls body with the number of packs as a constant.
template <typename Body>
Status WithPacks(int packs, const Body& body) {
  switch (packs) {
    case 1: return body(std::integral_constant<int, 1>());
    case 2: return body(std::integral_constant<int, 2>());
    case 4: return body(std::integral_constant<int, 4>());
    default: return body(std::integral_constant<int, 8>());
  }
}

}  // namespace

LayerFamily ChooseRows(const LayerNormProblem& p, const Chip& chip) {
  LayerFamily family;
  const int64_t elements = p.rows() * p.features;
  if (p.inner != 1 || p.features % (16 / SizeOf(p.dtype)) != 0 || elements == 0 ||
      !Aligned({p.x, p.y, p.dy, p.dx, p.gain, p.bias}))
    return family;
  if (!p.gradient) {
    const Shape shape = ForwardShape(p);
    family.fits = shape.group > 0 && CeilDiv(p.outer * p.segments * shape.group, 128) <= INT32_MAX;
    return family;
  }
  const Shape shape = elements > kSmallTensor ? BackwardShape(p, chip) : Shape{};
  if (shape.group == 0 || p.segments > INT32_MAX) return family;
  family.fits = true;
  family.parts =
      std::max<int64_t>(1, std::min(chip.multiprocessors / p.segments, CeilDiv(p.outer, kThreads / shape.group)));
  return family;
}

Status RunRows(const LayerNormProblem& p, float* dgain, float* dbias, const Chip& chip, Stream stream) {
  Status status;
  if (!p.gradient) {
    const Shape shape = ForwardShape(p);
    const int threads = shape.group == 32 ? 128 : shape.group;
    const int64_t rows = p.outer * p.segments, blocks = CeilDiv(rows, threads / shape.group);
    WithType(p.dtype, [&](auto type) {
      status = WithPacks(shape.packs, [&](auto packs) -> Status {
        RowsForward<decltype(type), decltype(packs)::value>
            <<<unsigned(blocks), threads, 0, stream>>>(p, shape.group, rows);
        return {};
      });
    });
  } else {
    const Shape shape = BackwardShape(p, chip);
    const int64_t parts = ChooseRows(p, chip).parts;
    WithType(p.dtype, [&](auto type) {
      status = WithPacks(shape.packs, [&](auto packs) {
        using T = decltype(type);
        constexpr int P = decltype(packs)::value;
        return p.relu ? LaunchBackward<T, P, true>(p, shape.group, parts, dgain, dbias, stream)
                      : LaunchBackward<T, P, false>(p, shape.group, parts, dgain, dbias, stream);
      });
    });
  }
  BLOCKSPARSE_RETURN_IF_ERROR(status);
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace cuda
}  // namespace blocksparse
