/* What the parts of the shim share: the library's functions, and how a thread enters it. */
#ifndef KVCONN_CUDA_SHIM_LIB_H
#define KVCONN_CUDA_SHIM_LIB_H

#include <pthread.h>

#include "abi.h"
#include "shim.h"

struct kvg_table {
#define KVG_MEMBER(name, symbol, arguments) kv_result(*name) arguments;
  KV_GPU_NEEDED(KVG_MEMBER)
  KV_GPU_OPTIONAL(KVG_MEMBER)
#undef KVG_MEMBER
};
extern struct kvg_table kvg_lib; /* filled by kvg_load */

enum kvg_calls {
  KVG_CALL_none,
#define KVG_CALL(name, symbol, arguments) KVG_CALL_##name,
  KV_GPU_NEEDED(KVG_CALL) KV_GPU_OPTIONAL(KVG_CALL)
#undef KVG_CALL
};

#ifdef KVCONN_FAULTS
int kvg_fault(const char *name); /* as fault.On */
#endif

#define KVG_DONE ((kvg_status){0, 0})
#define KVG_OWN(code) ((kvg_status){code, 0})
#define KVG_TRY(name, ...) ((kvg_status){kvg_lib.name(__VA_ARGS__), KVG_CALL_##name})

/* The first failure of two is told. */
static inline kvg_status kvg_first(kvg_status a, kvg_status b) { return a.code != 0 ? a : b; }

struct kvg_entry {
  unsigned mode; /* the thread's own capture mode */
};

/*
 * A thread may be in the middle of the engine's work: with a context of its own, and capturing
 * a graph. In any other mode than the relaxed one a call of ours would break the capture.
 */
void kvg_relax(struct kvg_entry *e);
void kvg_restore(struct kvg_entry *e);
/* The same with a context pushed. */
kvg_status kvg_enter(kv_context context, struct kvg_entry *e);
void kvg_leave(struct kvg_entry *e);

struct kvg_moment {
  uint64_t number;
  kv_event event;
  struct kvg_moment *next;
  int waiters;
  int dropped; /* it has passed: the last waiter gives it back */
};
enum { KVG_MOST_STREAMS = 64 };
struct kvg_stream {
  int used;
  uint64_t id;
  uint64_t last;   /* recorded */
  uint64_t passed; /* all up to this one */
  int open;        /* those that have not passed, as far as is known */
  unsigned recorded;
  struct kvg_moment *first, *newest;
};

struct kvg_device {
  kv_device ordinal;
  kv_context context;
  int number;    /* of the handle, 1 to 255 */
  uint64_t born; /* moments up to this one are of earlier handles */
  kv_module module;
  kv_function kernel; /* NULL: no_kernel says why */
  kvg_status no_kernel;

  pthread_mutex_t lock; /* what follows */
  int closed;
  int waiters;
  int made, most;
  struct kvg_moment *all, *spare;
  struct kvg_stream streams[KVG_MOST_STREAMS];
};
/* The copy kernel, in the device's context. suits says whether these copies go by the kernel; host: they are of pinned memory. */
void kvg_kernel_open(struct kvg_device *d);
void kvg_kernel_close(struct kvg_device *d);
int kvg_kernel_suits(const struct kvg_device *d, const kv_ptr *from, const kv_ptr *to, const size_t *sizes, int n, int host);
kvg_status kvg_kernel_copy(struct kvg_device *d, kv_stream stream, const kv_ptr *from, const kv_ptr *to, const size_t *sizes, int n);
/* Makes the device's part for moments, and gives it back. */
int kvg_moments_open(struct kvg_device *d, int most);
void kvg_moments_close(struct kvg_device *d);

#endif
