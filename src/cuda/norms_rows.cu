// Layer norm over features in sequence: a row is read once and stays on the chip, in registers, or for the gradient of a
// long one in shared memory.
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
    for (int i = 0; i < N; ++i) v[j][i] = (v[j][i] * rstd + base) * g[i] + b[i];
    if (p.relu) {
#pragma unroll
      for (int i = 0; i < N; ++i) v[j][i] = Relu(true, v[j][i]);
    }
    StoreVector(y + j * group * N, v[j]);
  }
}

// Long rows of a large tensor: groups of threads take one row after another, kForward elements of it a thread, in
// registers, while the next one is on its way to shared memory, where gains and biases are. Every thread reads back from
// there only what it copied itself. One thread block to a multiprocessor.
constexpr int kForward = 32, kForwardThreads = 1024;

template <typename T>
__global__ void __launch_bounds__(kForwardThreads, 1)
    LongForward(LayerNormProblem p, int group, int apart, int64_t step) {
  constexpr int N = kPerVector<T>, P = kForward / N;
  extern __shared__ __align__(16) char coming[];  // [P][threads] packs; gains and biases, [2][N / 4][packs] fours
  __shared__ float scratch[3][kForwardThreads / 32];
  const int groups = blockDim.x / group, which = threadIdx.x / group, t = threadIdx.x % group, lane = threadIdx.x % 32;
  const int64_t F = p.features, s = blockIdx.x % p.segments, part = blockIdx.x / p.segments;
  const int packs = int(F / N), piece = blockDim.x * 16;
  char* const mine = coming + threadIdx.x * 16;
  float4* const fours = reinterpret_cast<float4*>(coming + P * piece);
  const auto copy = [&](const T* x) {
#pragma unroll
    for (int j = 0; j < P; ++j)
      if (t + j * group < packs) CopyAsync(mine + j * piece, x + j * group * N);
    CommitCopies();
  };
  // Of this thread's first pack; from row to row it is `apart` rows, `step` elements.
  const int first_row = int(part) * groups + which, outer = int(p.outer);
  int64_t at = (first_row * p.segments + s) * F + t * N;
  if (first_row < outer) copy(static_cast<const T*>(p.x) + at);
  for (int k = threadIdx.x; k < packs * (N / 4); k += blockDim.x) {
    const int64_t from = s * F + k * 4, to = k % (N / 4) * packs + k / (N / 4);
    fours[to] = *reinterpret_cast<const float4*>(p.gain + from);
    fours[to + packs * (N / 4)] = *reinterpret_cast<const float4*>(p.bias + from);
  }
  __syncthreads();
  // Sums over the group, of 16 warps at most.
  const int warps = group / 32;
  const auto meet = [&] { asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(group) : "memory"); };
  const auto add_warps = [&](const float* sums) {
    float sum = lane % 16 < warps ? sums[threadIdx.x / group * warps + lane % 16] : 0.f;
#pragma unroll
    for (int half = 8; half > 0; half /= 2) sum += __shfl_xor_sync(0xffffffff, sum, half);
    return sum;
  };
  const float inverse = 1.f / float(F);
  for (int o = first_row; o < outer; o += apart, at += step) {
    WaitForCopies<0>();
    float v[P][N], sum = 0.f, off = 0.f, square = 0.f;
#pragma unroll
    for (int j = 0; j < P; ++j) {
      if (t + j * group >= packs) break;
      Widen(LoadShared<T>(mine + j * piece), v[j]);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += v[j][i];
    }
    if (outer - o > apart) copy(static_cast<const T*>(p.x) + at + step);
    sum = WarpSum(sum);
    if (warps > 1) {
      if (lane == 0) scratch[0][threadIdx.x / 32] = sum;
      meet();
      sum = add_warps(scratch[0]);
    }
    const float shift = sum * inverse;
#pragma unroll
    for (int j = 0; j < P; ++j) {
      if (t + j * group >= packs) break;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        v[j][i] -= shift;
        off += v[j][i];
        square += v[j][i] * v[j][i];
      }
    }
    off = WarpSum(off), square = WarpSum(square);
    if (warps > 1) {
      if (lane == 0) scratch[1][threadIdx.x / 32] = off, scratch[2][threadIdx.x / 32] = square;
      meet();
      off = add_warps(scratch[1]), square = add_warps(scratch[2]);
    }
    off *= inverse;
    const Statistics stats = FinishStatistics(shift, off, square * inverse, p.epsilon);
    if (t == 0) {
      const int64_t row = s * p.outer + o;
      p.mean[row] = stats.mean, p.residual[row] = stats.residual, p.rstd[row] = stats.rstd;
    }
    T* y = static_cast<T*>(p.y) + at;
    const float rstd = stats.rstd, base = -off * rstd;  // x^ = (x - shift) rstd + base
#pragma unroll
    for (int j = 0; j < P; ++j) {
      if (t + j * group >= packs) break;
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const float4 g = fours[i / 4 * packs + t + j * group], b = fours[(N / 4 + i / 4) * packs + t + j * group];
        v[j][i] = (v[j][i] * rstd + base) * g.x + b.x, v[j][i + 1] = (v[j][i + 1] * rstd + base) * g.y + b.y;
        v[j][i + 2] = (v[j][i + 2] * rstd + base) * g.z + b.z, v[j][i + 3] = (v[j][i + 3] * rstd + base) * g.w + b.w;
      }
      if (p.relu) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[j][i] = Relu(true, v[j][i]);
      }
      StoreVector(y + j * group * N, v[j]);
    }
  }
}

// -------------------------------------------------------------------------------------------------------- backward

constexpr int kThreads = 512;

// Rows of up to kThreads * kFew features: each group of threads takes kBatch rows at once, so that they wait together for
// their sums, with as many more on their way to shared memory. The rows at work stay in registers as they came. One
// thread block to a multiprocessor, so that there are few partial sums.
constexpr int kFew = 8;  // elements of a row to a thread
template <typename T>
constexpr int kBatch = sizeof(T) == 2 ? 4 : 2;
constexpr int kFewBytes = 2 * (2 * kFew * 8) + 2 * kFew * 4;  // of shared memory to a thread: rows; gains and biases

// The sums over a warp of kCount values: lane l has that of value l * kCount / 32.
template <int kCount>
__device__ __forceinline__ float WarpSums(float (&x)[kCount]) {
  const int lane = threadIdx.x % 32;
  int apart = 16;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2, apart /= 2) {
    const bool upper = lane & apart;
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const float other = __shfl_xor_sync(0xffffffff, upper ? x[k] : x[k + half], apart);
      x[k] = (upper ? x[k + half] : x[k]) + other;
    }
  }
#pragma unroll
  for (; apart > 0; apart /= 2) x[0] += __shfl_xor_sync(0xffffffff, x[0], apart);
  return x[0];
}

// Makes element i of a pack 0.
template <typename T>
__device__ __forceinline__ void Clear(uint32_t (&words)[4], int i) {
  words[i * int(sizeof(T)) / 4] &= sizeof(T) == 4 ? 0u : i % 2 ? 0x0000ffffu : 0xffff0000u;
}

template <typename T>
__device__ __forceinline__ Pack<T, kPerVector<T>> PackOf(const uint32_t (&words)[4]) {
  return AsPack<T>(make_uint4(words[0], words[1], words[2], words[3]));
}

template <typename T, bool kRelu>
__global__ void __launch_bounds__(kThreads, 1)
    BatchesBackward(LayerNormProblem p, int group, int64_t parts, float* dgain, float* dbias) {
  constexpr int N = kPerVector<T>, P = kFew / N, B = kBatch<T>, kSums = 2 * B, kLanes = 32 / kSums;
  constexpr int kWarps = kThreads / 32;
  extern __shared__ __align__(16) char ring[];
  __shared__ float scratch[2][kSums][kWarps];
  __shared__ __align__(16) float statistics[2][kWarps][3][B];  // of a batch of each group
  AllowKernelAfter();
  const int groups = blockDim.x / group, which = threadIdx.x / group, t = threadIdx.x % group;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, packs = int(p.features / N), piece = blockDim.x * 16;
  const int64_t F = p.features, s = blockIdx.x % p.segments, part = blockIdx.x / p.segments, row_step = p.segments * F;
  const int64_t first = s * F + t * N, first_row = part * groups + which, apart = parts * groups;
  char* mine = ring + threadIdx.x * 16;
  const auto has = [&](int j) { return t + j * group < packs; };
  // Row i of a batch, of which there are [P][x, dy] packs, lies `apart` rows after row i - 1.
  const auto copy = [&](int64_t o, char* to) {
#pragma unroll
    for (int i = 0; i < B; ++i)
#pragma unroll
      for (int j = 0; j < P; ++j)
        if (o + i * apart < p.outer && has(j)) {
          const int64_t at = first + (o + i * apart) * row_step + j * group * N;
          CopyAsync(to + (i * P + j) * 2 * piece, static_cast<const T*>(p.x) + at);
          CopyAsync(to + ((i * P + j) * 2 + 1) * piece, static_cast<const T*>(p.dy) + at);
        }
    CommitCopies();
  };
  const int64_t stride = B * apart;
  copy(first_row, mine);
  copy(first_row + stride, mine + B * P * 2 * piece);
  char* const gains = mine + 2 * B * P * 2 * piece;
  char* const biases = gains + kFew / 4 * piece;
#pragma unroll
  for (int j = 0; j < kFew / 4; ++j) {
    const int64_t at = first + j / (N / 4) * group * N + j % (N / 4) * 4;
    const bool here = has(j / (N / 4));
    const float4 zero = {};
    *reinterpret_cast<float4*>(gains + j * piece) = here ? *reinterpret_cast<const float4*>(p.gain + at) : zero;
    if (kRelu)
      *reinterpret_cast<float4*>(biases + j * piece) = here ? *reinterpret_cast<const float4*>(p.bias + at) : zero;
  }
  const auto vector = [&](const char* from, int j, float(&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + (j * (N / 4) + i / 4) * piece);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  };
  // Thread k < 3 B groups fetches one of the statistics of a batch.
  const int kind = threadIdx.x / B % 3;
  const bool fetches = threadIdx.x < 3 * B * groups;
  const auto fetch = [&](int64_t batch) {
    const int64_t o = batch + threadIdx.x / (3 * B) - which + threadIdx.x % B * apart;
    const float* from = kind == 0 ? p.mean : kind == 1 ? p.residual : p.rstd;
    return fetches && o < p.outer ? from[s * p.outer + o] : 0.f;
  };
  if (fetches) (&statistics[0][0][0][0])[threadIdx.x] = fetch(first_row);
  __syncthreads();

  float gain_sums[P][N] = {}, bias_sums[P][N] = {};
  const float inverse = 1.f / float(F);
  int parity = 0;
  for (int64_t o = first_row; o - which < p.outer; o += stride, parity ^= 1) {
    const float fetched = fetch(o + stride);
    uint32_t x[B][P][4], dy[B][P][4];
    float mean[B], rstd[B], base[B], sums[kSums] = {};
#pragma unroll
    for (int i = 0; i < B; ++i) {
      mean[i] = statistics[parity][which][0][i], rstd[i] = statistics[parity][which][2][i];
      base[i] = -statistics[parity][which][1][i] * rstd[i];  // x^ = (x - mean) rstd + base
    }
    WaitForCopies<1>();
    char* const place = mine + parity * (B * P * 2 * piece);
#pragma unroll
    for (int i = 0; i < B; ++i)
#pragma unroll
      for (int j = 0; j < P; ++j) {
        const bool here = o + i * apart < p.outer && has(j);
        const uint4 zero = {};
        const uint4 a = here ? *reinterpret_cast<const uint4*>(place + (i * P + j) * 2 * piece) : zero;
        const uint4 b = here ? *reinterpret_cast<const uint4*>(place + ((i * P + j) * 2 + 1) * piece) : zero;
        x[i][j][0] = a.x, x[i][j][1] = a.y, x[i][j][2] = a.z, x[i][j][3] = a.w;
        dy[i][j][0] = b.x, dy[i][j][1] = b.y, dy[i][j][2] = b.z, dy[i][j][3] = b.w;
      }
    copy(o + 2 * stride, place);
#pragma unroll
    for (int j = 0; j < P; ++j) {
      float g[N], c[N];
      vector(gains, j, g);
      if (kRelu) vector(biases, j, c);
#pragma unroll
      for (int i = 0; i < B; ++i) {
        float v[N], d[N];
        Widen(PackOf<T>(x[i][j]), v);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          v[k] = (v[k] - mean[i]) * rstd[i] + base[i];
          if (kRelu && !(v[k] * g[k] + c[k] > 0.f)) Clear<T>(dy[i][j], k);
        }
        Widen(PackOf<T>(dy[i][j]), d);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          gain_sums[j][k] += d[k] * v[k];
          bias_sums[j][k] += d[k];
          const float scaled = d[k] * g[k];
          sums[i] += scaled;
          sums[B + i] += scaled * v[k];
        }
      }
    }
    const float sum = WarpSums(sums);
    if (lane % kLanes == 0) scratch[parity][lane / kLanes][warp] = sum;
    if (fetches) (&statistics[parity ^ 1][0][0][0])[threadIdx.x] = fetched;
    __syncthreads();
    float total = 0.f;
    for (int w = lane % kLanes; w < group / 32; w += kLanes)
      total += scratch[parity][lane / kLanes][which * (group / 32) + w];
#pragma unroll
    for (int half = kLanes / 2; half > 0; half /= 2) total += __shfl_xor_sync(0xffffffff, total, half);
#pragma unroll
    for (int i = 0; i < B; ++i) {
      sums[i] = -__shfl_sync(0xffffffff, total, i * kLanes) * inverse * rstd[i];
      sums[B + i] = -__shfl_sync(0xffffffff, total, (B + i) * kLanes) * inverse * rstd[i];
    }
#pragma unroll
    for (int j = 0; j < P; ++j) {
      float g[N];
      vector(gains, j, g);
#pragma unroll
      for (int i = 0; i < B; ++i) {
        if (!(o + i * apart < p.outer && has(j))) break;
        float v[N], d[N];
        Widen(PackOf<T>(x[i][j]), v);
        Widen(PackOf<T>(dy[i][j]), d);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float xhat = (v[k] - mean[i]) * rstd[i] + base[i];
          v[k] = d[k] * g[k] * rstd[i] + (xhat * sums[B + i] + sums[i]);
        }
        StoreVector(static_cast<T*>(p.dx) + first + (o + i * apart) * row_step + j * group * N, v);
      }
    }
  }
  // The groups' sums meet in order.
  WaitForCopies<0>();
  float* all = reinterpret_cast<float*>(ring);
  for (int pass = 0; pass < 2; ++pass) {
    float* out = (pass == 0 ? dgain : dbias) + part * Channels(p) + s * F;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < P; ++j) {
      if (!has(j)) break;
#pragma unroll
      for (int k = 0; k < N; ++k)
        all[which * F + (t + j * group) * N + k] = pass == 0 ? gain_sums[j][k] : bias_sums[j][k];
    }
    __syncthreads();
    for (int f = threadIdx.x; f < F; f += blockDim.x) {
      float sum = all[f];
      for (int g = 1; g < groups; ++g) sum += all[g * F + f];
      out[f] = sum;
    }
  }
}

// Longer rows, one after another, P packs of each to a thread: pieces of x and dy on their way or being worked on, of 16
// bytes for each thread and tensor, some more than the P of a row.
template <int P>
constexpr int kRingSize = P == 2 ? 8 : 10;
// With the gains, which would not stay in L1; they are read twice for a row that is.
template <typename T, int P>
constexpr int kRingBytes = (kRingSize<P> * 32 + P * kPerVector<T> * 4) * kThreads;

// One thread block to a multiprocessor, so that there are few partial sums. Every thread reads back from shared memory
// only what it copied there itself.
template <typename T, int P, bool kRelu>
__global__ void __launch_bounds__(kThreads, 1)
    RowsBackward(LayerNormProblem p, int64_t parts, float* dgain, float* dbias) {
  constexpr int N = kPerVector<T>, R = kRingSize<P>, kStep = kThreads * 32;
  constexpr bool kKeep = P * N <= 16;  // x^ and d stay in registers
  extern __shared__ __align__(16) char ring[];
  __shared__ float scratch[2][2][kThreads / 32];
  AllowKernelAfter();
  const int t = threadIdx.x, lane = t % 32;
  const int64_t F = p.features, s = blockIdx.x % p.segments, part = blockIdx.x / p.segments;
  const int64_t row_step = p.segments * F;
  const int packs = int(F / N);
  const T *x = static_cast<const T*>(p.x) + s * F + t * N, *dy = static_cast<const T*>(p.dy) + s * F + t * N;
  T* dx = static_cast<T*>(p.dx) + s * F + t * N;
  const float *gain = p.gain + s * F + t * N, *bias = p.bias + s * F + t * N;
  const float *means = p.mean + s * p.outer, *residuals = p.residual + s * p.outer, *rstds = p.rstd + s * p.outer;
  char* mine = ring + t * 16;
  char* const gains = mine + R * kStep;

  const auto issue = [&](int64_t o, int j, char* slot) {
    if (o < p.outer && t + j * kThreads < packs) {
      CopyAsync(slot, x + o * row_step + j * kThreads * N);
      CopyAsync(slot + kThreads * 16, dy + o * row_step + j * kThreads * N);
    }
    CommitCopies();
  };
#pragma unroll
  for (int c = 0; c < R; ++c) issue(part + c / P * parts, c % P, mine + c * kStep);
#pragma unroll
  for (int j = 0; j < P; ++j) {
    if (t + j * kThreads >= packs) break;
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
      *reinterpret_cast<float4*>(gains + (j * (N / 4) + i) * (kThreads * 16)) =
          *reinterpret_cast<const float4*>(gain + j * kThreads * N + i * 4);
  }

  float gain_sums[P * N] = {}, bias_sums[P * N] = {};
  const float inverse = 1.f / float(F);
  Statistics stats = {}, next = {};
  if (part < p.outer) next = {means[part], residuals[part], rstds[part]};
  int slot = 0, parity = 0;
  for (int64_t o = part; o < p.outer; o += parts, parity ^= 1) {
    stats = next;
    if (o + parts < p.outer) next = {means[o + parts], residuals[o + parts], rstds[o + parts]};
    const float rstd = stats.rstd, base = -stats.residual * rstd;  // x^ = (x - mean) rstd + base
    float a = 0.f, b = 0.f;
    float kept_x[kKeep ? P * N : 1], kept_d[kKeep ? P * N : 1];
    const auto each = [&](int j, const char* at, auto&& body) {  // body(i, x^, t, d) for the elements of one pack
      float v[N], d[N], g[N], c[N] = {};
      Widen(LoadShared<T>(at), v);
      Widen(LoadShared<T>(at + kThreads * 16), d);
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(gains + (j * N + i) / 4 * (kThreads * 16));
        g[i] = four.x, g[i + 1] = four.y, g[i + 2] = four.z, g[i + 3] = four.w;
      }
      if (kRelu) LoadFloats<N>(bias + j * kThreads * N, c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float xhat = (v[i] - stats.mean) * rstd + base, dt = BeforeRelu(kRelu, d[i], xhat, g[i], c[i]);
        body(i, xhat, dt, dt * g[i]);
      }
    };
    const auto place = [&](int j) { return mine + (slot + j < R ? slot + j : slot + j - R) * kStep; };
    const auto pass1 = [&](int j) {
      if (t + j * kThreads < packs)
        each(j, place(j), [&](int i, float xhat, float dt, float d) {
          a += d;
          b += d * xhat;
          gain_sums[j * N + i] += dt * xhat;
          bias_sums[j * N + i] += dt;
          if constexpr (kKeep) kept_x[j * N + i] = xhat, kept_d[j * N + i] = d;
        });
      if constexpr (kKeep) issue(o + (j + R) / P * parts, (j + R) % P, place(j));
    };
    // The wait needs a constant, so no loop. Where a piece's place is given to a new one at once, one more is under way.
    constexpr int kStay = kKeep ? 0 : 1;
    if constexpr (P > 0) WaitForCopies<R - 1>(), pass1(0);
    if constexpr (P > 1) WaitForCopies<R - 1 - kStay>(), pass1(1);
    if constexpr (P > 2) WaitForCopies<R - 1 - 2 * kStay>(), pass1(2), WaitForCopies<R - 1 - 3 * kStay>(), pass1(3);
    if constexpr (P > 4) WaitForCopies<R - 1 - 4 * kStay>(), pass1(4), WaitForCopies<R - 1 - 5 * kStay>(), pass1(5);
    if constexpr (P > 4) WaitForCopies<R - 1 - 6 * kStay>(), pass1(6), WaitForCopies<R - 1 - 7 * kStay>(), pass1(7);
    a = WarpSum(a), b = WarpSum(b);
    // Two sets of scratch in turn: who writes one has passed the barrier that all came to after reading it.
    if (lane == 0) scratch[parity][0][t / 32] = a, scratch[parity][1][t / 32] = b;
    __syncthreads();
    a = WarpSum(lane < kThreads / 32 ? scratch[parity][0][lane] : 0.f);
    b = WarpSum(lane < kThreads / 32 ? scratch[parity][1][lane] : 0.f);
    const float mean = -a * inverse * rstd, slope = -b * inverse * rstd;
    T* to = dx + o * row_step;
#pragma unroll
    for (int j = 0; j < P; ++j) {
      if (t + j * kThreads < packs) {
        float out[N];
        if constexpr (kKeep) {
#pragma unroll
          for (int i = 0; i < N; ++i) out[i] = kept_d[j * N + i] * rstd + (kept_x[j * N + i] * slope + mean);
        } else {
          each(j, place(j), [&](int i, float xhat, float, float d) { out[i] = d * rstd + (xhat * slope + mean); });
        }
        StoreVector(to + j * kThreads * N, out);
      }
      if constexpr (!kKeep) issue(o + (j + R) / P * parts, (j + R) % P, place(j));
    }
    slot += P % R;
    if (slot >= R) slot -= R;
  }
  const int64_t to = part * Channels(p) + s * F + t * N;
#pragma unroll
  for (int j = 0; j < P; ++j) {
    if (t + j * kThreads >= packs) break;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dgain[to + j * kThreads * N + i] = gain_sums[j * N + i];
      dbias[to + j * kThreads * N + i] = bias_sums[j * N + i];
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

template <typename Kernel>
Status AllowShared(Kernel kernel, int bytes) {
  BLOCKSPARSE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  return {};
}

// Elements of a row to a thread of a gradient: 2 sums of each take registers, of which 64 are the most.
enum class Share { kNone = 0, kFew = 8, kSome = 16, kMany = 32 };

// Threads to a row of a gradient of the first kind.
int FewGroup(const LayerNormProblem& p) { return int(CeilDiv(p.features, kFew * 32) * 32); }

template <typename T, bool kRelu>
struct Backward {
  template <Share kShare>
  static constexpr int kPacks = int(kShare) / kPerVector<T>;

  static int Bytes(Share share) {
    return share == Share::kFew    ? kFewBytes * kThreads
           : share == Share::kSome ? kRingBytes<T, kPacks<Share::kSome>>
                                   : kRingBytes<T, kPacks<Share::kMany>>;
  }
  static Status LaunchFew(const LayerNormProblem& p, int64_t parts, float* dgain, float* dbias, Stream stream) {
    const int group = FewGroup(p), threads = kThreads / group * group;
    BLOCKSPARSE_RETURN_IF_ERROR(AllowShared(BatchesBackward<T, kRelu>, kFewBytes * kThreads));
    BatchesBackward<T, kRelu>
        <<<unsigned(parts * p.segments), threads, kFewBytes * threads, stream>>>(p, group, parts, dgain, dbias);
    return {};
  }
  template <Share kShare>
  static Status Launch(const LayerNormProblem& p, int64_t parts, float* dgain, float* dbias, Stream stream) {
    constexpr auto* kKernel = RowsBackward<T, kPacks<kShare>, kRelu>;
    BLOCKSPARSE_RETURN_IF_ERROR(AllowShared(kKernel, Bytes(kShare)));
    kKernel<<<unsigned(parts * p.segments), kThreads, Bytes(kShare), stream>>>(p, parts, dgain, dbias);
    return {};
  }
};

template <typename Body>
auto WithBackward(const LayerNormProblem& p, const Body& body) {
  return WithType(p.dtype, [&](auto type) {
    using T = decltype(type);
    return p.relu ? body(Backward<T, true>()) : body(Backward<T, false>());
  });
}

Share ShareOf(const LayerNormProblem& p, const Chip& chip) {
  for (Share share : {Share::kFew, Share::kSome, Share::kMany})
    if (p.features <= kThreads * int(share)) {
      constexpr int kStatic = 3 << 10;
      const int bytes = WithBackward(p, [&](auto kernels) { return kernels.Bytes(share); });
      return bytes + kStatic <= chip.shared_memory ? share : Share::kNone;
    }
  return Share::kNone;
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
  const Share share = elements > kSmallTensor ? ShareOf(p, chip) : Share::kNone;
  if (share == Share::kNone || p.segments > INT32_MAX) return family;
  family.fits = true;
  const int64_t rows_at_once = share == Share::kFew ? kThreads / FewGroup(p) * int(8 / SizeOf(p.dtype)) : 1;
  family.parts = std::max<int64_t>(1, std::min(chip.multiprocessors / p.segments, CeilDiv(p.outer, rows_at_once)));
  return family;
}

Status RunRows(const LayerNormProblem& p, float* dgain, float* dbias, const Chip& chip, Stream stream) {
  Status status;
  if (!p.gradient) {
    const int group = int(CeilDiv(p.features, kForward * 32) * 32);
    const int64_t rows_of_block = CeilDiv(p.outer * p.segments, chip.multiprocessors);
    const int groups = group <= 512 ? int(std::min<int64_t>(kForwardThreads / group, rows_of_block)) : 0;
    const int64_t bytes = int64_t(groups) * group * kForward * SizeOf(p.dtype) + 2 * sizeof(float) * p.features;
    // Of shorter rows, and of float32, a thread block to each does as well: gains and biases then are the smaller part of
    // what has to come from L2.
    if (groups > 0 && SizeOf(p.dtype) == 2 && p.features > 8192 && p.outer <= INT32_MAX / 2 &&
        p.rows() * p.features > kSmallTensor && bytes + 512 <= chip.shared_memory) {
      const int64_t parts = std::max<int64_t>(1, std::min(chip.multiprocessors / p.segments, CeilDiv(p.outer, groups)));
      WithType(p.dtype, [&](auto type) {
        using T = decltype(type);
        status = AllowShared(LongForward<T>, int(chip.shared_memory) - 512);
        LongForward<T><<<unsigned(parts * p.segments), groups * group, bytes, stream>>>(
            p, group, int(parts) * groups, parts * groups * p.segments * p.features);
      });
    } else {
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
    }
  } else {
    const Share share = ShareOf(p, chip);
    const int64_t parts = ChooseRows(p, chip).parts;
    status = WithBackward(p, [&](auto kernels) -> Status {
      if (share == Share::kSome) return kernels.template Launch<Share::kSome>(p, parts, dgain, dbias, stream);
      if (share == Share::kMany) return kernels.template Launch<Share::kMany>(p, parts, dgain, dbias, stream);
      return kernels.LaunchFew(p, parts, dgain, dbias, stream);
    });
  }
  BLOCKSPARSE_RETURN_IF_ERROR(status);
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace cuda
}  // namespace blocksparse
