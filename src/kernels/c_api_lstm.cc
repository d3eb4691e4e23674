#include "kernels/c_api_lstm.h"

#include <algorithm>

#include "kernels/c_api_common.h"

namespace blocksparse {

static Status Parse(const bs_lstm_args& args, LstmGatesProblem* p) {
  BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("dtype", args.dtype, &p->dtype));
  p->gradient = args.gradient != 0, p->rows = args.rows, p->width = args.width, p->stride = args.stride;
  p->forget_bias = args.forget_bias, p->bias = args.bias, p->c = args.c;
  std::copy(args.gate, args.gate + 4, p->gate);
  p->c_next = args.c_next, p->h_next = args.h_next, p->dc_next = args.dc_next, p->dh_next = args.dh_next;
  p->dc = args.dc, p->dbias = args.dbias;
  std::copy(args.dgate, args.dgate + 4, p->dgate);
  return {};
}

}  // namespace blocksparse

using namespace blocksparse;

int64_t bs_lstm_workspace(const char* device, const bs_lstm_args* args) {
  return WorkspaceFor<LstmGatesProblem>(device, *args);
}

int bs_lstm_run(const char* device, int threads, const bs_lstm_args* args, void* stream) {
  return RunFor<LstmGatesProblem>(device, threads, *args, stream);
}
