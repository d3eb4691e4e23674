// The ops of the LSTM gates: registration, shape functions, checks, and the way from tensors to a kernel.
#include "kernels/lstm.h"

#include <numeric>
#include <string>
#include <vector>

#include "ops/common.h"

namespace blocksparse {

// ----------------------------------------------------------------------------------------- from problem to kernel

static int64_t WorkspaceBytes(CpuDevice&, const LstmGatesProblem& problem) { return cpu::WorkspaceBytes(problem); }
static Status Run(CpuDevice& device, const LstmGatesProblem& problem, void* workspace) {
  return cpu::Run(problem, workspace, device.pool());
}
#ifdef BLOCKSPARSE_CUDA
static int64_t WorkspaceBytes(GpuDevice&, const LstmGatesProblem& problem) { return cuda::WorkspaceBytes(problem); }
static Status Run(GpuDevice& device, const LstmGatesProblem& problem, void* workspace) {
  return cuda::Run(problem, workspace, device.stream());
}
#endif

namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// ------------------------------------------------------------------------------------------------- registration

// The state c and all that has its shape: inputs 0 and [first, last]. h, input 1 where `merged`, is four times as wide.
absl::Status StateShape(InferenceContext* c, bool merged, int first, int last, ShapeHandle* state) {
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, state));
  for (int i = first; i <= last; ++i) TF_RETURN_IF_ERROR(c->Merge(*state, c->input(i), state));
  if (!merged || !c->RankKnown(*state)) return absl::OkStatus();
  DimensionHandle width;
  ShapeHandle h;
  TF_RETURN_IF_ERROR(c->Multiply(c->Dim(*state, -1), 4, &width));
  TF_RETURN_IF_ERROR(c->ReplaceDim(*state, c->Rank(*state) - 1, width, &h));
  return c->Merge(h, c->input(1), &h);
}

template <bool merged>
absl::Status GatesShape(InferenceContext* c) {
  ShapeHandle state;
  TF_RETURN_IF_ERROR(StateShape(c, merged, 1, merged ? 0 : 4, &state));
  c->set_output(0, state);
  c->set_output(1, state);
  return absl::OkStatus();
}

// The gradient of each input but the last, the lists of gradients.
template <bool merged>
absl::Status GatesGradShape(InferenceContext* c) {
  ShapeHandle state;
  TF_RETURN_IF_ERROR(StateShape(c, merged, 1, merged ? 0 : 4, &state));
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
  return absl::OkStatus();
}

#define GATES_OP(name) \
  REGISTER_OP(name).Attr("T: {half, bfloat16, float}").Attr("forget_bias: float = 1.0").Input("c: T")

GATES_OP("LSTMGates")
    .Input("h: T")
    .Input("bias: nbias * float")
    .Output("c_next: T")
    .Output("h_next: T")
    .Attr("nbias: int >= 0 = 0")
    .SetShapeFn(GatesShape<true>);
GATES_OP("LSTMGates4")
    .Input("i: T")
    .Input("u: T")
    .Input("f: T")
    .Input("o: T")
    .Output("c_next: T")
    .Output("h_next: T")
    .SetShapeFn(GatesShape<false>);
GATES_OP("LSTMGatesGrad")
    .Input("h: T")
    .Input("bias: nbias * float")
    .Input("dc_next: nc * T")
    .Input("dh_next: nh * T")
    .Output("dc: T")
    .Output("dh: T")
    .Output("dbias: nbias * float")
    .Attr("nbias: int >= 0 = 0")
    .Attr("nc: int >= 0")
    .Attr("nh: int >= 0")
    .SetShapeFn(GatesGradShape<true>);
GATES_OP("LSTMGates4Grad")
    .Input("i: T")
    .Input("u: T")
    .Input("f: T")
    .Input("o: T")
    .Input("dc_next: nc * T")
    .Input("dh_next: nh * T")
    .Output("dc: T")
    .Output("di: T")
    .Output("du: T")
    .Output("df: T")
    .Output("do: T")
    .Attr("nc: int >= 0")
    .Attr("nh: int >= 0")
    .SetShapeFn(GatesGradShape<false>);

// ------------------------------------------------------------------------------------------------------- kernels

// merged: inputs are c, h [..., 4 width] and an optional bias; else c, i, u, f, o of one shape. A gradient has, after
// these, those of c_next and of h_next, each of which may be missing.
template <class Device, bool merged, bool gradient>
class GatesOp : public OpKernel {
 public:
  explicit GatesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("forget_bias", &forget_bias_));
    if constexpr (merged) OP_REQUIRES_OK(ctx, ctx->GetAttr("nbias", &nbias_));
    if constexpr (gradient) {
      OP_REQUIRES_OK(ctx, ctx->GetAttr("nc", &nc_));
      OP_REQUIRES_OK(ctx, ctx->GetAttr("nh", &nh_));
    }
    OP_REQUIRES(ctx, nbias_ <= 1 && nc_ <= 1 && nh_ <= 1,
                Invalid(absl::StrCat(type_string(), ": at most one bias and one gradient of each output, got ", nbias_,
                                     ", ", nc_, " and ", nh_)));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& c = ctx->input(0);
    const TensorShape& state = c.shape();
    OP_REQUIRES(ctx, state.dims() >= 1, Invalid("c must have at least one dimension, got a scalar"));
    LstmGatesProblem problem;
    problem.gradient = gradient;
    problem.dtype = ToDType(c.dtype());
    problem.forget_bias = forget_bias_;
    problem.c = c.data();
    const int64_t width = state.dim_size(state.dims() - 1);
    constexpr int kGates = merged ? 1 : 4;
    if constexpr (merged) {
      TensorShape wide = state;
      wide.set_dim(state.dims() - 1, 4 * width);
      OP_REQUIRES(ctx, ctx->input(1).shape() == wide,
                  Invalid(absl::StrCat("h must be ", wide.DebugString(), ", four times as wide as c, ",
                                       state.DebugString(), "; got ", ctx->input(1).shape().DebugString())));
      problem.width = width;
      problem.rows = width > 0 ? state.num_elements() / width : 0;
      problem.stride = 4 * width;
      if (nbias_ > 0) {
        const Tensor& bias = ctx->input(2);
        OP_REQUIRES(ctx, bias.NumElements() == 4 * width,
                    Invalid(absl::StrCat("bias must have ", 4 * width, " elements, those of the gates i, u, f, o, got ",
                                         bias.shape().DebugString())));
        problem.bias = bias.flat<float>().data();
      }
    } else {
      for (int g = 1; g <= 4; ++g)
        OP_REQUIRES(ctx, ctx->input(g).shape() == state,
                    Invalid(absl::StrCat("c and the gates must have one shape, got ", state.DebugString(), " and ",
                                         ctx->input(g).shape().DebugString())));
      problem.width = problem.stride = state.num_elements();
    }
    const int64_t bytes = problem.width * SizeOf(problem.dtype);
    for (int g = 0; g < 4; ++g)
      problem.gate[g] = merged ? static_cast<const char*>(ctx->input(1).data()) + g * bytes : ctx->input(1 + g).data();
    if constexpr (!gradient) {
      Tensor *c_next = nullptr, *h_next = nullptr;
      OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 0, state, &c_next));
      if constexpr (merged)
        OP_REQUIRES_OK(ctx, ctx->allocate_output(1, state, &h_next));
      else
        OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({1, 2, 3, 4}, 1, state, &h_next));
      problem.c_next = c_next->data();
      problem.h_next = h_next->data();
    } else {
      const int first = 1 + kGates + nbias_;
      for (int i = first; i < first + nc_ + nh_; ++i)
        OP_REQUIRES(ctx, ctx->input(i).shape() == state,
                    Invalid(absl::StrCat("the gradients must have the shape of c, ", state.DebugString(), "; got ",
                                         ctx->input(i).shape().DebugString())));
      if (nc_ > 0) problem.dc_next = ctx->input(first).data();
      if (nh_ > 0) problem.dh_next = ctx->input(first + nc_).data();
      Tensor *dc = nullptr, *dgate = nullptr, *dbias = nullptr;
      // Outputs in the buffers of inputs of their shape that nobody else holds; but not the bias, which every row reads.
      std::vector<int> inputs(ctx->num_inputs());
      std::iota(inputs.begin(), inputs.end(), 0);
      inputs.erase(inputs.begin() + 1 + kGates, inputs.begin() + first);
      OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output(inputs, 0, state, &dc));
      problem.dc = dc->data();
      for (int g = 0; g < kGates; ++g) {
        OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output(inputs, 1 + g, ctx->input(1 + g).shape(), &dgate));
        problem.dgate[g] = dgate->data();
      }
      for (int g = 1; merged && g < 4; ++g) problem.dgate[g] = static_cast<char*>(problem.dgate[0]) + g * bytes;
      if (nbias_ > 0) {
        OP_REQUIRES_OK(ctx, ctx->allocate_output(2, ctx->input(2).shape(), &dbias));
        problem.dbias = dbias->flat<float>().data();
      }
    }
    // A gradient of no rows has a bias of zeros.
    if (problem.width == 0 || (problem.rows == 0 && !problem.dbias)) return;
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem));
  }

 private:
  float forget_bias_ = 1.f;
  int nbias_ = 0, nc_ = 0, nh_ = 0;
};

#define REGISTER_DEVICE(device, Backend)                                                       \
  REGISTER_KERNEL_BUILDER(Name("LSTMGates").Device(device), GatesOp<Backend, true, false>);    \
  REGISTER_KERNEL_BUILDER(Name("LSTMGates4").Device(device), GatesOp<Backend, false, false>);  \
  REGISTER_KERNEL_BUILDER(Name("LSTMGatesGrad").Device(device), GatesOp<Backend, true, true>); \
  REGISTER_KERNEL_BUILDER(Name("LSTMGates4Grad").Device(device), GatesOp<Backend, false, true>)

REGISTER_DEVICE(tensorflow::DEVICE_CPU, CpuDevice);
#ifdef BLOCKSPARSE_CUDA
REGISTER_DEVICE(tensorflow::DEVICE_GPU, GpuDevice);
#endif

}  // namespace
}  // namespace blocksparse
