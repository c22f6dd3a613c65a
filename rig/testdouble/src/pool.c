/* Stream-ordered allocation. The memory is of no context, and is freed when the stream comes to it. */
#include "double.h"

#include <stdlib.h>

static CUresult allocate(CUcontext ctx, CUdeviceptr *out, size_t n, CUstream handle) {
  CUstream s;
  if (!out || !n) return CUDA_ERROR_INVALID_VALUE;
  CUresult r = find_stream(ctx, handle, &s);
  if (r) return r;
  struct mem *m = new_memory(ctx->dev, NULL, n, POOLED);
  if (!m) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = m->at;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *out, size_t n, CUstream handle) {
  BEGIN(CONTEXT);
  return leave(allocate(ctx, out, n, handle));
}

/* The address is invalid for other calls at once; the bytes go when the stream has come so far. */
EXPORT CUresult cuMemFreeAsync(CUdeviceptr p, CUstream handle) {
  BEGIN(CONTEXT | AFTER_ERROR);
  CUstream s;
  struct mem *m = find_memory(p);
  REQUIRE(m && m->at == p && m->kind == POOLED, CUDA_ERROR_INVALID_VALUE);
  CUresult r = find_stream(ctx, handle, &s);
  if (!r) r = await_stream(s);
  if (r) return leave(r);
  await_memory(m);
  drop_memory(m);
  return leave(CUDA_SUCCESS);
}

/* One pool for each device, which cannot be shared with other processes. */
EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice dev) {
  BEGIN(0);
  REQUIRE(pool, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(dev >= 0 && dev < device_count, CUDA_ERROR_INVALID_DEVICE);
  *pool = (CUmemoryPool)&devices[dev];
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t n, CUmemoryPool pool, CUstream handle) {
  BEGIN(CONTEXT);
  REQUIRE(pool == (CUmemoryPool)&devices[ctx->dev], CUDA_ERROR_INVALID_VALUE);
  return leave(allocate(ctx, out, n, handle));
}
