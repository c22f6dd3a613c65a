/* Copies in batches and with strides. */
#include "double.h"

#include <stdlib.h>

#ifndef KVGPU_OLD
/* A driver takes an address that is no allocation's for host memory, also where an allocation was: its own access there ends the process. */
static void look_as_host(CUdeviceptr p) {
  if (!find_memory(p) && !find_pin((void *)p) && was_device_memory(p)) (void)*(const volatile char *)p;
}

static CUresult resolve(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count, struct piece *pieces, size_t *bad) {
  for (size_t i = 0; i < count; i++) {
    *bad = i;
    pieces[i].n = sizes[i];
    look_as_host(to[i]);
    look_as_host(from[i]);
    CUresult r = sizes[i] ? any_end(to[i], sizes[i], true, &pieces[i].to) : CUDA_ERROR_INVALID_VALUE;
    if (!r) r = any_end(from[i], sizes[i], false, &pieces[i].from);
    if (r) return r;
  }
  return CUDA_SUCCESS;
}

/* Attributes: the first begins at 0, each at a later copy than the one before it; orders are known ones. "During the call" and "any" let the
 * driver read the source before the stream has come so far: the double then does read it early. */
static CUresult check_attributes(const CUmemcpyAttributes *attributes, const size_t *first, size_t n, size_t count) {
  if (!n || !attributes || !first || first[0] || n > count) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < n; i++) {
    if (attributes[i].srcAccessOrder <= CU_MEMCPY_SRC_ACCESS_ORDER_INVALID || attributes[i].srcAccessOrder > CU_MEMCPY_SRC_ACCESS_ORDER_ANY) return CUDA_ERROR_INVALID_VALUE;
    if (i && (first[i] <= first[i - 1] || first[i] >= count)) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

static void read_early(const CUmemcpyAttributes *attributes, const size_t *first, size_t n, struct piece *pieces, size_t count) {
  for (size_t a = 0; a < n; a++) {
    size_t end = a + 1 < n ? first[a + 1] : count;
    if (attributes[a].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) continue;
    for (size_t i = first[a]; i < end; i++) move_bytes(pieces[i].to.at, pieces[i].from.at, pieces[i].n);
    for (size_t i = first[a]; i < end; i++) pieces[i].from = pieces[i].to; /* done: what is left moves bytes onto themselves */
  }
}

static CUresult batch(CUcontext ctx, CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes, size_t *first, size_t n, size_t *bad,
                      CUstream handle) {
  CUstream s;
  *bad = SIZE_MAX; /* the fault is no single copy's */
  if (!to || !from || !sizes || !count) return CUDA_ERROR_INVALID_VALUE;
  if (handle == NULL || handle == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
  CUresult r = find_stream(ctx, handle, &s);
  if (!r) r = check_attributes(attributes, first, n, count);
  if (r) return r;
  if (s->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  struct piece *pieces = calloc(count, sizeof *pieces);
  r = resolve(to, from, sizes, count, pieces, bad);
  if (!r) {
    read_early(attributes, first, n, pieces, count);
    r = put_copy(s, pieces, count);
  }
  free(pieces);
  return r;
}

/* The form of 12.8: it names the copy at fault. It is the plain symbol in every later driver. */
EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes, size_t *first, size_t n, size_t *bad, CUstream handle) {
  BEGIN(CONTEXT);
  size_t unasked;
  return leave(batch(ctx, to, from, sizes, count, attributes, first, n, bad ? bad : &unasked, handle));
}

#if CUDA_VERSION >= 13000
EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes, size_t *first, size_t n, CUstream handle) {
  BEGIN(CONTEXT);
  size_t bad;
  return leave(batch(ctx, to, from, sizes, count, attributes, first, n, &bad, handle));
}
#endif
#endif

static CUresult end_of(CUmemorytype type, const void *host, CUdeviceptr device, size_t offset, size_t span, bool write, struct end *e) {
  switch (type) {
  case CU_MEMORYTYPE_HOST: return host_end((const char *)host + offset, span, e);
  case CU_MEMORYTYPE_DEVICE: return device_end(device + offset, span, write, e);
  case CU_MEMORYTYPE_UNIFIED: return any_end(device + offset, span, write, e);
  default: return CUDA_ERROR_INVALID_VALUE;
  }
}

static CUresult strided(CUcontext ctx, const CUDA_MEMCPY2D *c, CUstream handle) {
  CUstream s;
  CUresult r = find_stream(ctx, handle, &s);
  if (r || !c->WidthInBytes || !c->Height) return r;
  if (c->srcXInBytes || c->srcY || c->dstXInBytes || c->dstY) return CUDA_ERROR_INVALID_VALUE; /* the double's own limit */
  if (c->Height > 1 && (c->srcPitch < c->WidthInBytes || c->dstPitch < c->WidthInBytes)) return CUDA_ERROR_INVALID_VALUE;
  struct piece *rows = calloc(c->Height, sizeof *rows);
  for (size_t y = 0; y < c->Height && !r; y++) {
    rows[y].n = c->WidthInBytes;
    r = end_of(c->dstMemoryType, c->dstHost, c->dstDevice, y * c->dstPitch, c->WidthInBytes, true, &rows[y].to);
    if (!r) r = end_of(c->srcMemoryType, c->srcHost, c->srcDevice, y * c->srcPitch, c->WidthInBytes, false, &rows[y].from);
  }
  if (!r) r = put_copy(s, rows, c->Height);
  free(rows);
  return r;
}

EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream handle) {
  BEGIN(CONTEXT);
  REQUIRE(c, CUDA_ERROR_INVALID_VALUE);
  return leave(strided(ctx, c, handle));
}
