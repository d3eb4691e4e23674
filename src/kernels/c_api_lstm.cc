#include "kernels/c_api_lstm.h"

#include <algorithm>

#include "kernels/c_api_common.h"
#include "kernels/lstm.h"

namespace blocksparse {
namespace {

Status Parse(const bs_lstm_args& args, LstmGatesProblem* p) {
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("dtype", args.dtype, &p->dtype));
  p->gradient = args.gradient != 0, p->rows = args.rows, p->width = args.width, p->stride = args.stride;
  p->forget_bias = args.forget_bias, p->bias = args.bias, p->c = args.c;
  std::copy(args.gate, args.gate + 4, p->gate);
  p->c_next = args.c_next, p->h_next = args.h_next, p->dc_next = args.dc_next, p->dh_next = args.dh_next;
  p->dc = args.dc, p->dbias = args.dbias;
  std::copy(args.dgate, args.dgate + 4, p->dgate);
  return {};
}

}  // namespace
}  // namespace blocksparse

using namespace blocksparse;

int64_t bs_lstm_workspace(const char* device, const bs_lstm_args* args) {
  bool gpu = false;
  LstmGatesProblem p;
  Status status = ParseDevice(device, &gpu);
  if (status.ok()) status = Parse(*args, &p);
  if (Return(status) != 0) return -1;
#ifdef BLOCKSPARSE_CUDA
  if (gpu) return cuda::WorkspaceBytes(p);
#endif
  return cpu::WorkspaceBytes(p);
}

int bs_lstm_run(const char* device, int threads, const bs_lstm_args* args, [[maybe_unused]] void* stream) {
  auto run = [&]() -> Status {
    bool gpu = false;
    LstmGatesProblem p;
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
