#include "kernels/c_api_norms.h"

#include <string>

#include "kernels/c_api_common.h"
#include "kernels/norms.h"

namespace blocksparse {
namespace {

// The fields that both structs have.
template <class Args, class Problem>
Status Common(const Args& args, Problem* p) {
  p->gradient = args.gradient != 0, p->epsilon = args.epsilon;
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("dtype", args.dtype, &p->dtype));
  p->outer = args.outer, p->inner = args.inner;
  p->x = args.x, p->dy = args.dy, p->gain = args.gain, p->bias = args.bias;
  p->mean = args.mean, p->residual = args.residual;
  p->y = args.y, p->dx = args.dx, p->dgain = args.dgain, p->dbias = args.dbias;
  return {};
}

Status Parse(const bs_layer_norm_args& args, LayerNormProblem* p) {
  BLOCKSPARSE_RETURN_IF_ERROR(Common(args, p));
  p->relu = args.relu != 0, p->segments = args.segments, p->features = args.features, p->rstd = args.rstd;
  return CheckNorm(*p);
}

Status Parse(const bs_batch_norm_args& args, BatchNormProblem* p) {
  BLOCKSPARSE_RETURN_IF_ERROR(Common(args, p));
  p->inference = args.inference != 0, p->channels = args.channels, p->variance = args.variance;
  return CheckNorm(*p);
}

template <class Problem, class Args>
Status Workspace(const char* device, int threads, const Args& args, int64_t* bytes) {
  bool gpu = false;
  Problem p;
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDevice(device, &gpu));
  BLOCKSPARSE_RETURN_IF_ERROR(Parse(args, &p));
#ifdef BLOCKSPARSE_CUDA
  if (gpu) {
    Chip chip;
    BLOCKSPARSE_RETURN_IF_ERROR(cuda::CurrentChip(&chip));
    *bytes = cuda::WorkspaceBytes(p, chip);
    return {};
  }
#endif
  *bytes = cpu::WorkspaceBytes(p, threads);
  return {};
}

template <class Problem, class Args>
Status RunOn(const char* device, int threads, const Args& args, [[maybe_unused]] void* stream) {
  bool gpu = false;
  Problem p;
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDevice(device, &gpu));
  BLOCKSPARSE_RETURN_IF_ERROR(Parse(args, &p));
#ifdef BLOCKSPARSE_CUDA
  if (gpu) {
    Chip chip;
    BLOCKSPARSE_RETURN_IF_ERROR(cuda::CurrentChip(&chip));
    return cuda::Run(p, args.workspace, chip, static_cast<Stream>(stream));
  }
#endif
  if (threads < 1) return Status::Invalid("threads must be at least 1, got " + std::to_string(threads));
  HostThreads pool(threads);
  return cpu::Run(p, args.workspace, &pool);
}

}  // namespace
}  // namespace blocksparse

using namespace blocksparse;

extern "C" {

int64_t bs_layer_norm_workspace(const char* device, int threads, const bs_layer_norm_args* args) {
  int64_t bytes = -1;
  return Return(Workspace<LayerNormProblem>(device, threads, *args, &bytes)) == 0 ? bytes : -1;
}

int64_t bs_batch_norm_workspace(const char* device, int threads, const bs_batch_norm_args* args) {
  int64_t bytes = -1;
  return Return(Workspace<BatchNormProblem>(device, threads, *args, &bytes)) == 0 ? bytes : -1;
}

int bs_layer_norm_run(const char* device, int threads, const bs_layer_norm_args* args, void* stream) {
  return Return(RunOn<LayerNormProblem>(device, threads, *args, stream));
}

int bs_batch_norm_run(const char* device, int threads, const bs_batch_norm_args* args, void* stream) {
  return Return(RunOn<BatchNormProblem>(device, threads, *args, stream));
}

}  // extern "C"
