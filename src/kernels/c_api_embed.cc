#include "kernels/c_api_embed.h"

#include <string>

#include "kernels/c_api_common.h"
#include "kernels/embed.h"

namespace blocksparse {
namespace {

Status Parse(const bs_embed_args& args, EmbeddingProblem* p) {
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("dtype", args.dtype, &p->dtype));
  if (args.index_bytes != 1 && args.index_bytes != 2 && args.index_bytes != 4 && args.index_bytes != 8)
    return Status::Invalid("index_bytes must be 1, 2, 4 or 8, got " + std::to_string(args.index_bytes));
  p->gradient = args.gradient != 0, p->index_bytes = args.index_bytes, p->index_signed = args.index_signed != 0;
  p->count = args.count, p->rows = args.rows, p->width = args.width;
  p->index = args.index, p->x = args.x, p->y = args.y;
  return {};
}

}  // namespace
}  // namespace blocksparse

using namespace blocksparse;

int64_t bs_embed_workspace(const char* device, const bs_embed_args* args) {
  bool gpu = false;
  EmbeddingProblem p;
  Status status = ParseDevice(device, &gpu);
  if (status.ok()) status = Parse(*args, &p);
  if (Return(status) != 0) return -1;
#ifdef BLOCKSPARSE_CUDA
  if (gpu) return cuda::WorkspaceBytes(p);
#endif
  return cpu::WorkspaceBytes(p);
}

int bs_embed_run(const char* device, int threads, const bs_embed_args* args, [[maybe_unused]] void* stream) {
  auto run = [&]() -> Status {
    bool gpu = false;
    EmbeddingProblem p;
    BLOCKSPARSE_RETURN_IF_ERROR(ParseDevice(device, &gpu));
    BLOCKSPARSE_RETURN_IF_ERROR(Parse(*args, &p));
#ifdef BLOCKSPARSE_CUDA
    if (gpu) {
      Chip chip;
      BLOCKSPARSE_RETURN_IF_ERROR(cuda::CurrentChip(&chip));
      return cuda::Run(p, args->workspace, static_cast<Stream>(stream));
    }
#endif
    HostThreads pool(threads);
    return cpu::Run(p, args->workspace, &pool);
  };
  return Return(run());
}
