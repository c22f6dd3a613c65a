/* kvconn's copy kernel: shim_kernel.c has the same table. */
#pragma once
#include "fact.h"

enum { MOST_PIECES = 128 };
struct table {
  CUdeviceptr from[MOST_PIECES], to[MOST_PIECES];
  uint32_t bytes[MOST_PIECES];
  uint32_t count, unused;
};
bool load_kernel(void); /* in the current context; false: the driver does not take it */
int launch_kernel(struct table *t, unsigned blocks, CUstream s);
