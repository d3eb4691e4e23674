// Block-sparse matrix product on the host: how the work is cut. The arithmetic is in matmul_kernels.h.
#include "kernels/matmul.h"

#include <algorithm>
#include <vector>

#include "cpu/isa.h"
#include "cpu/matmul_kernels.h"

namespace blocksparse {
namespace cpu {
namespace {

Status CurrentKernels(const MatmulKernels** kernels) {
  Isa isa;
  BLOCKSPARSE_RETURN_IF_ERROR(CurrentIsa(&isa));
  *kernels = isa == Isa::kAvx512 ? MatmulKernelsAvx512()
             : isa == Isa::kAvx2 ? MatmulKernelsAvx2()
                                 : MatmulKernelsBase();
  return {};
}

// Products that AMX tiles are made for. Smaller blocks would fill half a tile, a few batch entries a fraction.
bool WantsAmx(const MatmulProblem& p) {
  return p.product != Product::kWeightGrad && p.dtype == DType::kBFloat16 && !p.gate && p.bsize >= 32 && p.n[0] >= 16;
}

Status KernelsFor(const MatmulProblem& p, const MatmulKernels** kernels) {
  if (WantsAmx(p) && HasAmx() && MatmulKernelsAmx()) {
    *kernels = MatmulKernelsAmx();
    return {};
  }
  return CurrentKernels(kernels);
}

// What the cost estimates assume of one thread; they only decide whether waking another one pays.
constexpr double kMacPerNs = 30, kBytesPerNs = 8;

// Batch entries of a weight gradient that are packed at a time: bounds the workspace.
constexpr int64_t kGradPass = 512;
// Input features whose packed activations of one pass stay in a second-level cache.
constexpr int kGradSlice = 128;
// Features packed by one task.
constexpr int64_t kPackFeatures = 64;
// Of these, packed for one panel after the other where features come first; AMX packs 32 at a time.
constexpr int64_t kRowsTogether = 32;
// Floats between panels, whose lengths are often a multiple of the first-level cache's sets.
constexpr int64_t kPanelGap = 80;
// Output features that are written together, so that whole cache lines reach memory when features come last.
constexpr int kUnitFeatures = 64;
constexpr int kUnits = 256;
constexpr int kUnitGrain = 16;  // parts of a block column are multiples of this: a tile's outputs

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t Rounded(int64_t floats) { return CeilDiv(floats, 16) * 16; }
int64_t Ns(double macs, double bytes) { return int64_t(std::max(macs / kMacPerNs, bytes / kBytesPerNs)); }

// The batch in panels of `tile` entries, none of them much narrower than the others.
struct Panels {
  Panels(int64_t n, int lanes, int64_t tile) : n(n), lanes(lanes), vectors(CeilDiv(n, lanes)), most(tile / lanes) {
    count = CeilDiv(vectors, most);
    narrower = count * most - vectors;  // this many panels are one vector short
    if (narrower > count) narrower = 0;
  }
  int64_t First(int64_t panel) const {
    return (panel * most - std::max<int64_t>(panel - (count - narrower), 0)) * lanes;
  }
  int Width(int64_t panel) const {
    return int(std::min(panel < count - narrower ? most : most - (narrower > 0), vectors)) * lanes;
  }
  int Entries(int64_t panel) const { return int(std::min<int64_t>(Width(panel), n - First(panel))); }

  int64_t n;
  int lanes;
  int64_t vectors, most, count, narrower;
};

// How many panels make a group. Where a block has fewer outputs than a vector has lanes, what a panel is read for is so
// little that the last-level cache cannot keep up: then a group takes half of the second-level cache (AVX-512, blocks of 8:
// 204 in place of 127 GFLOP/s at a quarter of the blocks).
int64_t PanelsTogether(const MatmulProblem& p, int64_t panel_bytes, int lanes) {
  if (p.bsize > lanes) return kPanels;
  if (p.bsize == lanes) return 16;  // between the two: 132 in place of 125 GFLOP/s at N = 512, AVX2, blocks of 8
  return std::clamp<int64_t>(SecondCacheBytes() / 2 / panel_bytes, 1, kPanels);
}

// AMX tiles are fed by the second-level cache, the last one is three times too slow: so a slice of the batch whose panels
// fill half of the former meets all outputs, with weights packed once for all slices. Where a column has few blocks that
// costs more than it saves: bfloat16, N = 512, 1.5 times as fast at half of the blocks, 0.8 at 3 % and blocks of 128.
bool WantsSlices(const MatmulProblem& p, const MatmulKernels& kernels) {
  constexpr int64_t kEntries = 7;
  return kernels.pack_weights && p.blocks >= kEntries * (p.product == Product::kForward ? p.KB : p.CB);
}

// Forward or input gradient, with the layout's columns (rows) as outputs.
//
// Group by group of panels: all threads pack the group, then share the outputs. So the packed activations stay in the
// last-level cache, which the threads have in common, and the weights are packed and read once a group.
//
// Where weights are read in place and a panel fits half of the second-level cache, a thread packs a panel for itself and
// computes all of its outputs, as long as there is one for each thread: nobody waits, and what is packed stays near.
struct ProductRun {
  ProductRun(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, const MatmulKernels& kernels,
             int threads)
      : p(p),
        kernels(kernels),
        forward(p.product == Product::kForward),
        in_features(forward ? p.C() : p.K()),
        out_features(forward ? p.K() : p.C()),
        panels(p.n[0], kernels.lanes, choice.tile),
        one(p.n[0] == 1),
        in_place(kernels.column_in_place && p.dtype == DType::kFloat32 && !p.gate && !one),
        panel_floats(in_features * choice.tile + kPanelGap),
        alone(in_place && panel_floats * 4 <= SecondCacheBytes() / 2 ? panels.count / threads * threads : 0),
        groups(CeilDiv(panels.count - alone,
                       in_place ? kPanels : PanelsTogether(p, in_features * choice.tile * 4, kernels.lanes))),
        slice(WantsSlices(p, kernels)
                  ? std::clamp<int64_t>(SecondCacheBytes() / 4 / (in_features * choice.tile), 1, kPanels)
                  : kPanels),
        packed_weights(slice < std::min<int64_t>(panels.count, kPanels) ? int64_t(p.blocks) * p.bsize * p.bsize : 0),
        ptr(plan.words.data() + plan.numbers[0]),
        in(plan.words.data() + plan.numbers[1]),
        ids(plan.words.data() + plan.numbers[2]),
        units(plan.words.data() + plan.numbers[3]),
        unit_count(plan.numbers[4]),
        group_width(groups > 0 ? CeilDiv(panels.count - alone, groups) * choice.tile : choice.tile),
        sums_floats(Rounded(std::max(kUnitFeatures, p.bsize) * group_width)),
        packed_floats(Rounded(
            one ? in_features
                : std::max(in_features * group_width + kPanels * kPanelGap, alone > 0 ? threads * panel_floats : 0))) {}

  int64_t WorkerFloats() const { return sums_floats + kColumnScratch; }
  int64_t WorkspaceFloats(int threads) const {
    return WorkerFloats() * threads + packed_floats + Rounded(packed_weights / 2);
  }

  int64_t FirstPanel(int64_t group) const { return alone + (panels.count - alone) * group / groups; }
  int64_t PanelFloats(int64_t panel) const { return in_features * panels.Width(panel) + kPanelGap; }

  // Features [f0, f1) of panels [first, last). Where the batch comes last, some features at a time for all panels, so that
  // what one leaves of a cache line is there for the next.
  void Pack(int64_t first, int64_t last, int64_t f0, int64_t f1, float* packed) const {
    const int64_t step = p.axis == 0 ? kRowsTogether : f1 - f0;
    for (; f0 < f1; f0 += step) {
      float* to = packed;
      for (int64_t panel = first; panel < last; ++panel) {
        const int width = panels.Width(panel);
        kernels.pack_panel(Inputs(), panels.First(panel), panels.Entries(panel), f0, std::min(f0 + step, f1), width,
                           to + f0 * width);
        to += PanelFloats(panel);
      }
    }
  }

  // Outputs [f0, f1) of panels [first, last); `packed` is the first panel's.
  void Unit(int64_t f0, int64_t f1, int64_t first, int64_t last, const float* packed, const char* weights,
            float* scratch) const {
    Column column = Weights();
    column.scratch = scratch + sums_floats;
    column.panels = int(last - first);
    float* sums[kPanels];
    for (int i = 0; i < column.panels; ++i) {
      column.width[i] = one ? 1 : panels.Width(first + i);
      column.panel[i] = packed;
      sums[i] = scratch;
      if (!one) packed += PanelFloats(first + i);
      scratch += (f1 - f0) * column.width[i];
    }
    for (int64_t f = f0; f < f1; f += column.o1 - column.o0) {
      Outputs(f, f1, &column);
      if (packed_weights > 0) column.packed = weights + PackedBytes(f);
      for (int i = 0; i < column.panels; ++i) column.out[i] = sums[i] + (f - f0) * column.width[i];
      if (one)
        kernels.column_of_one(column);
      else if (in_place)
        kernels.column_in_place(column);
      else
        kernels.column(column);
    }
    if (one) return kernels.finish(sums[0], 1.f, nullptr, f1 - f0, Offset(p.out, f0), p.dtype);
    const int64_t step = p.axis == 0 ? kRowsTogether : f1 - f0;
    for (int64_t f = f0; f < f1; f += step)
      for (int i = 0; i < column.panels; ++i)
        kernels.unpack_panel(sums[i] + (f - f0) * column.width[i], column.width[i], Outputs(), panels.First(first + i),
                             panels.Entries(first + i), f, std::min(f + step, f1));
  }

  Column Weights() const {
    Column column = {};
    column.bsize = p.bsize;
    column.transposed = !forward;
    column.dtype = p.dtype;
    column.weights = p.b[0];
    column.gate = p.gate;
    return column;
  }
  // The part of one block's outputs that begins at output f.
  void Outputs(int64_t f, int64_t f1, Column* column) const {
    const int64_t b = p.bsize, j = f / b;
    column->o0 = int(f - j * b);
    column->o1 = int(std::min(b, f1 - j * b));
    column->in = in + ptr[j];
    column->ids = ids + ptr[j];
    column->count = ptr[j + 1] - ptr[j];
  }
  // Where the packed weights of the outputs from f on begin.
  int64_t PackedBytes(int64_t f) const {
    const int64_t b = p.bsize, j = f / b;
    return (ptr[j] * b + (f - j * b) * (ptr[j + 1] - ptr[j])) * b * SizeOf(p.dtype);
  }

  void PackWeights(int64_t u, char* packed) const {
    Column column = Weights();
    for (int64_t f = units[u]; f < units[u + 1]; f += column.o1 - column.o0) {
      Outputs(f, units[u + 1], &column);
      kernels.pack_weights(column, packed + PackedBytes(f));
    }
  }

  void Run(float* workspace, ThreadPool* pool) const {
    const int64_t weights = int64_t(p.blocks) * p.bsize * p.bsize;
    const int64_t unit_ns =
        Ns(double(weights) * double(std::min(group_width, panels.vectors * kernels.lanes)) / unit_count,
           double(weights) * SizeOf(p.dtype) / unit_count);
    float* packed = workspace + WorkerFloats() * pool->threads();
    if (one) {
      if (p.dtype == DType::kFloat32)
        packed = static_cast<float*>(const_cast<void*>(p.a[0]));
      else
        kernels.pack_panel({const_cast<void*>(p.a[0]), p.dtype, 0, in_features, 1}, 0, int(in_features), 0, 1,
                           int(in_features), packed);
    }
    char* packed_to = reinterpret_cast<char*>(packed + packed_floats);
    if (alone > 0) {
      pool->ForEach(alone, unit_ns * unit_count, [&](int64_t panel, int worker) {
        KeepSubnormals keep;
        float *mine = packed + worker * panel_floats, *scratch = workspace + worker * WorkerFloats();
        Pack(panel, panel + 1, 0, in_features, mine);
        // Where features come last, whole units of the smallest blocks are narrow pieces of rows.
        const int64_t least = p.axis == 1 ? kUnitFeatures : 1;
        for (int64_t u = 0, f0 = 0; u < unit_count; ++u) {
          const int64_t f1 = units[u + 1];
          if (f1 - f0 < least && f1 < out_features && units[u + 2] - f0 <= least) continue;
          Unit(f0, f1, panel, panel + 1, mine, packed_to, scratch);
          f0 = f1;
        }
      });
    }
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = FirstPanel(group), last = FirstPanel(group + 1);
      if (!one) {
        const int64_t moved = kPackFeatures * group_width * (SizeOf(p.dtype) + 4);
        const int64_t x_tasks = CeilDiv(in_features, kPackFeatures);
        const int64_t w_tasks = group == 0 && packed_weights > 0 ? unit_count : 0;
        pool->ForEach(x_tasks + w_tasks, Ns(0, double(moved)), [&](int64_t task, int) {
          KeepSubnormals keep;
          const int64_t f0 = task * kPackFeatures;
          if (task < x_tasks)
            Pack(first, last, f0, std::min(f0 + kPackFeatures, in_features), packed);
          else
            PackWeights(task - x_tasks, packed_to);
        });
      }
      // Slice by slice of the batch, so that its part of the panels stays in each thread's second-level cache.
      const int64_t slices = CeilDiv(last - first, slice);
      pool->ForEach(unit_count * slices, unit_ns / slices, [&](int64_t task, int worker) {
        KeepSubnormals keep;
        const int64_t u = task % unit_count, s = task / unit_count, from = (last - first) * s / slices,
                      to = (last - first) * (s + 1) / slices;
        Unit(units[u], units[u + 1], first + from, first + to, packed + from * panel_floats, packed_to,
             workspace + worker * WorkerFloats());
      });
    }
  }

  Activations Inputs() const { return {const_cast<void*>(p.a[0]), p.dtype, p.axis, p.n[0], in_features}; }
  Activations Outputs() const { return {p.out, p.dtype, p.axis, p.n[0], out_features}; }
  void* Offset(void* data, int64_t elements) const { return static_cast<char*>(data) + elements * SizeOf(p.dtype); }

  const MatmulProblem& p;
  const MatmulKernels& kernels;
  const bool forward;
  const int64_t in_features, out_features;
  const Panels panels;
  const bool one, in_place;
  const int64_t panel_floats, alone, groups, slice, packed_weights;
  const int32_t *ptr, *in, *ids, *units;
  const int64_t unit_count, group_width, sums_floats, packed_floats;
};

struct GradRun {
  GradRun(const MatmulProblem& p, const MatmulPlan& plan, const MatmulKernels& kernels)
      : p(p),
        kernels(kernels),
        order(plan.words.data()),
        piece(std::min(p.bsize, kGradPiece)),
        area(p.bsize * p.bsize) {
    for (int q = 0; q < p.pairs; ++q) n += p.n[q];
    stride = std::min(n, kGradPass);
  }

  bool InPlace() const { return p.out_dtype == DType::kFloat32; }
  int64_t PackedFloats() const { return Rounded(stride * (p.C() + p.K())); }
  int64_t SumsFloats(int threads) const {
    if (InPlace()) return 0;
    return int64_t(area) * (n > stride ? p.blocks : threads);
  }

  // Rows [n0, n0 + count) of all pairs laid end to end, features [f0, f1) of x or dy.
  void Pack(bool of_x, int64_t n0, int64_t count, int64_t f0, int64_t f1, float* pieces) const {
    const int64_t features = of_x ? p.C() : p.K();
    int64_t first = 0;
    for (int q = 0; q < p.pairs; first += p.n[q++]) {
      const int64_t from = std::max(n0, first), to = std::min(n0 + count, first + p.n[q]);
      if (from >= to) continue;
      const Activations a = {const_cast<void*>(of_x ? p.a[q] : p.b[q]), p.dtype, p.axis, p.n[q], features};
      kernels.pack_pieces(a, from - first, to - from, f0, f1, piece, stride,
                          pieces + f0 * stride + (from - n0) * piece);
    }
  }

  void Block(int64_t i, bool first, bool last, int64_t count, const float* x, const float* dy, float* sums) const {
    const int64_t c = order[3 * i] * int64_t(p.bsize), k = order[3 * i + 1] * int64_t(p.bsize), w = order[3 * i + 2];
    const int b = p.bsize;
    if (InPlace()) {
      sums = static_cast<float*>(p.out) + w * area;
    } else if (n > stride) {
      sums += w * area;
    }
    if (p.gate && p.gate[w] == 0.f) {
      if (first) std::fill(sums, sums + area, 0.f);
    } else {
      for (int r = 0; r < b; r += piece)
        for (int s = 0; s < b; s += piece)
          kernels.grad_piece(x + (c + r) * stride, dy + (k + s) * stride, count, piece, sums + r * b + s, b, !first);
    }
    if (last && (!InPlace() || p.addend))
      kernels.finish(sums, 1.f, p.addend ? p.addend + w * area : nullptr, area,
                     static_cast<char*>(p.out) + w * area * SizeOf(p.out_dtype), p.out_dtype);
  }

  void Run(float* workspace, ThreadPool* pool) const {
    float *x = workspace, *dy = x + stride * p.C(), *sums = workspace + PackedFloats();
    const int64_t x_tasks = CeilDiv(p.C(), kPackFeatures), dy_tasks = CeilDiv(p.K(), kPackFeatures);
    const int64_t tasks = std::min<int64_t>(p.blocks, 32 * pool->threads());
    for (int64_t n0 = 0; n0 == 0 || n0 < n; n0 += kGradPass) {
      const int64_t count = std::min(kGradPass, n - n0);
      pool->ForEach(x_tasks + dy_tasks, Ns(0, 8.0 * kPackFeatures * count), [&](int64_t task, int) {
        KeepSubnormals keep;
        const bool of_x = task < x_tasks;
        const int64_t f0 = (of_x ? task : task - x_tasks) * kPackFeatures;
        Pack(of_x, n0, count, f0, std::min(f0 + kPackFeatures, of_x ? p.C() : p.K()), of_x ? x : dy);
      });
      const double share = double(p.blocks) / tasks * area;
      pool->ForEach(tasks, Ns(share * count, share * SizeOf(p.out_dtype)), [&](int64_t task, int worker) {
        KeepSubnormals keep;
        float* mine = n > stride ? sums : sums + worker * int64_t(area);
        for (int64_t i = p.blocks * task / tasks; i < p.blocks * (task + 1) / tasks; ++i)
          Block(i, n0 == 0, n0 + kGradPass >= n, count, x, dy, mine);
      });
    }
  }

  const MatmulProblem& p;
  const MatmulKernels& kernels;
  const int32_t* order;  // [blocks] of (c, k, w)
  const int piece, area;
  int64_t n = 0, stride = 0;
};

// Cuts the outputs into units of about equal cost: several small columns, or a part of a hub.
std::vector<int32_t> Units(const int32_t* ptr, int columns, int bsize) {
  const int64_t target = (int64_t(ptr[columns]) + columns) * bsize / kUnits + 1;
  std::vector<int32_t> bounds = {0};
  int64_t cost = 0;
  for (int j = 0; j < columns; ++j) {
    const int32_t begin = j * bsize, end = begin + bsize;
    const int64_t mine = (int64_t(ptr[j + 1]) - ptr[j] + 1) * bsize;
    if (begin > bounds.back() && (end - bounds.back() > kUnitFeatures || cost + mine > 2 * target)) {
      bounds.push_back(begin);
      cost = 0;
    }
    cost += mine;
    if (mine <= 2 * target) continue;
    const int grain = std::min(bsize, kUnitGrain);
    const int step = int(std::max<int64_t>(bsize / grain * target / mine, 1)) * grain;
    for (int32_t f = begin + step; f < end; f += step) bounds.push_back(f);
    bounds.push_back(end);
    cost = 0;
  }
  if (bounds.back() < columns * bsize) bounds.push_back(columns * bsize);
  return bounds;
}

}  // namespace

MatmulChoice ChooseMatmul(const MatmulProblem& p, const LayoutTable&, int) {
  MatmulChoice choice;
  const MatmulKernels* kernels = nullptr;
  if (!KernelsFor(p, &kernels).ok()) return choice;  // RunMatmul reports it
  choice.tile = kernels->lanes * (kernels == MatmulKernelsAmx() ? 1 : kPanelVectors);
  if (p.product != Product::kWeightGrad)
    choice.tile = std::min(choice.tile, CeilDiv(p.n[0], kernels->lanes) * kernels->lanes);
  choice.name = kernels->name;
  return choice;
}

Status PlanMatmul(const MatmulProblem& p, const LayoutTable& t, const MatmulChoice& choice, MatmulPlan* plan) {
  plan->family = choice.family;
  plan->words.clear();
  plan->numbers.clear();
  auto append = [plan](const int32_t* list, int64_t length) {
    plan->numbers.push_back(int64_t(plan->words.size()));
    plan->words.insert(plan->words.end(), list, list + length);
  };
  if (p.product == Product::kWeightGrad) {
    // Slices of input rows; in each slice column by column, so that a piece of dy serves the whole slice.
    const int rows = std::max(kGradSlice / p.bsize, 1), slices = (t.CB + rows - 1) / rows;
    std::vector<int32_t> next(slices + 1);
    for (int s = 0; s <= slices; ++s) next[s] = t.row_ptr[std::min(s * rows, t.CB)];
    plan->words.resize(3 * int64_t(t.blocks));
    for (int k = 0; k < t.KB; ++k)
      for (int e = t.column_ptr[k]; e < t.column_ptr[k + 1]; ++e) {
        int32_t* entry = &plan->words[3 * int64_t(next[t.column_c[e] / rows]++)];
        entry[0] = t.column_c[e], entry[1] = k, entry[2] = t.column_w[e];
      }
    return {};
  }
  const bool forward = p.product == Product::kForward;
  const int32_t* ptr = forward ? t.column_ptr : t.row_ptr;
  const int columns = forward ? t.KB : t.CB;
  append(ptr, columns + 1);
  append(forward ? t.column_c : t.row_k, t.blocks);
  append(forward ? t.column_w : t.row_w, t.blocks);
  plan->words.resize(plan->words.size() + kListPadding, 0);
  const std::vector<int32_t> units = Units(ptr, columns, p.bsize);
  append(units.data(), int64_t(units.size()));
  plan->numbers.push_back(int64_t(units.size()) - 1);
  return {};
}

int64_t MatmulWorkspaceBytes(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, int threads) {
  const MatmulKernels* kernels = nullptr;
  if (!KernelsFor(p, &kernels).ok()) return 0;
  int64_t floats = 0;
  if (p.product == Product::kWeightGrad) {
    const GradRun run(p, plan, *kernels);
    floats = run.PackedFloats() + run.SumsFloats(threads);
  } else if (p.n[0] > 0) {
    floats = ProductRun(p, choice, plan, *kernels, threads).WorkspaceFloats(threads);
  }
  return floats * int64_t(sizeof(float));
}

Status RunMatmul(const MatmulProblem& p, const MatmulChoice& choice, const MatmulPlan& plan, void* workspace,
                 ThreadPool* pool) {
  const MatmulKernels* kernels = nullptr;
  BLOCKSPARSE_RETURN_IF_ERROR(KernelsFor(p, &kernels));
  const int64_t outputs = p.product == Product::kWeightGrad ? int64_t(p.blocks) * p.bsize * p.bsize
                          : p.product == Product::kForward  ? p.n[0] * p.K()
                                                            : p.n[0] * p.C();
  ExpectWrites(p.out, outputs * SizeOf(p.out_dtype));
  ExpectWrites(workspace, MatmulWorkspaceBytes(p, choice, plan, pool->threads()));
  if (p.product == Product::kWeightGrad)
    GradRun(p, plan, *kernels).Run(static_cast<float*>(workspace), pool);
  else if (p.n[0] > 0)
    ProductRun(p, choice, plan, *kernels, pool->threads()).Run(static_cast<float*>(workspace), pool);
  return {};
}

Status RunGateGrad(const GateGradProblem& p, ThreadPool* pool) {
  const MatmulKernels* kernels = nullptr;
  BLOCKSPARSE_RETURN_IF_ERROR(CurrentKernels(&kernels));
  const int64_t area = int64_t(p.bsize) * p.bsize;
  pool->ForEach(p.blocks, Ns(0, double(area) * (4 + SizeOf(p.dtype) + SizeOf(p.out_dtype))), [&](int64_t w, int) {
    KeepSubnormals keep;
    const float* dw = p.dw + w * area;
    const void* weights = static_cast<const char*>(p.w) + w * area * SizeOf(p.dtype);
    p.dgate[w] = p.gated && p.gate[w] == 0.f ? 0.f : kernels->dot(dw, weights, area, p.dtype);
    kernels->finish(dw, p.gate[w], nullptr, area, static_cast<char*>(p.dw_out) + w * area * SizeOf(p.out_dtype),
                    p.out_dtype);
  });
  return {};
}

}  // namespace cpu
}  // namespace blocksparse
