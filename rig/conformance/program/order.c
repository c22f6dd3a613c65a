/* Streams and events: what is in order, what is not, and which side waits. A gate keeps a stream busy as long as a fact
   needs. */
#include "groups.h"

#include <pthread.h>
#include <stdlib.h>

static CUevent new_event(unsigned flags) {
  CUevent e = NULL;
  return CU(cuEventCreate)(&e, flags) ? NULL : e;
}

static int last_in_host_function;
static void call_driver(void *event) { last_in_host_function = (int)CU(cuEventQuery)(event); }

static int order[3], ordered;
static void note(void *which) { order[ordered++] = (int)(intptr_t)which; }

void streams(void) {
  CUcontext c = open_device(), of = NULL;
  CUstream s = new_stream(), bad;
  CUevent e = new_event(CU_EVENT_DISABLE_TIMING), timed = new_event(0), later = new_event(0);
  struct gate g;
  unsigned flags = 99;
  float passed = -1;
  fact(130, "cuStreamCreate of unknown flags", CUDA_ERROR_INVALID_VALUE, (int)CU(cuStreamCreate)(&bad, 0x100));
  fact(131, "cuStreamQuery of an unused stream", 0, (int)CU(cuStreamQuery)(s));
  CU(cuStreamGetFlags)(s, &flags);
  number_fact(132, "cuStreamGetFlags tells a non-blocking one", CU_STREAM_NON_BLOCKING, flags);
  CU(cuStreamGetCtx)(s, &of);
  truth(133, "cuStreamGetCtx tells its context", of == c);
  fact(134, "cuEventCreate of unknown flags", CUDA_ERROR_INVALID_VALUE, (int)CU(cuEventCreate)(&later, 0x100));
  fact(135, "cuEventCreate of an interprocess event without DISABLE_TIMING", CUDA_ERROR_INVALID_VALUE, (int)CU(cuEventCreate)(&later, CU_EVENT_INTERPROCESS));
  fact(136, "cuEventQuery of an event that was never recorded", 0, (int)CU(cuEventQuery)(e));
  fact(137, "cuEventSynchronize of it", 0, (int)CU(cuEventSynchronize)(e));
  fact(138, "cuStreamWaitEvent for it", 0, (int)CU(cuStreamWaitEvent)(s, e, 0));
  later = new_event(0);
  shut(&g, s);
  fact(139, "cuStreamQuery of a stream that works", CUDA_ERROR_NOT_READY, (int)CU(cuStreamQuery)(s));
  CU(cuEventRecord)(e, s);
  let_time_pass();
  fact(140, "cuEventQuery of an event behind its work", CUDA_ERROR_NOT_READY, (int)CU(cuEventQuery)(e));
  open_gate(&g);
  fact(141, "cuEventSynchronize waits for it", 0, (int)CU(cuEventSynchronize)(e));
  truth(142, "so the work was done", __atomic_load_n(&g.passed, __ATOMIC_ACQUIRE));
  CU(cuEventRecord)(timed, s);
  CU(cuEventRecord)(later, s);
  CU(cuStreamSynchronize)(s);
  fact(143, "cuEventElapsedTime of two recorded events", 0, (int)CU(cuEventElapsedTime)(&passed, timed, later));
  truth(144, "is not negative", passed >= 0);
  fact(145, "cuEventElapsedTime of an event without timing", CUDA_ERROR_INVALID_HANDLE, (int)CU(cuEventElapsedTime)(&passed, e, later));
  for (intptr_t i = 0; i < 3; i++) CU(cuLaunchHostFunc)(s, note, (void *)(i + 1));
  CU(cuStreamSynchronize)(s);
  truth(146, "host functions of a stream run in order", ordered == 3 && order[0] == 1 && order[1] == 2 && order[2] == 3);
  CU(cuLaunchHostFunc)(s, call_driver, e);
  CU(cuStreamSynchronize)(s);
  strict(147, "a host function may not call the driver", CUDA_ERROR_NOT_PERMITTED, 0, last_in_host_function);
  CUstream next = new_stream();
  unsigned long long first_id = 0, next_id = 0, third_id = 0;
  fact(164, "cuStreamGetId", 0, (int)CU(cuStreamGetId)(s, &first_id) + (int)CU(cuStreamGetId)(next, &next_id));
  CU(cuStreamDestroy_v2)(next);
  next = new_stream();
  CU(cuStreamGetId)(next, &third_id);
  truth(165, "gives each stream a number that no other had before", first_id != next_id && next_id != third_id && first_id != third_id);
  shut(&g, s);
  fact(148, "cuStreamDestroy of a stream that works returns", 0, (int)CU(cuStreamDestroy_v2)(s));
  open_gate(&g);
  CU(cuCtxSynchronize)();
  truth(149, "and its work is still done", __atomic_load_n(&g.passed, __ATOMIC_ACQUIRE));
}

/* How many operations a stream takes while its first is busy. */
struct filler {
  CUcontext ctx;
  CUstream s;
  int queued, done;
};
static void nothing(void *unused) { (void)unused; }
static void *fill(void *argument) {
  struct filler *f = argument;
  CU(cuCtxPushCurrent_v2)(f->ctx);
  for (int i = 0; i < 5000; i++) {
    if (CU(cuLaunchHostFunc)(f->s, nothing, NULL)) break;
    __atomic_add_fetch(&f->queued, 1, __ATOMIC_RELAXED);
  }
  __atomic_store_n(&f->done, 1, __ATOMIC_RELEASE);
  return NULL;
}
static bool is_stuck(void *argument) { /* for as long as `eventually` looks */
  struct filler *f = argument;
  static int before = -1, same;
  int now = __atomic_load_n(&f->queued, __ATOMIC_RELAXED);
  same = now == before ? same + 1 : 0;
  before = now;
  return same > 1500 || __atomic_load_n(&f->done, __ATOMIC_ACQUIRE);
}

void waits(void) {
  CUcontext c = open_device();
  CUstream a = new_stream(), b = new_stream(), blocking = NULL;
  CUevent e = new_event(CU_EVENT_DISABLE_TIMING), f = new_event(CU_EVENT_DISABLE_TIMING);
  struct gate g, h;
  shut(&g, a);
  CU(cuEventRecord)(e, a);
  CU(cuStreamWaitEvent)(b, e, 0);
  CU(cuEventRecord)(f, b);
  let_time_pass();
  fact(150, "a stream that waits for an event of a busy one is busy", CUDA_ERROR_NOT_READY, (int)CU(cuEventQuery)(f));
  open_gate(&g);
  fact(151, "until it has passed", 0, (int)CU(cuEventSynchronize)(f));
  CU(cuEventRecord)(e, a);
  CU(cuStreamSynchronize)(a);
  CU(cuStreamWaitEvent)(b, e, 0);
  shut(&g, a);
  CU(cuEventRecord)(e, a);
  fact(152, "a wait is for the record before it: a later record does not hold it up", 0, (int)CU(cuStreamSynchronize)(b));
  fact(153, "and the event is the later record's now", CUDA_ERROR_NOT_READY, (int)CU(cuEventQuery)(e));
  CU(cuStreamWaitEvent)(b, e, 0);
  fact(154, "an event may be destroyed while a stream waits for it", 0, (int)CU(cuEventDestroy_v2)(e));
  let_time_pass();
  fact(155, "the stream goes on waiting", CUDA_ERROR_NOT_READY, (int)CU(cuStreamQuery)(b));
  open_gate(&g);
  fact(156, "and passes when the work is done", 0, (int)CU(cuStreamSynchronize)(b));
  fact(157, "cuStreamWaitEvent of unknown flags", CUDA_ERROR_INVALID_VALUE, (int)CU(cuStreamWaitEvent)(b, f, 0x100));

  CU(cuStreamCreate)(&blocking, CU_STREAM_DEFAULT);
  shut(&g, blocking);
  CU(cuEventRecord)(f, NULL);
  let_time_pass();
  fact(158, "the legacy stream waits for blocking streams", CUDA_ERROR_NOT_READY, (int)CU(cuEventQuery)(f));
  open_gate(&g);
  fact(159, "until they have done what they had", 0, (int)CU(cuEventSynchronize)(f));
  shut(&h, NULL);
  e = new_event(CU_EVENT_DISABLE_TIMING);
  CU(cuEventRecord)(e, blocking);
  CU(cuEventRecord)(f, b);
  fact(160, "a non-blocking stream does not wait for the legacy stream", 0, (int)CU(cuEventSynchronize)(f));
  let_time_pass();
  fact(161, "a blocking one does", CUDA_ERROR_NOT_READY, (int)CU(cuEventQuery)(e));
  open_gate(&h);
  CU(cuCtxSynchronize)();

  struct filler filler = {c, a, 0, 0};
  pthread_t t;
  shut(&g, a);
  if (pthread_create(&t, NULL, fill, &filler)) exit(3);
  eventually(is_stuck, &filler);
  told(162, "so many host functions fit behind a busy one before the call waits (5,000 at most)", __atomic_load_n(&filler.queued, __ATOMIC_RELAXED));
  open_gate(&g);
  pthread_join(t, NULL);
  truth(163, "a call that waited goes on when the stream does", filler.done);
}

void two_contexts(void) {
  CUcontext first = open_device(), second = NULL;
  CUstream a = new_stream(), b = NULL;
  CUevent e = new_event(CU_EVENT_DISABLE_TIMING);
  CUdeviceptr p = device_memory(4096), q;
  char *host = pinned_memory(4096);
  if (CU(cuCtxCreate_v2)(&second, 0, 0)) {
    not_here(170, "an event of one context is not recorded on a stream of another", "there is no second context");
    return;
  }
  CU(cuStreamCreate)(&b, CU_STREAM_NON_BLOCKING);
  fact(170, "an event of one context is not recorded on a stream of another", CUDA_ERROR_INVALID_HANDLE, (int)CU(cuEventRecord)(e, b));
  CU(cuCtxPushCurrent_v2)(first);
  struct gate g;
  shut(&g, a);
  CU(cuEventRecord)(e, a);
  CU(cuCtxPopCurrent_v2)(&first);
  fact(171, "a stream may wait for an event of another context", 0, (int)CU(cuStreamWaitEvent)(b, e, 0));
  let_time_pass();
  fact(172, "and does", CUDA_ERROR_NOT_READY, (int)CU(cuStreamQuery)(b));
  open_gate(&g);
  fact(173, "until it has passed", 0, (int)CU(cuStreamSynchronize)(b));
  strict(174, "cuEventRecord on a stream of a context that is not current", CUDA_ERROR_INVALID_HANDLE, 0, (int)CU(cuEventRecord)(e, a));
  strict(175, "cuMemcpyDtoHAsync on a stream of a context that is not current", CUDA_ERROR_INVALID_HANDLE, 0, (int)CU(cuMemcpyDtoHAsync_v2)(host, p, 64, a));
  CU(cuCtxPushCurrent_v2)(first);
  CU(cuStreamSynchronize)(a);
  CU(cuCtxPopCurrent_v2)(&first);
  strict(176, "cuStreamQuery of a stream of a context that is not current", CUDA_ERROR_INVALID_HANDLE, 0, (int)CU(cuStreamQuery)(a));
  fact(177, "memory of another context of the device can be copied", 0, (int)CU(cuMemAlloc_v2)(&q, 4096) + (int)CU(cuMemcpyDtoDAsync_v2)(q, p, 4096, b) + (int)CU(cuStreamSynchronize)(b));
  CU(cuCtxDestroy_v2)(second);
}

/* The calls that a moment makes, on a stream of a green context: its events are of the primary context. */
void green_contexts(void) {
  CUcontext own = NULL;
  CUdevResource all;
  CUdevResourceDesc desc;
  CUgreenCtx green = NULL;
  CUstream s = NULL;
  CUstreamCaptureStatus capturing;
  unsigned long long id;
  struct gate g;
  const char *made = "a green context of all multiprocessors, and a stream of it";
  open_device();
  if (!CU(cuGreenCtxStreamCreate)) {
    not_here(380, made, "the driver is older than CUDA 12.5");
    return;
  }
  int error = (int)CU(cuDeviceGetDevResource)(0, &all, CU_DEV_RESOURCE_TYPE_SM);
  if (!error) error = (int)CU(cuDevResourceGenerateDesc)(&desc, &all, 1);
  if (!error) error = (int)CU(cuGreenCtxCreate)(&green, desc, 0, CU_GREEN_CTX_DEFAULT_STREAM);
  if (!error) error = (int)CU(cuGreenCtxStreamCreate)(&s, green, CU_STREAM_NON_BLOCKING, 0);
  if (error == CUDA_ERROR_NOT_SUPPORTED) {
    not_here(380, made, "the device has no green contexts");
    return;
  }
  fact(380, made, 0, error);
  if (error || CU(cuCtxFromGreenCtx)(&own, green)) return;
  strict(381, "cuStreamIsCapturing of it while the primary context is current", CUDA_ERROR_INVALID_HANDLE, 0, (int)CU(cuStreamIsCapturing)(s, &capturing));
  strict(382, "and cuStreamGetId", CUDA_ERROR_INVALID_HANDLE, 0, (int)CU(cuStreamGetId)(s, &id));
  CUevent e = new_event(CU_EVENT_DISABLE_TIMING), theirs;
  CU(cuCtxPushCurrent_v2)(own);
  shut(&g, s);
  theirs = new_event(CU_EVENT_DISABLE_TIMING);
  fact(383, "an event of the green context is recorded on it", 0, (int)CU(cuEventRecord)(theirs, s));
  CU(cuCtxPopCurrent_v2)(&own);
  int recorded = (int)CU(cuEventRecord)(e, s);
  strict(384, "an event of the primary context is recorded on it", CUDA_ERROR_INVALID_HANDLE, 0, recorded);
  let_time_pass();
  const char *behind = "and has not passed while the stream is busy";
  if (recorded) not_here(385, behind, "it was not recorded");
  else fact(385, behind, CUDA_ERROR_NOT_READY, (int)CU(cuEventQuery)(e));
  CUstream ours = new_stream();
  fact(386, "a stream of the primary context may wait for the green context's event", 0, (int)CU(cuStreamWaitEvent)(ours, theirs, 0));
  fact(387, "and does", CUDA_ERROR_NOT_READY, (int)CU(cuStreamQuery)(ours));
  open_gate(&g);
  fact(388, "until it has passed", 0, (int)CU(cuStreamSynchronize)(ours));
  CU(cuCtxPushCurrent_v2)(own);
  CU(cuStreamDestroy_v2)(s);
  CU(cuCtxPopCurrent_v2)(&own);
  fact(389, "cuGreenCtxDestroy", 0, (int)CU(cuGreenCtxDestroy)(green));
}
