// What every operator family shares: element types, errors, host threads, the chip. No TensorFlow, no CUDA headers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

struct CUstream_st;

namespace blocksparse {

using Stream = CUstream_st*;  // cudaStream_t, without CUDA's headers

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr int64_t SizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Success, or an error whose message names what was wrong, what was given and what is allowed.
class Status {
 public:
  enum class Code { kOk, kInvalidArgument, kUnimplemented, kInternal };

  Status() = default;
  static Status Invalid(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }
  static Status Unimplemented(std::string message) { return {Code::kUnimplemented, std::move(message)}; }
  static Status Internal(std::string message) { return {Code::kInternal, std::move(message)}; }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  Code code_ = Code::kOk;
  std::string message_;
};

#define BLOCKSPARSE_RETURN_IF_ERROR(expression)   \
  do {                                            \
    ::blocksparse::Status status_ = (expression); \
    if (!status_.ok()) return status_;            \
  } while (0)

// The host threads a CPU kernel may use. TensorFlow's own pool in an op; a plain one behind the C interface.
class ThreadPool {
 public:
  virtual ~ThreadPool() = default;
  virtual int threads() const = 0;
  // Calls body(task, worker) once for every task in [0, tasks), on this thread and others; returns when all are done.
  // `worker` is in [0, threads()), and no two bodies that run at once have the same: it picks a piece of scratch.
  // `nanoseconds` estimates one task, so that a product too small to split runs on this thread alone.
  virtual void ForEach(int64_t tasks, int64_t nanoseconds,
                       const std::function<void(int64_t task, int worker)>& body) = 0;
};

// The GPU a call runs on.
struct Chip {
  int compute_capability = 0;  // 80, 86, 89, 90, 100, ...
  int multiprocessors = 0;
  int64_t shared_memory = 0;  // bytes one thread block may take
  int64_t l2 = 0;             // bytes
};

namespace cuda {
// The current device, read once; an error that says what was found where the chip or the driver will not do.
Status CurrentChip(Chip* chip);
// Devices that CurrentChip would accept; 0 without a driver.
int UsableDevices();
// Device memory for callers without an allocator of their own, as behind the C interface.
Status Allocate(int64_t bytes, void** device);
void Free(void* device);
// Copies from ordinary host memory, in the order of the stream; the source may be freed on return.
Status CopyToDevice(void* device, const void* host, int64_t bytes, Stream stream);
Status Synchronize(Stream stream);
}  // namespace cuda

}  // namespace blocksparse
