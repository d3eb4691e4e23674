#include "kernels/norms.h"

#include <string>

namespace blocksparse {
namespace {

// Their product must be an offset in bytes.
Status CheckSizes(const char* names, std::initializer_list<int64_t> sizes) {
  int64_t product = 8;
  std::string text;
  bool good = true, empty = false;
  for (int64_t size : sizes) {
    text += (text.empty() ? "" : ", ") + std::to_string(size);
    good = good && size >= 0;
    empty = empty || size == 0;
  }
  for (int64_t size : sizes) good = good && (empty || !__builtin_mul_overflow(product, size, &product));
  if (good) return {};
  return Status::Invalid(std::string(names) + " must be at least 0 and their product below 2^60, got " + text);
}

}  // namespace

Status CheckNorm(const LayerNormProblem& p) {
  BLOCKSPARSE_RETURN_IF_ERROR(
      CheckSizes("outer, segments, features and inner", {p.outer, p.segments, p.features, p.inner}));
  if (p.segments < 1) return Status::Invalid("segments must be at least 1, got " + std::to_string(p.segments));
  return {};
}

Status CheckNorm(const BatchNormProblem& p) {
  return CheckSizes("outer, channels and inner", {p.outer, p.channels, p.inner});
}

}  // namespace blocksparse
