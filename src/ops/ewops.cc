// Elementwise ops: registration, shape functions, checks, and the way from tensors to a kernel.
#include "kernels/ewops.h"

#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/ewops_formulas.h"
#include "ops/common.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace blocksparse {

// ----------------------------------------------------------------------------------------- from problem to kernel

template <class Device, class Problem>
static int64_t WorkspaceBytes(Device&, const Problem&) {
  return 0;
}
template <class Problem>
static Status Run(CpuDevice& device, const Problem& problem, void*) {
  return cpu::Run(problem, device.pool());
}
static int64_t WorkspaceBytes(CpuDevice&, const ChannelProblem& problem) { return cpu::WorkspaceBytes(problem); }
static Status Run(CpuDevice& device, const ChannelProblem& problem, void* workspace) {
  return cpu::Run(problem, workspace, device.pool());
}
#ifdef BLOCKSPARSE_CUDA
template <class Problem>
static Status Run(GpuDevice& device, const Problem& problem, void*) {
  return cuda::Run(problem, device.stream());
}
static int64_t WorkspaceBytes(GpuDevice&, const ChannelProblem& problem) { return cuda::WorkspaceBytes(problem); }
static Status Run(GpuDevice& device, const ChannelProblem& problem, void* workspace) {
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

// Every output has the shape of the first input, which the next `others` inputs must have too.
template <int others>
absl::Status SameShape(InferenceContext* c) {
  ShapeHandle shape = c->input(0);
  for (int i = 1; i <= others; ++i) TF_RETURN_IF_ERROR(c->Merge(shape, c->input(i), &shape));
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, shape);
  return absl::OkStatus();
}

#define EW_OP(name) REGISTER_OP(name).Attr("T: {half, bfloat16, float}")

EW_OP("EwZXy").Input("x: T").Input("y: T").Output("z: T").Attr("op: int").SetShapeFn(SameShape<1>);
EW_OP("EwZXa").Input("x: T").Output("z: T").Attr("alpha: float = 1.0").Attr("op: int").SetShapeFn(SameShape<0>);
EW_OP("EwZXb").Input("x: T").Input("b: float").Output("z: T").Attr("op: int").SetShapeFn(SameShape<0>);
EW_OP("EwDxdyDzxy")
    .Input("dz: T")
    .Input("x: T")
    .Input("y: T")
    .Output("dx: T")
    .Output("dy: T")
    .Attr("op: int")
    .SetShapeFn(SameShape<2>);
EW_OP("EwDxDzza")
    .Input("dz: T")
    .Input("z: T")
    .Output("dx: T")
    .Attr("alpha: float = 1.0")
    .Attr("op: int")
    .SetShapeFn(SameShape<1>);
EW_OP("EwDxDzxa")
    .Input("dz: T")
    .Input("x: T")
    .Output("dx: T")
    .Attr("alpha: float = 1.0")
    .Attr("op: int")
    .SetShapeFn(SameShape<1>);
EW_OP("EwDbDzb").Input("dz: T").Input("b: float").Output("db: float").Attr("op: int").SetShapeFn([](auto* c) {
  c->set_output(0, c->input(1));
  return absl::OkStatus();
});
EW_OP("EwDxdgDzxg")
    .Input("dz: T")
    .Input("x: T")
    .Input("g: float")
    .Output("dx: T")
    .Output("dg: float")
    .Attr("op: int")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(SameShape<1>(c));
      c->set_output(1, c->input(2));
      return absl::OkStatus();
    });

EW_OP("FilterTensor")
    .Input("x: T")
    .Input("scale: float")
    .Output("y: T")
    .Attr("saturate: float = 0.0")
    .Attr("zero_infs: bool = false")
    .Attr("zero_nans: bool = false")
    .SetShapeFn(SameShape<0>);
REGISTER_OP("FloatCast")
    .Input("x: TX")
    .Output("y: TY")
    .Attr("TX: {half, bfloat16, float}")
    .Attr("TY: {half, bfloat16, float}")
    .Attr("dx_dtype: {half, bfloat16, float}")
    .SetShapeFn(SameShape<0>);
EW_OP("AddN8").Input("x8: N * T").Output("y: T").Attr("N: int >= 1").SetShapeFn([](InferenceContext* c) {
  ShapeHandle shape = c->input(0);
  for (int i = 1; i < c->num_inputs(); ++i) TF_RETURN_IF_ERROR(c->Merge(shape, c->input(i), &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
});

EW_OP("BiasRelu")
    .Input("x: T")
    .Input("b: float")
    .Output("y: T")
    .Attr("axis: int = -1")
    .Attr("relu: int = 0")
    .Attr("bench: int = 0")
    .SetShapeFn(SameShape<0>);
EW_OP("BiasReluGrad")
    .Input("dy: T")
    .Input("y: T")
    .Input("b: float")
    .Output("dx: T")
    .Output("db: float")
    .Attr("axis: int = -1")
    .Attr("relu: int")
    .Attr("bench: int = 0")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(SameShape<1>(c));
      c->set_output(1, c->input(2));
      return absl::OkStatus();
    });
EW_OP("BiasGrad")
    .Input("dy: T")
    .Input("b: float")
    .Output("db: float")
    .Attr("axis: int = -1")
    .Attr("bench: int = 0")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

// The seed makes the result: the same seed gives the same bits, on every device.
REGISTER_OP("GenDropoutMask")
    .Input("seed: int32")
    .Input("size: int64")
    .Input("keep_prob: float")
    .Output("mask: int32")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });
EW_OP("Dropout")
    .Input("x: T")
    .Input("seed: int32")
    .Input("keep_prob: float")
    .Output("y: T")
    .Output("mask: int32")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      const DimensionHandle n = c->NumElements(c->input(0));
      c->set_output(1, c->Vector(c->ValueKnown(n) ? c->MakeDim((c->Value(n) + 31) / 32) : c->UnknownDim()));
      return absl::OkStatus();
    });
EW_OP("ApplyDropoutMask")
    .Input("x: T")
    .Input("mask: int32")
    .Input("keep_prob: float")
    .Input("mask_shape: int64")
    .Output("y: T")
    .SetShapeFn(SameShape<0>);
REGISTER_OP("ConcreteGate")
    .Input("loga: float")
    .Input("seed: int32")
    .Input("tempurature: float")
    .Output("gate: float")
    .Output("concrete: float")
    .Attr("limit_a: float = -0.1")
    .Attr("limit_b: float = 1.1")
    .Attr("epsilon: float = 1e-6")
    .SetShapeFn(SameShape<0>);
REGISTER_OP("ConcreteGateGrad")
    .Input("dg: float")
    .Input("concrete: float")
    .Input("tempurature: float")
    .Output("dloga: float")
    .Attr("limit_a: float = -0.1")
    .Attr("limit_b: float = 1.1")
    .SetShapeFn(SameShape<1>);
REGISTER_OP("ConcreteGateInfer")
    .Input("loga: float")
    .Output("gate: float")
    .Attr("limit_a: float = -0.1")
    .Attr("limit_b: float = 1.1")
    .SetShapeFn(SameShape<0>);

absl::Status ShapeFromInput(InferenceContext* c, int input) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(input, &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
}

REGISTER_OP("FancyGather")
    .Input("x: T")
    .Input("a: int32")
    .Output("y: T")
    .Attr("T: {int32, half, bfloat16, float}")
    .SetShapeFn([](InferenceContext* c) {
      const ShapeHandle x = c->input(0), a = c->input(1);
      if (!c->RankKnown(x) || !c->RankKnown(a)) {
        c->set_output(0, c->UnknownShape());
        return absl::OkStatus();
      }
      const int rank = c->Rank(a);
      ShapeHandle lead, rest, y;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(x, rank + 1, &lead));
      TF_RETURN_IF_ERROR(c->Subshape(x, 0, rank, &lead));
      TF_RETURN_IF_ERROR(c->Merge(lead, a, &lead));
      TF_RETURN_IF_ERROR(c->Subshape(x, rank + 1, &rest));
      TF_RETURN_IF_ERROR(c->Concatenate(lead, rest, &y));
      c->set_output(0, y);
      return absl::OkStatus();
    });
EW_OP("FancyGatherGrad")
    .Input("dy: T")
    .Input("a: int32")
    .Input("shape: int64")
    .Output("dx: T")
    .SetShapeFn([](InferenceContext* c) { return ShapeFromInput(c, 2); });
EW_OP("ReduceMax")
    .Input("x: T")
    .Output("y: T")
    .Output("a: int64")
    .Attr("axis: int")
    .Attr("keepdims: bool = false")
    .Attr("bench: int = 0")
    .SetShapeFn([](InferenceContext* c) {
      int axis;
      bool keepdims;
      TF_RETURN_IF_ERROR(c->GetAttr("axis", &axis));
      TF_RETURN_IF_ERROR(c->GetAttr("keepdims", &keepdims));
      ShapeHandle y = c->UnknownShape(), x = c->input(0);
      if (c->RankKnown(x)) {
        const int rank = c->Rank(x);
        if (axis < -rank || axis >= rank)
          return absl::InvalidArgumentError(
              absl::StrCat("axis must be -", rank, " to ", rank - 1, " for ", c->DebugString(x), ", got ", axis));
        if (axis < 0) axis += rank;
        ShapeHandle head, tail;
        TF_RETURN_IF_ERROR(c->Subshape(x, 0, axis, &head));
        TF_RETURN_IF_ERROR(c->Subshape(x, axis + 1, &tail));
        if (keepdims) TF_RETURN_IF_ERROR(c->Concatenate(head, c->Vector(1), &head));
        TF_RETURN_IF_ERROR(c->Concatenate(head, tail, &y));
      }
      c->set_output(0, y);
      c->set_output(1, y);
      return absl::OkStatus();
    });
EW_OP("ReduceMaxGrad")
    .Input("dy: T")
    .Input("a: int64")
    .Input("shape: int64")
    .Output("dx: T")
    .Attr("axis: int")
    .SetShapeFn([](InferenceContext* c) { return ShapeFromInput(c, 2); });

EW_OP("AssignAddOp").Input("y: Ref(T)").Input("x: T").Output("z: Ref(T)").SetShapeFn(SameShape<1>);
EW_OP("AssignAddVariable").Input("resource: resource").Input("x: T").SetIsStateful().SetShapeFn([](InferenceContext*) {
  return absl::OkStatus();
});

// ------------------------------------------------------------------------------------------------ element by element

// The operands of a map: `inputs` tensors of one shape, `outputs` of the same, in the buffers of inputs that nobody else
// holds.
absl::Status MapOperands(OpKernelContext* ctx, int inputs, int outputs, EwProblem* problem) {
  const TensorShape& shape = ctx->input(0).shape();
  problem->dtype = ToDType(ctx->input(0).dtype());
  problem->n = shape.num_elements();
  for (int i = 0; i < inputs; ++i) {
    if (ctx->input(i).shape() != shape)
      return Invalid(absl::StrCat(ctx->op_kernel().type_string(), ": all operands must have one shape, got ",
                                  shape.DebugString(), " and ", ctx->input(i).shape().DebugString()));
    problem->in[i] = ctx->input(i).data();
  }
  for (int i = 0; i < outputs; ++i) {
    Tensor* out = nullptr;
    constexpr int kInputs[] = {0, 1, 2};
    TF_RETURN_IF_ERROR(
        ctx->forward_input_or_allocate_output(absl::MakeConstSpan(kInputs, size_t(inputs)), i, shape, &out));
    problem->out[i] = out->data();
  }
  return absl::OkStatus();
}

// inputs, outputs: how many tensors; first, last: the op codes allowed.
template <class Device, int inputs, int outputs, int first, int last>
class MapOp : public OpKernel {
 public:
  explicit MapOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int op;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("op", &op));
    if (ctx->HasAttr("alpha")) OP_REQUIRES_OK(ctx, ctx->GetAttr("alpha", &problem_.alpha));
    OP_REQUIRES(ctx, first <= op && op <= last,
                Invalid(absl::StrCat(type_string(), ": op must be ", first, " to ", last, ", got ", op)));
    problem_.op = EwOp(op);
    problem_.gradient = inputs > outputs && !(inputs == 2 && IsBinary(problem_.op));
    const bool output = type_string() == "EwDxDzza";
    OP_REQUIRES(ctx, !problem_.gradient || IsBinary(problem_.op) || GradientFromOutput(problem_.op) == output,
                Invalid(absl::StrCat(type_string(), ": the gradient of op ", op, " is computed from the ",
                                     output ? "input: EwDxDzxa" : "output: EwDxDzza")));
  }

  void Compute(OpKernelContext* ctx) override {
    EwProblem problem = problem_;
    OP_REQUIRES_OK(ctx, MapOperands(ctx, inputs, outputs, &problem));
    if (problem.n > 0) OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem));
  }

 private:
  EwProblem problem_;
};

absl::Status HostScalar(OpKernelContext* ctx, int input, const char* name, float* value) {
  const Tensor& tensor = ctx->input(input);
  if (tensor.NumElements() != 1)
    return Invalid(absl::StrCat(name, " must be a scalar, got shape ", tensor.shape().DebugString()));
  *value = tensor.flat<float>()(0);
  return absl::OkStatus();
}

template <class Device>
class FilterOp : public OpKernel {
 public:
  explicit FilterOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    float saturate;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("saturate", &saturate));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("zero_infs", &problem_.zero_infs));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("zero_nans", &problem_.zero_nans));
    OP_REQUIRES(ctx, saturate >= 0, Invalid(absl::StrCat("saturate must be 0 (off) or more, got ", saturate)));
    problem_.op = EwOp::kFilter;
    problem_.high = saturate > 0 ? saturate : std::numeric_limits<float>::infinity();
    problem_.low = -problem_.high;
  }

  void Compute(OpKernelContext* ctx) override {
    EwProblem problem = problem_;
    OP_REQUIRES_OK(ctx, HostScalar(ctx, 1, "scale", &problem.alpha));
    OP_REQUIRES_OK(ctx, MapOperands(ctx, 1, 1, &problem));
    if (problem.n > 0) OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem));
  }

 private:
  EwProblem problem_;
};

template <class Device>
class CastOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    if (x.dtype() == output_type(0)) {
      ctx->set_output(0, x);
      return;
    }
    Tensor* y = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, x.shape(), &y));
    if (x.NumElements() == 0) return;
    CastProblem problem;
    problem.from = ToDType(x.dtype());
    problem.to = ToDType(y->dtype());
    problem.n = x.NumElements();
    problem.x = x.data();
    problem.y = y->data();
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem));
  }
};

template <class Device>
class AddNOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const int count = ctx->num_inputs();
    OP_REQUIRES(ctx, count <= AddNProblem::kMaxCount,
                Invalid(absl::StrCat("AddN8 adds at most ", AddNProblem::kMaxCount, " tensors at once, got ", count)));
    const Tensor& first = ctx->input(0);
    std::vector<const void*> x(count);
    std::vector<int> inputs(count);
    std::iota(inputs.begin(), inputs.end(), 0);
    for (int i = 0; i < count; ++i) {
      OP_REQUIRES(ctx, ctx->input(i).shape() == first.shape(),
                  Invalid(absl::StrCat("AddN8: all tensors must have one shape, got ", first.shape().DebugString(),
                                       " and ", ctx->input(i).shape().DebugString())));
      x[i] = ctx->input(i).data();
    }
    Tensor* y = nullptr;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output(inputs, 0, first.shape(), &y));
    if (first.NumElements() == 0) return;
    AddNProblem problem;
    problem.dtype = ToDType(first.dtype());
    problem.n = first.NumElements();
    problem.count = count;
    problem.x = x.data();
    problem.y = y->data();
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem));
  }
};

// ------------------------------------------------------------------------------------------------ channel by channel

// The shape of x seen as [outer, channels, inner], with one channel for each element of b.
absl::Status Channels(const std::string& op, const TensorShape& x, int axis, const char* name, const TensorShape& b,
                      ChannelProblem* problem) {
  const int rank = x.dims();
  if (rank == 0 || axis < -rank || axis >= rank)
    return Invalid(absl::StrCat(op, ": axis must be -", rank, " to ", rank - 1, " for x of shape ", x.DebugString(),
                                ", got ", axis));
  if (axis < 0) axis += rank;
  problem->channels = x.dim_size(axis);
  if (b.num_elements() != problem->channels)
    return Invalid(absl::StrCat(op, ": ", name, " must have ", problem->channels,
                                " elements, one for each index of axis ", axis, " of x of shape ", x.DebugString(),
                                ", got shape ", b.DebugString()));
  problem->outer = problem->inner = 1;
  for (int d = 0; d < axis; ++d) problem->outer *= x.dim_size(d);
  for (int d = axis + 1; d < rank; ++d) problem->inner *= x.dim_size(d);
  return absl::OkStatus();
}

enum class ChannelKind { kEw, kEwBiasGrad, kEwGainGrad, kBiasRelu, kBiasReluGrad, kBiasGrad };

template <class Device, ChannelKind kind>
class ChannelOp : public OpKernel {
 public:
  explicit ChannelOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    if (ctx->HasAttr("axis")) OP_REQUIRES_OK(ctx, ctx->GetAttr("axis", &axis_));
    if (ctx->HasAttr("bench")) OP_REQUIRES_OK(ctx, ctx->GetAttr("bench", &bench_));
    if (ctx->HasAttr("relu")) OP_REQUIRES_OK(ctx, ctx->GetAttr("relu", &act_));
    OP_REQUIRES(ctx, 0 <= act_ && act_ <= 2,
                Invalid(absl::StrCat("relu must be 0 (none), 1 (relu) or 2 (fast_gelu), got ", act_)));
    if (ctx->HasAttr("op")) {
      int op;
      OP_REQUIRES_OK(ctx, ctx->GetAttr("op", &op));
      const bool bias = op == int(EwOp::kBiasAdd), gain = op == int(EwOp::kGainMul);
      OP_REQUIRES(ctx,
                  kind == ChannelKind::kEw           ? bias || gain
                  : kind == ChannelKind::kEwBiasGrad ? bias
                                                     : gain,
                  Invalid(absl::StrCat(type_string(), ": op must be 18 (bias) or 19 (gain) as fits it, got ", op)));
      gain_ = gain;
    }
  }

  void Compute(OpKernelContext* ctx) override {
    constexpr bool sum_alone = kind == ChannelKind::kEwBiasGrad || kind == ChannelKind::kBiasGrad;
    constexpr bool forward = kind == ChannelKind::kEw || kind == ChannelKind::kBiasRelu;
    const Tensor &x = ctx->input(0), &b = ctx->input(forward || sum_alone ? 1 : 2);
    ChannelProblem problem;
    OP_REQUIRES_OK(ctx,
                   Channels(type_string(), x.shape(), axis_, gain_ ? "the gain" : "the bias", b.shape(), &problem));
    problem.gradient = !forward;
    problem.act = Activation(act_);
    problem.dtype = ToDType(x.dtype());
    (gain_ ? problem.gain : problem.bias) = b.flat<float>().data();

    double bytes = double(x.TotalBytes());
    Tensor* out = nullptr;
    if constexpr (forward) {
      OP_REQUIRES_OK(ctx, AllocateOver(ctx, {0}, x.shape(), bench_, &out));
      problem.x = x.data();
      problem.y = out->data();
      bytes *= 2;
    } else {
      problem.dy = x.data();
      if constexpr (!sum_alone) {
        const Tensor& other = ctx->input(1);
        OP_REQUIRES(ctx, other.shape() == x.shape(),
                    Invalid(absl::StrCat(type_string(), ": both tensors must have one shape, got ",
                                         x.shape().DebugString(), " and ", other.shape().DebugString())));
        if (problem.act == Activation::kRelu && !gain_)
          problem.y = const_cast<void*>(static_cast<const void*>(other.data()));
        else
          problem.x = other.data();
        OP_REQUIRES_OK(ctx, AllocateOver(ctx, {0, 1}, x.shape(), bench_, &out));
        problem.dx = out->data();
        bytes *= 3;
      }
      Tensor* sum = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(sum_alone ? 0 : 1, b.shape(), &sum));
      (gain_ ? problem.dgain : problem.dbias) = sum->flat<float>().data();
    }
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem, bench_, type_string().c_str(), bytes));
  }

 private:
  int axis_ = -1, bench_ = 0, act_ = 0;
  bool gain_ = false;
};

// ------------------------------------------------------------------------------------------------------ random bits

absl::Status ReadSeed(const Tensor& tensor, uint32_t* seed) {
  if (tensor.NumElements() != 2)
    return Invalid(absl::StrCat("seed must be two int32, got shape ", tensor.shape().DebugString()));
  for (int i = 0; i < 2; ++i) seed[i] = uint32_t(tensor.flat<int32_t>()(i));
  return absl::OkStatus();
}

absl::Status ReadKeepProb(OpKernelContext* ctx, int input, float* keep_prob) {
  TF_RETURN_IF_ERROR(HostScalar(ctx, input, "keep_prob", keep_prob));
  if (!(*keep_prob >= 0.f && *keep_prob <= 1.f))
    return Invalid(absl::StrCat("keep_prob must be 0 to 1, got ", *keep_prob));
  return absl::OkStatus();
}

template <class Device>
class GenDropoutMaskOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    DropoutProblem problem;
    problem.generate = true;
    OP_REQUIRES_OK(ctx, ReadSeed(ctx->input(0), problem.seed));
    OP_REQUIRES(ctx, ctx->input(1).NumElements() == 1 && ctx->input(1).flat<int64_t>()(0) >= 0,
                Invalid("size must be one number, 0 or more"));
    problem.n = ctx->input(1).flat<int64_t>()(0);
    OP_REQUIRES_OK(ctx, ReadKeepProb(ctx, 2, &problem.keep_prob));
    Tensor* mask = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({(problem.n + 31) / 32}), &mask));
    if (problem.n == 0) return;
    problem.mask = static_cast<uint32_t*>(mask->data());
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem));
  }
};

template <class Device>
class DropoutOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    DropoutProblem problem;
    problem.generate = true;
    problem.dtype = ToDType(x.dtype());
    problem.n = x.NumElements();
    OP_REQUIRES_OK(ctx, ReadSeed(ctx->input(1), problem.seed));
    OP_REQUIRES_OK(ctx, ReadKeepProb(ctx, 2, &problem.keep_prob));
    Tensor *y = nullptr, *mask = nullptr;
    problem.x = x.data();
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 0, x.shape(), &y));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({(problem.n + 31) / 32}), &mask));
    if (problem.n == 0) return;
    problem.y = y->data();
    problem.mask = static_cast<uint32_t*>(mask->data());
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem));
  }
};

// Dimensions of x and of a mask that broadcasts over it, as few as will do.
absl::Status BroadcastMask(const TensorShape& x, const std::vector<int64_t>& mask_shape, DropoutProblem* problem,
                           int64_t* mask_size) {
  const int rank = x.dims();
  bool fits = int(mask_shape.size()) == rank;
  for (int d = 0; fits && d < rank; ++d) fits = mask_shape[d] == 1 || mask_shape[d] == x.dim_size(d);
  if (!fits)
    return Invalid(absl::StrCat("mask_shape must have the rank of x, with 1 or x's size in each dimension: x is ",
                                x.DebugString(), ", got ", TensorShape(mask_shape).DebugString()));
  // From the last dimension on; a dimension joins the one before it where both are kept or both are broadcast.
  std::vector<int64_t> dims, strides;
  int64_t stride = 1;
  for (int d = rank - 1; d >= 0; --d) {
    const int64_t size = x.dim_size(d);
    if (size == 1) continue;
    const bool kept = mask_shape[d] != 1;
    if (!dims.empty() && (strides.back() != 0) == kept) {
      dims.back() *= size;
    } else {
      dims.push_back(size);
      strides.push_back(kept ? stride : 0);
    }
    if (kept) stride *= size;
  }
  *mask_size = stride;
  if (dims.empty() || (dims.size() == 1 && strides[0] == 1)) return absl::OkStatus();  // a bit for each element
  if (dims.size() > DropoutProblem::kMaxRank)
    return Invalid(absl::StrCat("mask_shape may change between kept and broadcast dimensions ",
                                DropoutProblem::kMaxRank - 1, " times, got ", dims.size() - 1));
  problem->rank = int(dims.size());
  for (int d = 0; d < problem->rank; ++d) {
    problem->dims[d] = dims[problem->rank - 1 - d];
    problem->stride[d] = strides[problem->rank - 1 - d];
  }
  return absl::OkStatus();
}

template <class Device>
class ApplyDropoutMaskOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &x = ctx->input(0), &mask = ctx->input(1), &shape = ctx->input(3);
    DropoutProblem problem;
    problem.dtype = ToDType(x.dtype());
    problem.n = x.NumElements();
    OP_REQUIRES_OK(ctx, ReadKeepProb(ctx, 2, &problem.keep_prob));
    int64_t bits = problem.n;
    if (shape.NumElements() > 0) {
      const auto sizes = shape.flat<int64_t>();
      OP_REQUIRES_OK(ctx, BroadcastMask(x.shape(), std::vector<int64_t>(sizes.data(), sizes.data() + sizes.size()),
                                        &problem, &bits));
    }
    OP_REQUIRES(ctx, mask.shape() == TensorShape({(bits + 31) / 32}),
                Invalid(absl::StrCat("mask must be [", (bits + 31) / 32, "] words, one bit for each of ", bits,
                                     " elements, got ", mask.shape().DebugString())));
    problem.x = x.data();
    Tensor* y = nullptr;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 0, x.shape(), &y));
    if (problem.n == 0) return;
    problem.y = y->data();
    problem.mask = static_cast<uint32_t*>(const_cast<void*>(static_cast<const void*>(mask.data())));
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem));
  }
};

template <class Device>
class ConcreteGateOp : public OpKernel {
 public:
  explicit ConcreteGateOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("limit_a", &problem_.low));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("limit_b", &problem_.high));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("epsilon", &problem_.epsilon));
    OP_REQUIRES(ctx, problem_.epsilon > 0.f && problem_.epsilon < 0.5f,
                Invalid(absl::StrCat("epsilon must lie between 0 and 0.5, got ", problem_.epsilon)));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    ConcreteGateProblem problem = problem_;
    float temperature;
    OP_REQUIRES_OK(ctx, ReadSeed(ctx->input(1), problem.seed));
    OP_REQUIRES_OK(ctx, HostScalar(ctx, 2, "tempurature", &temperature));
    OP_REQUIRES(ctx, temperature > 0, Invalid(absl::StrCat("tempurature must be more than 0, got ", temperature)));
    Tensor *gate = nullptr, *concrete = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, x.shape(), &gate));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, x.shape(), &concrete));
    if (x.NumElements() == 0) return;
    problem.inverse_temperature = 1.f / temperature;
    problem.n = x.NumElements();
    problem.x = x.flat<float>().data();
    problem.gate = gate->flat<float>().data();
    problem.concrete = concrete->flat<float>().data();
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem));
  }

 private:
  ConcreteGateProblem problem_;
};

template <class Device, bool gradient>
class ConcreteMapOp : public OpKernel {
 public:
  explicit ConcreteMapOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    problem_.op = gradient ? EwOp::kConcrete : EwOp::kConcreteInfer;
    problem_.gradient = gradient;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("limit_a", &problem_.low));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("limit_b", &problem_.high));
  }

  void Compute(OpKernelContext* ctx) override {
    EwProblem problem = problem_;
    if constexpr (gradient) {
      float temperature;
      OP_REQUIRES_OK(ctx, HostScalar(ctx, 2, "tempurature", &temperature));
      problem.alpha = 1.f / temperature;
    }
    OP_REQUIRES_OK(ctx, MapOperands(ctx, gradient ? 2 : 1, 1, &problem));
    if (problem.n > 0) OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem));
  }

 private:
  EwProblem problem_;
};

// --------------------------------------------------------------------------------------------------------- indices

absl::Status ShapeOf(const Tensor& tensor, TensorShape* shape) {
  if (tensor.dims() != 1) return Invalid("shape must be a vector");
  const auto sizes = tensor.flat<int64_t>();
  return TensorShape::BuildTensorShape(absl::Span<const int64_t>(sizes.data(), sizes.size()), shape);
}

template <class Device, bool gradient>
class FancyGatherOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &in = ctx->input(0), &index = ctx->input(1);
    TensorShape x = in.shape();
    if constexpr (gradient) OP_REQUIRES_OK(ctx, ShapeOf(ctx->input(2), &x));
    const int rank = index.dims();
    bool fits = x.dims() > rank;
    for (int d = 0; fits && d < rank; ++d) fits = x.dim_size(d) == index.dim_size(d);
    OP_REQUIRES(ctx, fits,
                Invalid(absl::StrCat("the leading dimensions of x must be those of idx, with one more to index: x is ",
                                     x.DebugString(), ", idx ", index.shape().DebugString())));
    FancyGatherProblem problem;
    problem.gradient = gradient;
    problem.element_bytes = tensorflow::DataTypeSize(in.dtype());
    problem.outer = index.NumElements();
    problem.dim = x.dim_size(rank);
    TensorShape y = index.shape();
    for (int d = rank + 1; d < x.dims(); ++d) {
      problem.inner *= x.dim_size(d);
      y.AddDim(x.dim_size(d));
    }
    OP_REQUIRES(ctx, !gradient || in.shape() == y,
                Invalid(absl::StrCat("dy must be ", y.DebugString(), ", got ", in.shape().DebugString())));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, gradient ? x : y, &out));
    if (out->NumElements() == 0) return;
    problem.index = index.flat<int32_t>().data();
    problem.x = in.data();
    problem.y = out->data();
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem));
  }
};

template <class Device, bool gradient>
class ReduceMaxOp : public OpKernel {
 public:
  explicit ReduceMaxOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("axis", &axis_));
    if (!gradient) {
      OP_REQUIRES_OK(ctx, ctx->GetAttr("keepdims", &keepdims_));
      OP_REQUIRES_OK(ctx, ctx->GetAttr("bench", &bench_));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& in = ctx->input(0);
    TensorShape x = in.shape();
    if constexpr (gradient) OP_REQUIRES_OK(ctx, ShapeOf(ctx->input(2), &x));
    const int rank = x.dims(), axis = axis_ < 0 ? axis_ + rank : axis_;
    OP_REQUIRES(ctx, 0 <= axis && axis < rank,
                Invalid(absl::StrCat("axis must be -", rank, " to ", rank - 1, " for x of shape ", x.DebugString(),
                                     ", got ", axis_)));
    ReduceMaxProblem problem;
    problem.gradient = gradient;
    problem.dtype = ToDType(in.dtype());
    problem.dim = x.dim_size(axis);
    TensorShape y;
    for (int d = 0; d < rank; ++d) {
      if (d != axis) y.AddDim(x.dim_size(d));
      if (d == axis && keepdims_) y.AddDim(1);
      if (d != axis) (d < axis ? problem.outer : problem.inner) *= x.dim_size(d);
    }
    OP_REQUIRES(ctx, problem.dim <= INT32_MAX, Invalid("axis may have at most 2^31 - 1 elements"));
    OP_REQUIRES(
        ctx, problem.dim > 0 || y.num_elements() == 0,
        Invalid(absl::StrCat("axis ", axis_, " has no elements to take the maximum of: x is ", x.DebugString())));
    Tensor *out = nullptr, *argmax = nullptr;
    if constexpr (gradient) {
      const int64_t size = problem.outer * problem.inner;
      OP_REQUIRES(
          ctx, in.NumElements() == size && ctx->input(1).NumElements() == size,
          Invalid(absl::StrCat("dy and the places must have ", size, " elements where x is ", x.DebugString(), ", got ",
                               in.shape().DebugString(), " and ", ctx->input(1).shape().DebugString())));
      OP_REQUIRES_OK(ctx, ctx->allocate_output(0, x, &out));
      problem.argmax = const_cast<int64_t*>(ctx->input(1).flat<int64_t>().data());
    } else {
      OP_REQUIRES_OK(ctx, ctx->allocate_output(0, y, &out));
      // The host's kernel is twice as fast where nobody asks for the places, as without a gradient.
      if (!std::is_same<Device, CpuDevice>::value || ctx->output_required(1)) {
        OP_REQUIRES_OK(ctx, ctx->allocate_output(1, y, &argmax));
        problem.argmax = argmax->flat<int64_t>().data();
      }
    }
    if (out->NumElements() == 0) return;
    problem.x = in.data();
    problem.y = out->data();
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem, bench_, "ReduceMax", double(in.TotalBytes())));
  }

 private:
  int axis_ = 0, bench_ = 0;
  bool keepdims_ = false;
};

// -------------------------------------------------------------------------------------------------------- variables

template <class Device>
absl::Status AddTo(OpKernelContext* ctx, const Tensor& y, const Tensor& x, Tensor* out) {
  if (y.shape() != x.shape() || y.dtype() != x.dtype())
    return Invalid(absl::StrCat("assign_add: the variable is ", tensorflow::DataTypeString(y.dtype()),
                                y.shape().DebugString(), ", the value ", tensorflow::DataTypeString(x.dtype()),
                                x.shape().DebugString()));
  if (x.NumElements() == 0) return absl::OkStatus();
  EwProblem problem;
  problem.op = EwOp::kAdd;
  problem.dtype = ToDType(x.dtype());
  problem.n = x.NumElements();
  problem.in[0] = y.data();
  problem.in[1] = x.data();
  problem.out[0] = out->data();
  return RunProblem<Device>(ctx, problem);
}

template <class Device>
class AssignAddRefOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    {
      tensorflow::mutex_lock lock(*ctx->input_ref_mutex(0));
      Tensor y = ctx->mutable_input(0, /*lock_held=*/true);
      OP_REQUIRES(ctx, y.IsInitialized(),
                  absl::FailedPreconditionError("assign_add: the variable has not been initialized"));
      OP_REQUIRES_OK(ctx, AddTo<Device>(ctx, y, ctx->input(1), &y));
    }
    ctx->forward_ref_input_to_ref_output(0, 0);
  }
};

template <class Device>
class AssignAddVariableOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    const absl::Status found = LookupResource(ctx, HandleFromInput(ctx, 0), &variable);
    OP_REQUIRES(ctx, found.ok(),
                absl::FailedPreconditionError(
                    absl::StrCat("assign_add: the variable has not been initialized: ", found.message())));
    tensorflow::mutex_lock lock(*variable->mu());
    Tensor* y = variable->tensor();
    OP_REQUIRES(ctx, variable->is_initialized && y->IsInitialized(),
                absl::FailedPreconditionError("assign_add: the variable has not been initialized"));
    if (y->RefCountIsOne()) {
      OP_REQUIRES_OK(ctx, AddTo<Device>(ctx, *y, ctx->input(1), y));
      return;
    }
    // Whoever has read the variable may still hold its buffer: the sum goes to one of its own.
    Tensor sum;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(y->dtype(), y->shape(), &sum));
    OP_REQUIRES_OK(ctx, AddTo<Device>(ctx, *y, ctx->input(1), &sum));
    *y = sum;
  }
};

// ----------------------------------------------------------------------------------------------------- registration

#define EW_KERNEL(name, device, ...) REGISTER_KERNEL_BUILDER(Name(name).Device(device), __VA_ARGS__)
#define EW_HOST_KERNEL(name, device, host, ...) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(device).HostMemory(host), __VA_ARGS__)

#define REGISTER_DEVICE(device, Backend)                                                                            \
  EW_KERNEL("EwZXy", device, MapOp<Backend, 2, 1, 0, 5>);                                                           \
  EW_KERNEL("EwZXa", device, MapOp<Backend, 1, 1, 6, 17>);                                                          \
  EW_KERNEL("EwDxdyDzxy", device, MapOp<Backend, 3, 2, 2, 5>);                                                      \
  EW_KERNEL("EwDxDzza", device, MapOp<Backend, 2, 1, 12, 14>);                                                      \
  EW_KERNEL("EwDxDzxa", device, MapOp<Backend, 2, 1, 6, 17>);                                                       \
  EW_KERNEL("EwZXb", device, ChannelOp<Backend, ChannelKind::kEw>);                                                 \
  EW_KERNEL("EwDbDzb", device, ChannelOp<Backend, ChannelKind::kEwBiasGrad>);                                       \
  EW_KERNEL("EwDxdgDzxg", device, ChannelOp<Backend, ChannelKind::kEwGainGrad>);                                    \
  EW_KERNEL("BiasRelu", device, ChannelOp<Backend, ChannelKind::kBiasRelu>);                                        \
  EW_KERNEL("BiasReluGrad", device, ChannelOp<Backend, ChannelKind::kBiasReluGrad>);                                \
  EW_KERNEL("BiasGrad", device, ChannelOp<Backend, ChannelKind::kBiasGrad>);                                        \
  EW_HOST_KERNEL("FilterTensor", device, "scale", FilterOp<Backend>);                                               \
  EW_KERNEL("FloatCast", device, CastOp<Backend>);                                                                  \
  EW_KERNEL("AddN8", device, AddNOp<Backend>);                                                                      \
  REGISTER_KERNEL_BUILDER(                                                                                          \
      Name("GenDropoutMask").Device(device).HostMemory("seed").HostMemory("size").HostMemory("keep_prob"),          \
      GenDropoutMaskOp<Backend>);                                                                                   \
  REGISTER_KERNEL_BUILDER(Name("Dropout").Device(device).HostMemory("seed").HostMemory("keep_prob"),                \
                          DropoutOp<Backend>);                                                                      \
  REGISTER_KERNEL_BUILDER(Name("ApplyDropoutMask").Device(device).HostMemory("keep_prob").HostMemory("mask_shape"), \
                          ApplyDropoutMaskOp<Backend>);                                                             \
  REGISTER_KERNEL_BUILDER(Name("ConcreteGate").Device(device).HostMemory("seed").HostMemory("tempurature"),         \
                          ConcreteGateOp<Backend>);                                                                 \
  EW_HOST_KERNEL("ConcreteGateGrad", device, "tempurature", ConcreteMapOp<Backend, true>);                          \
  EW_KERNEL("ConcreteGateInfer", device, ConcreteMapOp<Backend, false>);                                            \
  EW_KERNEL("FancyGather", device, FancyGatherOp<Backend, false>);                                                  \
  EW_HOST_KERNEL("FancyGatherGrad", device, "shape", FancyGatherOp<Backend, true>);                                 \
  EW_KERNEL("ReduceMax", device, ReduceMaxOp<Backend, false>);                                                      \
  EW_HOST_KERNEL("ReduceMaxGrad", device, "shape", ReduceMaxOp<Backend, true>);                                     \
  EW_KERNEL("AssignAddOp", device, AssignAddRefOp<Backend>);                                                        \
  EW_HOST_KERNEL("AssignAddVariable", device, "resource", AssignAddVariableOp<Backend>)

REGISTER_DEVICE(tensorflow::DEVICE_CPU, CpuDevice);
#ifdef BLOCKSPARSE_CUDA
REGISTER_DEVICE(tensorflow::DEVICE_GPU, GpuDevice);
#endif

}  // namespace
}  // namespace blocksparse
