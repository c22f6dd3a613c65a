/* Stream capture. While one is open, an unsafe call of any thread that has not exchanged its mode for a more relaxed one fails, and breaks
 * the capture: it is what a library's own thread can do to an engine. */
#include "double.h"

#include <stdlib.h>

static struct capture *captures; /* open ones */
static uint64_t ids;
static __thread CUstreamCaptureMode own_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUresult capture_forbids(void) {
  CUresult r = CUDA_SUCCESS;
  if (own_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return r;
  for (struct capture *c = captures; c; c = c->next) {
    bool own = pthread_equal(c->thread, pthread_self());
    bool forbids = own ? c->mode != CU_STREAM_CAPTURE_MODE_RELAXED : own_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!forbids) continue;
    c->invalid = true;
    r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return r;
}

/* Work on the legacy stream would have to wait for a blocking stream, which does not run while it is captured. */
bool breaks_capture(CUstream s) {
  bool breaks = false;
  for (CUstream other = streams; other && s == s->ctx->legacy; other = other->next) {
    if (!other->capture || other->ctx != s->ctx || other->flags & CU_STREAM_NON_BLOCKING) continue;
    other->capture->invalid = true;
    breaks = true;
  }
  return breaks;
}

unsigned open_captures(void) {
  unsigned n = 0;
  for (struct capture *c = captures; c; c = c->next) n++;
  return n;
}

void free_captures(void) {
  while (captures) {
    struct capture *c = captures;
    captures = c->next;
    free_nodes(c->head);
    free(c);
  }
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  BEGIN(AFTER_ERROR);
  REQUIRE(mode && (unsigned)*mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
  CUstreamCaptureMode before = own_mode;
  own_mode = *mode;
  *mode = before;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  BEGIN(CONTEXT);
  CUstream s;
  REQUIRE((unsigned)mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(handle && handle != CU_STREAM_LEGACY, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CUresult r = find_stream(ctx, handle, &s);
  if (r) return leave(r);
  REQUIRE(!s->capture, CUDA_ERROR_ILLEGAL_STATE);
  struct capture *c = calloc(1, sizeof *c);
  *c = (struct capture){.mode = mode, .thread = pthread_self(), .origin = s, .id = ++ids, .next = captures};
  c->tail = &c->head;
  captures = c;
  s->capture = c;
  return leave(CUDA_SUCCESS);
}

static void close_capture(struct capture *closed) {
  for (CUstream s = streams; s; s = s->next) {
    if (s->capture == closed) s->capture = NULL;
  }
  for (struct capture **c = &captures; *c; c = &(*c)->next) {
    if (*c != closed) continue;
    *c = closed->next;
    break;
  }
  free(closed);
}

EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph *out) {
  BEGIN(CONTEXT);
  CUstream s;
  REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
  CUresult r = find_stream(ctx, handle, &s);
  if (r) return leave(r);
  struct capture *c = s->capture;
  REQUIRE(c, CUDA_ERROR_ILLEGAL_STATE);
  REQUIRE(c->origin == s, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  REQUIRE(c->mode == CU_STREAM_CAPTURE_MODE_RELAXED || pthread_equal(c->thread, pthread_self()), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  *out = NULL;
  bool invalid = c->invalid;
  if (invalid) free_nodes(c->head);
  else *out = new_graph(c->head);
  close_capture(c);
  return leave(invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS);
}

static CUstreamCaptureStatus status_of(CUstream s) {
  if (!s->capture) return CU_STREAM_CAPTURE_STATUS_NONE;
  return s->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

EXPORT CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
  BEGIN(CONTEXT);
  CUstream s;
  REQUIRE(status, CUDA_ERROR_INVALID_VALUE);
  CUresult r = find_stream(ctx, handle, &s);
  if (!r) *status = status_of(s);
  return leave(r);
}

EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes, size_t *count) {
  BEGIN(CONTEXT);
  CUstream s;
  REQUIRE(status, CUDA_ERROR_INVALID_VALUE);
  CUresult r = find_stream(ctx, handle, &s);
  if (r) return leave(r);
  *status = status_of(s);
  if (id && s->capture) *id = s->capture->id;
  if (graph) *graph = NULL;
  if (nodes) *nodes = NULL;
  if (count) *count = 0;
  return leave(CUDA_SUCCESS);
}
