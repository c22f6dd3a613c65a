/* Events. Each record is an object of its own, so what waits for an event waits for the record that was newest when it was asked to. */
#include "double.h"

#include <stdlib.h>

#define ALIVE 0x6576656e74u

unsigned living_events;
static CUevent events;

void let_record(struct record *r) {
  if (r && !--r->references) free(r);
}

void free_events(void) {
  while (events) {
    CUevent e = events;
    events = e->next;
    let_record(e->last);
    free(e);
  }
}

static bool is_event(CUevent e) { return e && e->magic == ALIVE; }

EXPORT CUresult cuEventCreate(CUevent *out, unsigned int flags) {
  BEGIN(CONTEXT);
  unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  REQUIRE(out && !(flags & ~known), CUDA_ERROR_INVALID_VALUE);
  REQUIRE(!(flags & CU_EVENT_INTERPROCESS) || flags & CU_EVENT_DISABLE_TIMING, CUDA_ERROR_INVALID_VALUE);
  CUevent e = calloc(1, sizeof *e);
  *e = (struct CUevent_st){.magic = ALIVE, .ctx = ctx, .flags = flags, .next = events};
  events = e;
  living_events++;
  *out = e;
  return leave(CUDA_SUCCESS);
}

/* The handle is invalid at once; what waits for its records goes on waiting. Its memory stays, so that a use of it is seen. */
EXPORT CUresult cuEventDestroy_v2(CUevent e) {
  BEGIN(CONTEXT | AFTER_ERROR);
  REQUIRE(is_event(e), CUDA_ERROR_INVALID_HANDLE);
  e->magic = 0;
  let_record(e->last);
  e->last = NULL;
  living_events--;
  return leave(CUDA_SUCCESS);
}

static CUresult put_record(CUcontext ctx, CUevent e, CUstream handle) {
  CUstream s;
  if (!is_event(e)) return CUDA_ERROR_INVALID_HANDLE;
  CUresult r = find_stream(ctx, handle, &s);
  if (r) return r;
  if (e->ctx != s->ctx) return CUDA_ERROR_INVALID_HANDLE;
  e->captured = s->capture;
  if (s->capture) return s->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
  struct record *record = calloc(1, sizeof *record);
  record->references = 2; /* the event's and the operation's */
  let_record(e->last);
  e->last = record;
  return put_op(s, &(struct op){.what = RECORD, .record = record});
}

EXPORT CUresult cuEventRecord(CUevent e, CUstream handle) {
  BEGIN(CONTEXT);
  return leave(put_record(ctx, e, handle));
}

EXPORT CUresult cuEventRecordWithFlags(CUevent e, CUstream handle, unsigned int flags) {
  BEGIN(CONTEXT);
  REQUIRE(!(flags & ~(unsigned)CU_EVENT_RECORD_EXTERNAL), CUDA_ERROR_INVALID_VALUE);
  return leave(put_record(ctx, e, handle));
}

/* One that was never recorded counts as passed. */
EXPORT CUresult cuEventQuery(CUevent e) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(is_event(e), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(!e->captured, CUDA_ERROR_CAPTURED_EVENT);
  if (!e->last) return leave(CUDA_SUCCESS);
  return leave(e->last->done ? e->last->result : CUDA_ERROR_NOT_READY);
}

EXPORT CUresult cuEventSynchronize(CUevent e) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(is_event(e), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(!e->captured, CUDA_ERROR_CAPTURED_EVENT);
  struct record *record = e->last;
  if (!record) return leave(CUDA_SUCCESS);
  record->references++;
  while (!record->done && !gone) pthread_cond_wait(&progress, &world);
  CUresult r = record->done ? record->result : CUDA_ERROR_DEINITIALIZED;
  let_record(record);
  return leave(r);
}

/* The stream may be of another context than the event: that is how devices are ordered. A stream that waits for a captured event joins the
 * capture. */
EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent e, unsigned int flags) {
  BEGIN(CONTEXT);
  CUstream s;
  REQUIRE(!(flags & ~(unsigned)CU_EVENT_WAIT_EXTERNAL), CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_event(e), CUDA_ERROR_INVALID_HANDLE);
  CUresult r = find_stream(ctx, handle, &s);
  if (r) return leave(r);
  if (e->captured) {
    REQUIRE(!s->capture || s->capture == e->captured, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    s->capture = e->captured;
    return leave(CUDA_SUCCESS);
  }
  if (s->capture && e->last) { /* a graph cannot wait for what was recorded outside of it */
    s->capture->invalid = true;
    return leave(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  }
  if (!e->last) return leave(CUDA_SUCCESS);
  e->last->references++;
  return leave(put_op(s, &(struct op){.what = WAIT, .record = e->last}));
}

static CUresult elapsed(float *milliseconds, CUevent start, CUevent end) {
  if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
  if (!is_event(start) || !is_event(end) || !start->last || !end->last || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
  if (!start->last->done || !end->last->done) return CUDA_ERROR_NOT_READY;
  *milliseconds = (float)((double)(int64_t)(end->last->nanoseconds - start->last->nanoseconds) / 1e6);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
  BEGIN(CONTEXT | UNSAFE);
  return leave(elapsed(milliseconds, start, end));
}

#if CUDA_VERSION >= 12080 && !defined(KVGPU_OLD)
EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
  BEGIN(CONTEXT | UNSAFE);
  return leave(elapsed(milliseconds, start, end));
}
#endif
