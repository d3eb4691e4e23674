#include "kernels/c_api.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/abi.h"
#include "kernels/c_api_common.h"
#include "kernels/common.h"
#include "kernels/layout_table.h"
#include "kernels/matmul.h"

namespace blocksparse {
namespace {

thread_local std::string last_error, choice_text;

struct Plan {
  MatmulPlan host;
  void* words = nullptr;  // on the GPU: host.words there
};

}  // namespace

int Return(const Status& status) {
  if (status.ok()) return 0;
  last_error = status.message();
  return int(status.code());
}

Status ParseDevice(const char* device, bool* gpu) {
  const std::string name = device == nullptr ? "null" : device;
  if (name != "cpu" && name != "gpu") return Status::Invalid("device must be \"cpu\" or \"gpu\", got \"" + name + "\"");
  *gpu = name == "gpu";
#ifndef BLOCKSPARSE_CUDA
  if (*gpu) return Status::Unimplemented("this library was built without CUDA; build it where nvcc is found");
#endif
  return {};
}

Status ParseDType(const char* what, int32_t value, DType* dtype) {
  if (value < 0 || value > 2)
    return Status::Invalid(std::string(what) + " must be 0 (float32), 1 (float16) or 2 (bfloat16), got " +
                           std::to_string(value));
  *dtype = DType(value);
  return {};
}

}  // namespace blocksparse

using namespace blocksparse;

struct bs_matmul {
  bool gpu = false;
  std::vector<int32_t> table_words;
  LayoutTable table;
  Chip chip;
  std::unique_ptr<HostThreads> pool;
  std::map<std::tuple<Product, int, int, DType, int>, Plan> plans;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;

  ~bs_matmul() {
    for (auto& entry : plans) Release(entry.second.words);
    Release(workspace);
  }

  void Release(void* pointer) {
#ifdef BLOCKSPARSE_CUDA
    if (gpu) return cuda::Free(pointer);
#endif
    std::free(pointer);
  }

  Status Create(const char* device, int threads, const int32_t* words, int64_t count) {
    BLOCKSPARSE_RETURN_IF_ERROR(ParseDevice(device, &gpu));
    if (words == nullptr || count < 0) return Status::Invalid("the layout table is missing");
    table_words.assign(words, words + count);
    BLOCKSPARSE_RETURN_IF_ERROR(LayoutTable::Parse(table_words.data(), count, &table));
    BLOCKSPARSE_RETURN_IF_ERROR(table.Validate());
#ifdef BLOCKSPARSE_CUDA
    if (gpu) return cuda::CurrentChip(&chip);
#endif
    if (threads < 1) return Status::Invalid("threads must be at least 1, got " + std::to_string(threads));
    pool = std::make_unique<HostThreads>(threads);
    return {};
  }

  Status Problem(const bs_matmul_args& args, MatmulProblem* p) const {
    if (args.product < 0 || args.product > 2)
      return Status::Invalid("product must be 0 (forward), 1 (input gradient) or 2 (weight gradient), got " +
                             std::to_string(args.product));
    p->product = Product(args.product), p->axis = args.axis, p->bsize = args.bsize, p->tf32 = args.tf32 != 0;
    BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("dtype", args.dtype, &p->dtype));
    BLOCKSPARSE_RETURN_IF_ERROR(ParseDType("out_dtype", args.out_dtype, &p->out_dtype));
    p->CB = table.CB, p->KB = table.KB, p->blocks = table.blocks;
    p->pairs = args.pairs, p->n = args.n, p->a = args.a, p->b = args.b;
    p->gate = args.gate, p->addend = args.addend, p->out = args.out;
    if (args.pairs > 0 && (args.n == nullptr || args.a == nullptr || args.b == nullptr))
      return Status::Invalid("the arrays n, a and b are missing");
    return CheckMatmul(*p, table);
  }

  MatmulChoice Choose(const MatmulProblem& problem) const {
#ifdef BLOCKSPARSE_CUDA
    if (gpu) return cuda::ChooseMatmul(problem, table, chip);
#endif
    return cpu::ChooseMatmul(problem, table, pool->threads());
  }

  Status Reserve(int64_t bytes) {
    if (bytes <= workspace_bytes) return {};
    Release(std::exchange(workspace, nullptr));
    workspace_bytes = 0;
#ifdef BLOCKSPARSE_CUDA
    if (gpu) {
      BLOCKSPARSE_RETURN_IF_ERROR(cuda::Allocate(bytes, &workspace));
      workspace_bytes = bytes;
      return {};
    }
#endif
    constexpr int64_t kAlignment = 64;
    workspace = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (workspace == nullptr)
      return Status::Internal("no memory for a workspace of " + std::to_string(bytes) + " bytes");
    workspace_bytes = bytes;
    return {};
  }

  Status Run(const bs_matmul_args& args, [[maybe_unused]] Stream stream) {
    MatmulProblem problem;
    BLOCKSPARSE_RETURN_IF_ERROR(Problem(args, &problem));
    const MatmulChoice choice = Choose(problem);
    const auto key = std::make_tuple(problem.product, problem.axis, problem.bsize, problem.dtype, choice.family);
    auto found = plans.find(key);
    if (found == plans.end()) {
      Plan plan;
#ifdef BLOCKSPARSE_CUDA
      if (gpu) {
        BLOCKSPARSE_RETURN_IF_ERROR(cuda::PlanMatmul(problem, table, choice, &plan.host));
        const int64_t bytes = int64_t(plan.host.words.size()) * sizeof(int32_t);
        BLOCKSPARSE_RETURN_IF_ERROR(cuda::Allocate(bytes, &plan.words));
        found = plans.emplace(key, std::move(plan)).first;  // owns the words from here on
        const Status copied = cuda::CopyToDevice(found->second.words, found->second.host.words.data(), bytes, stream);
        if (!copied.ok()) {
          Release(found->second.words);
          plans.erase(found);
          return copied;
        }
      }
#endif
      if (!gpu) {
        BLOCKSPARSE_RETURN_IF_ERROR(cpu::PlanMatmul(problem, table, choice, &plan.host));
        found = plans.emplace(key, std::move(plan)).first;
      }
    }
    const Plan& plan = found->second;
#ifdef BLOCKSPARSE_CUDA
    if (gpu) {
      BLOCKSPARSE_RETURN_IF_ERROR(Reserve(cuda::MatmulWorkspaceBytes(problem, choice, plan.host, chip)));
      return cuda::RunMatmul(problem, choice, plan.host, static_cast<const int32_t*>(plan.words), workspace, chip,
                             stream);
    }
#endif
    BLOCKSPARSE_RETURN_IF_ERROR(Reserve(cpu::MatmulWorkspaceBytes(problem, choice, plan.host, pool->threads())));
    return cpu::RunMatmul(problem, choice, plan.host, workspace, pool.get());
  }
};

extern "C" {

const char* bs_last_error(void) { return last_error.c_str(); }

int bs_abi_version(void) { return BLOCKSPARSE_ABI; }

int bs_device_count(void) {
#ifdef BLOCKSPARSE_CUDA
  return cuda::UsableDevices();
#else
  return 0;
#endif
}

bs_matmul* bs_matmul_create(const char* device, int threads, const int32_t* table, int64_t words) {
  auto matmul = std::make_unique<bs_matmul>();
  return Return(matmul->Create(device, threads, table, words)) == 0 ? matmul.release() : nullptr;
}

void bs_matmul_destroy(bs_matmul* matmul) { delete matmul; }

int bs_matmul_run(bs_matmul* matmul, const bs_matmul_args* args, void* stream) {
  return Return(matmul->Run(*args, static_cast<Stream>(stream)));
}

const char* bs_matmul_choice(bs_matmul* matmul, const bs_matmul_args* args) {
  MatmulProblem problem;
  if (Return(matmul->Problem(*args, &problem)) != 0) return nullptr;
  const MatmulChoice choice = matmul->Choose(problem);
  choice_text = std::string(choice.name) + " family " + std::to_string(choice.family) + " split " +
                std::to_string(choice.split) + " tile " + std::to_string(choice.tile);
  return choice_text.c_str();
}

int bs_gate_grad_run(const char* device, int threads, const bs_gate_grad_args* args, [[maybe_unused]] void* stream) {
  bool gpu = false;
  GateGradProblem p;
  p.bsize = args->bsize, p.blocks = args->blocks, p.gated = args->gated != 0;
  p.dw = args->dw, p.w = args->w, p.gate = args->gate, p.dw_out = args->dw_out, p.dgate = args->dgate;
  int error = Return(ParseDevice(device, &gpu));
  if (error == 0) error = Return(ParseDType("dtype", args->dtype, &p.dtype));
  if (error == 0) error = Return(ParseDType("out_dtype", args->out_dtype, &p.out_dtype));
  if (error != 0) return error;
#ifdef BLOCKSPARSE_CUDA
  if (gpu) return Return(cuda::RunGateGrad(p, static_cast<Stream>(stream)));
#endif
  if (threads < 1) return Return(Status::Invalid("threads must be at least 1, got " + std::to_string(threads)));
  HostThreads pool(threads);
  return Return(cpu::RunGateGrad(p, &pool));
}

}  // extern "C"
