#include "kernels/c_api_ewops.h"

#include <algorithm>
#include <string>

#include "kernels/c_api_common.h"
#include "kernels/ewops.h"

namespace blocksparse {
namespace {

Status Range(const char* what, int64_t value, int64_t low, int64_t high) {
  if (low <= value && value <= high) return {};
  return Status::Invalid(std::string(what) + " must be " + std::to_string(low) + " to " + std::to_string(high) +
                         ", got " + std::to_string(value));
}

Status Parse(const bs_ew_args& args, EwProblem* p) {
  BLOCKSPARSE_RETURN_IF_ERROR(Range("op", args.op, 0, int(EwOp::kConcreteInfer)));
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("dtype", args.dtype, &p->dtype));
  p->op = EwOp(args.op), p->gradient = args.gradient != 0, p->n = args.n;
  p->alpha = args.alpha, p->low = args.low, p->high = args.high;
  p->zero_infs = args.zero_infs != 0, p->zero_nans = args.zero_nans != 0;
  std::copy(args.in, args.in + 3, p->in);
  std::copy(args.out, args.out + 2, p->out);
  return {};
}

Status Parse(const bs_cast_args& args, CastProblem* p) {
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("from", args.from, &p->from));
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("to", args.to, &p->to));
  p->n = args.n, p->x = args.x, p->y = args.y;
  return {};
}

Status Parse(const bs_add_n_args& args, AddNProblem* p) {
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("dtype", args.dtype, &p->dtype));
  BLOCKSPARSE_RETURN_IF_ERROR(Range("count", args.count, 1, AddNProblem::kMaxCount));
  p->n = args.n, p->count = args.count, p->x = args.x, p->y = args.y;
  return {};
}

Status Parse(const bs_channel_args& args, ChannelProblem* p) {
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("dtype", args.dtype, &p->dtype));
  BLOCKSPARSE_RETURN_IF_ERROR(Range("act", args.act, 0, 2));
  p->gradient = args.gradient != 0, p->act = Activation(args.act);
  p->outer = args.outer, p->channels = args.channels, p->inner = args.inner;
  p->gain = args.gain, p->bias = args.bias, p->x = args.x, p->dy = args.dy, p->y = args.y, p->dx = args.dx;
  p->dgain = args.dgain, p->dbias = args.dbias;
  return {};
}

Status Parse(const bs_dropout_args& args, DropoutProblem* p) {
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("dtype", args.dtype, &p->dtype));
  BLOCKSPARSE_RETURN_IF_ERROR(Range("rank", args.rank, 0, DropoutProblem::kMaxRank));
  if (!(args.keep_prob >= 0.f && args.keep_prob <= 1.f))
    return Status::Invalid("keep_prob must be 0 to 1, got " + std::to_string(args.keep_prob));
  p->generate = args.generate != 0, p->keep_prob = args.keep_prob, p->n = args.n;
  std::copy(args.seed, args.seed + 2, p->seed);
  p->mask = args.mask, p->x = args.x, p->y = args.y, p->rank = args.rank;
  std::copy(args.dims, args.dims + args.rank, p->dims);
  std::copy(args.stride, args.stride + args.rank, p->stride);
  return {};
}

Status Parse(const bs_concrete_gate_args& args, ConcreteGateProblem* p) {
  std::copy(args.seed, args.seed + 2, p->seed);
  p->inverse_temperature = args.inverse_temperature, p->epsilon = args.epsilon;
  p->low = args.low, p->high = args.high, p->n = args.n, p->x = args.x;
  p->gate = args.gate, p->concrete = args.concrete;
  return {};
}

Status Parse(const bs_fancy_gather_args& args, FancyGatherProblem* p) {
  if (args.element_bytes != 2 && args.element_bytes != 4)
    return Status::Invalid("element_bytes must be 2 or 4, got " + std::to_string(args.element_bytes));
  p->gradient = args.gradient != 0, p->element_bytes = args.element_bytes;
  p->outer = args.outer, p->dim = args.dim, p->inner = args.inner;
  p->index = args.index, p->x = args.x, p->y = args.y;
  return {};
}

Status Parse(const bs_reduce_max_args& args, ReduceMaxProblem* p) {
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("dtype", args.dtype, &p->dtype));
  BLOCKSPARSE_RETURN_IF_ERROR(Range("dim", args.dim, 1, INT32_MAX));
  p->gradient = args.gradient != 0, p->outer = args.outer, p->dim = args.dim, p->inner = args.inner;
  p->x = args.x, p->y = args.y, p->argmax = args.argmax;
  return {};
}

template <class Problem, class Args, class... Workspace>
int RunOn(const char* device, int threads, const Args& args, [[maybe_unused]] void* stream, Workspace... workspace) {
  auto run = [&]() -> Status {
    bool gpu = false;
    Problem p;
    BLOCKSPARSE_RETURN_IF_ERROR(ParseDevice(device, &gpu));
    BLOCKSPARSE_RETURN_IF_ERROR(Parse(args, &p));
#ifdef BLOCKSPARSE_CUDA
    if (gpu) {
      Chip chip;
      BLOCKSPARSE_RETURN_IF_ERROR(cuda::CurrentChip(&chip));
      return cuda::Run(p, workspace..., static_cast<Stream>(stream));
    }
#endif
    HostThreads pool(threads);
    return cpu::Run(p, workspace..., &pool);
  };
  return Return(run());
}

}  // namespace
}  // namespace blocksparse

using namespace blocksparse;

int bs_ew_run(const char* device, int threads, const bs_ew_args* args, void* stream) {
  return RunOn<EwProblem>(device, threads, *args, stream);
}
int bs_cast_run(const char* device, int threads, const bs_cast_args* args, void* stream) {
  return RunOn<CastProblem>(device, threads, *args, stream);
}
int bs_add_n_run(const char* device, int threads, const bs_add_n_args* args, void* stream) {
  return RunOn<AddNProblem>(device, threads, *args, stream);
}
int64_t bs_channel_workspace(const char* device, const bs_channel_args* args) {
  bool gpu = false;
  ChannelProblem p;
  Status status = ParseDevice(device, &gpu);
  if (status.ok()) status = Parse(*args, &p);
  if (Return(status) != 0) return -1;
#ifdef BLOCKSPARSE_CUDA
  if (gpu) return cuda::WorkspaceBytes(p);
#endif
  return cpu::WorkspaceBytes(p);
}
int bs_channel_run(const char* device, int threads, const bs_channel_args* args, void* stream) {
  return RunOn<ChannelProblem>(device, threads, *args, stream, args->workspace);
}
int bs_dropout_run(const char* device, int threads, const bs_dropout_args* args, void* stream) {
  return RunOn<DropoutProblem>(device, threads, *args, stream);
}
int bs_concrete_gate_run(const char* device, int threads, const bs_concrete_gate_args* args, void* stream) {
  return RunOn<ConcreteGateProblem>(device, threads, *args, stream);
}
int bs_fancy_gather_run(const char* device, int threads, const bs_fancy_gather_args* args, void* stream) {
  return RunOn<FancyGatherProblem>(device, threads, *args, stream);
}
int bs_reduce_max_run(const char* device, int threads, const bs_reduce_max_args* args, void* stream) {
  return RunOn<ReduceMaxProblem>(device, threads, *args, stream);
}
