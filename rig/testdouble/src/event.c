/* Events. Each record is an object of its own, so what waits for an event waits for the record that was newest when it was asked to. */
#include "double.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

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
    if (e->shared) munmap(e->shared, HOST_PAGE);
    if (e->fd >= 0) close(e->fd);
    free(e);
  }
}

static void end_event(CUevent e) {
  e->magic = 0;
  let_record(e->last);
  e->last = NULL;
  if (e->fd >= 0) close(e->fd); /* the page stays mapped: operations may still tell it */
  e->fd = -1;
  living_events--;
}

void end_events(CUcontext ctx) {
  for (CUevent e = events; e; e = e->next) {
    if (e->magic == EVENT_ALIVE && e->ctx == ctx) end_event(e);
  }
}

bool is_event(CUevent e) { return e && e->magic == EVENT_ALIVE; }

bool is_reached(const struct shared *shared, uint64_t number) { return __atomic_load_n(&shared->done, __ATOMIC_ACQUIRE) >= number; }

void nap_on_progress(void) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += 200000;
  if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
  pthread_cond_timedwait(&progress, &world, &until);
}

CUevent new_event(CUcontext ctx, unsigned flags, int fd) {
  struct shared *page = fd < 0 ? NULL : mmap(NULL, HOST_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) return NULL;
  CUevent e = calloc(1, sizeof *e);
  *e = (struct CUevent_st){.magic = EVENT_ALIVE, .ctx = ctx, .flags = flags, .shared = page, .fd = fd, .next = events};
  events = e;
  living_events++;
  return e;
}

static int shared_page(void) {
  int fd = memfd_create("kvgpu-event", MFD_CLOEXEC);
  if (fd >= 0 && !ftruncate(fd, (off_t)HOST_PAGE)) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

EXPORT CUresult cuEventCreate(CUevent *out, unsigned int flags) {
  BEGIN(CONTEXT);
  unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  REQUIRE(out && !(flags & ~known), CUDA_ERROR_INVALID_VALUE);
  REQUIRE(!(flags & CU_EVENT_INTERPROCESS) || flags & CU_EVENT_DISABLE_TIMING, CUDA_ERROR_INVALID_VALUE);
  int fd = flags & CU_EVENT_INTERPROCESS ? shared_page() : -1;
  CUevent e = flags & CU_EVENT_INTERPROCESS && fd < 0 ? NULL : new_event(ctx, flags, fd);
  REQUIRE(e, CUDA_ERROR_OUT_OF_MEMORY);
  *out = e;
  return leave(CUDA_SUCCESS);
}

/* The handle is invalid at once; what waits for its records goes on waiting. Its memory stays, so that a use of it is seen. */
EXPORT CUresult cuEventDestroy_v2(CUevent e) {
  BEGIN(CONTEXT | AFTER_ERROR);
  REQUIRE(is_event(e), CUDA_ERROR_INVALID_HANDLE);
  end_event(e);
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
  record->shared = e->shared;
  if (e->shared) record->number = __atomic_add_fetch(&e->shared->recorded, 1, __ATOMIC_ACQ_REL);
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

static uint64_t recorded_of(CUevent e) { return __atomic_load_n(&e->shared->recorded, __ATOMIC_ACQUIRE); }

/* One that was never recorded counts as passed. */
EXPORT CUresult cuEventQuery(CUevent e) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(is_event(e), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(!e->captured, CUDA_ERROR_CAPTURED_EVENT);
  if (e->shared) return leave(is_reached(e->shared, recorded_of(e)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
  if (!e->last) return leave(CUDA_SUCCESS);
  return leave(e->last->done ? e->last->result : CUDA_ERROR_NOT_READY);
}

EXPORT CUresult cuEventSynchronize(CUevent e) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(is_event(e), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(!e->captured, CUDA_ERROR_CAPTURED_EVENT);
  if (e->shared) {
    struct shared *page = e->shared;
    for (uint64_t number = recorded_of(e); !is_reached(page, number) && !gone;) nap_on_progress();
    return leave(gone ? CUDA_ERROR_DEINITIALIZED : devices[ctx->dev].sticky);
  }
  struct record *record = e->last;
  if (!record) return leave(CUDA_SUCCESS);
  record->references++;
  while (!record->done && !gone) pthread_cond_wait(&recorded, &world);
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
  if (e->shared) return leave(put_op(s, &(struct op){.what = WAIT, .shared = e->shared, .number = recorded_of(e)}));
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
