// The chip a call runs on, and device memory for callers without an allocator of their own.
#include <mutex>
#include <string>
#include <vector>

#include "cuda/check.h"
#include "kernels/common.h"

namespace blocksparse {
namespace cuda {
namespace {

constexpr int kLowestCapability = 80;

std::string Version(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

Status DriverError(cudaError_t error) {
  int driver = 0;
  cudaDriverGetVersion(&driver);
  cudaGetLastError();
  const std::string needed = "an NVIDIA GPU of compute capability 8.0 or newer and a driver for CUDA " +
                             Version(CUDART_VERSION / 1000 * 1000) + " or newer (580 for CUDA 13.0) are needed; found ";
  if (driver == 0) return Status::Unimplemented(needed + "no NVIDIA driver");
  return Status::Unimplemented(needed + "a driver for CUDA " + Version(driver) + " and: " + cudaGetErrorString(error));
}

Status ReadChip(int device, Chip* chip) {
  int major = 0, minor = 0, multiprocessors = 0, shared_memory = 0, l2 = 0;
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } reads[] = {{cudaDevAttrComputeCapabilityMajor, &major},
               {cudaDevAttrComputeCapabilityMinor, &minor},
               {cudaDevAttrMultiProcessorCount, &multiprocessors},
               {cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_memory},
               {cudaDevAttrL2CacheSize, &l2}};
  for (const auto& read : reads) BLOCKSPARSE_CUDA_CHECK(cudaDeviceGetAttribute(read.value, read.attribute, device));
  chip->compute_capability = 10 * major + minor;
  chip->multiprocessors = multiprocessors;
  chip->shared_memory = shared_memory;
  chip->l2 = l2;
  if (chip->compute_capability < kLowestCapability)
    return Status::Unimplemented("the GPU must have compute capability 8.0 or newer, device " + std::to_string(device) +
                                 " has " + std::to_string(major) + "." + std::to_string(minor));
  return {};
}

struct KnownChip {
  bool read = false;
  Status status;
  Chip chip;
};

// Never destroyed: kernels may still be asked for while the process's statics go.
KnownChip Known(int device) {
  static auto* mutex = new std::mutex;
  static auto* known = new std::vector<KnownChip>;
  std::lock_guard<std::mutex> lock(*mutex);
  if (device >= int(known->size())) known->resize(device + 1);
  KnownChip& entry = (*known)[device];
  if (!entry.read) {
    entry.status = ReadChip(device, &entry.chip);
    entry.read = entry.status.code() != Status::Code::kInternal;  // what may pass is asked again
  }
  return entry;
}

}  // namespace

Status CurrentChip(Chip* chip) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return DriverError(error);
  const KnownChip known = Known(device);
  *chip = known.chip;
  return known.status;
}

int UsableDevices() {
  int count = 0, usable = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  for (int device = 0; device < count; ++device) usable += Known(device).status.ok();
  return usable;
}

Status Allocate(int64_t bytes, void** device) {
  *device = nullptr;
  if (bytes > 0) BLOCKSPARSE_CUDA_CHECK(cudaMalloc(device, bytes));
  return {};
}

void Free(void* device) { cudaFree(device); }

Status CopyToDevice(void* device, const void* host, int64_t bytes, Stream stream) {
  BLOCKSPARSE_CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream));
  return Synchronize(stream);  // the source may be freed on return
}

Status Synchronize(Stream stream) {
  BLOCKSPARSE_CUDA_CHECK(cudaStreamSynchronize(stream));
  return {};
}

}  // namespace cuda
}  // namespace blocksparse
