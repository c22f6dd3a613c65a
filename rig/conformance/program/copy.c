/* Copies: which bytes, when, and what is refused. */
#include "groups.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define N ((size_t)1 << 20)

struct slow { /* a copy that another thread makes, to see whether the call waits */
  CUcontext ctx;
  CUstream s;
  CUdeviceptr device;
  void *host;
  bool to_device;
  int returned;
};
static void *copy_slowly(void *argument) {
  struct slow *c = argument;
  CU(cuCtxPushCurrent_v2)(c->ctx);
  if (c->to_device) CU(cuMemcpyHtoDAsync_v2)(c->device, c->host, N, c->s);
  else CU(cuMemcpyDtoHAsync_v2)(c->host, c->device, N, c->s);
  __atomic_store_n(&c->returned, 1, __ATOMIC_RELEASE);
  return NULL;
}
static bool has_returned(void *argument) { return __atomic_load_n(&((struct slow *)argument)->returned, __ATOMIC_ACQUIRE); }
static int looks;
static bool soon(void *argument) { return has_returned(argument) || ++looks > 300; } /* for calls that should not return */

/* Whether the call returns while its stream is busy with something else. */
static bool returns_early(struct slow *c, bool (*patience)(void *)) {
  struct gate g;
  pthread_t t;
  shut(&g, c->s);
  c->returned = looks = 0;
  if (pthread_create(&t, NULL, copy_slowly, c)) exit(3);
  eventually(patience, c);
  bool early = has_returned(c);
  open_gate(&g);
  pthread_join(t, NULL);
  CU(cuStreamSynchronize)(c->s);
  return early;
}

static bool all(const unsigned char *p, unsigned char value) {
  for (size_t i = 0; i < N; i++) {
    if (p[i] != value) return false;
  }
  return true;
}

void copies(void) {
  CUcontext c = open_device();
  CUstream s = new_stream();
  CUdeviceptr p = device_memory(N), q = device_memory(N);
  unsigned char *pinned = pinned_memory(N), *other = pinned_memory(N), *pageable = malloc(N);
  memset(pinned, 7, N);
  fact(180, "cuMemcpyHtoDAsync", 0, (int)CU(cuMemcpyHtoDAsync_v2)(p, pinned, N, s));
  fact(181, "cuMemcpyDtoDAsync", 0, (int)CU(cuMemcpyDtoDAsync_v2)(q, p, N, s));
  fact(182, "cuMemcpyDtoHAsync", 0, (int)CU(cuMemcpyDtoHAsync_v2)(other, q, N, s));
  CU(cuStreamSynchronize)(s);
  truth(183, "on one stream they are in order: the bytes have come back", all(other, 7));
  fact(184, "a copy of nothing", 0, (int)CU(cuMemcpyDtoHAsync_v2)(other, q, 0, s));
  fact(185, "a copy beyond the end of an allocation", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemcpyDtoHAsync_v2)(other, p + N - 100, 200, s));
  fact(186, "a copy to NULL", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemcpyDtoHAsync_v2)(NULL, p, 64, s));
  struct slow slow = {c, s, p, pinned, false, 0};
  truth(187, "cuMemcpyDtoHAsync to pinned memory returns before it is done", returns_early(&slow, has_returned));
  slow.host = pageable;
  truth(188, "cuMemcpyDtoHAsync to pageable memory returns when it is done", !returns_early(&slow, soon));
  slow.to_device = true;
  told(189, "cuMemcpyHtoDAsync of 1 MiB from pageable memory returns before its stream has come to it", returns_early(&slow, soon));
  slow.host = pinned;
  truth(190, "cuMemcpyHtoDAsync from pinned memory returns before it is done", returns_early(&slow, has_returned));
  fact(191, "cuMemcpyAsync finds out what its addresses are", 0, (int)CU(cuMemcpyAsync)((CUdeviceptr)other, p, N, s));
  fact(192, "cuMemsetD8Async", 0, (int)CU(cuMemsetD8Async)(p, 9, N, s));
  fact(193, "cuMemsetD32Async at an address that is no multiple of 4", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemsetD32Async)(p + 1, 9, 16, s));
  fact(194, "cuMemcpyDtoH waits", 0, (int)CU(cuStreamSynchronize)(s) + (int)CU(cuMemcpyDtoH_v2)(pageable, p, N));
  truth(195, "and brings the bytes", all(pageable, 9));
  CUDA_MEMCPY2D rows = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = p, .srcPitch = 2048, .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = other, .dstPitch = 1024, .WidthInBytes = 1024, .Height = 16};
  fact(196, "cuMemcpy2DAsync of rows with a stride", 0, (int)CU(cuMemcpy2DAsync_v2)(&rows, s));
  rows.srcPitch = 512;
  fact(197, "cuMemcpy2DAsync of rows that are wider than the stride", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemcpy2DAsync_v2)(&rows, s));
  CU(cuStreamSynchronize)(s);
  CU(cuMemFree_v2)(q);
  fact(198, "a copy from freed memory", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemcpyDtoHAsync_v2)(other, q, 64, s));
}

#define PIECES 64
#define PIECE ((size_t)4096)

void batches(void) {
  const char *here = "cuMemcpyBatchAsync is there (CUDA 12.8)";
  if (!CU(cuMemcpyBatchAsync)) {
    not_here(200, here, "the driver is older");
    return;
  }
  open_device();
  truth(200, here, true);
  CUstream s = new_stream();
  CUdeviceptr p = device_memory(PIECES * PIECE), to[PIECES], from[PIECES];
  unsigned char *pinned = pinned_memory(PIECES * PIECE);
  size_t sizes[PIECES], first[2] = {0, 0}, bad = 99;
  CUmemcpyAttributes attributes[2] = {{.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM}, {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM}};
  for (size_t i = 0; i < PIECES; i++) to[i] = (CUdeviceptr)pinned + i * PIECE, from[i] = p + (PIECES - 1 - i) * PIECE, sizes[i] = PIECE;
  for (size_t i = 0; i < PIECES; i++) CU(cuMemsetD8Async)(p + i * PIECE, (unsigned char)(i + 1), PIECE, s);
#define BATCH(count, n, stream) ((int)CU(cuMemcpyBatchAsync)(to, from, sizes, (count), attributes, first, (n), &bad, (stream)))
  fact(201, "a batch of 64 copies from device to pinned memory", 0, BATCH(PIECES, 1, s));
  CU(cuStreamSynchronize)(s);
  bool right = true;
  for (size_t i = 0; i < PIECES * PIECE; i++) right &= pinned[i] == (unsigned char)(PIECES - i / PIECE);
  truth(202, "brings each to its place, after what the stream had before", right);
  fact(203, "a batch on the legacy stream", CUDA_ERROR_INVALID_VALUE, BATCH(PIECES, 1, NULL));
  fact(204, "a batch of no copies", CUDA_ERROR_INVALID_VALUE, BATCH(0, 1, s));
  fact(205, "a batch without attributes", CUDA_ERROR_INVALID_VALUE, BATCH(PIECES, 0, s));
  first[0] = 1;
  fact(206, "attributes that do not begin with the first copy", CUDA_ERROR_INVALID_VALUE, BATCH(PIECES, 1, s));
  first[0] = 0;
  fact(207, "attributes that do not ascend", CUDA_ERROR_INVALID_VALUE, BATCH(PIECES, 2, s));
  attributes[0].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_INVALID;
  fact(208, "a source order that is none", CUDA_ERROR_INVALID_VALUE, BATCH(PIECES, 1, s));
  attributes[0].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  from[5] = p + PIECES * PIECE - PIECE / 2;
  fact(209, "a batch with one copy that goes beyond the end of its allocation", CUDA_ERROR_INVALID_VALUE, BATCH(PIECES, 1, s));
  told(210, "the copy that failIdx names then (the fault was in 5)", (long long)bad);
  from[5] = p, sizes[5] = 0;
  told(211, "a batch with one copy of nothing answers", BATCH(PIECES, 1, s));
  sizes[5] = PIECE;
  struct gate g;
  shut(&g, s);
  CUevent e;
  CU(cuEventCreate)(&e, CU_EVENT_DISABLE_TIMING);
  fact(212, "a batch on a busy stream returns", 0, BATCH(PIECES, 1, s));
  CU(cuEventRecord)(e, s);
  let_time_pass();
  fact(213, "and an event behind it has not passed", CUDA_ERROR_NOT_READY, (int)CU(cuEventQuery)(e));
  open_gate(&g);
  fact(214, "until the batch is done", 0, (int)CU(cuEventSynchronize)(e));
}
