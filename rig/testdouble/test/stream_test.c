/* Streams: order, lateness, races that are seen, limits; capture; what goes wrong. */
#include "test.h"

#include <sched.h>
#include <string.h>

#define N ((size_t)64 << 10)

struct pair { /* an engine's stream and ours, some device memory and a pinned buffer */
  CUstream engine, ours;
  CUdeviceptr p;
  void *host;
  CUevent e;
};

static struct pair make_pair(void) {
  struct pair x;
  enter_device(0);
  OK(cuStreamCreate(&x.engine, CU_STREAM_NON_BLOCKING));
  OK(cuStreamCreate(&x.ours, CU_STREAM_NON_BLOCKING));
  OK(cuEventCreate(&x.e, CU_EVENT_DISABLE_TIMING));
  OK(cuMemAlloc_v2(&x.p, N));
  OK(cuMemHostAlloc(&x.host, N, CU_MEMHOSTALLOC_PORTABLE));
  return x;
}

static void end_pair(struct pair *x) {
  OK(cuStreamSynchronize(x->engine));
  OK(cuStreamSynchronize(x->ours));
  OK(cuMemFreeHost(x->host));
  OK(cuMemFree_v2(x->p));
  OK(cuEventDestroy_v2(x->e));
  OK(cuStreamDestroy_v2(x->engine));
  OK(cuStreamDestroy_v2(x->ours));
  leave_device(0);
}

/* Whether the pinned buffer holds the pattern. The stream has been waited for. */
static bool holds(const struct pair *x, uint64_t pattern) {
  for (size_t i = 0; i < N; i++) {
    if (((unsigned char *)x->host)[i] != kvgpu_byte(pattern, i)) return false;
  }
  return true;
}

void test_order(void) {
  struct pair x = make_pair();
  FAILS(CUDA_SUCCESS, cuEventQuery(x.e)); /* never recorded: passed */
  OK(kvgpu_hold(x.engine));
  OK(kvgpu_kernel_fill(x.engine, x.p, N, 1, 0));
  OK(cuEventRecord(x.e, x.engine));
  FAILS(CUDA_ERROR_NOT_READY, cuEventQuery(x.e));
  FAILS(CUDA_ERROR_NOT_READY, cuStreamQuery(x.engine));
  OK(cuStreamWaitEvent(x.ours, x.e, 0));
  OK(cuEventRecord(x.e, x.ours)); /* a new record: a stream that waits already waits for the old one */
  OK(cuMemcpyDtoHAsync_v2(x.host, x.p, N, x.ours));
  OK(kvgpu_release(x.engine));
  OK(cuEventSynchronize(x.e));
  OK(cuStreamSynchronize(x.ours));
  EXPECT(holds(&x, 1));
  uint64_t wrong = 0;
  OK(kvgpu_kernel_check(x.ours, x.p, N, 1, 0, &wrong));
  OK(cuStreamSynchronize(x.ours));
  EXPECT(!wrong && !kvgpu_wrong(x.p, N, 1, 0));
  OK(kvgpu_fill(x.p + 10, 1, 99, 3));
  EXPECT(kvgpu_wrong(x.p, N, 1, 0) <= 1);
  CUevent shared;
  OK(cuEventCreate(&shared, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
  OK(kvgpu_hold(x.engine));
  OK(kvgpu_kernel_fill(x.engine, x.p, N, 2, 0));
  OK(cuEventRecord(shared, x.engine));
  OK(cuStreamWaitEvent(x.ours, shared, 0));
  OK(cuMemcpyDtoHAsync_v2(x.host, x.p, N, x.ours));
  FAILS(CUDA_ERROR_NOT_READY, cuEventQuery(shared));
  OK(kvgpu_release(x.engine));
  OK(cuStreamSynchronize(x.ours));
  OK(cuEventSynchronize(shared));
  EXPECT(holds(&x, 2));
  OK(cuEventDestroy_v2(shared));
  end_pair(&x);
}

/* A build that leaves the wait out must be seen: the engine's kernel writes, our copy reads. */
void test_races(void) {
  struct pair x = make_pair();
  int without[2] = {0}, with = 0, rounds = 60; /* without the wait: on their own, and held */
  for (int i = 0; i < rounds; i++) {
    int held = i % 4 == 0; /* the kernel is late for certain */
    if (held) OK(kvgpu_hold(x.engine));
    OK(kvgpu_kernel_fill(x.engine, x.p, N, 1000u + (unsigned)i, 0));
    OK(cuMemcpyDtoHAsync_v2(x.host, x.p, N, x.ours));
    OK(cuStreamSynchronize(x.ours));
    if (held) OK(kvgpu_release(x.engine));
    without[held] += !holds(&x, 1000u + (unsigned)i);
    OK(cuStreamSynchronize(x.engine));
    OK(kvgpu_kernel_fill(x.engine, x.p, N, 2000u + (unsigned)i, 0));
    OK(cuEventRecord(x.e, x.engine));
    OK(cuStreamWaitEvent(x.ours, x.e, 0));
    OK(cuMemcpyDtoHAsync_v2(x.host, x.p, N, x.ours));
    OK(cuStreamSynchronize(x.ours));
    with += !holds(&x, 2000u + (unsigned)i);
  }
  printf("a copy without the event: %d of %d wrong; with it: %d\n", without[0] + without[1], rounds, with);
  EXPECT(without[1] == rounds / 4 && !with); /* who is first in the other rounds, the scheduler says */
  end_pair(&x);
}

static void add(void *counter) { ++*(int *)counter; }

/* What a batch holds, a queue's limit, host functions, strides, pageable memory. */
void test_queue(void) {
  struct pair x = make_pair();
  CUdeviceptr to[64], from[64];
  size_t sizes[64], first = 0, bad = 7;
  for (size_t i = 0; i < 64; i++) to[i] = (CUdeviceptr)x.host + i * 1024, from[i] = x.p + (63 - i) * 1024, sizes[i] = 1024;
  CUmemcpyAttributes stream_order = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
  OK(kvgpu_kernel_fill(x.ours, x.p, N, 5, 0));
  OK(cuMemcpyBatchAsync(to, from, sizes, 64, &stream_order, &first, 1, &bad, x.ours));
  OK(cuStreamSynchronize(x.ours));
  for (size_t i = 0; i < N; i++) EXPECT(((unsigned char *)x.host)[i] == kvgpu_byte(5, (63 - i / 1024) * 1024 + i % 1024));
  from[9] = x.p + N - 512;
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemcpyBatchAsync(to, from, sizes, 64, &stream_order, &first, 1, &bad, x.ours));
  EXPECT(bad == 9);
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemcpyBatchAsync(to, from, sizes, 64, &stream_order, &first, 1, &bad, NULL));

  int calls = 0;
  kvgpu_delay(0);
  for (int i = 0; i < 3 * QUEUE_MAX; i++) OK(cuLaunchHostFunc(x.ours, add, &calls));
  EXPECT(kvgpu_count("queued") <= QUEUE_MAX);
  OK(cuStreamSynchronize(x.ours));
  EXPECT(calls == 3 * QUEUE_MAX);
  kvgpu_delay(300);

  unsigned char *pageable = malloc(N);
  OK(kvgpu_kernel_fill(x.ours, x.p, N, 6, 0));
  OK(cuMemcpyDtoHAsync_v2(pageable, x.p, N, x.ours)); /* done when it returns */
  EXPECT(pageable[N - 1] == kvgpu_byte(6, N - 1));
  free(pageable);
  end_pair(&x);
}

/* Streams have no order among them, but with one connection all wait for what was given before. */
void test_one_connection(void) {
  struct pair x = make_pair();
  for (int one = 0; one < 2; one++) {
    kvgpu_one_connection(one);
    OK(kvgpu_hold(x.engine));
    OK(kvgpu_kernel_fill(x.engine, x.p, N, 1, 0));
    OK(cuEventRecord(x.e, x.ours));
    if (one) {
      for (int i = 0; i < 50; i++) sched_yield();
      FAILS(CUDA_ERROR_NOT_READY, cuEventQuery(x.e));
      OK(kvgpu_release(x.engine));
    }
    OK(cuEventSynchronize(x.e));
    if (!one) FAILS(CUDA_ERROR_NOT_READY, cuStreamQuery(x.engine));
    OK(kvgpu_release(x.engine));
    OK(cuStreamSynchronize(x.engine));
  }
  kvgpu_one_connection(0);
  end_pair(&x);
}

/* A green context's streams are as another context's. Its end is not the primary context's. */
void test_green(void) {
  CUcontext own = enter_device(0), is;
  CUdevResource all;
  CUdevResourceDesc desc;
  CUgreenCtx g;
  CUstream s;
  CUevent e, theirs;
  FAILS(CUDA_ERROR_INVALID_RESOURCE_TYPE, cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_INVALID));
  OK(cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_SM));
  OK(cuDevResourceGenerateDesc(&desc, &all, 1));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuGreenCtxCreate(&g, desc, 1, CU_GREEN_CTX_DEFAULT_STREAM));
  OK(cuGreenCtxCreate(&g, desc, 0, CU_GREEN_CTX_DEFAULT_STREAM));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuGreenCtxStreamCreate(&s, g, CU_STREAM_DEFAULT, 0));
  OK(cuGreenCtxStreamCreate(&s, g, CU_STREAM_NON_BLOCKING, 0));
  OK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  FAILS(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(e, s));
  OK(cuCtxFromGreenCtx(&is, g));
  EXPECT(is != own);
  FAILS(CUDA_ERROR_INVALID_CONTEXT, cuCtxDestroy_v2(is));
  OK(cuCtxPushCurrent_v2(is));
  FAILS(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(e, s));
  OK(cuEventCreate(&theirs, CU_EVENT_DISABLE_TIMING));
  OK(cuEventRecord(theirs, s));
  OK(cuEventSynchronize(theirs));
  OK(cuCtxPopCurrent_v2(NULL));
  OK(cuGreenCtxDestroy(g));
  FAILS(CUDA_ERROR_INVALID_CONTEXT, cuCtxFromGreenCtx(&is, g));
  OK(cuEventRecord(e, NULL));
  OK(cuEventSynchronize(e));
  OK(cuEventDestroy_v2(e));
  leave_device(0);
}

/* The legacy stream comes after all blocking streams and before their later work; a non-blocking one knows nothing of it. */
void test_legacy(void) {
  struct pair x = make_pair();
  CUstream blocking;
  OK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
  for (unsigned i = 0; i < 20; i++) {
    OK(kvgpu_kernel_fill(blocking, x.p, N, i, 0));
    OK(cuMemcpyDtoHAsync_v2(x.host, x.p, N, NULL));
    OK(kvgpu_kernel_fill(blocking, x.p, N, 500 + i, 0));
    OK(cuStreamSynchronize(NULL));
    EXPECT(holds(&x, i));
  }
  OK(cuStreamSynchronize(blocking));
  OK(cuStreamDestroy_v2(blocking));
  FAILS(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(blocking));
  end_pair(&x);
}

struct asker { /* another thread, which asks for an event in a mode */
  CUstreamCaptureMode mode;
  CUcontext ctx;
  CUevent e;
  CUresult result;
};
static void *ask(void *argument) {
  struct asker *a = argument;
  OK(cuThreadExchangeStreamCaptureMode(&a->mode));
  OK(cuCtxPushCurrent_v2(a->ctx));
  a->result = cuEventQuery(a->e);
  OK(cuCtxPopCurrent_v2(NULL));
  return NULL;
}

void test_capture(void) {
  struct pair x = make_pair();
  CUgraph graph;
  CUstreamCaptureStatus status;
  for (int relaxed = 0; relaxed < 2; relaxed++) {
    pthread_t other;
    struct asker a = {.mode = relaxed ? CU_STREAM_CAPTURE_MODE_RELAXED : CU_STREAM_CAPTURE_MODE_GLOBAL, .e = x.e};
    OK(cuCtxGetCurrent(&a.ctx));
    OK(cuStreamBeginCapture_v2(x.engine, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(kvgpu_kernel_fill(x.engine, x.p, N, 1, 0));
    EXPECT(!pthread_create(&other, NULL, ask, &a) && !pthread_join(other, NULL));
    OK(cuStreamIsCapturing(x.engine, &status));
    EXPECT(a.result == (relaxed ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    EXPECT(status == (relaxed ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_INVALIDATED));
    FAILS(relaxed ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(x.engine, &graph));
    if (relaxed) OK(cuGraphDestroy(graph));
  }
  EXPECT(*(unsigned char *)kvgpu_alias(x.p) == POISON); /* what is captured does not run */

  CUgraphExec run;
  CUdeviceptr gone;
  OK(cuMemAlloc_v2(&gone, N));
  OK(cuStreamBeginCapture_v2(x.engine, CU_STREAM_CAPTURE_MODE_RELAXED));
  OK(kvgpu_kernel_fill(x.engine, x.p, N, 8, 0));
  OK(cuMemcpyDtoDAsync_v2(gone, x.p, N, x.engine));
  OK(cuStreamEndCapture(x.engine, &graph));
  OK(cuGraphInstantiateWithFlags(&run, graph, 0));
  OK(cuGraphDestroy(graph));
  OK(cuGraphLaunch(run, x.engine));
  OK(cuStreamSynchronize(x.engine));
  EXPECT(!kvgpu_wrong(gone, N, 8, 0));
  OK(cuMemFree_v2(gone));
  fprintf(stderr, "one violation is expected here:\n");
  FAILS(CUDA_ERROR_ILLEGAL_ADDRESS, cuGraphLaunch(run, x.engine));
  violations = 0;
  OK(cuGraphExecDestroy(run));
  end_pair(&x);
}

/* A release too many ends what the engine has. */
void test_end(void) {
  struct pair x = make_pair();
  OK(cuDevicePrimaryCtxRelease_v2(0));
  EXPECT(!kvgpu_count("contexts") && !kvgpu_count("streams") && !kvgpu_count("allocations") && !kvgpu_count("pinned") && !kvgpu_count("events"));
  FAILS(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuStreamSynchronize(x.ours));
  OK(cuCtxPopCurrent_v2(NULL));
  enter_device(0);
  FAILS(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(x.ours));
  FAILS(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(x.e));
  leave_device(0);
}

/* An operation fails when the stream comes to it; what came before it is done. */
static void fail_late(struct pair *x) {
  OK(kvgpu_fail_operation(0, 2, CUDA_ERROR_ILLEGAL_ADDRESS));
  OK(kvgpu_kernel_fill(x->ours, x->p, N, 3, 0));
  OK(cuEventRecord(x->e, x->ours));
  OK(cuMemsetD8Async(x->p, 1, N, x->ours));
  while (kvgpu_count("queued")) sched_yield();
  FAILS(CUDA_ERROR_ILLEGAL_ADDRESS, cuEventRecord(x->e, x->ours));
  EXPECT(!kvgpu_wrong(x->p, N, 3, 0));
  kvgpu_stick(0, 0);
  OK(cuEventQuery(x->e));
  FAILS(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(x->ours));
  OK(cuStreamDestroy_v2(x->ours));
  OK(cuStreamCreate(&x->ours, CU_STREAM_NON_BLOCKING));
}

struct recorder {
  CUcontext ctx;
  struct pair *x;
};

static void *record(void *of) {
  struct recorder *r = of;
  OK(cuCtxSetCurrent(r->ctx));
  OK(cuEventRecord(r->x->e, r->x->ours));
  return NULL;
}

static void test_blocked(struct pair *x) {
  pthread_t other;
  struct recorder r = {.x = x};
  OK(cuCtxGetCurrent(&r.ctx));
  kvgpu_block("cuEventRecord");
  EXPECT(!pthread_create(&other, NULL, record, &r));
  while (!kvgpu_count("blocked")) sched_yield();
  OK(cuStreamSynchronize(x->ours)); /* others go on */
  EXPECT(kvgpu_count("blocked") == 1);
  kvgpu_block(NULL);
  EXPECT(!pthread_join(other, NULL) && !kvgpu_count("blocked"));
}

void test_faults(void) {
  struct pair x = make_pair();
  test_blocked(&x);
  OK(kvgpu_fail("cuEventRecord", 2, CUDA_ERROR_LAUNCH_FAILED));
  OK(cuEventRecord(x.e, x.ours));
  FAILS(CUDA_ERROR_LAUNCH_FAILED, cuEventRecord(x.e, x.ours));
  OK(cuEventRecord(x.e, x.ours));
  OK(cuStreamSynchronize(x.ours));
  OK(kvgpu_hold(x.ours));
  memset(x.host, 0, N);
  int calls = 0;
  OK(cuMemcpyDtoHAsync_v2(x.host, x.p, N, x.ours));
  OK(cuLaunchHostFunc(x.ours, add, &calls));
  OK(cuEventRecord(x.e, x.ours));
  kvgpu_stick(0, CUDA_ERROR_ILLEGAL_ADDRESS);
  FAILS(CUDA_ERROR_ILLEGAL_ADDRESS, cuEventQuery(x.e));
  FAILS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemcpyDtoHAsync_v2(x.host, x.p, N, x.ours));
  while (kvgpu_count("queued")) sched_yield();
  EXPECT(!calls && *(char *)x.host == 0); /* nothing was done */
  kvgpu_stick(0, 0);
  FAILS(CUDA_ERROR_ILLEGAL_ADDRESS, cuEventSynchronize(x.e));
  OK(cuStreamDestroy_v2(x.ours));
  OK(cuStreamCreate(&x.ours, CU_STREAM_NON_BLOCKING));
  fail_late(&x);
  end_pair(&x);
}
