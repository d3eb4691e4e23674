/* Normalization with C linkage; see kernels/c_api.h for the conventions and kernels/norms.h for what the fields mean. */
#pragma once

#include "kernels/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t gradient, relu, dtype;
  float epsilon;
  int64_t outer, segments, features, inner;
  const void *x, *dy;
  const float *gain, *bias;
  float *mean, *residual, *rstd; /* [segments, outer, inner] */
  void *y, *dx;
  float *dgain, *dbias;
  void* workspace; /* of the size that bs_layer_norm_workspace gives */
} bs_layer_norm_args;

typedef struct {
  int32_t gradient, inference, dtype;
  float epsilon;
  int64_t outer, channels, inner;
  const void *x, *dy;
  const float *gain, *bias;
  float *mean, *residual, *variance; /* [channels] */
  void *y, *dx;
  float *dgain, *dbias;
  void* workspace;
} bs_batch_norm_args;

/* Bytes, or -1 and an error. */
BS_API int64_t bs_layer_norm_workspace(const char* device, int threads, const bs_layer_norm_args*);
BS_API int64_t bs_batch_norm_workspace(const char* device, int threads, const bs_batch_norm_args*);
BS_API int bs_layer_norm_run(const char* device, int threads, const bs_layer_norm_args*, void* stream);
BS_API int bs_batch_norm_run(const char* device, int threads, const bs_batch_norm_args*, void* stream);

#ifdef __cplusplus
}
#endif
