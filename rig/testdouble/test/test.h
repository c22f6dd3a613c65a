/* The smallest frame for the double's own tests: each is a function, and ends with its first failure. */
#pragma once
#include "double.h"

#include <stdio.h>
#include <stdlib.h>

#define EXPECT(condition)                                                                                                      \
  do {                                                                                                                         \
    if (!(condition)) {                                                                                                        \
      fprintf(stderr, "%s:%d: %s does not hold (KVGPU_SEED=%llu)\n", __FILE__, __LINE__, #condition, (unsigned long long)kvgpu_seed()); \
      exit(1);                                                                                                                 \
    }                                                                                                                          \
  } while (0)
#define OK(call) is_result(#call, __FILE__, __LINE__, (int)(call), 0)
#define FAILS(code, call) is_result(#call, __FILE__, __LINE__, (int)(call), (int)(code))

static inline void is_result(const char *call, const char *file, int line, int got, int wanted) {
  if (got == wanted) return;
  fprintf(stderr, "%s:%d: %s: %d, not %d (KVGPU_SEED=%llu)\n", file, line, call, got, wanted, (unsigned long long)kvgpu_seed());
  exit(1);
}

/* The calling thread gets the primary context of device 0 until `leave_device`. */
static inline CUcontext enter_device(int device) {
  CUcontext c;
  OK(cuDevicePrimaryCtxRetain(&c, device));
  OK(cuCtxPushCurrent_v2(c));
  return c;
}
static inline void leave_device(int device) {
  OK(cuCtxPopCurrent_v2(NULL));
  OK(cuDevicePrimaryCtxRelease_v2(device));
}

void test_memory(void);
void test_pointers(void);
void test_mapped(void);
void test_imported(void);
void test_export(void);
void test_order(void);
void test_races(void);
void test_queue(void);
void test_one_connection(void);
void test_green(void);
void test_legacy(void);
void test_capture(void);
void test_end(void);
void test_faults(void);
