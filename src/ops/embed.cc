// The ops of embedding lookup: registration, shape functions, checks, and the way from tensors to a kernel.
#include "kernels/embed.h"

#include <string>

#include "ops/common.h"

namespace blocksparse {

// ----------------------------------------------------------------------------------------- from problem to kernel

static int64_t WorkspaceBytes(CpuDevice&, const EmbeddingProblem& problem) { return cpu::WorkspaceBytes(problem); }
static Status Run(CpuDevice& device, const EmbeddingProblem& problem, void* workspace) {
  return cpu::Run(problem, workspace, device.pool());
}
#ifdef BLOCKSPARSE_CUDA
static int64_t WorkspaceBytes(GpuDevice&, const EmbeddingProblem& problem) { return cuda::WorkspaceBytes(problem); }
static Status Run(GpuDevice& device, const EmbeddingProblem& problem, void* workspace) {
  return cuda::Run(problem, workspace, device.stream());
}
#endif

namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

#define EMBEDDING_OP(name)                \
  REGISTER_OP(name)                       \
      .Attr("T: {half, bfloat16, float}") \
      .Attr("TI: {int8, uint8, int16, uint16, int32, uint32, int64, uint64}")

EMBEDDING_OP("EmbeddingLookup")
    .Input("emb: T")
    .Input("idx: TI")
    .Output("y: T")
    .Attr("bench: int = 0")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle emb, y;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &emb));
      TF_RETURN_IF_ERROR(c->Concatenate(c->input(1), c->Vector(c->Dim(emb, 1)), &y));
      c->set_output(0, y);
      return absl::OkStatus();
    });
EMBEDDING_OP("EmbeddingLookupGrad")
    .Input("dy: T")
    .Input("idx: TI")
    .Input("c: int64")
    .Output("dw: T")
    .Attr("bench: int = 0")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle dy, rows, dw;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &dy));
      if (c->RankKnown(dy)) {
        TF_RETURN_IF_ERROR(c->Subshape(dy, 0, -1, &rows));
        TF_RETURN_IF_ERROR(c->Merge(rows, c->input(1), &rows));
      }
      tensorflow::shape_inference::DimensionHandle count;
      TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(2, &count));
      c->set_output(0, c->Matrix(count, c->RankKnown(dy) ? c->Dim(dy, -1) : c->UnknownDim()));
      return absl::OkStatus();
    });

template <class Device, bool gradient>
class EmbeddingOp : public OpKernel {
 public:
  explicit EmbeddingOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bench", &bench_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &x = ctx->input(0), &index = ctx->input(1);
    EmbeddingProblem problem;
    problem.gradient = gradient;
    problem.dtype = ToDType(x.dtype());
    problem.index_bytes = tensorflow::DataTypeSize(index.dtype());
    problem.index_signed = !tensorflow::DataTypeIsUnsigned(index.dtype());
    problem.count = index.NumElements();
    TensorShape y = index.shape();
    if constexpr (gradient) {
      const Tensor& rows = ctx->input(2);
      OP_REQUIRES(ctx, rows.NumElements() == 1 && rows.flat<int64_t>()(0) >= 0,
                  Invalid("c must be a scalar, the number of rows, 0 or more"));
      OP_REQUIRES(ctx, x.dims() == index.dims() + 1,
                  Invalid(absl::StrCat("dy must have one dimension more than idx, got ", x.shape().DebugString(),
                                       " and ", index.shape().DebugString())));
      problem.rows = rows.flat<int64_t>()(0);
      problem.width = x.dim_size(x.dims() - 1);
      y.AddDim(problem.width);
      OP_REQUIRES(ctx, x.shape() == y,
                  Invalid(absl::StrCat("dy must be ", y.DebugString(), ", got ", x.shape().DebugString())));
      y = TensorShape({problem.rows, problem.width});
    } else {
      OP_REQUIRES(ctx, x.dims() == 2,
                  Invalid(absl::StrCat("emb must be [rows, width], got ", x.shape().DebugString())));
      problem.rows = x.dim_size(0);
      problem.width = x.dim_size(1);
      y.AddDim(problem.width);
    }
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, y, &out));
    if (out->NumElements() == 0) return;
    problem.index = index.data();
    problem.x = x.data();
    problem.y = out->data();
    const double bytes = double(x.TotalBytes()) + double(out->TotalBytes());
    OP_REQUIRES_OK(ctx, RunProblem<Device>(ctx, problem, bench_, type_string().c_str(), bytes));
  }

 private:
  int bench_ = 0;
};

#define REGISTER_DEVICE(device, Backend)                                                        \
  REGISTER_KERNEL_BUILDER(Name("EmbeddingLookup").Device(device), EmbeddingOp<Backend, false>); \
  REGISTER_KERNEL_BUILDER(Name("EmbeddingLookupGrad").Device(device).HostMemory("c"), EmbeddingOp<Backend, true>)

REGISTER_DEVICE(tensorflow::DEVICE_CPU, CpuDevice);
#ifdef BLOCKSPARSE_CUDA
REGISTER_DEVICE(tensorflow::DEVICE_GPU, GpuDevice);
#endif

}  // namespace
}  // namespace blocksparse
