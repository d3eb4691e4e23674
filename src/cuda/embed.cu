// Embedding lookup on the GPU.
//
// The gradient sorts the places of the indices by row (a stable radix sort, so places of one row ascend), cuts the
// sorted sequence into chunks of equal length whatever rows they belong to, and sums each chunk's rows. A row within one
// chunk is finished there. Of rows that reach over a chunk's ends each chunk leaves partial sums, two at most, which
// are a sorted sequence of places themselves, some 32 times shorter: the same again, until one chunk is left. So all
// indices equal cost as much as all different, and the order of additions depends on the indices alone.
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "cuda/check.h"
#include "cuda/vector.cuh"
#include "kernels/embed.h"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 64;  // places that are summed in one go
constexpr uint32_t kNothing = 0xffffffff;

template <typename Body>
void WithIndexType(const EmbeddingProblem& p, Body body) {
  switch (p.index_bytes) {
    case 1: return p.index_signed ? body(int8_t()) : body(uint8_t());
    case 2: return p.index_signed ? body(int16_t()) : body(uint16_t());
    case 4: return p.index_signed ? body(int32_t()) : body(uint32_t());
    default: return p.index_signed ? body(int64_t()) : body(uint64_t());
  }
}

// ---------------------------------------------------------------------------------------------------------- lookup

// Leaves the cache to the table, whose rows may be read again.
template <typename Word>
__device__ __forceinline__ void StoreOnce(Word* p, const Word& word) {
  __stcs(p, word);
}

// Rows as words of any width, kUnroll of them for each thread: the table's rows are fetched together.
template <typename Word, typename I, typename Position>
__global__ void __launch_bounds__(kThreads) Lookup(EmbeddingProblem p, int64_t row_words, int64_t n) {
  constexpr int kUnroll = 4;
  const I* index = static_cast<const I*>(p.index);
  const int64_t first = int64_t(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  Word word[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t t = first + u * kThreads;
    word[u] = Word{};
    if (t >= n) continue;
    const Position place = Position(t) / Position(row_words), w = Position(t) - place * Position(row_words);
    // As an unsigned number a negative index is too large.
    const uint64_t row = uint64_t(int64_t(index[place]));
    if (row < uint64_t(p.rows)) word[u] = static_cast<const Word*>(p.x)[row * row_words + w];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
    if (first + u * kThreads < n) StoreOnce(static_cast<Word*>(p.y) + first + u * kThreads, word[u]);
}

// Rows of 16-byte words, of one range of the table after another: of a table larger than the cache, rows that are named
// again are found there. A warp looks at kPlaces indices, and copies the rows of those that are in the range of its block;
// the first range takes what is outside the table too.
constexpr int kPlaces = 8;
constexpr int64_t kRangeBytes = 24 << 20;  // half of the cache of a large chip

template <typename I>
__global__ void __launch_bounds__(kThreads)
    LookupRanges(EmbeddingProblem p, int64_t row_words, int64_t range_rows, unsigned blocks) {
  constexpr int kUnroll = 4;
  const int lane = threadIdx.x % 32;
  const unsigned range = blockIdx.x / blocks;
  const int64_t first = (int64_t(blockIdx.x - range * blocks) * (kThreads / 32) + threadIdx.x / 32) * kPlaces;
  const bool looks = lane < kPlaces && first + lane < p.count;
  // As an unsigned number a negative index is too large.
  const uint64_t index = looks ? uint64_t(int64_t(static_cast<const I*>(p.index)[first + lane])) : 0;
  const uint64_t low = uint64_t(range) * uint64_t(range_rows), high = min(low + uint64_t(range_rows), uint64_t(p.rows));
  unsigned pending =
      __ballot_sync(0xffffffff, looks && ((index >= low && index < high) || (range == 0 && index >= p.rows)));
  for (; pending > 0; pending &= pending - 1) {
    const int n = __ffs(pending) - 1;
    const uint64_t row = __shfl_sync(0xffffffff, index, n);
    const uint4* x = static_cast<const uint4*>(p.x) + row * row_words;
    uint4* y = static_cast<uint4*>(p.y) + (first + n) * row_words;
    for (int64_t begin = lane; begin < row_words; begin += 32 * kUnroll) {
      uint4 word[kUnroll] = {};
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (row < uint64_t(p.rows) && begin + u * 32 < row_words) word[u] = x[begin + u * 32];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (begin + u * 32 < row_words) StoreOnce(y + begin + u * 32, word[u]);
    }
  }
}

template <typename Word>
void LaunchLookup(const EmbeddingProblem& p, Stream stream) {
  const int64_t row_words = p.width * SizeOf(p.dtype) / int64_t(sizeof(Word)), n = p.count * row_words;
  const unsigned blocks = unsigned(CeilDiv(n, 4 * kThreads));
  if constexpr (sizeof(Word) == 16) {
    // Worth it where many rows are named again, and a row is as long as a warp.
    const int64_t range_rows = std::max<int64_t>(1, kRangeBytes / (row_words * 16)),
                  ranges = CeilDiv(p.rows, range_rows);
    const int64_t blocks_of_range = CeilDiv(p.count, kPlaces * (kThreads / 32));
    if (ranges > 1 && ranges <= 32 && p.count >= p.rows / 2 && row_words >= 32 &&
        ranges * blocks_of_range <= INT32_MAX) {
      WithIndexType(p, [&](auto type) {
        LookupRanges<decltype(type)><<<unsigned(ranges * blocks_of_range), kThreads, 0, stream>>>(
            p, row_words, range_rows, unsigned(blocks_of_range));
      });
      return;
    }
  }
  WithIndexType(p, [&](auto type) {
    using I = decltype(type);
    if (n <= UINT32_MAX)
      Lookup<Word, I, uint32_t><<<blocks, kThreads, 0, stream>>>(p, row_words, n);
    else
      Lookup<Word, I, uint64_t><<<blocks, kThreads, 0, stream>>>(p, row_words, n);
  });
}

// -------------------------------------------------------------------------------------------------------- gradient

// Keys to sort by, the rows, or `rows` for what is out of range; and the places themselves.
template <typename I>
__global__ void __launch_bounds__(kThreads) Keys(EmbeddingProblem p, uint32_t* keys, uint32_t* places) {
  const int64_t n = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= p.count) return;
  const uint64_t row = uint64_t(int64_t(static_cast<const I*>(p.index)[n]));
  keys[n] = uint32_t(row < uint64_t(p.rows) ? row : uint64_t(p.rows));
  places[n] = uint32_t(n);
}

// One level: places[0, count) of rows of x, sorted by keys. Sums go to y, partial ones of chunk c to entries 2c and
// 2c + 1 of the next level.
struct Level {
  int64_t count, width;
  uint32_t rows;
  const uint32_t *keys, *places;
  uint32_t *next_keys, *next_places;
  float* partial;  // [2 chunks, width]
};

template <typename From, typename To, int N>
__global__ void __launch_bounds__(kThreads) SumChunks(Level level, const From* x, To* y, int64_t column_tiles) {
  constexpr int kUnroll = 4;  // rows in flight
  const int64_t chunk = int64_t(blockIdx.x) / column_tiles * blockDim.y + threadIdx.y;
  const int64_t begin = chunk * kChunk, end = min(level.count, begin + kChunk);
  if (begin >= level.count) return;
  const int64_t k = (int64_t(blockIdx.x) % column_tiles * blockDim.x + threadIdx.x) * N;
  const bool inside = k < level.width, first_thread = k == 0;
  const uint32_t *keys = level.keys, *places = level.places;
  const uint32_t before = begin > 0 ? keys[begin - 1] : kNothing, after = end < level.count ? keys[end] : kNothing;
  const int64_t left = 2 * chunk, right = left + 1;
  float sum[N] = {};
  uint32_t current = keys[begin];
  bool is_first = true, used_left = false, used_right = false;
  // The run of `current` is over; `is_last`: with the chunk.
  auto finish = [&](bool is_last) {
    if (current < level.rows) {
      const bool from_before = is_first && current == before, to_after = is_last && current == after;
      if (from_before || to_after) {
        const int64_t entry = from_before ? left : right;
        if (inside) {
#pragma unroll
          for (int j = 0; j < N; ++j) level.partial[entry * level.width + k + j] = sum[j];
        }
        if (first_thread) level.next_keys[entry] = current, level.next_places[entry] = uint32_t(entry);
        (from_before ? used_left : used_right) = true;
        // A run that is all of the chunk goes on behind an empty entry.
        if (from_before && to_after) {
          if (first_thread) level.next_keys[right] = current, level.next_places[right] = kNothing;
          used_right = true;
        }
      } else if (inside) {
        StorePack(y + int64_t(current) * level.width + k, sum);
      }
    }
    is_first = false;
  };
  for (int64_t base = begin; base < end; base += kUnroll) {
    Pack<From, N> loaded[kUnroll] = {};
    uint32_t key[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u >= end) continue;
      key[u] = keys[base + u];
      const uint32_t place = places[base + u];
      if (inside && key[u] < level.rows && place != kNothing)
        loaded[u] = LoadPack<From, N>(x + int64_t(place) * level.width + k);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u >= end) break;
      if (key[u] != current) {
        finish(false);
        current = key[u];
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = 0.f;
      }
      float values[N];
      Widen(loaded[u], values);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += values[j];
    }
  }
  finish(true);
  if (first_thread && level.next_keys) {
    if (!used_left) level.next_keys[left] = kNothing, level.next_places[left] = kNothing;
    if (!used_right) level.next_keys[right] = kNothing, level.next_places[right] = kNothing;
  }
}

template <typename From, typename To, int N>
void LaunchSum(const Level& level, const void* x, void* y, Stream stream) {
  const int64_t threads = CeilDiv(level.width, N);
  int threads_x = 1;
  while (threads_x < threads && threads_x < kThreads) threads_x *= 2;
  const int64_t tiles = CeilDiv(threads, threads_x), chunks = CeilDiv(level.count, kChunk);
  const int threads_y = int(std::min<int64_t>(kThreads / threads_x, chunks));
  const unsigned blocks = unsigned(CeilDiv(chunks, threads_y) * tiles);
  SumChunks<From, To, N><<<blocks, dim3(threads_x, threads_y), 0, stream>>>(level, static_cast<const From*>(x),
                                                                            static_cast<To*>(y), tiles);
}

int64_t Align(int64_t bytes) { return CeilDiv(bytes, 256) * 256; }

// What the gradient's workspace holds, in order.
struct Layout {
  int64_t keys = 0, sorted_keys = 0, places = 0, sorted_places = 0, next[2][2] = {}, partial[2] = {}, sort = 0;
  int64_t sort_bytes = 0, total = 0;
  int bits = 1;

  explicit Layout(const EmbeddingProblem& p) {
    while (bits < 32 && (uint64_t(p.rows) >> bits) > 0) ++bits;  // keys are 0 to rows
    size_t bytes = 0;
    const uint32_t* in = nullptr;
    uint32_t* out = nullptr;
    cub::DeviceRadixSort::SortPairs(nullptr, bytes, in, out, in, out, uint32_t(p.count), 0, bits);
    sort_bytes = int64_t(bytes);
    auto take = [&](int64_t size) {
      const int64_t offset = total;
      total += Align(size);
      return offset;
    };
    for (int64_t* indices : {&keys, &sorted_keys, &places, &sorted_places}) *indices = take(4 * p.count);
    int64_t entries = p.count;
    for (int level = 0; level < 2; ++level) {  // later ones fit where these were
      entries = 2 * CeilDiv(entries, kChunk);
      next[level][0] = take(4 * entries);
      next[level][1] = take(4 * entries);
      partial[level] = take(4 * entries * p.width);
    }
    sort = take(sort_bytes);
  }
};

template <typename T>
Status Gradient(const EmbeddingProblem& p, char* workspace, Stream stream) {
  const Layout layout(p);
  auto words = [&](int64_t offset) { return reinterpret_cast<uint32_t*>(workspace + offset); };
  BLOCKSPARSE_CUDA_CHECK(cudaMemsetAsync(p.y, 0, p.rows * p.width * sizeof(T), stream));  // rows that no index names
  if (p.count == 0) return {};
  WithIndexType(p, [&](auto type) {
    Keys<decltype(type)>
        <<<unsigned(CeilDiv(p.count, kThreads)), kThreads, 0, stream>>>(p, words(layout.keys), words(layout.places));
  });
  BLOCKSPARSE_CUDA_LAUNCHED();
  size_t sort_bytes = size_t(layout.sort_bytes);
  BLOCKSPARSE_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
      workspace + layout.sort, sort_bytes, static_cast<const uint32_t*>(words(layout.keys)), words(layout.sorted_keys),
      static_cast<const uint32_t*>(words(layout.places)), words(layout.sorted_places), uint32_t(p.count), 0,
      layout.bits, stream));
  constexpr int N = kPerVector<T>;
  const bool packed = p.width % N == 0 && Aligned({p.x, p.y});
  Level level = {p.count, p.width, uint32_t(p.rows), words(layout.sorted_keys), words(layout.sorted_places), {},
                 {},      {}};
  for (int i = 0; level.count > 0; ++i) {
    const float* sums = level.partial;
    const int64_t chunks = CeilDiv(level.count, kChunk);
    if (chunks > 1) {
      level.next_keys = words(layout.next[i % 2][0]);
      level.next_places = words(layout.next[i % 2][1]);
      level.partial = reinterpret_cast<float*>(workspace + layout.partial[i % 2]);
    } else {
      level.next_keys = level.next_places = nullptr;
    }
    if (i == 0)
      packed ? LaunchSum<T, T, N>(level, p.x, p.y, stream) : LaunchSum<T, T, 1>(level, p.x, p.y, stream);
    else
      packed ? LaunchSum<float, T, 4>(level, sums, p.y, stream) : LaunchSum<float, T, 1>(level, sums, p.y, stream);
    BLOCKSPARSE_CUDA_LAUNCHED();
    level.count = chunks > 1 ? 2 * chunks : 0;
    level.keys = level.next_keys;
    level.places = level.next_places;
  }
  return {};
}

}  // namespace

int64_t WorkspaceBytes(const EmbeddingProblem& p) {
  return p.gradient && p.count < EmbeddingProblem::kMaxGradient ? Layout(p).total : 0;
}

Status Run(const EmbeddingProblem& p, void* workspace, Stream stream) {
  if (p.width == 0) return {};
  if (p.gradient) {
    if (p.count >= EmbeddingProblem::kMaxGradient || p.rows >= EmbeddingProblem::kMaxGradient)
      return Status::Unimplemented("the gradient of an embedding takes fewer than 2^32 - 1 indices and rows, got " +
                                   std::to_string(p.count) + " and " + std::to_string(p.rows));
    char* scratch = static_cast<char*>(workspace);
    if (p.dtype == DType::kFloat32) return Gradient<float>(p, scratch, stream);
    if (p.dtype == DType::kFloat16) return Gradient<__half>(p, scratch, stream);
    return Gradient<__nv_bfloat16>(p, scratch, stream);
  }
  if (p.count == 0) return {};
  if (p.width * SizeOf(p.dtype) % 16 == 0 && Aligned({p.x, p.y}))
    LaunchLookup<uint4>(p, stream);
  else if (p.dtype == DType::kFloat32)
    LaunchLookup<uint32_t>(p, stream);
  else
    LaunchLookup<uint16_t>(p, stream);
  BLOCKSPARSE_CUDA_LAUNCHED();
  return {};
}

}  // namespace cuda
}  // namespace blocksparse
