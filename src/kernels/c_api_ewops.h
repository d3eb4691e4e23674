/* Elementwise operators with C linkage; see kernels/c_api.h for the conventions and kernels/ewops.h for what the fields
 * mean. */
#pragma once

#include "kernels/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t op, gradient, dtype, zero_infs, zero_nans;
  float alpha, low, high;
  int64_t n;
  const void* in[3];
  void* out[2];
} bs_ew_args;

typedef struct {
  int32_t from, to;
  int64_t n;
  const void* x;
  void* y;
} bs_cast_args;

typedef struct {
  int32_t dtype, count;
  int64_t n;
  const void* const* x; /* [count], on the host */
  void* y;
} bs_add_n_args;

typedef struct {
  int32_t gradient, act, dtype;
  int64_t outer, channels, inner;
  const float *gain, *bias;
  const void *x, *dy;
  void *y, *dx;
  float *dgain, *dbias;
  void* workspace; /* of the size that bs_channel_workspace gives */
} bs_channel_args;

typedef struct {
  int32_t generate, dtype, rank;
  float keep_prob;
  uint32_t seed[2];
  int64_t n;
  uint32_t* mask;
  const void* x;
  void* y;
  const int64_t *dims, *stride; /* [rank], on the host */
} bs_dropout_args;

typedef struct {
  uint32_t seed[2];
  float inverse_temperature, low, high, epsilon;
  int64_t n;
  const float* x;
  float *gate, *concrete;
} bs_concrete_gate_args;

typedef struct {
  int32_t gradient, element_bytes;
  int64_t outer, dim, inner;
  const int32_t* index;
  const void* x;
  void* y;
} bs_fancy_gather_args;

typedef struct {
  int32_t gradient, dtype;
  int64_t outer, dim, inner;
  const void* x;
  void* y;
  int64_t* argmax;
} bs_reduce_max_args;

BS_API int bs_ew_run(const char* device, int threads, const bs_ew_args*, void* stream);
BS_API int bs_cast_run(const char* device, int threads, const bs_cast_args*, void* stream);
BS_API int bs_add_n_run(const char* device, int threads, const bs_add_n_args*, void* stream);
BS_API int64_t bs_channel_workspace(const char* device, const bs_channel_args*); /* bytes, or -1 and an error */
BS_API int bs_channel_run(const char* device, int threads, const bs_channel_args*, void* stream);
BS_API int bs_dropout_run(const char* device, int threads, const bs_dropout_args*, void* stream);
BS_API int bs_concrete_gate_run(const char* device, int threads, const bs_concrete_gate_args*, void* stream);
BS_API int bs_fancy_gather_run(const char* device, int threads, const bs_fancy_gather_args*, void* stream);
BS_API int bs_reduce_max_run(const char* device, int threads, const bs_reduce_max_args*, void* stream);

#ifdef __cplusplus
}
#endif
