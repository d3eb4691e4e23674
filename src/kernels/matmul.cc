#include "kernels/matmul.h"

#include <algorithm>
#include <string>

namespace blocksparse {

Status CheckMatmul(const MatmulProblem& p, const LayoutTable& table) {
  if (p.axis != 0 && p.axis != 1) return Status::Invalid("feature axis must be 0 or 1, got " + std::to_string(p.axis));
  if (p.bsize != 8 && p.bsize != 16 && p.bsize != 32 && p.bsize != 64 && p.bsize != 128)
    return Status::Invalid("block size must be 8, 16, 32, 64 or 128, got " + std::to_string(p.bsize));
  if (p.CB != table.CB || p.KB != table.KB || p.blocks != table.blocks)
    return Status::Invalid("the layout table describes " + std::to_string(table.CB) + " x " + std::to_string(table.KB) +
                           " with " + std::to_string(table.blocks) + " blocks, the operands " + std::to_string(p.CB) +
                           " x " + std::to_string(p.KB) + " with " + std::to_string(p.blocks));
  // A block's index and an element's index within a row are 32-bit; only their products with N are 64-bit.
  if (p.C() > INT32_MAX || p.K() > INT32_MAX)
    return Status::Invalid("feature counts must stay below 2^31, got C " + std::to_string(p.C()) + " and K " +
                           std::to_string(p.K()));
  if (p.product != Product::kWeightGrad && (p.pairs != 1 || p.addend != nullptr || p.out_dtype != p.dtype))
    return Status::Invalid("only a weight gradient takes several pairs, an addend or an output type of its own");
  if (p.pairs < 1) return Status::Invalid("a weight gradient needs at least one pair, got " + std::to_string(p.pairs));
  for (int i = 0; i < p.pairs; ++i)
    if (p.n[i] < 0 || p.n[i] > INT64_MAX / 8 / std::max(p.C(), p.K()))
      return Status::Invalid("batch size must be at least 0 and its product with the features below 2^60, got " +
                             std::to_string(p.n[i]));
  return {};
}

}  // namespace blocksparse
