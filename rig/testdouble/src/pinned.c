/* Host memory that the device may read and write: allocated pinned, or registered. */
#include "double.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct pin *pins;

struct pin *find_pin(const void *p) {
  for (struct pin *q = pins; q; q = q->next) {
    if ((const char *)p >= q->at && (const char *)p < q->at + q->len) return q;
  }
  return NULL;
}

static void add_pin(CUcontext ctx, void *at, size_t len, bool registered, unsigned flags) {
  struct pin *q = calloc(1, sizeof *q);
  *q = (struct pin){.at = at, .len = len, .registered = registered, .flags = flags, .ctx = ctx, .id = next_id++, .next = pins};
  pins = q;
}

static void remove_pin(struct pin *pin) {
  for (struct pin **p = &pins; *p; p = &(*p)->next) {
    if (*p != pin) continue;
    *p = pin->next;
    break;
  }
  if (!pin->registered) munmap(pin->at, (pin->len + HOST_PAGE - 1) / HOST_PAGE * HOST_PAGE);
  free(pin);
}

void end_pins(CUcontext ctx) {
  for (struct pin *q = pins, *next; q; q = next) {
    next = q->next;
    if (q->ctx == ctx) remove_pin(q);
  }
}

void free_pins(void) {
  while (pins) remove_pin(pins);
}

static CUresult allocate(CUcontext ctx, void **out, size_t n, unsigned flags) {
  if (!out || !n) return CUDA_ERROR_INVALID_VALUE;
  void *at = mmap(NULL, (n + HOST_PAGE - 1) / HOST_PAGE * HOST_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  memset(at, POISON, n);
  add_pin(ctx, at, n, false, flags);
  *out = at;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **out, size_t n, unsigned int flags) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(!(flags & ~(unsigned)(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED)), CUDA_ERROR_INVALID_VALUE);
  return leave(allocate(ctx, out, n, flags));
}

EXPORT CUresult cuMemAllocHost_v2(void **out, size_t n) {
  BEGIN(CONTEXT | UNSAFE);
  return leave(allocate(ctx, out, n, 0));
}

static CUresult release(struct pin *q) {
  while (q->in_flight && !gone) pthread_cond_wait(&progress, &world);
  remove_pin(q);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFreeHost(void *p) {
  BEGIN(CONTEXT | UNSAFE | AFTER_ERROR);
  struct pin *q = find_pin(p);
  REQUIRE(q && q->at == p && !q->registered, CUDA_ERROR_INVALID_VALUE);
  return leave(release(q));
}

EXPORT CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned int flags) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(p && n, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(!was_device_memory((CUdeviceptr)p), CUDA_ERROR_INVALID_VALUE);
  for (const struct pin *q = pins; q; q = q->next) {
    REQUIRE((char *)p + n <= q->at || (char *)p >= q->at + q->len, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  }
  add_pin(ctx, p, n, true, flags);
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemHostUnregister(void *p) {
  BEGIN(CONTEXT | UNSAFE | AFTER_ERROR);
  struct pin *q = find_pin(p);
  REQUIRE(q && q->at == p && q->registered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  return leave(release(q));
}

/* With unified addressing the device's address of pinned memory is the host's. */
EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *p, unsigned int flags) {
  BEGIN(CONTEXT);
  REQUIRE(out && !flags && find_pin(p), CUDA_ERROR_INVALID_VALUE);
  *out = (CUdeviceptr)p;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemHostGetFlags(unsigned int *flags, void *p) {
  BEGIN(CONTEXT);
  const struct pin *q = find_pin(p);
  REQUIRE(flags && q, CUDA_ERROR_INVALID_VALUE);
  *flags = q->flags | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE;
  return leave(CUDA_SUCCESS);
}
