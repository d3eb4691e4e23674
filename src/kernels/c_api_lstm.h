/* LSTM gates with C linkage; see kernels/c_api.h for the conventions and kernels/lstm.h for what the fields mean. */
#pragma once

#include "kernels/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t gradient, dtype;
  int64_t rows, width, stride;
  float forget_bias;
  const float* bias;
  const void* c;
  const void* gate[4];
  void *c_next, *h_next;
  const void *dc_next, *dh_next;
  void* dc;
  void* dgate[4];
  float* dbias;
  void* workspace; /* of the size that bs_lstm_workspace gives */
} bs_lstm_args;

BS_API int64_t bs_lstm_workspace(const char* device, const bs_lstm_args* args);
BS_API int bs_lstm_run(const char* device, int threads, const bs_lstm_args* args, void* stream);

#ifdef __cplusplus
}
#endif
