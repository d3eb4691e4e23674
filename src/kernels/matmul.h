// Block-sparse matrix product: the contract between the ops (or any other caller) and the kernels of both backends.
//
// The dense equivalent of a layout's weight is Wd [C, K]: block w, at (c, k) of the layout, is the b x b piece with rows
// c*b.. and columns k*b.., stored as W[w] [b, b]; everything else is zero. With G[w] the gate of block w (1 when absent):
//
//   forward          y  = x Wd          axis 1: x [N, C], y [N, K]      axis 0: x [C, N], y [K, N]: y = Wd^T x
//   input gradient   dx = dy Wd^T       the same product with rows and columns of the layout exchanged
//   weight gradient  dW[w] = sum over pairs p of x_p[:, block c]^T dy_p[:, block k]
//
// in the forward product and the input gradient every block counts G[w] times; in the weight gradient a gate only
// selects: blocks whose gate is 0 give 0. Accumulation is in float32, with one rounding (to nearest even) at the end;
// NaN and infinity behave as in a dense product over the blocks that are present, except that a block whose gate is 0
// is not read at all.
//
// A call goes: Choose (which kernel family, from sizes and the layout's statistics; at each call), Plan (the layout as
// that family reads it; once per layout), WorkspaceBytes, Run. The same inputs give the same bits, whatever the number
// of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/common.h"
#include "kernels/layout_table.h"

namespace blocksparse {

enum class Product : int32_t { kForward = 0, kInputGrad = 1, kWeightGrad = 2 };

struct MatmulProblem {
  Product product = Product::kForward;
  int axis = 1;                       // the feature axis, 0 or 1
  int bsize = 32;                     // 8, 16, 32, 64 or 128
  DType dtype = DType::kFloat32;      // of activations and weights
  DType out_dtype = DType::kFloat32;  // of `out`; differs from dtype in weight gradients only
  bool tf32 = false;                  // float32 on the GPU: products of operands rounded to TF32 will do
  int CB = 0, KB = 0, blocks = 0;

  int pairs = 1;                   // 1 but for weight gradients
  const int64_t* n = nullptr;      // [pairs] batch size of each pair
  const void* const* a = nullptr;  // [pairs] forward: x. Input gradient: dy. Weight gradient: x of each pair
  const void* const* b = nullptr;  // [pairs] forward, input gradient: W. Weight gradient: dy of each pair
  const float* gate = nullptr;     // [blocks], or null
  const float* addend = nullptr;   // weight gradient: [blocks, b, b] added before the rounding, or null
  void* out = nullptr;             // y [N, K], dx [N, C] (axis 0 transposed) or dW [blocks, b, b]

  int64_t C() const { return int64_t(CB) * bsize; }
  int64_t K() const { return int64_t(KB) * bsize; }
};

// What a gate's gradient needs of a block's ungated weight gradient dw [blocks, b, b] in float32:
// dw_out[w] = gate[w] * dw[w], rounded to out_dtype; dgate[w] = sum over i, j of dw[w, i, j] * W[w, i, j].
struct GateGradProblem {
  int bsize = 32, blocks = 0;
  DType dtype = DType::kFloat32;      // of w
  DType out_dtype = DType::kFloat32;  // of dw_out
  const float* dw = nullptr;
  const void* w = nullptr;
  const float* gate = nullptr;
  bool gated = false;  // dgate of a block whose gate is 0 is 0
  void* dw_out = nullptr;
  float* dgate = nullptr;  // [blocks]
};

// The kernel family and the split of the work, by a backend's cost model. Together with product, axis, bsize and dtype,
// `family` names the plan; `split` and the rest are free to differ from call to call.
struct MatmulChoice {
  int family = 0;
  int split = 1;          // parts the reduction is cut in; partial sums meet in a fixed order
  int64_t tile = 0;       // batch entries per tile
  const char* name = "";  // for the log (BLOCKSPARSE_PRINT_CHOICE=1)
};

// A layout as one kernel family reads it. Nothing of a call: no pointers, no batch size.
struct MatmulPlan {
  int family = 0;
  std::vector<int32_t> words;    // what the kernel reads; a GPU plan is copied to device memory once
  std::vector<int64_t> numbers;  // what the host needs at launch: counts, offsets into words
};

// Checks what a caller can get wrong, before anything runs; the table must have been parsed.
Status CheckMatmul(const MatmulProblem& problem, const LayoutTable& table);

namespace cpu {

MatmulChoice ChooseMatmul(const MatmulProblem& problem, const LayoutTable& table, int threads);
Status PlanMatmul(const MatmulProblem& problem, const LayoutTable& table, const MatmulChoice& choice, MatmulPlan* plan);
int64_t MatmulWorkspaceBytes(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan,
                             int threads);
Status RunMatmul(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan, void* workspace,
                 ThreadPool* pool);
Status RunGateGrad(const GateGradProblem& problem, ThreadPool* pool);

}  // namespace cpu

namespace cuda {

MatmulChoice ChooseMatmul(const MatmulProblem& problem, const LayoutTable& table, const Chip& chip);
Status PlanMatmul(const MatmulProblem& problem, const LayoutTable& table, const MatmulChoice& choice, MatmulPlan* plan);
int64_t MatmulWorkspaceBytes(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan,
                             const Chip& chip);
// `words` is the plan's copy in device memory. The problem's arrays n, a and b lie on the host and hold device pointers.
Status RunMatmul(const MatmulProblem& problem, const MatmulChoice& choice, const MatmulPlan& plan, const int32_t* words,
                 void* workspace, const Chip& chip, Stream stream);
Status RunGateGrad(const GateGradProblem& problem, Stream stream);

}  // namespace cuda
}  // namespace blocksparse
