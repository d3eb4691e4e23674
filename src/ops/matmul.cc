// Ops of the block-sparse matrix product: registration, shape functions, checks, and the way from tensors to a kernel.
#include "kernels/matmul.h"

#include <cstdio>
#include <memory>
#include <type_traits>
#include <vector>

#include "ops/common.h"
#include "ops/matmul_plans.h"
#include "tensorflow/core/platform/tensor_float_32_utils.h"

namespace blocksparse {
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

// `shape` with its feature dimension, the first (axis 0) or the last (axis 1), checked against `from` and set to `to`.
absl::Status ReplaceFeatures(InferenceContext* c, ShapeHandle shape, int64_t from, int64_t to, ShapeHandle* out) {
  int axis;
  TF_RETURN_IF_ERROR(c->GetAttr("axis", &axis));
  if (!c->RankKnown(shape)) {
    *out = c->UnknownShape();
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(shape, 1, &shape));
  const int dim = axis == 0 ? 0 : c->Rank(shape) - 1;
  DimensionHandle unused;
  TF_RETURN_IF_ERROR(c->WithValue(c->Dim(shape, dim), from, &unused));
  return c->ReplaceDim(shape, dim, c->MakeDim(to), out);
}

absl::Status XpropShape(InferenceContext* c, const char* from, const char* to) {
  int64_t features_in, features_out, bsize;
  TF_RETURN_IF_ERROR(c->GetAttr(from, &features_in));
  TF_RETURN_IF_ERROR(c->GetAttr(to, &features_out));
  TF_RETURN_IF_ERROR(c->GetAttr("bsize", &bsize));
  ShapeHandle out, unused;
  TF_RETURN_IF_ERROR(ReplaceFeatures(c, c->input(0), features_in, features_out, &out));
  TF_RETURN_IF_ERROR(c->Merge(c->input(1), c->MakeShape({c->UnknownDim(), bsize, bsize}), &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &unused));
  c->set_output(0, out);
  return absl::OkStatus();
}

absl::Status WeightGradShape(InferenceContext* c) {
  int64_t C, K, bsize, blocks;
  int params;
  TF_RETURN_IF_ERROR(c->GetAttr("C", &C));
  TF_RETURN_IF_ERROR(c->GetAttr("K", &K));
  TF_RETURN_IF_ERROR(c->GetAttr("bsize", &bsize));
  TF_RETURN_IF_ERROR(c->GetAttr("blocks", &blocks));
  TF_RETURN_IF_ERROR(c->GetAttr("params", &params));
  ShapeHandle unused;
  for (int p = 0; p < params; ++p) {
    TF_RETURN_IF_ERROR(ReplaceFeatures(c, c->input(p), C, C, &unused));
    TF_RETURN_IF_ERROR(ReplaceFeatures(c, c->input(params + p), K, K, &unused));
  }
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * params), 1, &unused));
  c->set_output(0, c->MakeShape({blocks > 0 ? c->MakeDim(blocks) : c->UnknownDim(), bsize, bsize}));
  return absl::OkStatus();
}

absl::Status GateGradShape(InferenceContext* c) {
  ShapeHandle w, gate;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 3, &w));
  TF_RETURN_IF_ERROR(c->Merge(w, c->input(1), &w));
  TF_RETURN_IF_ERROR(c->Merge(c->input(2), c->Vector(c->Dim(w, 0)), &gate));
  c->set_output(0, w);
  c->set_output(1, gate);
  return absl::OkStatus();
}

// What all three products say of a layout. `tf32` false keeps float32 true whatever TensorFlow's switch says.
#define MATMUL_ATTRS                  \
  Attr("T: {half, bfloat16, float}")  \
      .Attr("axis: int")              \
      .Attr("bsize: int")             \
      .Attr("C: int")                 \
      .Attr("K: int")                 \
      .Attr("ngate: int >= 0 = 0")    \
      .Attr("gated_dw: bool = false") \
      .Attr("tf32: bool = true")      \
      .Attr("bench: int = 0")
// What forward and input gradient carry for the gradients taken of them.
#define XPROP_ATTRS MATMUL_ATTRS.Attr("gate_grad: bool = false").Attr("dw_dtype: {half, bfloat16, float} = DT_FLOAT")
// `blocks` lets the shape be known where the table is not; 0 leaves it open.
#define WEIGHT_GRAD_ATTRS \
  MATMUL_ATTRS.Attr("dw_dtype: {half, bfloat16, float}").Attr("params: int >= 1").Attr("blocks: int >= 0 = 0")

REGISTER_OP("BlocksparseMatmul")
    .Input("x: T")
    .Input("w: T")
    .Input("table: int32")
    .Input("gate: ngate * float")
    .Output("y: T")
    .XPROP_ATTRS.SetShapeFn([](InferenceContext* c) { return XpropShape(c, "C", "K"); });

REGISTER_OP("BlocksparseMatmulDX")
    .Input("dy: T")
    .Input("w: T")
    .Input("table: int32")
    .Input("gate: ngate * float")
    .Output("dx: T")
    .XPROP_ATTRS.SetShapeFn([](InferenceContext* c) { return XpropShape(c, "K", "C"); });

REGISTER_OP("BlocksparseMatmulDW")
    .Input("x: params * T")
    .Input("dy: params * T")
    .Input("table: int32")
    .Input("gate: ngate * float")
    .Output("dw: dw_dtype")
    .WEIGHT_GRAD_ATTRS.SetShapeFn(WeightGradShape);

REGISTER_OP("BlocksparseMatmulDWA")
    .Input("x: params * T")
    .Input("dy: params * T")
    .Input("table: int32")
    .Input("gate: ngate * float")
    .Input("dwi: float")
    .Output("dw: dw_dtype")
    .WEIGHT_GRAD_ATTRS.SetShapeFn(WeightGradShape);

REGISTER_OP("BlocksparseMatmulDG")
    .Input("dw: float")
    .Input("w: T")
    .Input("gate: float")
    .Output("dw_out: dw_dtype")
    .Output("dg: float")
    .Attr("T: {half, bfloat16, float}")
    .Attr("dw_dtype: {half, bfloat16, float}")
    .Attr("bsize: int")
    .Attr("gated: bool = false")
    .SetShapeFn(GateGradShape);

// ------------------------------------------------------------------------------------------ from problem to kernel

// A device as a product meets it: the backend's functions, with what they need of TensorFlow.
class CpuMatmul : public CpuDevice {
 public:
  using CpuDevice::CpuDevice;
  MatmulChoice Choose(const MatmulProblem& p, const LayoutTable& t) {
    return cpu::ChooseMatmul(p, t, pool()->threads());
  }
  absl::Status Plan(const MatmulProblem& p, const LayoutTable& t, const MatmulChoice& c, MatmulPlans::Entry* entry) {
    return ToAbsl(cpu::PlanMatmul(p, t, c, &entry->plan));
  }
  int64_t WorkspaceBytes(const MatmulProblem& p, const MatmulChoice& c, const MatmulPlan& plan) {
    return cpu::MatmulWorkspaceBytes(p, c, plan, pool()->threads());
  }
  Status Run(const MatmulProblem& p, const MatmulChoice& c, const MatmulPlans::Entry& entry, void* workspace) {
    return cpu::RunMatmul(p, c, entry.plan, workspace, pool());
  }
  Status Run(const GateGradProblem& p) { return cpu::RunGateGrad(p, pool()); }
};

#ifdef BLOCKSPARSE_CUDA
class GpuMatmul : public GpuDevice {
 public:
  explicit GpuMatmul(OpKernelContext* ctx) : GpuDevice(ctx), ctx_(ctx) {}
  MatmulChoice Choose(const MatmulProblem& p, const LayoutTable& t) { return cuda::ChooseMatmul(p, t, chip()); }
  absl::Status Plan(const MatmulProblem& p, const LayoutTable& t, const MatmulChoice& c, MatmulPlans::Entry* entry) {
    TF_RETURN_IF_ERROR(ToAbsl(cuda::PlanMatmul(p, t, c, &entry->plan)));
    const auto& words = entry->plan.words;
    const int64_t bytes = int64_t(words.size()) * 4;
    TF_RETURN_IF_ERROR(ctx_->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}), &entry->words));
    return ToAbsl(cuda::CopyToDevice(entry->words.data(), words.data(), bytes, stream()));
  }
  int64_t WorkspaceBytes(const MatmulProblem& p, const MatmulChoice& c, const MatmulPlan& plan) {
    return cuda::MatmulWorkspaceBytes(p, c, plan, chip());
  }
  Status Run(const MatmulProblem& p, const MatmulChoice& c, const MatmulPlans::Entry& entry, void* workspace) {
    const auto* words = static_cast<const int32_t*>(entry.words.data());
    return cuda::RunMatmul(p, c, entry.plan, words, workspace, chip(), stream());
  }
  Status Run(const GateGradProblem& p) { return cuda::RunGateGrad(p, stream()); }

 private:
  OpKernelContext* ctx_;
};
#endif

absl::Status CreatePlans(MatmulPlans** plans) {
  *plans = new MatmulPlans;
  return absl::OkStatus();
}

// The launch repeated `bench` times, its mean time printed. Every repeat writes the same output.
template <class Device, class Run>
absl::Status Bench(int bench, const MatmulProblem& problem, const MatmulChoice& choice, Device& device, Run run) {
  TF_RETURN_IF_ERROR(ToAbsl(run()));
  double ms;
  TF_RETURN_IF_ERROR(MeanMs(device, bench, run, &ms));
  int64_t n = 0;
  for (int p = 0; p < problem.pairs; ++p) n += problem.n[p];
  const double flops = 2.0 * double(n) * problem.blocks * problem.bsize * problem.bsize;
  static const char* const kNames[] = {"FPROP", "BPROP", "UPDAT"};
  std::printf("%s %d-%d C:%lld K:%lld blks:%d N:%lld %s %.4f ms %.1f GFLOPS\n", kNames[int(problem.product)],
              problem.bsize, problem.axis, static_cast<long long>(problem.C()), static_cast<long long>(problem.K()),
              problem.blocks, static_cast<long long>(n), choice.name, ms, flops / ms * 1e-6);
  std::fflush(stdout);
  return absl::OkStatus();
}

// Choose, find or make the plan, allocate scratch, run.
template <class Device>
absl::Status RunProduct(OpKernelContext* ctx, const MatmulProblem& problem, const LayoutTable& table, int bench) {
  TF_RETURN_IF_ERROR(ToAbsl(CheckMatmul(problem, table)));
  Device device(ctx);
  TF_RETURN_IF_ERROR(ToAbsl(device.Prepare()));
  const MatmulChoice choice = device.Choose(problem, table);

  MatmulPlans* plans = nullptr;
  TF_RETURN_IF_ERROR(
      ctx->resource_manager()->LookupOrCreate<MatmulPlans>("blocksparse", "matmul_plans", &plans, CreatePlans));
  tensorflow::core::ScopedUnref unref(plans);
  const MatmulPlans::Key key = MatmulPlans::MakeKey(problem, table, choice);
  std::shared_ptr<const MatmulPlans::Entry> entry = plans->Find(key);
  if (entry == nullptr) {
    TF_RETURN_IF_ERROR(ToAbsl(table.Validate()));
    auto made = std::make_shared<MatmulPlans::Entry>();
    TF_RETURN_IF_ERROR(device.Plan(problem, table, choice, made.get()));
    entry = plans->Insert(key, std::move(made));
  }

  Tensor scratch;
  void* workspace = nullptr;
  TF_RETURN_IF_ERROR(AllocateScratch(ctx, device.WorkspaceBytes(problem, choice, entry->plan), &scratch, &workspace));
  auto run = [&] { return device.Run(problem, choice, *entry, workspace); };
  return bench > 0 ? Bench(bench, problem, choice, device, run) : ToAbsl(run());
}

// ------------------------------------------------------------------------------------------------------- kernels

// Attributes and checks that the three products share.
class MatmulOp : public OpKernel {
 public:
  explicit MatmulOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("axis", &axis_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bsize", &bsize_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("C", &C_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("K", &K_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ngate", &ngate_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("gated_dw", &gated_dw_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tf32", &tf32_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bench", &bench_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES(ctx, axis_ == 0 || axis_ == 1,
                absl::InvalidArgumentError(absl::StrCat("axis must be 0 or 1, got ", axis_)));
    OP_REQUIRES(ctx, bsize_ == 8 || bsize_ == 16 || bsize_ == 32 || bsize_ == 64 || bsize_ == 128,
                absl::InvalidArgumentError(absl::StrCat("bsize must be 8, 16, 32, 64 or 128, got ", bsize_)));
    OP_REQUIRES(ctx, C_ > 0 && K_ > 0 && C_ % bsize_ == 0 && K_ % bsize_ == 0,
                absl::InvalidArgumentError(absl::StrCat("C and K must be positive multiples of bsize ", bsize_,
                                                        ", got C ", C_, " and K ", K_)));
    OP_REQUIRES(ctx, ngate_ <= 1, absl::InvalidArgumentError(absl::StrCat("at most one gate, got ", ngate_)));
  }

 protected:
  absl::Status ReadTable(const Tensor& tensor, LayoutTable* table) const {
    if (tensor.dims() != 1)
      return absl::InvalidArgumentError(absl::StrCat("table must be a vector, got ", tensor.shape().DebugString()));
    TF_RETURN_IF_ERROR(ToAbsl(LayoutTable::Parse(tensor.flat<int32_t>().data(), tensor.NumElements(), table)));
    if (table->CB * bsize_ != C_ || table->KB * bsize_ != K_)
      return absl::InvalidArgumentError(absl::StrCat("at block size ", bsize_, " the layout table describes C ",
                                                     table->CB * bsize_, " and K ", table->KB * bsize_,
                                                     ", the attributes say C ", C_, " and K ", K_));
    return absl::OkStatus();
  }

  int FeatureDim(const TensorShape& shape) const { return axis_ == 0 ? 0 : shape.dims() - 1; }

  // The batch size of an operand whose feature dimension must be `features`.
  absl::Status BatchSize(const char* name, const TensorShape& shape, int64_t features, int64_t* n) const {
    if (shape.dims() < 1 || shape.dim_size(FeatureDim(shape)) != features)
      return absl::InvalidArgumentError(absl::StrCat(name, " must have ", features, " features in its ",
                                                     axis_ == 0 ? "first" : "last", " dimension (axis ", axis_,
                                                     "), got ", shape.DebugString()));
    *n = shape.num_elements() / features;
    return absl::OkStatus();
  }

  absl::Status CheckBlocks(const char* name, const TensorShape& shape, const LayoutTable& table) const {
    if (shape != TensorShape({table.blocks, bsize_, bsize_}))
      return absl::InvalidArgumentError(absl::StrCat(name, " must be [", table.blocks, ",", bsize_, ",", bsize_,
                                                     "] for this layout, got ", shape.DebugString()));
    return absl::OkStatus();
  }

  absl::Status ReadGate(OpKernelContext* ctx, int input, const LayoutTable& table, const float** gate) const {
    *gate = nullptr;
    if (ngate_ == 0) return absl::OkStatus();
    const Tensor& tensor = ctx->input(input);
    if (tensor.shape() != TensorShape({table.blocks}))
      return absl::InvalidArgumentError(
          absl::StrCat("gate must be [", table.blocks, "] for this layout, got ", tensor.shape().DebugString()));
    *gate = tensor.flat<float>().data();
    return absl::OkStatus();
  }

  MatmulProblem Problem(Product product, const LayoutTable& table) const {
    MatmulProblem problem;
    problem.product = product;
    problem.axis = axis_;
    problem.bsize = static_cast<int>(bsize_);
    problem.dtype = problem.out_dtype = ToDType(dtype_);
    problem.tf32 = tf32_ && tensorflow::tensor_float_32_execution_enabled();
    problem.CB = table.CB;
    problem.KB = table.KB;
    problem.blocks = table.blocks;
    return problem;
  }

  int axis_, ngate_, bench_;
  int64_t bsize_, C_, K_;
  bool gated_dw_, tf32_;
  tensorflow::DataType dtype_;
};

template <class Device, Product product>
class XpropOp : public MatmulOp {
 public:
  using MatmulOp::MatmulOp;

  void Compute(OpKernelContext* ctx) override {
    constexpr bool forward = product == Product::kForward;
    const int64_t features_in = forward ? C_ : K_, features_out = forward ? K_ : C_;
    const Tensor &x = ctx->input(0), &w = ctx->input(1);
    LayoutTable table;
    OP_REQUIRES_OK(ctx, ReadTable(ctx->input(2), &table));
    MatmulProblem problem = Problem(product, table);
    int64_t n;
    OP_REQUIRES_OK(ctx, BatchSize(forward ? "x" : "dy", x.shape(), features_in, &n));
    OP_REQUIRES_OK(ctx, CheckBlocks("w", w.shape(), table));
    OP_REQUIRES_OK(ctx, ReadGate(ctx, 3, table, &problem.gate));

    TensorShape shape = x.shape();
    shape.set_dim(FeatureDim(shape), features_out);
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &out));
    if (n == 0) return;
    const void *a = x.data(), *b = w.data();
    problem.n = &n;
    problem.a = &a;
    problem.b = &b;
    problem.out = out->data();
    OP_REQUIRES_OK(ctx, RunProduct<Device>(ctx, problem, table, bench_));
  }
};

// The sum over all pairs in one launch; with `accumulate`, added to a float32 sum of earlier pairs.
template <class Device, bool accumulate>
class WeightGradOp : public MatmulOp {
 public:
  explicit WeightGradOp(OpKernelConstruction* ctx) : MatmulOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("params", &params_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dw_dtype", &dw_dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("blocks", &blocks_));
  }

  void Compute(OpKernelContext* ctx) override {
    LayoutTable table;
    OP_REQUIRES_OK(ctx, ReadTable(ctx->input(2 * params_), &table));
    OP_REQUIRES(ctx, blocks_ == 0 || blocks_ == table.blocks,
                absl::InvalidArgumentError(
                    absl::StrCat("the layout table has ", table.blocks, " blocks, the attribute says ", blocks_)));
    MatmulProblem problem = Problem(Product::kWeightGrad, table);
    std::vector<int64_t> n(params_);
    std::vector<const void*> a(params_), b(params_);
    for (int p = 0; p < params_; ++p) {
      const Tensor &x = ctx->input(p), &dy = ctx->input(params_ + p);
      OP_REQUIRES_OK(ctx, BatchSize("x", x.shape(), C_, &n[p]));
      TensorShape expected = x.shape();
      expected.set_dim(FeatureDim(expected), K_);
      OP_REQUIRES(
          ctx, dy.shape() == expected,
          absl::InvalidArgumentError(absl::StrCat("dy must be ", expected.DebugString(), " where x is ",
                                                  x.shape().DebugString(), ", got ", dy.shape().DebugString())));
      a[p] = x.data();
      b[p] = dy.data();
    }
    const float* gate;
    OP_REQUIRES_OK(ctx, ReadGate(ctx, 2 * params_ + 1, table, &gate));
    if (gated_dw_) problem.gate = gate;
    if constexpr (accumulate) {
      const Tensor& dwi = ctx->input(2 * params_ + 1 + ngate_);
      OP_REQUIRES_OK(ctx, CheckBlocks("dwi", dwi.shape(), table));
      problem.addend = dwi.flat<float>().data();
    }
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({table.blocks, bsize_, bsize_}), &out));
    problem.out_dtype = ToDType(dw_dtype_);
    problem.pairs = params_;
    problem.n = n.data();
    problem.a = a.data();
    problem.b = b.data();
    problem.out = out->data();
    OP_REQUIRES_OK(ctx, RunProduct<Device>(ctx, problem, table, bench_));
  }

 private:
  int params_;
  int64_t blocks_;
  tensorflow::DataType dw_dtype_;
};

template <class Device>
class GateGradOp : public OpKernel {
 public:
  explicit GateGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bsize", &bsize_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("gated", &gated_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dw_dtype", &dw_dtype_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &dw = ctx->input(0), &w = ctx->input(1), &gate = ctx->input(2);
    OP_REQUIRES(ctx, w.dims() == 3 && w.dim_size(1) == bsize_ && w.dim_size(2) == bsize_ && w.dim_size(0) <= INT32_MAX,
                absl::InvalidArgumentError(
                    absl::StrCat("w must be [blocks,", bsize_, ",", bsize_, "], got ", w.shape().DebugString())));
    OP_REQUIRES(ctx, dw.shape() == w.shape() && gate.shape() == TensorShape({w.dim_size(0)}),
                absl::InvalidArgumentError(absl::StrCat(
                    "dw must have the shape of w, and gate one entry for each block: w is ", w.shape().DebugString(),
                    ", got dw ", dw.shape().DebugString(), " and gate ", gate.shape().DebugString())));
    Tensor *dw_out = nullptr, *dgate = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, w.shape(), &dw_out));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, gate.shape(), &dgate));
    if (w.NumElements() == 0) return;
    GateGradProblem problem;
    problem.bsize = static_cast<int>(bsize_);
    problem.blocks = static_cast<int>(w.dim_size(0));
    problem.dtype = ToDType(dtype_);
    problem.out_dtype = ToDType(dw_dtype_);
    problem.gated = gated_;
    problem.dw = dw.flat<float>().data();
    problem.w = w.data();
    problem.gate = gate.flat<float>().data();
    problem.dw_out = dw_out->data();
    problem.dgate = dgate->flat<float>().data();
    OP_REQUIRES_OK(ctx, ToAbsl(Device(ctx).Run(problem)));
  }

 private:
  int64_t bsize_;
  bool gated_;
  tensorflow::DataType dtype_, dw_dtype_;
};

#define REGISTER_MATMUL(name, device, ...) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(device).HostMemory("table"), __VA_ARGS__)

#define REGISTER_DEVICE(device, Backend)                                                       \
  REGISTER_MATMUL("BlocksparseMatmul", device, XpropOp<Backend, Product::kForward>);           \
  REGISTER_MATMUL("BlocksparseMatmulDX", device, XpropOp<Backend, Product::kInputGrad>);       \
  REGISTER_MATMUL("BlocksparseMatmulDW", device, WeightGradOp<Backend, /*accumulate=*/false>); \
  REGISTER_MATMUL("BlocksparseMatmulDWA", device, WeightGradOp<Backend, /*accumulate=*/true>); \
  REGISTER_KERNEL_BUILDER(Name("BlocksparseMatmulDG").Device(device), GateGradOp<Backend>)

REGISTER_DEVICE(tensorflow::DEVICE_CPU, CpuMatmul);
#ifdef BLOCKSPARSE_CUDA
REGISTER_DEVICE(tensorflow::DEVICE_GPU, GpuMatmul);
#endif

}  // namespace
}  // namespace blocksparse
