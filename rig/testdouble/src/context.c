/* Contexts: a stack of them for each thread; primary ones are inactive until they are retained, and end with the last release. */
#include "double.h"

#include <stdlib.h>

#define DEPTH_MAX 32

struct CUctx_st primaries[DEVICES_MAX];
static CUcontext made; /* by cuCtxCreate */
static __thread CUcontext stack[DEPTH_MAX];
static __thread int depth;
static uint64_t ids;

void make_primaries(void) {
  for (int i = 0; i < DEVICES_MAX; i++) primaries[i] = (struct CUctx_st){.dev = i, .primary = true, .id = ++ids};
}

CUcontext current_context(void) { return depth ? stack[depth - 1] : NULL; }

unsigned living_contexts(void) {
  unsigned n = 0;
  for (int i = 0; i < DEVICES_MAX; i++) n += primaries[i].alive;
  for (CUcontext c = made; c; c = c->next) n += c->alive;
  return n;
}

void free_contexts(void) {
  while (made) {
    CUcontext c = made;
    made = c->next;
    free(c);
  }
}

bool is_context(CUcontext wanted) {
  for (int i = 0; i < device_count; i++) {
    if (wanted == &primaries[i]) return wanted->alive;
  }
  for (CUcontext c = made; c; c = c->next) {
    if (c == wanted) return c->alive;
  }
  return false;
}

static bool is_device(CUdevice d) { return d >= 0 && d < device_count; }

void retain_primary(int dev) {
  primaries[dev].retained++;
  primaries[dev].alive = true;
}

void release_primary(int dev) {
  if (!--primaries[dev].retained) end_context(&primaries[dev]);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active) {
  BEGIN(0);
  REQUIRE(flags && active, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_device(dev), CUDA_ERROR_INVALID_DEVICE);
  *flags = primaries[dev].flags;
  *active = primaries[dev].alive;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice dev) {
  BEGIN(UNSAFE);
  REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_device(dev), CUDA_ERROR_INVALID_DEVICE);
  REQUIRE(!devices[dev].sticky, devices[dev].sticky);
  retain_primary(dev);
  *out = &primaries[dev];
  return leave(CUDA_SUCCESS);
}

/* When a context ends, its streams, events and memory end too, whoever made them. So one release too many takes them
   from the engine. */
void end_context(CUcontext c) {
  (void)await_context(c);
  c->alive = false;
  end_streams(c);
  end_events(c);
  end_memories(c);
  end_pins(c);
  end_modules(c);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
  BEGIN(UNSAFE | AFTER_ERROR);
  REQUIRE(is_device(dev), CUDA_ERROR_INVALID_DEVICE);
  REQUIRE(primaries[dev].retained, CUDA_ERROR_INVALID_CONTEXT);
  release_primary(dev);
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags) {
  BEGIN(0);
  REQUIRE(is_device(dev), CUDA_ERROR_INVALID_DEVICE);
  primaries[dev].flags = flags;
  return leave(CUDA_SUCCESS);
}

static CUresult push(CUcontext c) {
  if (depth == DEPTH_MAX) return CUDA_ERROR_OUT_OF_MEMORY;
  stack[depth++] = c;
  return CUDA_SUCCESS;
}

CUcontext new_context(int dev, unsigned flags) {
  CUcontext c = calloc(1, sizeof *c);
  *c = (struct CUctx_st){.dev = dev, .alive = true, .flags = flags, .id = ++ids, .next = made};
  made = c;
  return c;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice dev) {
  BEGIN(UNSAFE);
  REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_device(dev), CUDA_ERROR_INVALID_DEVICE);
  CUcontext c = new_context(dev, flags);
  *out = c;
  return leave(push(c));
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext c) {
  BEGIN(UNSAFE | AFTER_ERROR);
  REQUIRE(c && is_context(c) && !c->primary && !c->green, CUDA_ERROR_INVALID_CONTEXT);
  end_context(c);
  if (current_context() == c) depth--;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext c) {
  BEGIN(AFTER_ERROR);
  REQUIRE(c && is_context(c), CUDA_ERROR_INVALID_CONTEXT);
  return leave(push(c));
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *out) {
  BEGIN(AFTER_ERROR);
  REQUIRE(depth, CUDA_ERROR_INVALID_CONTEXT);
  depth--;
  if (out) *out = stack[depth];
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSetCurrent(CUcontext c) {
  BEGIN(AFTER_ERROR);
  REQUIRE(!c || is_context(c), CUDA_ERROR_INVALID_CONTEXT);
  if (depth) depth--;
  return leave(c ? push(c) : CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *out) {
  BEGIN(AFTER_ERROR);
  REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
  *out = ctx;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetDevice(CUdevice *dev) {
  BEGIN(CONTEXT | AFTER_ERROR);
  REQUIRE(dev, CUDA_ERROR_INVALID_VALUE);
  *dev = ctx->dev;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetId(CUcontext c, unsigned long long *id) {
  BEGIN(0);
  if (!c) c = ctx;
  REQUIRE(id, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(c && is_context(c), CUDA_ERROR_INVALID_CONTEXT);
  *id = c->id;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetFlags(unsigned int *flags) {
  BEGIN(CONTEXT);
  REQUIRE(flags, CUDA_ERROR_INVALID_VALUE);
  *flags = ctx->flags;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSetFlags(unsigned int flags) {
  BEGIN(CONTEXT);
  ctx->flags = flags;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSynchronize(void) {
  BEGIN(CONTEXT | UNSAFE);
  return leave(await_context(ctx));
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  BEGIN(CONTEXT);
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(!flags, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(peer && is_context(peer), CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(peer->dev != ctx->dev, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
  return leave(CUDA_SUCCESS);
}
