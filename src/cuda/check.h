// CUDA's error codes as a Status.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "kernels/common.h"

#define BLOCKSPARSE_CUDA_CHECK(call)                                                                              \
  do {                                                                                                            \
    const cudaError_t error_ = (call);                                                                            \
    if (error_ != cudaSuccess) {                                                                                  \
      cudaGetLastError(); /* or the next, innocent call would report it again */                                  \
      return ::blocksparse::Status::Internal(std::string(#call) + " failed: " + cudaGetErrorName(error_) + ": " + \
                                             cudaGetErrorString(error_));                                         \
    }                                                                                                             \
  } while (0)

// After a launch: a bad configuration shows here, a fault in the kernel at the next synchronization.
#define BLOCKSPARSE_CUDA_LAUNCHED() BLOCKSPARSE_CUDA_CHECK(cudaGetLastError())
