// What the functions with C linkage share: errors, arguments, host threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/common.h"
#include "kernels/embed.h"
#include "kernels/lstm.h"

namespace blocksparse {

// 0, or the error's code, its text kept for bs_last_error.
int Return(const Status& status);
Status ParseDevice(const char* device, bool* gpu);
Status ParseDType(const char* what, int32_t value, DType* dtype);

// Plain host threads, joined when the pool goes: an owner frees it before the process ends, so that no thread outlives
// what it waits on.
class HostThreads : public ThreadPool {
 public:
  explicit HostThreads(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { Work(i); });
  }
  ~HostThreads() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const override { return int(workers_.size()) + 1; }

  void ForEach(int64_t tasks, int64_t nanoseconds, const std::function<void(int64_t, int)>& body) override {
    constexpr int64_t kWorthWaking = 20000;  // waking a thread costs some microseconds
    if (workers_.empty() || tasks < 2 || tasks * std::max<int64_t>(nanoseconds, 1) < kWorthWaking) {
      for (int64_t i = 0; i < tasks; ++i) body(i, 0);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body, tasks_ = tasks, next_ = 0, busy_ = int(workers_.size()), ++round_;
    }
    wake_.notify_all();
    for (int64_t i; (i = next_++) < tasks;) body(i, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void Work(int worker) {
    int64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return closing_ || round_ != seen; });
      if (closing_) return;
      seen = round_;
      const auto* body = body_;
      const int64_t tasks = tasks_;
      lock.unlock();
      for (int64_t i; (i = next_++) < tasks;) (*body)(i, worker);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  bool closing_ = false;
  const std::function<void(int64_t, int)>* body_ = nullptr;
  int64_t tasks_ = 0, round_ = 0;
  std::atomic<int64_t> next_{0};
  int busy_ = 0;
};

// The two functions of a family with one problem: Parse(const Args&, Problem*) says what its arguments mean.
template <class Problem, class Args>
int64_t WorkspaceFor(const char* device, const Args& args) {
  bool gpu = false;
  Problem p;
  Status status = ParseDevice(device, &gpu);
  if (status.ok()) status = Parse(args, &p);
  if (Return(status) != 0) return -1;
#ifdef BLOCKSPARSE_CUDA
  if (gpu) return cuda::WorkspaceBytes(p);
#endif
  return cpu::WorkspaceBytes(p);
}

template <class Problem, class Args>
int RunFor(const char* device, int threads, const Args& args, [[maybe_unused]] void* stream) {
  auto run = [&]() -> Status {
    bool gpu = false;
    Problem p;
    BLOCKSPARSE_RETURN_IF_ERROR(ParseDevice(device, &gpu));
    BLOCKSPARSE_RETURN_IF_ERROR(Parse(args, &p));
#ifdef BLOCKSPARSE_CUDA
    if (gpu) {
      Chip chip;
      BLOCKSPARSE_RETURN_IF_ERROR(cuda::CurrentChip(&chip));
      return cuda::Run(p, args.workspace, static_cast<Stream>(stream));
    }
#endif
    HostThreads pool(threads);
    return cpu::Run(p, args.workspace, &pool);
  };
  return Return(run());
}

}  // namespace blocksparse
