/* Embedding lookup with C linkage; see kernels/c_api.h for the conventions and kernels/embed.h for what the fields
 * mean. */
#pragma once

#include "kernels/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t gradient, dtype, index_bytes, index_signed;
  int64_t count, rows, width;
  const void *index, *x;
  void* y;
  void* workspace; /* of the size that bs_embed_workspace gives */
} bs_embed_args;

BS_API int64_t bs_embed_workspace(const char* device, const bs_embed_args* args);
BS_API int bs_embed_run(const char* device, int threads, const bs_embed_args* args, void* stream);

#ifdef __cplusplus
}
#endif
