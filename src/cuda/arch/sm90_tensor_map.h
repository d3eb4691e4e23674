// Host: descriptions of 2-D tensors for the tensor copy engine.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "kernels/common.h"

namespace blocksparse::cuda::sm90 {

// A row-major [rows, columns] tensor of 2- or 4-byte elements, moved in boxes of `box_rows` x `box_columns`, with the
// swizzle that fits a box's row (at most 128 bytes). What lies outside the tensor reads as zero and is not written.
// With `chunks`, the columns (a multiple of box_columns) are a third dimension: a box is that many pieces of box_rows x
// box_columns, one after the other.
inline Status MakeTensorMap(CUtensorMap* map, DType dtype, const void* base, int64_t rows, int64_t columns,
                            int box_rows, int box_columns, int chunks = 0) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<Encode>(entry);
  }();
  if (encode == nullptr) return Status::Internal("the CUDA driver has no cuTensorMapEncodeTiled");
  const int row_bytes = box_columns * int(SizeOf(dtype));
  const cuuint64_t sizes[3] = {cuuint64_t(chunks > 0 ? box_columns : columns), cuuint64_t(rows),
                               cuuint64_t(columns / box_columns)};
  const cuuint64_t pitch[2] = {cuuint64_t(columns) * SizeOf(dtype), cuuint64_t(row_bytes)};
  const cuuint32_t box[3] = {cuuint32_t(box_columns), cuuint32_t(box_rows), cuuint32_t(chunks)}, step[3] = {1, 1, 1};
  const CUtensorMapDataType type = dtype == DType::kFloat32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUtensorMapSwizzle swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : row_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                       : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUresult result = encode(map, type, chunks > 0 ? 3 : 2, const_cast<void*>(base), sizes, pitch, box, step,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return Status::Internal("cuTensorMapEncodeTiled gave " + std::to_string(int(result)) + " for a tensor of " +
                            std::to_string(rows) + " x " + std::to_string(columns));
  return {};
}

}  // namespace blocksparse::cuda::sm90
