// What every op family needs of TensorFlow: errors, element types, the stream, the host threads, scratch.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>

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
    // Waking a thread costs some microseconds; it must find at least as much work.
    constexpr double kWorthAThread = 5000;
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
    job->finished.WaitForNotification();
  }

 private:
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

}  // namespace blocksparse
