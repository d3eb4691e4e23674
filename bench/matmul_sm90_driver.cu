// Checks and times the Hopper kernels without Python:
// matmul_sm90_driver SET[,SET...] [bf16|fp16|tf32|fp32 [BLOCK or 0 [PRODUCT or -1 [N or 0 [REPEATS]]]]].
//
// Each case draws a fresh layout and random operands, poisons the output, compares (all of it for small cases, samples
// of large ones) with a product summed in float64, and times launches with the L2 cache flushed.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/matmul_sm90.h"

using namespace blocksparse;

#define CHECK_CUDA(call)                                                              \
  do {                                                                                \
    cudaError_t error_ = (call);                                                      \
    if (error_ != cudaSuccess) {                                                      \
      std::printf("%s: %s (line %d)\n", #call, cudaGetErrorString(error_), __LINE__); \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (0)

namespace {

__device__ uint32_t Hash(uint64_t i, uint32_t seed) {
  uint64_t h = (i + 1) * 0x9e3779b97f4a7c15ull ^ (uint64_t(seed) << 32 | seed);
  h ^= h >> 31, h *= 0xbf58476d1ce4e5b9ull, h ^= h >> 27, h *= 0x94d049bb133111ebull;
  return uint32_t(h ^ h >> 32);
}

template <class T>
__device__ T From(float v);
template <>
__device__ float From<float>(float v) {
  return v;
}
template <>
__device__ __half From<__half>(float v) {
  return __float2half(v);
}
template <>
__device__ __nv_bfloat16 From<__nv_bfloat16>(float v) {
  return __float2bfloat16(v);
}
__device__ float To(float v) { return v; }
__device__ float To(__half v) { return __half2float(v); }
__device__ float To(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__global__ void Fill(T* p, int64_t n, uint32_t seed, float low) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    const uint32_t h = Hash(i, seed);
    // A triangle over [low, 2), with bits below bfloat16's.
    const float unit = ((h & 0xffff) + (h >> 16)) * (1.f / 131072.f) + (h * 2654435761u >> 20) * 0x1p-30f;
    p[i] = From<T>(low + (2.f - low) * unit);
  }
}

struct Shape {
  int product, axis, b;
  int64_t N, C, K;
  int pairs;
};

// One warp an output element. `ptr/input/id` list the blocks of each output column; for weight gradients `update`.
template <class T, class O>
__global__ void Reference(Shape s, const T* a, const T* w, const int* ptr, const int* input, const int* id,
                          const int* update, const O* out, int64_t outputs, int64_t samples, float* difference,
                          float* reference, float* magnitude) {
  const int64_t sample = blockIdx.x;
  uint64_t index = samples == outputs ? sample : (uint64_t(Hash(sample, 7)) << 32 | Hash(sample, 8)) % outputs;
  double sum = 0, size = 0;
  auto add = [&](float x, float y) { sum += double(x) * y, size += fabs(double(x) * y); };
  if (s.product == 2) {
    const int64_t block = index / (s.b * s.b), i = index / s.b % s.b, j = index % s.b;
    const int64_t c = update[2 * block] * int64_t(s.b) + i, k = update[2 * block + 1] * int64_t(s.b) + j;
    for (int64_t n = threadIdx.x; n < s.N; n += 32)
      s.axis ? add(To(a[n * s.C + c]), To(w[n * s.K + k])) : add(To(a[c * s.N + n]), To(w[k * s.N + n]));
    sum *= s.pairs, size *= s.pairs;
  } else {
    const int64_t in = s.product == 0 ? s.C : s.K, outs = s.product == 0 ? s.K : s.C;
    const int64_t n = s.axis ? index / outs : index % s.N, o = s.axis ? index % outs : index / s.N;
    const int ob = o / s.b, oo = o % s.b;
    for (int q = ptr[ob]; q < ptr[ob + 1]; ++q)
      for (int r = threadIdx.x; r < s.b; r += 32) {
        const int64_t f = input[q] * int64_t(s.b) + r;
        const float x = To(s.axis ? a[n * in + f] : a[f * s.N + n]);
        const int64_t base = int64_t(id[q]) * s.b * s.b;
        add(x, To(s.product == 0 ? w[base + r * s.b + oo] : w[base + oo * s.b + r]));
      }
  }
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o), size += __shfl_xor_sync(~0u, size, o);
  if (threadIdx.x == 0) {
    difference[sample] = To(out[index]) - sum;
    reference[sample] = sum;
    magnitude[sample] = size;
  }
}

template <class O>
__global__ void CountUnwritten(const O* p, int64_t n, unsigned long long* count) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    if (isnan(To(p[i]))) atomicAdd(count, 1ull);
}

// Leaves the L2 cache full of other, clean lines.
__global__ void ReadAll(const float4* p, int64_t n, float* out) {
  float sum = 0;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    sum += p[i].x;
  if (sum == 1.234f) *out = sum;
}

struct Case {
  const char* set;  // matched against FILTER
  Product product;
  int axis, b;
  DType dtype;
  int64_t N;
  int CB, KB;
  double density;
  const char* layout = "random";  // random: equal columns; bernoulli; hub: one full row and column too
  int pairs = 1;
  DType out = DType::kBFloat16;
  bool tf32 = false;
  float low = -2.f;  // of the values, the other end is 2: positive ones show how sums lose
};

std::vector<int32_t> MakeTable(const Case& c, std::mt19937& rng) {
  std::vector<std::pair<int, int>> blocks;  // c, k
  const std::string kind = c.layout;
  for (int k = 0; k < c.KB; ++k) {
    std::vector<int> rows(c.CB);
    for (int i = 0; i < c.CB; ++i) rows[i] = i;
    if (kind == "bernoulli") {
      for (int i = 0; i < c.CB; ++i)
        if (rng() < c.density * 4294967296.0) blocks.push_back({i, k});
      continue;
    }
    int count = int(c.CB * c.density + 0.5);
    if (c.density > 0 && count == 0) count = 1;
    if (kind == "gaps" && k % 5 == 3) count = 0;
    for (int i = 0; i < count; ++i) {
      std::swap(rows[i], rows[i + rng() % (c.CB - i)]);
      blocks.push_back({rows[i], k});
    }
    if (kind == "hub") {
      std::vector<char> have(c.CB, 0);
      for (int i = 0; i < count; ++i) have[rows[i]] = 1;
      for (int i = 0; i < c.CB; ++i)
        if (!have[i] && (i == c.CB / 3 || k == c.KB / 2)) blocks.push_back({i, k});
    }
  }
  std::shuffle(blocks.begin(), blocks.end(), rng);  // any order of ids must do
  if (kind != "shuffled" && c.CB * c.KB > 4096) std::sort(blocks.begin(), blocks.end());
  const int n = int(blocks.size());
  std::vector<int32_t> t(LayoutTable::Words(c.CB, c.KB, n), 0);
  int32_t* column_ptr = &t[16];
  int32_t *column_c = column_ptr + c.KB + 1, *column_w = column_c + n, *row_ptr = column_w + n,
          *row_k = row_ptr + c.CB + 1, *row_w = row_k + n, *update = row_w + n;
  std::vector<std::vector<std::pair<int, int>>> columns(c.KB), rows(c.CB);
  for (int w = 0; w < n; ++w) {
    update[2 * w] = blocks[w].first, update[2 * w + 1] = blocks[w].second;
    columns[blocks[w].second].push_back({blocks[w].first, w});
    rows[blocks[w].first].push_back({blocks[w].second, w});
  }
  int longest[2] = {}, some[2] = {};
  for (int side = 0; side < 2; ++side) {
    auto& lists = side ? rows : columns;
    int32_t *ptr = side ? row_ptr : column_ptr, *index = side ? row_k : column_c, *id = side ? row_w : column_w;
    int at = 0;
    for (size_t k = 0; k < lists.size(); ++k) {
      ptr[k] = at;
      std::sort(lists[k].begin(), lists[k].end());
      for (auto& e : lists[k]) index[at] = e.first, id[at] = e.second, ++at;
      longest[side] = std::max<int>(longest[side], lists[k].size());
      some[side] += !lists[k].empty();
    }
    ptr[lists.size()] = at;
  }
  const auto print = Fingerprint(c.CB, c.KB, n, update);
  const int32_t header[12] = {
      LayoutTable::kVersion, c.CB,          c.KB,       n,          int(print[0]), int(print[1]),
      int(print[2]),         int(print[3]), longest[0], longest[1], some[0],       some[1]};
  std::copy(header, header + 12, t.begin());
  return t;
}

int forward_longest(const LayoutTable& t, Product product) {
  return product == Product::kForward ? t.longest_column : t.longest_row;
}

int g_repeats = 3;  // of a check, each of which must give the same bits
float* g_flush = nullptr;
constexpr int64_t kFlush = 160 << 20;

template <class T, class O>
bool RunCase(const Case& c, const Chip& chip, bool timing) {
  static std::mt19937 rng(std::random_device{}());
  std::vector<int32_t> words = MakeTable(c, rng);
  LayoutTable table;
  Status status = LayoutTable::Parse(words.data(), words.size(), &table);
  if (status.ok()) status = table.Validate();
  if (!status.ok()) {
    std::printf("table: %s\n", status.message().c_str());
    return false;
  }
  MatmulProblem p;
  p.product = c.product, p.axis = c.axis, p.bsize = c.b, p.dtype = c.dtype;
  p.out_dtype = c.product == Product::kWeightGrad ? c.out : c.dtype;
  p.tf32 = c.tf32, p.CB = c.CB, p.KB = c.KB, p.blocks = table.blocks, p.pairs = c.pairs;
  std::vector<int64_t> ns(c.pairs, c.N);
  p.n = ns.data();
  const int64_t in = c.product == Product::kInputGrad ? p.K() : p.C(),
                outs = c.product == Product::kInputGrad ? p.C() : p.K();
  const int64_t weights = int64_t(p.blocks) * c.b * c.b;
  const bool dw = c.product == Product::kWeightGrad;
  const int64_t a_size = c.N * in, b_size = dw ? c.N * p.K() : weights, out_size = dw ? weights : c.N * outs;
  T *a, *b;
  O* out;
  int* lists;
  float *difference, *reference, *magnitude;
  unsigned long long* unwritten;
  CHECK_CUDA(cudaMalloc(&a, std::max<int64_t>(1, a_size) * sizeof(T)));
  CHECK_CUDA(cudaMalloc(&b, std::max<int64_t>(1, b_size) * sizeof(T)));
  CHECK_CUDA(cudaMalloc(&out, std::max<int64_t>(1, out_size) * sizeof(O)));
  CHECK_CUDA(cudaMalloc(&lists, words.size() * 4));
  CHECK_CUDA(cudaMemcpy(lists, words.data(), words.size() * 4, cudaMemcpyHostToDevice));
  Fill<<<1024, 256>>>(a, a_size, rng(), c.low);
  Fill<<<1024, 256>>>(b, b_size, rng(), c.low);
  std::vector<const void*> as(c.pairs, a), bs(c.pairs, b);
  p.a = as.data(), p.b = bs.data(), p.out = out;

  bool ok = cuda::sm90::Supports(p, chip);
  const bool supported = ok;
  double error = NAN, worst = NAN, us = NAN, best = NAN, plan_ms = NAN;
  MatmulChoice choice;
  if (ok) {
    choice = cuda::sm90::Choose(p, table, chip);
    MatmulPlan plan;
    const auto start = std::chrono::steady_clock::now();
    status = cuda::sm90::Plan(p, table, choice, &plan);
    plan_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    int32_t* device_plan;
    void* workspace;
    const int64_t bytes = cuda::sm90::WorkspaceBytes(p, choice, plan, chip);
    CHECK_CUDA(cudaMalloc(&device_plan, std::max<size_t>(1, plan.words.size()) * 4));
    CHECK_CUDA(cudaMemcpy(device_plan, plan.words.data(), plan.words.size() * 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMalloc(&workspace, std::max<int64_t>(256, bytes)));
    CHECK_CUDA(cudaMemset(workspace, 0xff, std::max<int64_t>(256, bytes)));
    CHECK_CUDA(cudaMemset(out, 0xff, out_size * sizeof(O)));
    auto run = [&] {
      Status s = cuda::sm90::Run(p, choice, plan, device_plan, workspace, chip, nullptr);
      if (!s.ok()) std::printf("run: %s\n", s.message().c_str()), std::exit(1);
    };
    if (!status.ok()) std::printf("plan: %s\n", status.message().c_str()), std::exit(1);
    run();
    CHECK_CUDA(cudaDeviceSynchronize());
    if (out_size > 0) {
      const int64_t samples = std::min<int64_t>(out_size, 1 << 18);
      CHECK_CUDA(cudaMalloc(&difference, samples * 4));
      CHECK_CUDA(cudaMalloc(&reference, samples * 4));
      CHECK_CUDA(cudaMalloc(&magnitude, samples * 4));
      CHECK_CUDA(cudaMalloc(&unwritten, 8));
      CHECK_CUDA(cudaMemset(unwritten, 0, 8));
      const int* column_ptr = lists + 16;
      const int* row_ptr = column_ptr + c.KB + 1 + 2 * int64_t(p.blocks);
      const int* update = row_ptr + c.CB + 1 + 2 * int64_t(p.blocks);
      const bool forward = c.product == Product::kForward;
      const int* ptr = forward ? column_ptr : row_ptr;
      const int* index = ptr + (forward ? c.KB : c.CB) + 1;
      Reference<<<samples, 32>>>(Shape{int(c.product), c.axis, c.b, c.N, p.C(), p.K(), c.pairs}, a, b, ptr, index,
                                 index + p.blocks, update, out, out_size, samples, difference, reference, magnitude);
      CountUnwritten<<<1024, 256>>>(out, out_size, unwritten);
      CHECK_CUDA(cudaDeviceSynchronize());
      std::vector<float> d(samples), r(samples), m(samples);
      unsigned long long bad = 0;
      CHECK_CUDA(cudaMemcpy(d.data(), difference, samples * 4, cudaMemcpyDeviceToHost));
      CHECK_CUDA(cudaMemcpy(r.data(), reference, samples * 4, cudaMemcpyDeviceToHost));
      CHECK_CUDA(cudaMemcpy(m.data(), magnitude, samples * 4, cudaMemcpyDeviceToHost));
      CHECK_CUDA(cudaMemcpy(&bad, unwritten, 8, cudaMemcpyDeviceToHost));
      double sd = 0, sr = 0;
      for (int64_t i = 0; i < samples; ++i) sd += double(d[i]) * d[i], sr += double(r[i]) * r[i];
      error = std::sqrt(sd / std::max(sr, 1e-30));
      // The worst element: its error beyond the rounding of the result, in 2^-24 of the sum of the terms' sizes.
      worst = 0;
      const double ulp = p.out_dtype == DType::kBFloat16 ? 0x1p-8 : p.out_dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-24;
      for (int64_t i = 0; i < samples; ++i)
        if (m[i] > 0)
          worst = std::max(worst, (std::fabs(double(d[i])) - ulp * std::fabs(double(r[i]))) / (m[i] * 0x1p-24));
      const bool exact = c.dtype == DType::kFloat32 && !c.tf32;
      const double terms = dw ? double(c.N) * c.pairs : double(forward_longest(table, c.product)) * c.b;
      // 16-bit rounding of the result alone gives 1.7e-3 (bfloat16), 2e-4 (float16).
      const double allowed = p.out_dtype == DType::kBFloat16 ? 2.5e-3 : p.out_dtype == DType::kFloat16 ? 4e-4 : 2e-5;
      ok = bad == 0 && (c.dtype != DType::kFloat32 ? error < allowed
                        : exact                    ? worst <= std::max(8.0, 2 * std::sqrt(terms))
                                                   : error < 6e-4);
      // The same bits again.
      std::vector<char> first(out_size * sizeof(O)), again(out_size * sizeof(O));
      if (!timing) {
        CHECK_CUDA(cudaMemcpy(first.data(), out, first.size(), cudaMemcpyDeviceToHost));
        for (int i = 0; i < g_repeats && ok; ++i) {
          CHECK_CUDA(cudaMemset(out, 0xff, out_size * sizeof(O)));
          run();
          CHECK_CUDA(cudaMemcpy(again.data(), out, first.size(), cudaMemcpyDeviceToHost));
          ok = std::memcmp(first.data(), again.data(), first.size()) == 0;
          if (!ok) std::printf("other bits in run %d\n", i);
        }
      }
      if (bad) std::printf("%llu elements unwritten or NaN\n", bad);
      cudaFree(difference), cudaFree(reference), cudaFree(magnitude), cudaFree(unwritten);
    }
    if (timing) {
      cudaEvent_t begin, end;
      CHECK_CUDA(cudaEventCreate(&begin));
      CHECK_CUDA(cudaEventCreate(&end));
      std::vector<float> times;
      for (int i = 0; i < 11; ++i) {
        ReadAll<<<528, 512>>>(reinterpret_cast<const float4*>(g_flush), kFlush / 16, g_flush);
        CHECK_CUDA(cudaEventRecord(begin));
        run();
        CHECK_CUDA(cudaEventRecord(end));
        CHECK_CUDA(cudaEventSynchronize(end));
        float ms;
        CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 2) times.push_back(ms * 1e3f);
      }
      std::sort(times.begin(), times.end());
      us = times[times.size() / 2], best = times[0];
    }
    cudaFree(device_plan), cudaFree(workspace);
  }
  const char* names[] = {"fwd", "dx", "dw"};
  const char* types[] = {"f32", "f16", "bf16"};
  std::printf("%-5s %-3s ax%d b%-3d %-4s N%-5ld %5ldx%-5ld %4.0f%% %-9s %-22s %s err %.1e, %.1f u", c.set,
              names[int(c.product)], c.axis, c.b, c.tf32 ? "tf32" : types[int(c.dtype)], long(c.N), long(p.C()),
              long(p.K()), c.density * 100, c.layout, choice.name,
              !supported ? "none"
              : ok       ? "ok  "
                         : "FAIL",
              error, worst);
  if (timing) std::printf(" %8.1f us (%8.1f) %6.1f TF", us, best, 2.0 * c.N * weights * c.pairs / us * 1e-6);
  std::printf(" plan %.1f ms\n", plan_ms);
  std::fflush(stdout);
  cudaFree(a), cudaFree(b), cudaFree(out), cudaFree(lists);
  return ok || !supported;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  Chip chip;
  cudaDeviceProp prop;
  CHECK_CUDA(cudaGetDeviceProperties(&prop, 0));
  chip.compute_capability = prop.major * 10 + prop.minor;
  chip.multiprocessors = prop.multiProcessorCount;
  chip.shared_memory = prop.sharedMemPerBlockOptin;
  chip.l2 = prop.l2CacheSize;
  CHECK_CUDA(cudaMalloc(&g_flush, kFlush));
  CHECK_CUDA(cudaMemset(g_flush, 0, kFlush));

  const Product F = Product::kForward, X = Product::kInputGrad, W = Product::kWeightGrad;
  const DType bf = DType::kBFloat16, hf = DType::kFloat16;
  std::vector<Case> cases;
  // Correctness over the combination table, sizes that divide nothing.
  for (int b : {8, 16, 32, 64, 128})
    for (Product product : {F, X, W})
      for (int axis : {1, 0})
        for (DType type : {bf, hf}) {
          if (b <= 16 && product == W) continue;
          const DType out = type;
          cases.push_back({"check", product, axis, b, type, 200, 9, 7, 0.4, "gaps", 1, out});
          cases.push_back({"check", product, axis, b, type, 1032, 24, 26, 0.3, "bernoulli", product == W ? 2 : 1, out});
          cases.push_back({"check", product, axis, b, type, 8, 3, 5, 1.0, "shuffled", 1, DType::kFloat32});
          if (type == bf) cases.push_back({"check", product, axis, b, type, 3336, 40, 61, 0.1, "hub", 1, out});
          if (product != W) {
            cases.push_back({"check", product, axis, b, type, axis ? 1 : 8, 40, 61, 0.1, "hub", 1, out});
            cases.push_back({"check", product, axis, b, type, axis ? 43 : 64, 17, 19, 0.5, "gaps", 1, out});
            cases.push_back({"check", product, axis, b, type, 104, 96, 50, 0.3, "bernoulli", 1, out});
          }
        }
  // Blocks of 8 and 16 by way of larger ones, float32.
  for (int b : {8, 16})
    for (Product product : {F, X, W})
      for (int axis : {1, 0})
        for (DType type : {bf, hf}) {
          cases.push_back({"merge-check", product, axis, b, type, 1032, 24 * 16 / b, 48 * 16 / b, 0.3, "bernoulli",
                           product == W ? 2 : 1, type});
          cases.push_back({"merge-check", product, axis, b, type, 3336, 64, 64, 0.9, "bernoulli", 1,
                           product == W && axis ? DType::kFloat32 : type});
          cases.push_back({"merge-check", product, axis, b, type, 3336, 160, 244, 0.05, "hub", 1, type});
        }
  for (bool tf32 : {true, false})
    for (int b : {8, 16, 32, 64, 128})
      for (Product product : {F, X, W})
        for (int axis : {1, 0})
          for (float low : {-2.f, 0.01f}) {
            const DType f = DType::kFloat32;
            if (b < (tf32 && product != W ? 16 : 32)) continue;
            cases.push_back({"float-check", product, axis, b, f, 200, 9, 7, 0.4, "gaps", 1, f, tf32, low});
            cases.push_back({"float-check", product, axis, b, f, 1032, 24, 26, 0.3, "bernoulli", product == W ? 2 : 1,
                             f, tf32, low});
            cases.push_back({"float-check", product, axis, b, f, 8, 3, 5, 1.0, "shuffled", 1, f, tf32, low});
            cases.push_back({"float-check", product, axis, b, f, 3336, 40, 61, 0.05, "hub", 1, f, tf32, low});
          }
  // Small batches: long lists, several rounds of slabs of activations, few and many columns.
  for (int b : {8, 16, 32, 64, 128})
    for (Product product : {F, X})
      for (int axis : {1, 0})
        for (DType type : {bf, hf})
          for (int64_t N : {axis ? 3 : 8, 16, 40, 64}) {
            cases.push_back({"small-check", product, axis, b, type, N, 6400 / b, 1152 / b, 0.2, "bernoulli", 1, type});
            cases.push_back({"small-check", product, axis, b, type, N, 640 / b, 9000 / b, 0.3, "gaps", 1, type});
          }
  auto perf = [&](const char* set, Product product, int axis, int b, int64_t N, int D, double density,
                  const char* layout = "random", DType type = DType::kBFloat16) {
    cases.push_back({set, product, axis, b, type, N, D / b, D / b, density, layout, 1, type});
  };
  for (Product product : {F, X, W})
    for (int axis : {1, 0}) {
      perf("merge", product, axis, 8, 4096, 12288, .1);
      perf("merge", product, axis, 16, 4096, 12288, .1);
    }
  perf("merge", F, 1, 8, 4096, 12288, .05);
  perf("merge", F, 1, 8, 4096, 12288, .01);
  perf("merge", F, 1, 16, 4096, 4096, .25);
  perf("merge", F, 1, 16, 4096, 8192, 1);
  perf("merge", F, 1, 16, 4096, 12288, .18);
  perf("merge", F, 1, 16, 4096, 12288, .25);
  perf("merge", F, 1, 16, 4096, 12288, .05);
  perf("merge", W, 1, 16, 4096, 12288, .25);
  for (int b : {128, 64, 32, 16, 8})  // the highest densities that must beat a dense product
    perf("dense", F, 1, b, 4096, 12288, b == 128 ? .88 : b == 64 ? .72 : b == 32 ? .4 : b == 16 ? .18 : .05);
  for (int tf32 = 1; tf32 >= 0; --tf32)
    for (Product product : {F, X, W})
      for (int axis : {1, 0})
        for (int b : {128, 64, 32, 16}) {
          if (b == 16 && (!tf32 || product == W)) continue;
          perf("float", product, axis, b, 4096, 12288, .1, "random", DType::kFloat32);
          cases.back().tf32 = tf32;
        }
  for (Product product : {F, X, W})
    for (int axis : {1, 0})
      for (int b : {128, 64, 32, 16}) perf("main", product, axis, b, 4096, 12288, .1);
  for (int b : {128, 64, 32, 16}) {
    perf("more", F, 1, b, 4096, 4096, .25);
    perf("more", F, 1, b, 4096, 8192, 1);
    perf("more", F, 1, b, 4096, 12288, .05);
    perf("more", F, 1, b, 4096, 12288, .25);
    perf("more", F, 1, b, 4096, 12288, .1, "random", hf);
    perf("more", F, 1, b, 4096, 12288, .1, "hub");
    perf("more", W, 1, b, 4096, 12288, .25);
    perf("more", F, 1, b, 512, 12288, .1);
  }
  for (int b : {128, 64, 32, 16, 8})
    for (int64_t N : {1, 64, 128, 256}) perf("small", F, 1, b, N, 12288, .25);
  for (int b : {128, 64, 32, 16, 8}) {
    perf("small", X, 1, b, 64, 12288, .25);
    perf("small", F, 0, b, 64, 12288, .25);
    perf("small", X, 0, b, 8, 12288, .25);
  }
  // Small, but with every way of sharing work: for checkers that slow the kernels down.
  for (int b : {8, 16, 32, 64, 128})
    for (Product product : {F, X, W})
      for (int axis : {1, 0})
        for (int64_t N : {40, 1032})
          cases.push_back({"tiny-check", product, axis, b, bf, N, 12, 8, 0.5, "gaps", product == W ? 2 : 1});
  if (argc > 6) g_repeats = std::atoi(argv[6]);
  bool all = true;
  int run = 0;
  for (const Case& c : cases) {
    if ((',' + filter + ',').find(',' + std::string(c.set) + ',') == std::string::npos) continue;
    const char* type = c.tf32 ? "tf32" : c.dtype == bf ? "bf16" : c.dtype == hf ? "fp16" : "fp32";
    if (argc > 2 && std::string(argv[2]) != type) continue;
    if (argc > 3 && std::atoi(argv[3]) > 0 && std::atoi(argv[3]) != c.b) continue;
    if (argc > 4 && std::atoi(argv[4]) >= 0 && std::atoi(argv[4]) != int(c.product)) continue;
    if (argc > 5 && std::atoi(argv[5]) > 0 && std::atoi(argv[5]) != c.N) continue;
    const bool timing = std::strstr(c.set, "check") == nullptr;
    if (c.dtype == DType::kFloat32)
      all &= RunCase<float, float>(c, chip, timing);
    else if (c.product == W && c.out == DType::kFloat32)
      all &= c.dtype == bf ? RunCase<__nv_bfloat16, float>(c, chip, timing) : RunCase<__half, float>(c, chip, timing);
    else
      all &= c.dtype == bf ? RunCase<__nv_bfloat16, __nv_bfloat16>(c, chip, timing)
                           : RunCase<__half, __half>(c, chip, timing);
    ++run;
  }
  std::printf("%d cases, %s\n", run, all ? "all right" : "SOME WRONG");
  return all ? 0 : 1;
}
