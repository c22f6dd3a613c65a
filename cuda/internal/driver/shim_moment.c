/* Moments: events of a bounded pool, recorded on the engine's streams. */
#include <stdatomic.h>
#include <stdlib.h>

#include "shim_lib.h"

/* A moment: the handle's number (8 bits), the stream's place (8), and a number that grows over all moments of the process (48). */
static atomic_uint_least64_t numbered;
enum { NUMBER_BITS = 48 };
static uint64_t name_of(struct kvg_device *d, long place, uint64_t number) {
  return (uint64_t)d->number << 56 | (uint64_t)place << NUMBER_BITS | number;
}

uint64_t kvg_number(struct kvg_device *d) { return (uint64_t)d->number; }

int kvg_moments_open(struct kvg_device *d, int most) {
  d->all = calloc((size_t)most, sizeof *d->all);
  d->most = most;
  d->born = atomic_load(&numbered);
  return d->all != NULL && pthread_mutex_init(&d->lock, NULL) == 0;
}

/* The context is pushed, if there still is one. */
void kvg_moments_close(struct kvg_device *d) {
  for (int i = 0; i < d->made; i++) kvg_lib.event_destroy(d->all[i].event);
  free(d->all);
  pthread_mutex_destroy(&d->lock);
}

/* All of a stream's moments up to number have passed. Their events become spare, except those that a thread waits
   for. */
static void pass(struct kvg_device *d, struct kvg_stream *s, uint64_t number) {
  if (number > s->passed) s->passed = number;
  while (s->first != NULL && s->first->number <= number) {
    struct kvg_moment *m = s->first;
    s->first = m->next;
    s->open--;
    m->dropped = m->waiters > 0;
    if (!m->dropped) m->next = d->spare, d->spare = m;
  }
  if (s->first == NULL) s->newest = NULL;
}

/* Asks for a stream's oldest moments, at most so many, and passes those that have passed. */
static kvg_status sweep(struct kvg_device *d, struct kvg_stream *s, int most) {
  for (; most > 0 && s->first != NULL; most--) {
    kvg_status r = KVG_TRY(event_query, s->first->event);
    if (r.code == KV_NOT_READY) return KVG_DONE;
    if (r.code != 0) return r;
    pass(d, s, s->first->number);
  }
  return KVG_DONE;
}

/* The place of a stream: its own, else one that was never used, else one whose moments have all passed. */
static kvg_status place_of(struct kvg_device *d, uint64_t id, struct kvg_stream **out) {
  struct kvg_stream *idle = NULL;
  for (int i = 0; i < KVG_MOST_STREAMS; i++) {
    struct kvg_stream *s = &d->streams[i];
    if (s->used && s->id == id) {
      *out = s;
      return KVG_DONE;
    }
    if (!s->used) { /* nor are those behind it */
      idle = s;
      break;
    }
    if (idle == NULL && s->first == NULL) idle = s;
  }
  for (int i = 0; idle == NULL && i < KVG_MOST_STREAMS; i++) {
    kvg_status r = sweep(d, &d->streams[i], d->most);
    if (r.code != 0) return r;
    if (d->streams[i].first == NULL) idle = &d->streams[i];
  }
  if (idle == NULL) return KVG_OWN(KVG_STREAMS);
  idle->used = 1, idle->id = id;
  *out = idle;
  return KVG_DONE;
}

static kvg_status spare_event(struct kvg_device *d, struct kvg_moment **out) {
  kvg_status r = KVG_DONE;
  if (d->spare == NULL && d->made < d->most) {
    struct kvg_moment *m = &d->all[d->made];
    r = KVG_TRY(event_create, &m->event, KV_EVENT_BLOCKING_SYNC | KV_EVENT_DISABLE_TIMING);
    if (r.code != 0) return r;
    d->made++;
    m->next = NULL, d->spare = m;
  }
  for (int i = 0; i < KVG_MOST_STREAMS && d->spare == NULL && r.code == 0; i++) r = sweep(d, &d->streams[i], d->most);
  if (r.code != 0) return r;
  if (d->spare == NULL) return KVG_OWN(KVG_FULL);
  *out = d->spare;
  d->spare = d->spare->next;
  **out = (struct kvg_moment){.event = (*out)->event};
  return r;
}

/*
 * Perhaps nobody ever asks whether a moment has passed. So each LOOK_EVERY-th moment of a stream looks,
 * with one call, whether the stream's first LOOK_AT have passed, which is so if the last of these has.
 */
enum { LOOK_EVERY = 16, LOOK_AT = 32 };
static kvg_status look(struct kvg_device *d, struct kvg_stream *s) {
  if (++s->recorded % LOOK_EVERY != 0 || s->open < LOOK_AT) return KVG_DONE;
  struct kvg_moment *m = s->first;
  for (int i = 1; i < LOOK_AT; i++) m = m->next;
  kvg_status r = KVG_TRY(event_query, m->event);
  if (r.code == 0) pass(d, s, m->number);
  return r.code == KV_NOT_READY ? KVG_DONE : r;
}

static kvg_status record(struct kvg_device *d, kv_stream stream, uint64_t *out) {
  unsigned capturing = KV_CAPTURE_NONE;
  unsigned long long id;
  struct kvg_stream *s;
  struct kvg_moment *m;
  if (d->closed) return KVG_OWN(KVG_CLOSED);
  kvg_status r = KVG_TRY(stream_capturing, stream, &capturing);
  if (r.code == KV_CAPTURE_IMPLICIT || (r.code == 0 && capturing != KV_CAPTURE_NONE)) return KVG_OWN(KVG_CAPTURING);
  if (r.code == 0) r = KVG_TRY(stream_id, stream, &id);
  if (r.code == 0) r = place_of(d, id, &s);
  if (r.code == 0) r = look(d, s);
  if (r.code == 0) r = spare_event(d, &m);
  if (r.code != 0) return r;
  r = KVG_TRY(event_record, m->event, stream);
  if (r.code != 0) {
    m->next = d->spare, d->spare = m;
    return r;
  }
  m->number = s->last = atomic_fetch_add(&numbered, 1) + 1;
  if (s->newest != NULL) s->newest->next = m;
  if (s->first == NULL) s->first = m;
  s->newest = m;
  s->open++;
  *out = name_of(d, s - d->streams, m->number);
  return r;
}

kvg_status kvg_moment(struct kvg_device *d, uintptr_t stream, uint64_t *moment) {
  struct kvg_entry e;
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  pthread_mutex_lock(&d->lock);
  s = record(d, (kv_stream)stream, moment);
  pthread_mutex_unlock(&d->lock);
  kvg_leave(&e);
  return s;
}

/* The stream of a moment, and the moment's entry: NULL when it has passed. The lock is held. */
static kvg_status find(struct kvg_device *d, uint64_t moment, struct kvg_stream **stream, struct kvg_moment **m) {
  uint64_t number = moment & ((UINT64_C(1) << NUMBER_BITS) - 1), place = moment >> NUMBER_BITS & 0xff;
  *m = NULL;
  if (d->closed) return KVG_OWN(KVG_CLOSED);
  if (moment >> 56 != (uint64_t)d->number || place >= KVG_MOST_STREAMS || number <= d->born) return KVG_OWN(KVG_UNKNOWN);
  struct kvg_stream *s = *stream = &d->streams[place];
  if (number > s->last) return KVG_OWN(KVG_UNKNOWN);
  for (*m = s->first; *m != NULL && (*m)->number != number;) *m = (*m)->next;
  return *m == NULL && number > s->passed ? KVG_OWN(KVG_UNKNOWN) : KVG_DONE;
}

kvg_status kvg_await(struct kvg_device *d, uint64_t moment) {
  struct kvg_entry e;
  struct kvg_stream *stream;
  struct kvg_moment *m;
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  pthread_mutex_lock(&d->lock);
  s = find(d, moment, &stream, &m);
  if (s.code == 0 && m != NULL) {
    m->waiters++, d->waiters++;
    pthread_mutex_unlock(&d->lock);
    s = KVG_TRY(event_wait, m->event);
    pthread_mutex_lock(&d->lock);
    m->waiters--, d->waiters--;
    if (m->dropped) {
      if (m->waiters == 0) m->next = d->spare, d->spare = m;
    } else if (s.code == 0) {
      pass(d, stream, m->number);
    }
  }
  pthread_mutex_unlock(&d->lock);
  kvg_leave(&e);
  return s;
}

static kvg_status moment_entry(void *d, uintptr_t stream, uint64_t *moment) { return kvg_moment(d, stream, moment); }
void *kvg_moment_entry(void) { return (void *)moment_entry; }
