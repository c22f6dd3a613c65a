/* What a stream's thread does for each operation. Copies are torn: made in slices, from either end, with yields between. */
#include "double.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SLICE ((size_t)16 << 10)
#define YIELDS 4

uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Two streams that race for bytes are what tests look for, not a defect of the double: the thread sanitizer must not see them. */
__attribute__((no_sanitize("thread"), optimize("no-tree-loop-distribute-patterns"))) void move_bytes(char *to, const char *from, size_t n) {
#ifdef __SANITIZE_THREAD__
  for (size_t i = 0; i < n; i++) to[i] = from[i];
#else
  memcpy(to, from, n);
#endif
}

__attribute__((no_sanitize("thread"), optimize("no-tree-loop-distribute-patterns"))) static void set_bytes(char *to, unsigned value, unsigned width, size_t n) {
  for (size_t i = 0; i < n; i++) to[i] = (char)(value >> (8 * (i % width)));
}

/* Eight bytes of a pattern are of one word, which is made once. */
__attribute__((no_sanitize("thread"))) static void fill_bytes(char *to, size_t n, uint64_t pattern, uint64_t from) {
  uint64_t word = 0;
  for (size_t i = 0; i < n; i++, word >>= 8) {
    if (i == 0 || (from + i) % 8 == 0) word = kvgpu_word(pattern, from + i);
    to[i] = (char)word;
  }
}

__attribute__((no_sanitize("thread"))) static size_t count_wrong(const char *at, size_t n, uint64_t pattern, uint64_t from) {
  size_t wrong = 0;
  uint64_t word = 0;
  for (size_t i = 0; i < n; i++, word >>= 8) {
    if (i == 0 || (from + i) % 8 == 0) word = kvgpu_word(pattern, from + i);
    wrong += (unsigned char)at[i] != (unsigned char)word;
  }
  return wrong;
}

/* Calls `part` for each slice of n bytes. It yields a few times only: beside busy processes each costs some of their turns. */
static void torn(CUstream s, bool tear, size_t n, void (*part)(const struct op *, const struct piece *, size_t, size_t), const struct op *op, const struct piece *piece) {
  if (!tear || n <= SLICE) {
    part(op, piece, 0, n);
    return;
  }
  size_t slices = (n + SLICE - 1) / SLICE;
  bool backwards = draw(&s->chance) & 1;
  for (size_t i = 0; i < slices; i++) {
    size_t at = (backwards ? slices - 1 - i : i) * SLICE;
    part(op, piece, at, n - at < SLICE ? n - at : SLICE);
    if (i % (slices / YIELDS + 1) == 0) sched_yield();
  }
}

static void copy_part(const struct op *op, const struct piece *p, size_t at, size_t n) {
  (void)op;
  if (p->to.at != p->from.at) move_bytes(p->to.at + at, p->from.at + at, n);
}

static void fill_part(const struct op *op, const struct piece *p, size_t at, size_t n) { fill_bytes(p->to.at + at, n, op->pattern, op->from + at); }

/* The pieces of a batch have no order among them: the double draws one. */
static void shuffle(CUstream s, struct piece *pieces, size_t n) {
  for (size_t i = n; i > 1; i--) {
    size_t j = draw(&s->chance) % i;
    struct piece kept = pieces[i - 1];
    pieces[i - 1] = pieces[j];
    pieces[j] = kept;
  }
}

static void move_op(CUstream s, const struct op *op, bool tear) {
  if (tear) shuffle(s, op->pieces, op->count);
  for (size_t i = 0; i < op->count; i++) torn(s, tear, op->pieces[i].n, copy_part, op, &op->pieces[i]);
}

static void call_host(const struct op *op) {
  in_host_function = true;
  op->call(op->argument);
  in_host_function = false;
}

static size_t work(CUstream s, const struct op *op, bool tear) {
  const struct piece *first = op->pieces;
  switch (op->what) {
  case COPY: move_op(s, op, tear); break;
  case SET: set_bytes(first->to.at, op->value, op->width, first->n); break;
  case FILL: torn(s, tear, first->n, fill_part, op, first); break;
  case CHECK: return count_wrong(first->to.at, first->n, op->pattern, op->from);
  case CALL: call_host(op); break;
  case RECORD:
  case WAIT: break;
  }
  return 0;
}

/* Records of one event may end in another order than they were made. */
static void tell_others(const struct record *r) {
  uint64_t told = r->shared ? __atomic_load_n(&r->shared->done, __ATOMIC_ACQUIRE) : UINT64_MAX;
  while (told < r->number && !__atomic_compare_exchange_n(&r->shared->done, &told, r->number, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
}

/* The world is locked before and after, and open while bytes move. After an error nothing is done, but events pass, with the error. */
void perform(CUstream s, struct op *op) {
  size_t wrong = 0;
  if (!s->sick && op->what != RECORD && op->what != WAIT) {
    bool tear = delay_max != 0;
    pthread_mutex_unlock(&world);
    wrong = work(s, op, tear);
    pthread_mutex_lock(&world);
  }
  if (op->wrong) *op->wrong += wrong;
  for (size_t i = 0; i < op->count && op->what != CHECK; i++) {
    if (op->pieces[i].to.mem) mirror(&op->pieces[i].to, op->pieces[i].n);
  }
  if (op->what == RECORD) {
    op->record->done = true;
    pthread_cond_broadcast(&recorded);
    op->record->result = s->sick;
    op->record->nanoseconds = now();
    tell_others(op->record);
  }
}

void free_op(struct op *op) {
  if (op->record) let_record(op->record);
  free(op->pieces);
  free(op->after);
  free(op);
}

/* ---- an engine's side: at once, or as a kernel of a stream */

static CUresult range(uint64_t at, size_t n, struct piece *piece) {
  piece->n = n;
  return device_end(at, n, true, &piece->to);
}

EXPORT void *kvgpu_alias(uint64_t at) {
  pthread_mutex_lock(&world);
  struct mem *m = find_memory(at);
  void *alias = m ? m->alias + (at - m->at) : NULL;
  pthread_mutex_unlock(&world);
  return alias;
}

EXPORT int kvgpu_fill(uint64_t at, size_t n, uint64_t pattern, uint64_t from) {
  struct piece p = {0};
  pthread_mutex_lock(&world);
  CUresult r = range(at, n, &p);
  if (!r) fill_bytes(p.to.at, n, pattern, from);
  if (!r && p.to.mem) mirror(&p.to, n);
  pthread_mutex_unlock(&world);
  return r;
}

EXPORT size_t kvgpu_wrong(uint64_t at, size_t n, uint64_t pattern, uint64_t from) {
  struct piece p = {0};
  pthread_mutex_lock(&world);
  size_t wrong = range(at, n, &p) ? SIZE_MAX : count_wrong(p.to.at, n, pattern, from);
  pthread_mutex_unlock(&world);
  return wrong;
}

static CUresult launch(CUcontext ctx, CUstream handle, uint64_t at, size_t n, struct op op) {
  CUstream s;
  CUresult r = find_stream(ctx, handle, &s);
  op.count = 1;
  op.pieces = calloc(1, sizeof *op.pieces);
  if (!r) r = range(at, n, op.pieces);
  if (!r) return put_op(s, &op);
  free(op.pieces);
  return r;
}

EXPORT int kvgpu_kernel_fill(void *stream, uint64_t at, size_t n, uint64_t pattern, uint64_t from) {
  BEGIN(CONTEXT);
  return leave(launch(ctx, stream, at, n, (struct op){.what = FILL, .pattern = pattern, .from = from}));
}

EXPORT int kvgpu_kernel_check(void *stream, uint64_t at, size_t n, uint64_t pattern, uint64_t from, uint64_t *wrong) {
  BEGIN(CONTEXT);
  return leave(launch(ctx, stream, at, n, (struct op){.what = CHECK, .pattern = pattern, .from = from, .wrong = wrong}));
}
