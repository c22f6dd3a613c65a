/* The mover's calls: pinned memory, a stream of our own for each direction, and copies between them and the device. */
#include <stdlib.h>

#include "shim_lib.h"

struct kvg_queue {
  struct kvg_device *device;
  int to_device;
  kv_stream stream;
  kv_event events[KVG_MOST_BATCHES];
  kv_ptr from[KVG_MOST_RUNS], to[KVG_MOST_RUNS];
  size_t sizes[KVG_MOST_RUNS];
};

kvg_status kvg_ring(struct kvg_device *d, uint64_t bytes, void **ring) {
  struct kvg_entry e;
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(host_alloc, ring, bytes, KV_HOST_PORTABLE);
  kvg_leave(&e);
  return s;
}

kvg_status kvg_ring_free(struct kvg_device *d, void *ring) {
  struct kvg_entry e;
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(host_free, ring);
  kvg_leave(&e);
  return s;
}

void kvg_queue_close(struct kvg_queue *q) {
  struct kvg_entry e;
  if (kvg_enter(q->device->context, &e).code == 0) {
    for (int i = 0; i < KVG_MOST_BATCHES; i++)
      if (q->events[i] != NULL) kvg_lib.event_destroy(q->events[i]);
    if (q->stream != NULL) kvg_lib.stream_destroy(q->stream);
    kvg_leave(&e);
  }
  free(q);
}

uintptr_t kvg_queue_stream(struct kvg_queue *q) { return (uintptr_t)q->stream; }

kvg_status kvg_queue_open(struct kvg_device *d, int to_device, struct kvg_queue **out) {
  struct kvg_entry e;
  struct kvg_queue *q = calloc(1, sizeof *q);
  if (q == NULL) return KVG_OWN(KVG_NO_MEMORY);
  q->device = d, q->to_device = to_device;
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code == 0) {
    /* Else our stream would wait for the engine's work on the legacy stream, and that
       work for our stream. */
    s = KVG_TRY(stream_create, &q->stream, KV_STREAM_NON_BLOCKING);
    for (int i = 0; i < KVG_MOST_BATCHES && s.code == 0; i++)
      s = KVG_TRY(event_create, &q->events[i], KV_EVENT_BLOCKING_SYNC | KV_EVENT_DISABLE_TIMING);
    kvg_leave(&e);
  }
  if (s.code != 0) {
    kvg_queue_close(q);
    return s;
  }
  *out = q;
  return s;
}

/*
 * Copies from, to and sizes in one call. In stream order the sources are read when the stream gets
 * there; in any other order the driver might read them at once.
 */
static kvg_status copy_batch(struct kvg_queue *q, int n) {
  struct kv_copy_attributes order = {.source_order = KV_SOURCE_ORDER_STREAM};
  size_t first = 0, failed = 0;
  return KVG_TRY(copy_batch, q->to, q->from, q->sizes, (size_t)n, &order, &first, 1, &failed, q->stream);
}

static kvg_status copy_each(struct kvg_queue *q, uintptr_t host, const struct kvg_run *runs, int n) {
  kvg_status s = KVG_DONE;
  for (int i = 0; i < n && s.code == 0; i++) {
    s = q->to_device ? KVG_TRY(copy_to_device, runs[i].addr, (const void *)host, runs[i].len, q->stream)
                     : KVG_TRY(copy_to_host, (void *)host, runs[i].addr, runs[i].len, q->stream);
    host += runs[i].len;
  }
  return s;
}

/* Memory of another device goes by the driver's own copies, which find the way there. */
static kvg_status copy_runs(struct kvg_queue *q, uintptr_t host, const struct kvg_run *runs, int n, int near) {
  uintptr_t at = host;
  for (int i = 0; i < n; i++) {
    q->from[i] = q->to_device ? at : runs[i].addr;
    q->to[i] = q->to_device ? runs[i].addr : at;
    q->sizes[i] = runs[i].len;
    at += runs[i].len;
  }
  if (near && kvg_kernel_suits(q->device, q->from, q->to, q->sizes, n, 1)) return kvg_kernel_copy(q->device, q->stream, q->from, q->to, q->sizes, n);
  return n > 1 && kvg_has_batch() ? copy_batch(q, n) : copy_each(q, host, runs, n);
}

static kvg_status copy_pairs(struct kvg_queue *q, const struct kvg_pair *pairs, int n, int near) {
  kvg_status s = KVG_DONE;
  for (int i = 0; i < n; i++) q->from[i] = pairs[i].from, q->to[i] = pairs[i].to, q->sizes[i] = pairs[i].len;
  if (near && kvg_kernel_suits(q->device, q->from, q->to, q->sizes, n, 0)) return kvg_kernel_copy(q->device, q->stream, q->from, q->to, q->sizes, n);
  if (n > 1 && kvg_has_batch()) return copy_batch(q, n);
  if (kvg_lib.copy_on_device == NULL) return (kvg_status){KVG_ABSENT, KVG_CALL_copy_on_device};
  for (int i = 0; i < n && s.code == 0; i++) s = KVG_TRY(copy_on_device, pairs[i].to, pairs[i].from, pairs[i].len, q->stream);
  return s;
}

/* Puts the batch's event behind what was queued, and leaves. */
static kvg_status end_batch(struct kvg_queue *q, int batch, kvg_status s, int *queued, struct kvg_entry *e) {
  kvg_status r = KVG_TRY(event_record, q->events[batch], q->stream);
  *queued = r.code == 0;
  kvg_leave(e);
  return kvg_first(s, r);
}

kvg_status kvg_copy(struct kvg_queue *q, int batch, uintptr_t host, const struct kvg_run *runs, int n, int near, int *queued) {
  struct kvg_entry e;
  *queued = 0;
  kvg_status s = kvg_enter(q->device->context, &e);
  if (s.code != 0) return s;
  return end_batch(q, batch, copy_runs(q, host, runs, n, near), queued, &e);
}

kvg_status kvg_copy_pairs(struct kvg_queue *q, int batch, const struct kvg_pair *pairs, int n, int near, int *queued) {
  struct kvg_entry e;
  *queued = 0;
  kvg_status s = kvg_enter(q->device->context, &e);
  if (s.code != 0) return s;
  return end_batch(q, batch, copy_pairs(q, pairs, n, near), queued, &e);
}

kvg_status kvg_copied(struct kvg_queue *q, int batch) {
  struct kvg_entry e;
  kvg_status s = kvg_enter(q->device->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(event_wait, q->events[batch]);
  kvg_leave(&e);
  return s;
}
