// The inner kernels of the block-sparse product, compiled once per instruction set.
//
// Forward and input gradient: the batch lies in the vector lanes. Activations of `width` batch entries are packed to a
// panel [feature][width] in float32; the kernel keeps a tile of outputs x width sums in registers, and for each feature of
// the reduction broadcasts one weight per output. So the block size only sets how often an index is read, and the input
// gradient is the same kernel with the strides of the weights exchanged. Weight gradient: activations are packed to
// [piece of features][batch][piece], and a tile of c x k sums stays in registers over the batch.
#pragma once

#include <cstdint>

#include "kernels/common.h"

namespace blocksparse {
namespace cpu {

// Activations in the caller's memory: [n, features] (axis 1) or [features, n] (axis 0).
struct Activations {
  void* data;
  DType dtype;
  int axis;
  int64_t n, features;
};

// Panels that use a column's packed weights together. Packing costs about what one panel does with a weight; the panels'
// activations have to stay in the last-level cache.
constexpr int kPanels = 24;

// One block column of a product (or a part of it): outputs [o0, o1) of the block.
struct Column {
  const int32_t* in;   // [count] input block of each entry
  const int32_t* ids;  // [count] its weight block; both lists can be read kListPadding entries past their end
  int count;
  int bsize, o0, o1;
  bool transposed;  // weights are read as [output][input]: input gradient
  DType dtype;      // of weights
  const void* weights;
  const float* gate;   // or null
  const void* packed;  // these outputs' weights as pack_weights leaves them, or null
  int panels;
  const float* panel[kPanels];  // [features][width]; for one batch entry [features]
  int width[kPanels];
  float* out[kPanels];  // [o1 - o0][width]
  float* scratch;       // kColumnScratch floats
};

constexpr int kListPadding = 32;
// Features reduced before the sums are put aside, so that a panel's piece stays in the first-level cache while all
// outputs of the block use it.
constexpr int kReduction = 160;
constexpr int64_t kColumnScratch = kReduction * 128;

// The weight gradient works on pieces of blocks of at most this many features.
constexpr int kGradPiece = 32;

struct MatmulKernels {
  const char* name;
  int lanes;  // panels are multiples of this wide, up to kPanelVectors times
  // Batch entries [n0, n0 + count), features [f0, f1) into panel [features][width], whose columns past count are zero.
  void (*pack_panel)(const Activations& x, int64_t n0, int count, int64_t f0, int64_t f1, int width, float* panel);
  // [f1 - f0][width] to features [f0, f1) of batch entries [n0, n0 + count).
  void (*unpack_panel)(const float* sums, int width, const Activations& y, int64_t n0, int count, int64_t f0,
                       int64_t f1);
  void (*column)(const Column& column);
  // The same with float32 weights read in place and no gate, so that one panel alone is worth its way;
  // null where the registers are too few.
  void (*column_in_place)(const Column& column);
  void (*column_of_one)(const Column& column);  // batch of one entry
  // All weights of a column, as many elements as they are, for several groups of panels to read; or null.
  void (*pack_weights)(const Column& column, void* packed);
  // Batch entries [n0, n0 + count), features [f0, f1) into pieces [(f1 - f0) / piece][stride][piece], from row 0 on.
  void (*pack_pieces)(const Activations& x, int64_t n0, int64_t count, int64_t f0, int64_t f1, int piece,
                      int64_t stride, float* pieces);
  // sums [piece, piece], `ld` apart, (+)= x^T dy of n batch entries.
  void (*grad_piece)(const float* x, const float* dy, int64_t n, int piece, float* sums, int ld, bool add);
  // out = round(scale * sums + addend)
  void (*finish)(const float* sums, float scale, const float* addend, int64_t count, void* out, DType dtype);
  float (*dot)(const float* a, const void* b, int64_t count, DType dtype);
};

constexpr int kPanelVectors = 3;

// Null where the library was built for another architecture.
const MatmulKernels* MatmulKernelsBase();
const MatmulKernels* MatmulKernelsAvx2();
const MatmulKernels* MatmulKernelsAvx512();
// Forward and input gradient in bfloat16 alone: panels of `lanes` entries, and layouts of its own inside panels and sums.
const MatmulKernels* MatmulKernelsAmx();

}  // namespace cpu
}  // namespace blocksparse
