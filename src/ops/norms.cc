// Normalization ops: registration, shape functions, checks, and the way from tensors to a kernel.
#include "kernels/norms.h"

#include "ops/common.h"

namespace blocksparse {

// ----------------------------------------------------------------------------------------- from problem to kernel

template <class Problem>
static int64_t WorkspaceBytes(CpuDevice& device, const Problem& problem) {
  return cpu::WorkspaceBytes(problem, device.pool()->threads());
}
template <class Problem>
static Status Run(CpuDevice& device, const Problem& problem, void* workspace) {
  return cpu::Run(problem, workspace, device.pool());
}
#ifdef BLOCKSPARSE_CUDA
template <class Problem>
static int64_t WorkspaceBytes(GpuDevice& device, const Problem& problem) {
  return cuda::WorkspaceBytes(problem, device.chip());
}
template <class Problem>
static Status Run(GpuDevice& device, const Problem& problem, void* workspace) {
  return cuda::Run(problem, workspace, device.chip(), device.stream());
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

absl::Status AxisError(int axis, int rank, const std::string& shape) {
  return absl::InvalidArgumentError(
      rank == 0 ? absl::StrCat("x must have at least one dimension, got ", shape)
                : absl::StrCat("axis must be ", -rank, " to ", rank - 1, " for x of shape ", shape, ", got ", axis));
}

absl::Status SegmentsError(int64_t segments, int64_t features) {
  return absl::InvalidArgumentError(
      absl::StrCat("segments must be at least 1 and divide the ", features, " features, got ", segments));
}

// A gain or bias has one element for each of `features`, in any shape.
absl::Status CheckChannels(InferenceContext* c, const char* name, ShapeHandle shape, DimensionHandle features) {
  const DimensionHandle elements = c->NumElements(shape);
  if (!c->ValueKnown(elements) || !c->ValueKnown(features) || c->Value(elements) == c->Value(features))
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " must have ", c->Value(features), " elements, one for each ",
                                                 "feature, got ", c->DebugString(shape)));
}

// Input 0, and the next `others`, are x; then gain and bias. `*rows` becomes the shape of the statistics.
absl::Status LayerShapes(InferenceContext* c, int others, ShapeHandle* x, ShapeHandle* rows) {
  int axis;
  int64_t segments;
  TF_RETURN_IF_ERROR(c->GetAttr("axis", &axis));
  TF_RETURN_IF_ERROR(c->GetAttr("S", &segments));
  *x = c->input(0);
  for (int i = 1; i <= others; ++i) TF_RETURN_IF_ERROR(c->Merge(*x, c->input(i), x));
  *rows = c->UnknownShape();
  if (!c->RankKnown(*x)) return absl::OkStatus();
  const int rank = c->Rank(*x);
  if (axis < -rank || axis >= rank) return AxisError(axis, rank, c->DebugString(*x));
  if (axis < 0) axis += rank;
  const DimensionHandle features = c->Dim(*x, axis);
  if (segments < 1 || (c->ValueKnown(features) && c->Value(features) % segments != 0))
    return SegmentsError(segments, c->ValueKnown(features) ? c->Value(features) : -1);
  TF_RETURN_IF_ERROR(CheckChannels(c, "gain", c->input(others + 1), features));
  TF_RETURN_IF_ERROR(CheckChannels(c, "bias", c->input(others + 2), features));
  ShapeHandle head, tail;
  TF_RETURN_IF_ERROR(c->Subshape(*x, 0, axis, &head));
  TF_RETURN_IF_ERROR(c->Subshape(*x, axis + 1, &tail));
  TF_RETURN_IF_ERROR(c->Concatenate(c->Vector(segments), head, rows));
  return c->Concatenate(*rows, tail, rows);
}

#define LAYER_ATTRS                  \
  Attr("T: {half, bfloat16, float}") \
      .Attr("S: int = 1")            \
      .Attr("axis: int = 1")         \
      .Attr("epsilon: float = 1e-6") \
      .Attr("relu: bool = false")    \
      .Attr("bench: int = 0")

REGISTER_OP("LayerNorm")
    .Input("x: T")
    .Input("g: float")
    .Input("b: float")
    .Output("y: T")
    .Output("mean: float")
    .Output("residual: float")
    .Output("rstd: float")
    .LAYER_ATTRS.SetShapeFn([](InferenceContext* c) {
      ShapeHandle x, rows;
      TF_RETURN_IF_ERROR(LayerShapes(c, 0, &x, &rows));
      c->set_output(0, x);
      for (int i = 1; i < 4; ++i) c->set_output(i, rows);
      return absl::OkStatus();
    });

REGISTER_OP("LayerNormGrad")
    .Input("dy: T")
    .Input("x: T")
    .Input("g: float")
    .Input("b: float")
    .Input("mean: float")
    .Input("residual: float")
    .Input("rstd: float")
    .Output("dx: T")
    .Output("dg: float")
    .Output("db: float")
    .LAYER_ATTRS.SetShapeFn([](InferenceContext* c) {
      ShapeHandle x, rows;
      TF_RETURN_IF_ERROR(LayerShapes(c, 1, &x, &rows));
      for (int i = 4; i < 7; ++i) TF_RETURN_IF_ERROR(c->Merge(rows, c->input(i), &rows));
      c->set_output(0, x);
      c->set_output(1, c->input(2));
      c->set_output(2, c->input(3));
      return absl::OkStatus();
    });

// x (after dy in a gradient) and the vectors of channels that follow.
absl::Status BatchShapes(InferenceContext* c, int others, std::initializer_list<const char*> vectors, ShapeHandle* x) {
  *x = c->input(0);
  for (int i = 1; i <= others; ++i) TF_RETURN_IF_ERROR(c->Merge(*x, c->input(i), x));
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(*x, 2, x));
  if (!c->RankKnown(*x)) return absl::OkStatus();
  int input = others + 1;
  for (const char* name : vectors) TF_RETURN_IF_ERROR(CheckChannels(c, name, c->input(input++), c->Dim(*x, 1)));
  return absl::OkStatus();
}

#define BATCH_ATTRS Attr("T: {half, bfloat16, float}").Attr("eps: float = 1e-6").Attr("bench: int = 0")

REGISTER_OP("BatchNormNCDHW")
    .Input("x: T")
    .Input("g: float")
    .Input("b: float")
    .Output("y: T")
    .Output("m: float")
    .Output("v: float")
    .Output("residual: float")
    .BATCH_ATTRS.SetShapeFn([](InferenceContext* c) {
      ShapeHandle x;
      TF_RETURN_IF_ERROR(BatchShapes(c, 0, {"gain", "bias"}, &x));
      c->set_output(0, x);
      for (int i = 1; i < 4; ++i) c->set_output(i, c->input(1));
      return absl::OkStatus();
    });

REGISTER_OP("BatchNormInferenceNCDHW")
    .Input("x: T")
    .Input("g: float")
    .Input("b: float")
    .Input("m: float")
    .Input("v: float")
    .Output("y: T")
    .BATCH_ATTRS.SetShapeFn([](InferenceContext* c) {
      ShapeHandle x;
      TF_RETURN_IF_ERROR(BatchShapes(c, 0, {"gain", "bias", "mean", "variance"}, &x));
      c->set_output(0, x);
      return absl::OkStatus();
    });

// With `inference` the statistics are constants.
REGISTER_OP("BatchNormGradNCDHW")
    .Input("dy: T")
    .Input("x: T")
    .Input("g: float")
    .Input("m: float")
    .Input("v: float")
    .Input("residual: float")
    .Output("dx: T")
    .Output("dg: float")
    .Output("db: float")
    .Attr("inference: bool = false")
    .BATCH_ATTRS.SetShapeFn([](InferenceContext* c) {
      ShapeHandle x;
      TF_RETURN_IF_ERROR(BatchShapes(c, 1, {"gain", "mean", "variance", "residual"}, &x));
      c->set_output(0, x);
      c->set_output(1, c->input(2));
      c->set_output(2, c->input(2));
      return absl::OkStatus();
    });

// Every tensor is read or written once.
double Bytes(int64_t elements, DType dtype, bool gradient) {
  return double(elements) * double(SizeOf(dtype)) * (gradient ? 3 : 2);
}

// ------------------------------------------------------------------------------------------------------- kernels

absl::Status CheckVector(const char* name, const Tensor& tensor, int64_t features) {
  if (tensor.NumElements() == features) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " must have ", features, " elements, one for each feature, got ",
                                                 tensor.shape().DebugString()));
}

absl::Status CheckSame(const char* name, const Tensor& tensor, const TensorShape& expected) {
  if (tensor.shape() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must be ", expected.DebugString(), ", got ", tensor.shape().DebugString()));
}

// Output 0, on the host in the buffer of one of the inputs where that may be.
template <class Device>
absl::Status AllocateLike(OpKernelContext* ctx, std::initializer_list<int> inputs, const TensorShape& shape, int bench,
                          Tensor** out) {
  if (!Device::kInPlace) return ctx->allocate_output(0, shape, out);
  return AllocateOver(ctx, inputs, shape, bench, out);
}

template <class Device, bool gradient>
class LayerNormOp : public OpKernel {
 public:
  explicit LayerNormOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("S", &segments_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("axis", &axis_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("epsilon", &epsilon_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("relu", &relu_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bench", &bench_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
  }

  void Compute(OpKernelContext* ctx) override {
    constexpr int kX = gradient ? 1 : 0;
    const Tensor &x = ctx->input(kX), &g = ctx->input(kX + 1), &b = ctx->input(kX + 2);
    const int rank = x.dims();
    OP_REQUIRES(ctx, axis_ >= -rank && axis_ < rank, AxisError(axis_, rank, x.shape().DebugString()));
    const int axis = axis_ < 0 ? axis_ + rank : axis_;
    const int64_t features = x.dim_size(axis);
    OP_REQUIRES(ctx, segments_ >= 1 && features % segments_ == 0, SegmentsError(segments_, features));
    OP_REQUIRES_OK(ctx, CheckVector("gain", g, features));
    OP_REQUIRES_OK(ctx, CheckVector("bias", b, features));

    LayerNormProblem p;
    p.gradient = gradient, p.relu = relu_, p.dtype = ToDType(dtype_), p.epsilon = epsilon_;
    p.segments = segments_, p.features = features / segments_;
    TensorShape rows({segments_});
    for (int d = 0; d < rank; ++d) {
      if (d == axis) continue;
      (d < axis ? p.outer : p.inner) *= x.dim_size(d);
      rows.AddDim(x.dim_size(d));
    }
    p.x = x.data(), p.gain = g.flat<float>().data(), p.bias = b.flat<float>().data();
    if constexpr (gradient) {
      OP_REQUIRES_OK(ctx, CheckSame("dy", ctx->input(0), x.shape()));
      float** const statistics[] = {&p.mean, &p.residual, &p.rstd};
      const char* const names[] = {"mean", "residual", "rstd"};
      for (int i = 0; i < 3; ++i) {
        OP_REQUIRES_OK(ctx, CheckSame(names[i], ctx->input(4 + i), rows));
        *statistics[i] = const_cast<float*>(ctx->input(4 + i).flat<float>().data());  // only read
      }
      Tensor *dx, *dg, *db;
      OP_REQUIRES_OK(ctx, AllocateLike<Device>(ctx, {0, 1}, x.shape(), bench_, &dx));
      OP_REQUIRES_OK(ctx, ctx->allocate_output(1, g.shape(), &dg));
      OP_REQUIRES_OK(ctx, ctx->allocate_output(2, b.shape(), &db));
      p.dy = ctx->input(0).data(), p.dx = dx->data();
      p.dgain = dg->flat<float>().data(), p.dbias = db->flat<float>().data();
    } else {
      Tensor *y, *statistics[3];
      OP_REQUIRES_OK(ctx, AllocateLike<Device>(ctx, {0}, x.shape(), bench_, &y));
      for (int i = 0; i < 3; ++i) OP_REQUIRES_OK(ctx, ctx->allocate_output(1 + i, rows, &statistics[i]));
      p.y = y->data();
      p.mean = statistics[0]->flat<float>().data();
      p.residual = statistics[1]->flat<float>().data();
      p.rstd = statistics[2]->flat<float>().data();
    }
    OP_REQUIRES_OK(ctx, ToAbsl(CheckNorm(p)));
    const double bytes = Bytes(x.NumElements(), p.dtype, gradient);
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, p, bench_, gradient ? "LayerNormGrad" : "LayerNorm", bytes));
  }

 private:
  int64_t segments_;
  int axis_, bench_;
  float epsilon_;
  bool relu_;
  tensorflow::DataType dtype_;
};

enum class Batch { kForward, kInference, kGradient };

template <class Device, Batch kind>
class BatchNormOp : public OpKernel {
 public:
  explicit BatchNormOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("eps", &epsilon_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bench", &bench_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    if (kind == Batch::kGradient) OP_REQUIRES_OK(ctx, ctx->GetAttr("inference", &inference_));
  }

  void Compute(OpKernelContext* ctx) override {
    constexpr int kX = kind == Batch::kGradient ? 1 : 0;
    const Tensor &x = ctx->input(kX), &g = ctx->input(kX + 1);
    OP_REQUIRES(ctx, x.dims() >= 2,
                absl::InvalidArgumentError(
                    absl::StrCat("x must be [N, C, ...], of rank 2 or more, got ", x.shape().DebugString())));
    const int64_t channels = x.dim_size(1);
    static const char* const kNames[3][5] = {
        {"gain", "bias"}, {"gain", "bias", "mean", "variance"}, {"gain", "mean", "variance", "residual"}};
    for (int i = kX + 1; i < ctx->num_inputs(); ++i)
      OP_REQUIRES_OK(ctx, CheckVector(kNames[int(kind)][i - kX - 1], ctx->input(i), channels));
    const auto vector = [&](int i) { return const_cast<float*>(ctx->input(i).flat<float>().data()); };  // only read

    BatchNormProblem p;
    p.gradient = kind == Batch::kGradient;
    p.inference = kind == Batch::kInference || inference_;
    p.dtype = ToDType(dtype_), p.epsilon = epsilon_;
    p.outer = x.dim_size(0), p.channels = channels;
    for (int d = 2; d < x.dims(); ++d) p.inner *= x.dim_size(d);
    p.x = x.data(), p.gain = vector(kX + 1);
    Tensor *out, *vectors[3];
    OP_REQUIRES_OK(ctx, kX == 0 ? AllocateLike<Device>(ctx, {0}, x.shape(), bench_, &out)
                                : AllocateLike<Device>(ctx, {0, 1}, x.shape(), bench_, &out));
    for (int i = 1; i < ctx->num_outputs(); ++i)
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, g.shape(), &vectors[i - 1]));
    if constexpr (kind == Batch::kGradient) {
      OP_REQUIRES_OK(ctx, CheckSame("dy", ctx->input(0), x.shape()));
      p.dy = ctx->input(0).data(), p.dx = out->data();
      p.mean = vector(3), p.variance = vector(4), p.residual = vector(5);
      p.dgain = vectors[0]->flat<float>().data(), p.dbias = vectors[1]->flat<float>().data();
    } else {
      p.y = out->data(), p.bias = vector(2);
      if constexpr (kind == Batch::kInference) {
        p.mean = vector(3), p.variance = vector(4);
      } else {
        p.mean = vectors[0]->flat<float>().data(), p.variance = vectors[1]->flat<float>().data();
        p.residual = vectors[2]->flat<float>().data();
      }
    }
    static const char* const kLabels[] = {"BatchNorm", "BatchNormInference", "BatchNormGrad"};
    OP_REQUIRES_OK(ctx, ToAbsl(CheckNorm(p)));
    const double bytes = Bytes(x.NumElements(), p.dtype, p.gradient);
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, p, bench_, kLabels[int(kind)], bytes));
  }

 private:
  int bench_;
  float epsilon_;
  bool inference_ = false;
  tensorflow::DataType dtype_;
};

#define REGISTER_DEVICE(device, Backend)                                                                            \
  REGISTER_KERNEL_BUILDER(Name("LayerNorm").Device(device), LayerNormOp<Backend, false>);                           \
  REGISTER_KERNEL_BUILDER(Name("LayerNormGrad").Device(device), LayerNormOp<Backend, true>);                        \
  REGISTER_KERNEL_BUILDER(Name("BatchNormNCDHW").Device(device), BatchNormOp<Backend, Batch::kForward>);            \
  REGISTER_KERNEL_BUILDER(Name("BatchNormInferenceNCDHW").Device(device), BatchNormOp<Backend, Batch::kInference>); \
  REGISTER_KERNEL_BUILDER(Name("BatchNormGradNCDHW").Device(device), BatchNormOp<Backend, Batch::kGradient>)

REGISTER_DEVICE(tensorflow::DEVICE_CPU, CpuDevice);
#ifdef BLOCKSPARSE_CUDA
REGISTER_DEVICE(tensorflow::DEVICE_GPU, GpuDevice);
#endif

}  // namespace
}  // namespace blocksparse
