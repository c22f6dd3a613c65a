/* Copies: where their ends are, whether they may go there, and which of them the caller waits for. */
#include "double.h"

#include <stdlib.h>

/* The device of the calling thread may use the memory. A test that looks has no context, and may always. */
static bool may_use(const struct mem *m, bool write) {
  CUcontext ctx = current_context();
  return !ctx || (write ? m->writers : m->readers) >> ctx->dev & 1;
}

/* Whether the range lies in one allocation, or in mappings side by side of one reservation and device. */
static bool is_covered(const struct mem *m, CUdeviceptr p, size_t n, bool write) {
  for (CUdeviceptr end = p + n; m && may_use(m, write);) {
    if (end <= m->at + m->len) return end >= p;
    const struct mem *next = m->kind == MAPPED ? find_memory(m->at + m->len) : NULL;
    if (!next || next->kind != MAPPED || next->dev != m->dev || next->alias != m->alias + m->len) return false;
    m = next;
  }
  return false;
}

CUresult device_end(CUdeviceptr p, size_t n, bool write, struct end *e) {
  struct mem *m = find_memory(p);
  if (m && is_covered(m, p, n, write)) {
    *e = (struct end){.at = m->alias + (p - m->at), .mem = m, .p = p};
    return CUDA_SUCCESS;
  }
  struct pin *q = m ? NULL : find_pin((void *)p); /* pinned memory has the same address on the device */
  if (!q || n > q->len || (char *)p > q->at + q->len - n) return CUDA_ERROR_INVALID_VALUE;
  *e = (struct end){.at = (char *)p, .pin = q};
  return CUDA_SUCCESS;
}

CUresult host_end(const void *p, size_t n, struct end *e) {
  struct mem *m = find_memory((CUdeviceptr)p);
  if (!p || (m ? m->kind != MANAGED : was_device_memory((CUdeviceptr)p))) return CUDA_ERROR_INVALID_VALUE;
  struct pin *q = find_pin(p);
  if (q && (n > q->len || (const char *)p > q->at + q->len - n)) return CUDA_ERROR_INVALID_VALUE;
  *e = (struct end){.at = (char *)p, .pin = q, .pageable = !q && !m};
  return CUDA_SUCCESS;
}

/* For calls that take any address: an address that was device memory is not taken for host memory. */
CUresult any_end(CUdeviceptr p, size_t n, bool write, struct end *e) {
  return find_memory(p) || find_pin((void *)p) || was_device_memory(p) ? device_end(p, n, write, e) : host_end((void *)p, n, e);
}

/* A copy with pageable memory is done before the call returns, after all that the stream holds, whatever "async" says. */
CUresult put_copy(CUstream s, const struct piece *pieces, size_t n) {
  struct op op = {.what = COPY, .pieces = malloc(n * sizeof *pieces), .count = n};
  bool pageable = false;
  for (size_t i = 0; i < n; i++) {
    op.pieces[i] = pieces[i];
    pageable |= pieces[i].to.pageable || pieces[i].from.pageable;
  }
  if (pageable && s->capture) {
    free(op.pieces);
    s->capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  CUresult r = put_op(s, &op);
  return r || !pageable ? r : await_stream(s);
}

typedef CUresult find_end(uintptr_t p, size_t n, bool write, struct end *e);
static CUresult on_device(uintptr_t p, size_t n, bool write, struct end *e) { return device_end((CUdeviceptr)p, n, write, e); }
static CUresult on_host(uintptr_t p, size_t n, bool write, struct end *e) {
  (void)write;
  return host_end((void *)p, n, e);
}
static CUresult anywhere(uintptr_t p, size_t n, bool write, struct end *e) { return any_end((CUdeviceptr)p, n, write, e); }

static CUresult copy(CUcontext ctx, CUstream handle, uintptr_t to, find_end *to_end, uintptr_t from, find_end *from_end, size_t n) {
  struct piece piece = {.n = n};
  CUstream s;
  CUresult r = find_stream(ctx, handle, &s);
  if (r || !n) return r;
  r = to_end(to, n, true, &piece.to);
  if (!r) r = from_end(from, n, false, &piece.from);
  return r ? r : put_copy(s, &piece, 1);
}

/* Synchronous copies go over the legacy stream, and are waited for. */
static CUresult copy_now(CUcontext ctx, uintptr_t to, find_end *to_end, uintptr_t from, find_end *from_end, size_t n) {
  CUresult r = copy(ctx, CU_STREAM_LEGACY, to, to_end, from, from_end, n);
  return r || !n ? r : await_stream(ctx->legacy);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, CUstream handle) {
  BEGIN(CONTEXT);
  return leave(copy(ctx, handle, (uintptr_t)to, on_host, from, on_device, n));
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream handle) {
  BEGIN(CONTEXT);
  return leave(copy(ctx, handle, to, on_device, (uintptr_t)from, on_host, n));
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream handle) {
  BEGIN(CONTEXT);
  return leave(copy(ctx, handle, to, on_device, from, on_device, n));
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream handle) {
  BEGIN(CONTEXT);
  return leave(copy(ctx, handle, to, anywhere, from, anywhere, n));
}

EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t n, CUstream handle) {
  BEGIN(CONTEXT);
  REQUIRE(to_ctx && from_ctx, CUDA_ERROR_INVALID_CONTEXT);
  const struct mem *a = find_memory(to), *b = find_memory(from);
  REQUIRE(a && b && a->dev == to_ctx->dev && b->dev == from_ctx->dev, CUDA_ERROR_INVALID_VALUE);
  return leave(copy(ctx, handle, to, on_device, from, on_device, n));
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t n) {
  BEGIN(CONTEXT | UNSAFE);
  return leave(copy_now(ctx, (uintptr_t)to, on_host, from, on_device, n));
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t n) {
  BEGIN(CONTEXT | UNSAFE);
  return leave(copy_now(ctx, to, on_device, (uintptr_t)from, on_host, n));
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t n) {
  BEGIN(CONTEXT | UNSAFE);
  return leave(copy_now(ctx, to, on_device, from, on_device, n));
}

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) {
  BEGIN(CONTEXT | UNSAFE);
  return leave(copy_now(ctx, to, anywhere, from, anywhere, n));
}

static CUresult set(CUcontext ctx, CUstream handle, CUdeviceptr to, unsigned value, unsigned width, size_t count) {
  CUstream s;
  CUresult r = find_stream(ctx, handle, &s);
  if (r || !count) return r;
  struct piece *piece = calloc(1, sizeof *piece);
  piece->n = count * width;
  r = to % width ? CUDA_ERROR_INVALID_VALUE : device_end(to, piece->n, true, &piece->to);
  if (!r) return put_op(s, &(struct op){.what = SET, .pieces = piece, .count = 1, .value = value, .width = width});
  free(piece);
  return r;
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream handle) {
  BEGIN(CONTEXT);
  return leave(set(ctx, handle, to, value, 1, count));
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream handle) {
  BEGIN(CONTEXT);
  return leave(set(ctx, handle, to, value, 4, count));
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
  BEGIN(CONTEXT | UNSAFE);
  CUresult r = set(ctx, CU_STREAM_LEGACY, to, value, 1, count);
  return leave(r || !count ? r : await_stream(ctx->legacy));
}
