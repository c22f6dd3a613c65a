/* Streams: a queue of operations and a thread each, which is late before every operation by a drawn time. */
#include "double.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

CUstream streams;
static uint64_t ids, given; /* streams, operations */
static bool one_connection; /* a device does what its streams have in the order in which they were given it */

__attribute__((constructor)) static void read_connections(void) {
  const char *told = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  one_connection = told && !strcmp(told, "1");
}

CUstream new_stream(CUcontext ctx, unsigned flags, int priority) {
  CUstream s = calloc(1, sizeof *s);
  *s = (struct CUstream_st){.ctx = ctx, .flags = flags, .priority = priority, .id = ++ids, .alive = true, .next = streams};
  s->chance = mix(kvgpu_seed() + s->id);
  s->delay_max = UINT32_MAX;
  s->tail = &s->head;
  pthread_cond_init(&s->work, NULL);
  streams = s;
  return s;
}

/* 0 and 1 are the context's legacy stream, 2 the thread's (here: the context's) default stream. */
static CUstream special(CUcontext ctx, CUstream handle) {
  CUstream *kept = handle == CU_STREAM_PER_THREAD ? &ctx->per_thread : &ctx->legacy;
  if (!*kept) *kept = new_stream(ctx, CU_STREAM_DEFAULT, 0);
  return *kept;
}

static bool is_special(CUstream handle) { return (uintptr_t)handle <= (uintptr_t)CU_STREAM_PER_THREAD; }

CUstream any_stream(CUstream handle) {
  for (CUstream s = streams; s; s = s->next) {
    if (s == handle) return s->alive ? s : NULL;
  }
  return NULL;
}

CUresult find_stream(CUcontext ctx, CUstream handle, CUstream *out) {
  *out = is_special(handle) ? special(ctx, handle) : any_stream(handle);
  if (!*out || (*out)->ctx != ctx) return CUDA_ERROR_INVALID_HANDLE;
  return CUDA_SUCCESS;
}

/* ---- the thread of a stream */

static void be_late(CUstream s) {
  uint64_t most = s->delay_max == UINT32_MAX ? delay_max : s->delay_max;
  uint64_t microseconds = most ? draw(&s->chance) % (most + 1) : 0;
  if (!microseconds) return;
  pthread_mutex_unlock(&world);
  struct timespec t = {(time_t)(microseconds / 1000000), (long)(microseconds % 1000000) * 1000};
  nanosleep(&t, NULL);
  pthread_mutex_lock(&world);
}

static bool is_passed(const struct stamp *stamp) { return stamp->stream->got >= stamp->until; }

/* Whether all that the device was given before has been done. What waits waits for something older, so no two wait for each other. */
static bool is_oldest(CUstream s, const struct op *op) {
  for (CUstream other = streams; other; other = other->next) {
    if (other->ctx->dev == s->ctx->dev && other->head && other->head->place < op->place) return false;
  }
  return true;
}

/* Whether the operation may begin: not held, and all that it waits for has passed. A device that has failed ends all that it has. */
static bool may_begin(CUstream s, const struct op *op) {
  if (devices[s->ctx->dev].sticky) return true;
  if (s->held || devices[s->ctx->dev].halted) return false;
  if (one_connection && !is_oldest(s, op)) return false;
  for (size_t i = 0; i < op->afters; i++) {
    if (!is_passed(&op->after[i])) return false;
  }
  if (op->shared) return is_reached(op->shared, op->number);
  return op->what != WAIT || op->record->done;
}

static void use_end(const struct end *e, size_t n, unsigned by) {
  if (e->pin) e->pin->in_flight += by;
  if (!e->mem) return;
  if (e->p + n <= e->mem->at + e->mem->len) {
    e->mem->in_flight += by;
    return;
  }
  for (struct mem *m = NULL; (m = next_overlap(m, e->p, n));) m->in_flight += by;
}

static void use(const struct op *op, int by) {
  for (size_t i = 0; i < op->count; i++) {
    use_end(&op->pieces[i].to, op->pieces[i].n, (unsigned)by);
    use_end(&op->pieces[i].from, op->pieces[i].n, (unsigned)by);
  }
}

static void finish(CUstream s, struct op *op) {
  s->head = op->next;
  if (!s->head) s->tail = &s->head;
  use(op, -1);
  free_op(op);
  s->got++;
  pthread_cond_broadcast(&progress);
}

static void *run(void *argument) {
  CUstream s = argument;
  pthread_mutex_lock(&world);
  for (;;) {
    while (!s->head && !gone && s->alive) pthread_cond_wait(&s->work, &world);
    if (gone || !s->head) break;
    struct op *op = s->head;
    be_late(s);
    while (!gone && !may_begin(s, op)) {
      if (op->shared) nap_on_progress();
      else pthread_cond_wait(&progress, &world);
    }
    if (gone) break;
    CUresult sticky = devices[s->ctx->dev].sticky;
    if (!sticky && op->what != RECORD && op->what != WAIT) sticky = failing_operation(s->ctx->dev);
    if (!sticky && op->fails) sticky = devices[s->ctx->dev].sticky = op->fails;
    if (!s->sick) s->sick = sticky ? sticky : op->what == WAIT && op->record ? op->record->result : CUDA_SUCCESS;
    perform(s, op);
    finish(s, op);
  }
  pthread_mutex_unlock(&world);
  return NULL;
}

/* ---- what is put on it */

/* The legacy stream waits for all blocking ones of its context, and they for it. */
static void imply_order(CUstream s, struct op *op) {
  if (s->flags & CU_STREAM_NON_BLOCKING) return;
  CUstream legacy = s->ctx->legacy;
  for (CUstream other = streams; other; other = other->next) {
    if (other == s || other->ctx != s->ctx || other->flags & CU_STREAM_NON_BLOCKING || other->got == other->put) continue;
    if (s != legacy && other != legacy) continue;
    op->after = realloc(op->after, (op->afters + 1) * sizeof *op->after);
    op->after[op->afters++] = (struct stamp){other, other->put};
  }
}

CUresult put_op(CUstream s, const struct op *wanted) {
  struct op *op = malloc(sizeof *op);
  *op = *wanted;
  op->next = NULL;
  op->place = 0;
  if (s->capture) { /* a node of a graph, not work */
    if (s->capture->invalid) {
      free_op(op);
      return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    *s->capture->tail = op;
    s->capture->tail = &op->next;
    return CUDA_SUCCESS;
  }
  if (breaks_capture(s)) {
    free_op(op);
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  use(op, 1);
  while (s->put - s->got >= QUEUE_MAX && !gone) pthread_cond_wait(&progress, &world);
  if (!s->started && !gone) s->started = !pthread_create(&s->thread, NULL, run, s);
  if (!s->started || gone) {
    use(op, -1);
    free_op(op);
    return gone ? CUDA_ERROR_DEINITIALIZED : CUDA_ERROR_OUT_OF_MEMORY;
  }
  imply_order(s, op);
  op->place = ++given;
  *s->tail = op;
  s->tail = &op->next;
  s->put++;
  pthread_cond_signal(&s->work);
  return CUDA_SUCCESS;
}

CUresult await_stream(CUstream s) {
  uint64_t until = s->put;
  while (s->got < until && !gone) pthread_cond_wait(&progress, &world);
  CUresult sticky = devices[s->ctx->dev].sticky;
  return gone ? CUDA_ERROR_DEINITIALIZED : sticky ? sticky : s->sick;
}

CUresult await_context(CUcontext ctx) {
  CUresult result = CUDA_SUCCESS;
  for (CUstream s = streams; s; s = s->next) {
    CUresult r = s->ctx == ctx ? await_stream(s) : CUDA_SUCCESS;
    if (!result && s->alive) result = r; /* what befell a stream went with it */
  }
  return result ? result : devices[ctx->dev].sticky;
}

uint64_t queued_operations(void) {
  uint64_t n = 0;
  for (CUstream s = streams; s; s = s->next) n += s->put - s->got;
  return n;
}

uint64_t stuck_operations(void) {
  uint64_t n = 0;
  for (CUstream s = streams; s; s = s->next)
    if (devices[s->ctx->dev].halted) n += s->put - s->got;
  return n;
}

/* At unload. Threads that are performing end their operation first. */
void stop_streams(void) {
  pthread_mutex_lock(&world);
  for (CUstream s = streams; s; s = s->next) pthread_cond_broadcast(&s->work);
  pthread_cond_broadcast(&progress);
  pthread_cond_broadcast(&recorded);
  pthread_mutex_unlock(&world);
  if (!is_initialized()) return; /* a fork's child has no threads */
  for (CUstream s = streams; s; s = s->next) {
    if (s->started) pthread_join(s->thread, NULL);
  }
}

void end_streams(CUcontext ctx) {
  for (CUstream s = streams; s; s = s->next) {
    if (s->ctx != ctx) continue;
    s->alive = s->held = false;
    pthread_cond_broadcast(&s->work);
  }
  ctx->legacy = ctx->per_thread = NULL;
  pthread_cond_broadcast(&progress);
}

/* After all threads have ended. */
void free_streams(void) {
  while (streams) {
    CUstream s = streams;
    streams = s->next;
    while (s->head) {
      struct op *op = s->head;
      s->head = op->next;
      free_op(op);
    }
    pthread_cond_destroy(&s->work);
    free(s);
  }
}

/* ---- the interface */

EXPORT CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(out && !(flags & ~(unsigned)CU_STREAM_NON_BLOCKING), CUDA_ERROR_INVALID_VALUE);
  *out = new_stream(ctx, flags, priority);
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamCreate(CUstream *out, unsigned int flags) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(out && !(flags & ~(unsigned)CU_STREAM_NON_BLOCKING), CUDA_ERROR_INVALID_VALUE);
  *out = new_stream(ctx, flags, 0);
  return leave(CUDA_SUCCESS);
}

/* Work that is queued is still done; the handle is invalid at once, and never comes back. */
EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
  BEGIN(CONTEXT | UNSAFE | AFTER_ERROR);
  CUstream s;
  REQUIRE(!is_special(handle) && !find_stream(ctx, handle, &s), CUDA_ERROR_INVALID_HANDLE);
  s->alive = false;
  s->held = false;
  pthread_cond_broadcast(&s->work);
  pthread_cond_broadcast(&progress);
  return leave(CUDA_SUCCESS);
}

#define STREAM(s)                                     \
  CUstream s;                                         \
  do {                                                \
    CUresult found_ = find_stream(ctx, handle, &s);   \
    if (found_) return leave(found_);                 \
  } while (0)

EXPORT CUresult cuStreamQuery(CUstream handle) {
  BEGIN(CONTEXT | UNSAFE);
  STREAM(s);
  REQUIRE(!s->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  return leave(s->sick ? s->sick : s->got < s->put ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) {
  BEGIN(CONTEXT | UNSAFE);
  STREAM(s);
  if (s->capture) s->capture->invalid = true;
  REQUIRE(!s->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  return leave(await_stream(s));
}

EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext *out) {
  BEGIN(CONTEXT);
  REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
  CUstream s = is_special(handle) ? special(ctx, handle) : any_stream(handle);
  REQUIRE(s, CUDA_ERROR_INVALID_HANDLE);
  *out = s->ctx;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamGetId(CUstream handle, unsigned long long *id) {
  BEGIN(CONTEXT);
  REQUIRE(id, CUDA_ERROR_INVALID_VALUE);
  STREAM(s);
  *id = s->id;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags) {
  BEGIN(CONTEXT);
  REQUIRE(flags, CUDA_ERROR_INVALID_VALUE);
  STREAM(s);
  *flags = s->flags;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamGetPriority(CUstream handle, int *priority) {
  BEGIN(CONTEXT);
  REQUIRE(priority, CUDA_ERROR_INVALID_VALUE);
  STREAM(s);
  *priority = s->priority;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn call, void *argument) {
  BEGIN(CONTEXT);
  REQUIRE(call, CUDA_ERROR_INVALID_VALUE);
  STREAM(s);
  return leave(put_op(s, &(struct op){.what = CALL, .call = call, .argument = argument}));
}

static int set_held(void *handle, bool held) {
  pthread_mutex_lock(&world);
  CUstream s = any_stream(handle);
  if (s) s->held = held;
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&world);
  return s ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT int kvgpu_slow(void *stream, unsigned microseconds) {
  pthread_mutex_lock(&world);
  CUstream s = any_stream(stream);
  if (s) s->delay_max = microseconds;
  pthread_mutex_unlock(&world);
  return s ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT void kvgpu_one_connection(int on) {
  pthread_mutex_lock(&world);
  one_connection = on;
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&world);
}

EXPORT int kvgpu_hold(void *stream) { return set_held(stream, true); }
EXPORT int kvgpu_release(void *stream) { return set_held(stream, false); }
