// What every op family needs of TensorFlow: errors, element types, the stream, the host threads, scratch.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "kernels/common.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "xla/stream_executor/stream.h"

namespace blocksparse {

inline absl::Status ToAbsl(const Status& status) {
  switch (status.code()) {
    case Status::Code::kOk: return absl::OkStatus();
    case Status::Code::kInvalidArgument: return absl::InvalidArgumentError(status.message());
    case Status::Code::kUnimplemented: return absl::UnimplementedError(status.message());
    default: return absl::InternalError(status.message());
  }
}

inline DType ToDType(tensorflow::DataType dtype) {
  return dtype == tensorflow::DT_FLOAT  ? DType::kFloat32
         : dtype == tensorflow::DT_HALF ? DType::kFloat16
                                        : DType::kBFloat16;
}

// The call's CUDA stream, through TensorFlow's platform handle: no CUDA header is needed here.
inline Stream GpuStream(tensorflow::OpKernelContext* ctx) {
  return static_cast<Stream>(ctx->op_device_context()->stream()->platform_specific_handle().stream);
}

// TensorFlow's intra-op threads. The calling thread works too, and never waits for a thread that has not started: on a
// busy machine a product is finished by whoever is there.
class OpThreadPool : public ThreadPool {
 public:
  explicit OpThreadPool(tensorflow::OpKernelContext* ctx) {
    const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
    workers_ = workers->workers;
    threads_ = std::max(1, workers->num_threads);
  }

  int threads() const override { return threads_; }

  void ForEach(int64_t tasks, int64_t nanoseconds, const std::function<void(int64_t, int)>& body) override {
    // Waking a thread costs some microseconds, and what it reads lies in this one's cache: work of 13 us took 17 on two.
    constexpr double kWorthAThread = 10000;
    const double worth = double(tasks) * double(std::max<int64_t>(nanoseconds, 1)) / kWorthAThread;
    const int helpers = int(std::min({double(threads_), double(tasks), worth})) - 1;
    if (helpers < 1) {
      for (int64_t task = 0; task < tasks; ++task) body(task, 0);
      return;
    }
    auto job = std::make_shared<Job>(tasks, body);
    for (int worker = 1; worker <= helpers; ++worker) {
      workers_->Schedule([job, worker] { job->Work(worker); });
    }
    job->Work(0);
    // Whoever has the last task is about to be done with it, mostly sooner than this thread could fall asleep and wake.
    constexpr int kLooks = 2000;
    for (int look = 0; look < kLooks && !job->finished.HasBeenNotified(); ++look) Pause();
    job->finished.WaitForNotification();
  }

 private:
  static void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  struct Job {
    Job(int64_t tasks, const std::function<void(int64_t, int)>& body) : tasks(tasks), body(body) {}

    void Work(int worker) {
      int64_t mine = 0;
      // `body` lives until every task is done, so it is touched only for a task that was still open.
      for (int64_t task; (task = next.fetch_add(1)) < tasks; ++mine) body(task, worker);
      if (mine > 0 && done.fetch_add(mine) + mine == tasks) finished.Notify();
    }

    const int64_t tasks;
    const std::function<void(int64_t, int)>& body;
    std::atomic<int64_t> next{0}, done{0};
    absl::Notification finished;
  };

  tensorflow::thread::ThreadPool* workers_;
  int threads_;
};

// Scratch for one call, from TensorFlow's allocator; `holder` keeps it alive.
inline absl::Status AllocateScratch(tensorflow::OpKernelContext* ctx, int64_t bytes, tensorflow::Tensor* holder,
                                    void** data) {
  *data = nullptr;
  if (bytes == 0) return absl::OkStatus();
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_UINT8, tensorflow::TensorShape({bytes}), holder));
  *data = holder->data();
  return absl::OkStatus();
}

// Where an op's kernels run; one is made for each call.
class CpuDevice {
 public:
  // Whether an output in the buffer of an input saves anything: fresh memory is slow here, and pooled on a GPU.
  static constexpr bool kInPlace = true;

  explicit CpuDevice(tensorflow::OpKernelContext* ctx) : pool_(ctx) {}
  Status Prepare() { return {}; }
  ThreadPool* pool() { return &pool_; }
  Status Synchronize() { return {}; }

 private:
  OpThreadPool pool_;
};

#ifdef BLOCKSPARSE_CUDA
class GpuDevice {
 public:
  static constexpr bool kInPlace = false;

  explicit GpuDevice(tensorflow::OpKernelContext* ctx) : stream_(GpuStream(ctx)) {}
  Status Prepare() { return cuda::CurrentChip(&chip_); }
  const Chip& chip() const { return chip_; }
  Stream stream() const { return stream_; }
  Status Synchronize() { return cuda::Synchronize(stream_); }

 private:
  Stream stream_;
  Chip chip_;
};
#endif

inline absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

// Output 0, in the buffer of one of `inputs` that nobody else holds; but not where `bench` repeats read the inputs again.
inline absl::Status AllocateOver(tensorflow::OpKernelContext* ctx, std::initializer_list<int> inputs,
                                 const tensorflow::TensorShape& shape, int bench, tensorflow::Tensor** out) {
  return bench > 0 ? ctx->allocate_output(0, shape, out) : ctx->forward_input_or_allocate_output(inputs, 0, shape, out);
}

// The mean time of `times` runs more, in milliseconds. Every repeat writes the same output.
template <class Device, class Body>
absl::Status MeanMs(Device& device, int times, const Body& run, double* ms) {
  TF_RETURN_IF_ERROR(ToAbsl(device.Synchronize()));
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < times; ++i) TF_RETURN_IF_ERROR(ToAbsl(run()));
  TF_RETURN_IF_ERROR(ToAbsl(device.Synchronize()));
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
  *ms = elapsed.count() / times;
  return absl::OkStatus();
}

// Allocates scratch and runs; with `bench` that many times more, and prints the mean time and the rate of `bytes`.
// A family has, for each device, WorkspaceBytes(Device&, const Problem&) and Run(Device&, const Problem&, void* workspace).
template <class Device, class Problem>
absl::Status RunProblem(tensorflow::OpKernelContext* ctx, const Problem& problem, int bench = 0, const char* label = "",
                        double bytes = 0) {
  Device device(ctx);
  TF_RETURN_IF_ERROR(ToAbsl(device.Prepare()));
  tensorflow::Tensor scratch;
  void* workspace = nullptr;
  TF_RETURN_IF_ERROR(AllocateScratch(ctx, WorkspaceBytes(device, problem), &scratch, &workspace));
  const auto run = [&] { return Run(device, problem, workspace); };
  TF_RETURN_IF_ERROR(ToAbsl(run()));
  if (bench <= 0) return absl::OkStatus();
  double ms;
  TF_RETURN_IF_ERROR(MeanMs(device, bench, run, &ms));
  std::printf("%s %.4f ms %.1f GB/s\n", label, ms, bytes / ms * 1e-6);
  std::fflush(stdout);
  return absl::OkStatus();
}

}  // namespace blocksparse
