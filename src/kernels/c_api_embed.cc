#include "kernels/c_api_embed.h"

#include <string>

#include "kernels/c_api_common.h"

namespace blocksparse {

static Status Parse(const bs_embed_args& args, EmbeddingProblem* p) {
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("dtype", args.dtype, &p->dtype));
  if (args.index_bytes != 1 && args.index_bytes != 2 && args.index_bytes != 4 && args.index_bytes != 8)
    return Status::Invalid("index_bytes must be 1, 2, 4 or 8, got " + std::to_string(args.index_bytes));
  p->gradient = args.gradient != 0, p->index_bytes = args.index_bytes, p->index_signed = args.index_signed != 0;
  p->count = args.count, p->rows = args.rows, p->width = args.width;
  p->index = args.index, p->x = args.x, p->y = args.y;
  return {};
}

}  // namespace blocksparse

using namespace blocksparse;

int64_t bs_embed_workspace(const char* device, const bs_embed_args* args) {
  return WorkspaceFor<EmbeddingProblem>(device, *args);
}

int bs_embed_run(const char* device, int threads, const bs_embed_args* args, void* stream) {
  return RunFor<EmbeddingProblem>(device, threads, *args, stream);
}
