/* The kernels with C linkage: planning and running without TensorFlow, for benchmarks, sanitizers and other frameworks.
 * Every function that returns int gives 0, or an error whose text bs_last_error returns (per thread).
 * `device` is "cpu" or "gpu"; on the GPU all operand pointers are device pointers on the current device and `stream` is a
 * cudaStream_t (null: the default stream); on the CPU `threads` host threads work. dtype: 0 float32, 1 float16,
 * 2 bfloat16. product: 0 forward, 1 input gradient, 2 weight gradient. */
#pragma once

#include <stdint.h>

#if defined(__GNUC__)
#define BS_API __attribute__((visibility("default")))
#else
#define BS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bs_matmul bs_matmul; /* a layout and its plans, made on first use and kept */

typedef struct {
  int32_t product, axis, bsize, dtype, out_dtype, tf32, pairs;
  const int64_t* n;     /* [pairs] */
  const void* const* a; /* [pairs] x, dy, x */
  const void* const* b; /* [pairs] W, W, dy */
  const float* gate;    /* or null */
  const float* addend;  /* or null */
  void* out;
} bs_matmul_args;

typedef struct {
  int32_t bsize, blocks, dtype, out_dtype, gated;
  const float* dw;
  const void* w;
  const float* gate;
  void* dw_out;
  float* dgate;
} bs_gate_grad_args;

BS_API const char* bs_last_error(void);
BS_API int bs_abi_version(void);
BS_API int bs_device_count(void); /* GPUs this library can use; 0 without a driver or when built for the CPU alone */

BS_API bs_matmul* bs_matmul_create(const char* device, int threads, const int32_t* table, int64_t words);
BS_API void bs_matmul_destroy(bs_matmul*);
/* Allocates its workspace on first use and keeps it with the handle: one handle serves one thread (stream) at a time. */
BS_API int bs_matmul_run(bs_matmul*, const bs_matmul_args*, void* stream);
/* The cost model's choice as text, without running. */
BS_API const char* bs_matmul_choice(bs_matmul*, const bs_matmul_args*);
BS_API int bs_gate_grad_run(const char* device, int threads, const bs_gate_grad_args*, void* stream);

#ifdef __cplusplus
}
#endif
