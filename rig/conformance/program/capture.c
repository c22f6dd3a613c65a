/* What calls of another thread do to a capture. */
#include "groups.h"

struct other { /* a thread beside the capturing one */
  CUcontext ctx;
  CUstreamCaptureMode mode;
  int (*call)(struct other *);
  CUevent e;
  CUstream s;
};
static int run_other(void *argument) {
  struct other *o = argument;
  CUstreamCaptureMode mode = o->mode;
  CU(cuThreadExchangeStreamCaptureMode)(&mode);
  CU(cuCtxPushCurrent_v2)(o->ctx);
  return o->call(o);
}
static int query(struct other *o) { return (int)CU(cuEventQuery)(o->e); }
static int record(struct other *o) { return (int)CU(cuEventRecord)(o->e, o->s); }
static int ask_pointer(struct other *o) {
  unsigned type;
  (void)o;
  return (int)CU(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)&type);
}
static int allocate(struct other *o) {
  CUdeviceptr p;
  (void)o;
  int r = (int)CU(cuMemAlloc_v2)(&p, 4096);
  if (!r) CU(cuMemFree_v2)(p);
  return r;
}

static CUstream captured;
static int end(struct other *o) {
  CUgraph graph;
  (void)o;
  return (int)CU(cuStreamEndCapture)(captured, &graph);
}

static int begin(CUstreamCaptureMode mode) { return (int)CU(cuStreamBeginCapture_v2)(captured, mode); }
static CUstreamCaptureStatus status(void) {
  CUstreamCaptureStatus s = (CUstreamCaptureStatus)9;
  CU(cuStreamIsCapturing)(captured, &s);
  return s;
}
/* Ends the capture; a broken one answers 901. */
static int finish(void) {
  CUgraph graph = NULL;
  int r = (int)CU(cuStreamEndCapture)(captured, &graph);
  if (graph) CU(cuGraphDestroy)(graph);
  return r;
}

/* torch's default stream is the legacy one; what is recorded there can break a capture of a blocking stream. */
static void legacy_beside(CUevent e) {
  CUstream kept = captured, other = NULL;
  CU(cuStreamCreate)(&other, CU_STREAM_DEFAULT);
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  fact(216, "cuEventRecord on the legacy stream while a non-blocking stream is captured", 0, (int)CU(cuEventRecord)(e, NULL));
  fact(217, "leaves the capture whole", 0, finish());
  captured = other;
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  fact(218, "cuEventRecord on the legacy stream while a blocking stream is captured", CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, (int)CU(cuEventRecord)(e, NULL));
  fact(219, "breaks the capture", CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, finish());
  captured = kept;
}

/* A graph with one memset, launched behind other work. */
static void launches(CUdeviceptr p) {
  CUgraph graph = NULL;
  CUgraphExec run = NULL;
  unsigned char byte = 0;
  CUevent e;
  struct gate g;
  CU(cuEventCreate)(&e, CU_EVENT_DISABLE_TIMING);
  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  CU(cuMemsetD8Async)(p, 6, 64, captured);
  CU(cuStreamEndCapture)(captured, &graph);
  fact(242, "cuGraphInstantiate", 0, (int)CU(cuGraphInstantiateWithFlags)(&run, graph, 0));
  shut(&g, captured);
  fact(243, "cuGraphLaunch on a busy stream", 0, (int)CU(cuGraphLaunch)(run, captured));
  fact(244, "an event recorded behind a graph", 0, (int)CU(cuEventRecord)(e, captured));
  let_time_pass();
  fact(245, "has not passed before the graph has run", CUDA_ERROR_NOT_READY, (int)CU(cuEventQuery)(e));
  open_gate(&g);
  fact(246, "and passes then", 0, (int)CU(cuEventSynchronize)(e));
  CU(cuMemcpyDtoH_v2)(&byte, p, 1);
  number_fact(247, "what the graph wrote is there", 6, byte);
  fact(248, "the graph and its instance are destroyed", 0, (int)CU(cuGraphExecDestroy)(run) + (int)CU(cuGraphDestroy)(graph));
}

void captures(void) {
  CUcontext c = open_device();
  CUstream ours = new_stream();
  captured = new_stream();
  CUdeviceptr p = device_memory(4096);
  CUevent e, f;
  CU(cuEventCreate)(&e, CU_EVENT_DISABLE_TIMING);
  CU(cuEventCreate)(&f, CU_EVENT_DISABLE_TIMING);
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  fact(220, "cuThreadExchangeStreamCaptureMode", 0, (int)CU(cuThreadExchangeStreamCaptureMode)(&mode));
  number_fact(221, "a thread's mode is 'global' until it is changed", CU_STREAM_CAPTURE_MODE_GLOBAL, mode);
  CU(cuThreadExchangeStreamCaptureMode)(&mode);
  number_fact(222, "the exchange gives the mode before", CU_STREAM_CAPTURE_MODE_RELAXED, mode);
  fact(223, "the legacy stream cannot be captured", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, (int)CU(cuStreamBeginCapture_v2)(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL));
  fact(224, "cuStreamBeginCapture", 0, begin(CU_STREAM_CAPTURE_MODE_GLOBAL));
  number_fact(225, "cuStreamIsCapturing tells it", CU_STREAM_CAPTURE_STATUS_ACTIVE, status());
  struct other o = {c, CU_STREAM_CAPTURE_MODE_GLOBAL, query, e, ours};
  fact(226, "cuEventQuery of another thread fails while a capture is open", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, in_thread(run_other, &o));
  number_fact(227, "and breaks the capture", CU_STREAM_CAPTURE_STATUS_INVALIDATED, status());
  fact(228, "whose end then fails", CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, finish());

  begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
  o.mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  fact(229, "with the mode 'relaxed' it may be called", 0, in_thread(run_other, &o));
  o.call = allocate;
  fact(230, "and cuMemAlloc too", 0, in_thread(run_other, &o));
  o.mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
  fact(249, "and with the mode 'thread local' too, since the capture is another thread's", 0, in_thread(run_other, &o));
  o.mode = CU_STREAM_CAPTURE_MODE_GLOBAL, o.call = record;
  fact(231, "cuEventRecord of another thread on another stream may be called in any mode", 0, in_thread(run_other, &o));
  o.call = ask_pointer;
  fact(232, "and so may cuPointerGetAttribute", CUDA_ERROR_INVALID_VALUE, in_thread(run_other, &o));
  number_fact(233, "the capture is whole", CU_STREAM_CAPTURE_STATUS_ACTIVE, status());
  fact(234, "an event can be recorded on a capturing stream", 0, (int)CU(cuEventRecord)(f, captured));
  mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  CU(cuThreadExchangeStreamCaptureMode)(&mode);
  fact(235, "but then it is a graph's, and cuEventQuery fails", CUDA_ERROR_CAPTURED_EVENT, (int)CU(cuEventQuery)(f));
  CU(cuThreadExchangeStreamCaptureMode)(&mode);
  finish();
  CU(cuStreamSynchronize)(ours);

  begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
  o.call = allocate;
  fact(236, "cuMemAlloc of another thread fails while a capture is open", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, in_thread(run_other, &o));
  fact(237, "and breaks it", CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, finish());

  begin(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  o.call = query;
  fact(238, "a capture of the mode 'thread local' is not broken by other threads", 0, in_thread(run_other, &o));
  o.call = end;
  fact(239, "but only its own thread may end it", CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, in_thread(run_other, &o));
  finish();

  begin(CU_STREAM_CAPTURE_MODE_RELAXED);
  CU(cuMemsetD8Async)(p, 5, 64, captured);
  fact(240, "a relaxed capture with work in it ends", 0, finish());
  unsigned char byte = 0;
  CU(cuMemsetD8_v2)(p, 1, 64);
  CU(cuMemcpyDtoH_v2)(&byte, p, 1);
  number_fact(241, "what was captured did not run", 1, byte);
  launches(p);
  legacy_beside(e);
}
