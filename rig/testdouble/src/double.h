/* What the files of the double share. The real cuda.h is included, so a function that is defined otherwise than declared there does
 * not compile. All state is guarded by one lock, `world`; only bytes are moved, and host functions called, without it. */
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define __CUDA_API_VERSION_INTERNAL 1 /* each name is the symbol's own, none is a macro for a newer one */
#include <cuda.h>

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvgpu.h"

#define EXPORT __attribute__((visibility("default")))
#define DEVICES_MAX 8
#define GRAIN ((size_t)2 << 20)   /* memory is mapped in pieces of this size */
#define HOST_PAGE ((size_t)4096)
#define QUEUE_MAX 1024            /* operations of a stream; the next call waits */
#define ATTRIBUTES_MAX 256
#define POISON 0xDB               /* what fresh memory holds */
#define CANARY 0xC5               /* what stands behind an allocation */

extern pthread_mutex_t world;
extern pthread_cond_t progress; /* something has ended: an operation, a hold, the world */
extern pthread_cond_t recorded; /* an event has passed, or the world has ended: of many operations, its waiters need not hear */
extern bool gone;               /* the library is being unloaded: calls answer DEINITIALIZED */

/* ---- entry.c: what each call passes first */
struct site { /* one function of the interface */
  const char *name;
  struct site *next;
  bool listed;
  uint64_t calls;
};
enum rules {
  BEFORE_INIT = 1,  /* may be called before cuInit */
  CONTEXT = 2,      /* needs a current context */
  UNSAFE = 4,       /* breaks a capture of another thread */
  AFTER_ERROR = 8,  /* works after a sticky error too */
};
/* On success the world is locked, and `leave` unlocks it. */
CUresult enter(struct site *site, unsigned rules, CUcontext *ctx);
CUresult leave(CUresult result);
#define BEGIN(rules)                                  \
  static struct site site_ = {.name = __func__};      \
  CUcontext ctx = NULL;                               \
  CUresult refused_ = enter(&site_, (rules), &ctx);   \
  if (refused_) return refused_;                      \
  (void)ctx
#define REQUIRE(condition, code) \
  do {                           \
    if (!(condition)) return leave(code); \
  } while (0)
extern __thread bool in_host_function;
bool is_initialized(void);
void set_initialized(void);
uint64_t calls_of(const char *name); /* all, when the name is NULL; UINT64_MAX if never called */
uint64_t blocked_calls(void);

/* ---- chance.c */
uint64_t mix(uint64_t x);
uint64_t draw(uint64_t *state);
uint64_t kvgpu_word(uint64_t pattern, uint64_t i); /* the bytes of a pattern from byte i on, to the end of its eight */
extern unsigned delay_max; /* microseconds */

/* ---- violation.c: what no driver forgives and none reports */
void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
extern uint64_t violations;

/* ---- device.c */
extern int device_count;
struct device {
  int physical; /* its number when nothing is hidden by CUDA_VISIBLE_DEVICES */
  CUresult sticky;
  bool halted; /* its streams begin nothing */
  uint64_t operations_left; /* until one of its operations fails; 0: none will */
  CUresult failure;
  int attributes[ATTRIBUTES_MAX];
};
extern struct device devices[DEVICES_MAX];
void make_devices(void);
CUresult failing_operation(int dev); /* counts one; its failure sticks */

/* ---- context.c */
struct CUctx_st {
  int dev;
  bool primary, green, alive;
  int retained; /* of a primary one */
  unsigned flags;
  uint64_t id;
  CUstream legacy, per_thread;
  CUcontext next;
};
extern struct CUctx_st primaries[DEVICES_MAX];
CUcontext current_context(void);
void make_primaries(void);
CUcontext new_context(int dev, unsigned flags);
bool is_context(CUcontext c);
void end_context(CUcontext c);
void retain_primary(int dev);
void release_primary(int dev);
unsigned living_contexts(void);
void free_contexts(void);
void end_streams(CUcontext ctx);
void end_events(CUcontext ctx);
void end_memories(CUcontext ctx);
void end_pins(CUcontext ctx);
void end_modules(CUcontext ctx);

/* ---- memory.c */
enum kind { LINEAR, POOLED, MAPPED, IMPORTED, MANAGED, EXPOSED };
struct mem {
  CUdeviceptr at;
  size_t len, room; /* what was asked for; what is mapped */
  char *alias;
  int fd;
  int64_t fd_offset;
  int dev;
  enum kind kind;
  CUcontext ctx;       /* NULL: of no context */
  uint64_t id;
  bool rdma;
  unsigned readers, writers; /* devices, a bit each */
  uint64_t handle_types;
  unsigned in_flight;  /* operations that use it */
  struct late *late;   /* what a card has written and no flush has carried over */
  CUmemGenericAllocationHandle handle; /* of a mapped one */
  uint64_t inode; /* of an imported one's file */
  unsigned opens;
  struct mem *next;
};
extern uint64_t next_id;
extern struct mem *memories;
struct mem *find_memory(CUdeviceptr p);
struct mem *new_memory(int dev, CUcontext ctx, size_t len, enum kind kind);
struct mem *map_file(int dev, CUcontext ctx, int fd, int64_t offset, size_t len, enum kind kind, CUdeviceptr at, char *alias);
struct mem *next_overlap(struct mem *m, CUdeviceptr p, size_t n); /* after m, or the first */
void drop_memory(struct mem *m);   /* its range stays untouchable */
void await_memory(struct mem *m);  /* until no operation uses it */
char *reserve(size_t len);         /* of addresses, at GRAIN, untouchable */
CUdeviceptr take_retired(size_t len); /* addresses of memory that is gone, if they are to be given out again; else 0 */
bool was_device_memory(CUdeviceptr p);
void check_canary(const struct mem *m);
void free_memories(void);

/* ---- pinned.c */
struct pin {
  char *at;
  size_t len;
  bool registered;
  unsigned flags, in_flight;
  CUcontext ctx;
  uint64_t id;
  struct pin *next;
};
extern struct pin *pins;
struct pin *find_pin(const void *p);
void free_pins(void);

/* ---- stream.c, operation.c */
enum what { COPY, SET, RECORD, WAIT, CALL, FILL, CHECK };
struct end { /* of a copy */
  char *at;
  struct mem *mem; /* the first of the mappings that it lies in */
  CUdeviceptr p;
  struct pin *pin;
  bool pageable;
};
struct piece {
  struct end to, from;
  size_t n;
};
struct record { /* of one cuEventRecord */
  unsigned references;
  bool done;
  CUresult result;
  uint64_t nanoseconds;
  struct shared *shared; /* told there too, as this number */
  uint64_t number;
};
struct shared { /* an interprocess event's page */
  uint64_t recorded, done;
};
struct stamp { /* "this stream, up to here" */
  CUstream stream;
  uint64_t until;
};
struct op {
  enum what what;
  struct piece *pieces; /* COPY; for SET, FILL and CHECK the one `to` */
  size_t count;
  unsigned value, width;        /* SET */
  uint64_t pattern, from;       /* FILL, CHECK */
  uint64_t place;               /* in the order in which all streams were given work */
  uint64_t *wrong;              /* CHECK */
  struct record *record;        /* RECORD, WAIT */
  const struct shared *shared;  /* WAIT for another process's record */
  uint64_t number;
  CUhostFn call;
  void *argument;
  CUresult fails; /* it ends with this, and the context with it */
  struct stamp *after;          /* implied by the legacy stream */
  size_t afters;
  struct op *next;
};
struct CUstream_st {
  CUcontext ctx;
  unsigned flags;
  int priority;
  uint64_t id, chance;
  bool alive, held, started;
  unsigned delay_max; /* UINT32_MAX: as all */
  pthread_t thread;
  pthread_cond_t work;
  struct op *head, **tail;
  uint64_t put, got;
  CUresult sick;
  struct capture *capture;
  CUstream next;
};
extern CUstream streams;
CUstream new_stream(CUcontext ctx, unsigned flags, int priority);
CUresult find_stream(CUcontext ctx, CUstream handle, CUstream *out); /* also the legacy one; 400 if it is of another context */
CUstream any_stream(CUstream handle);                               /* of any context; NULL if it is none */
CUresult put_op(CUstream s, const struct op *op);                   /* takes over what op points to */
CUresult await_stream(CUstream s);
CUresult await_context(CUcontext ctx);
uint64_t queued_operations(void);
uint64_t stuck_operations(void); /* those queued on devices that kvgpu_halt has halted */
void stop_streams(void);
void free_streams(void);
void perform(CUstream s, struct op *op);
void free_op(struct op *op);
void move_bytes(char *to, const char *from, size_t n);
uint64_t now(void);

/* ---- event.c */
struct CUevent_st {
  uint64_t magic;
  CUcontext ctx;
  unsigned flags;
  struct record *last;
  struct capture *captured;
  struct shared *shared; /* of an interprocess event */
  int fd;
  CUevent next;
};
#define EVENT_ALIVE 0x6576656e74u
extern unsigned living_events;
CUevent new_event(CUcontext ctx, unsigned flags, int fd); /* with the descriptor of a page, or -1 */
bool is_event(CUevent e);
bool is_reached(const struct shared *shared, uint64_t number);
void nap_on_progress(void); /* for what no thread of this process will tell */
void let_record(struct record *r);
void free_events(void);

/* ---- copy.c */
CUresult device_end(CUdeviceptr p, size_t n, bool write, struct end *e);
CUresult host_end(const void *p, size_t n, struct end *e);
CUresult any_end(CUdeviceptr p, size_t n, bool write, struct end *e);
CUresult put_copy(CUstream s, const struct piece *pieces, size_t n);

/* ---- graph.c */
CUgraph new_graph(struct op *head); /* takes the operations over */
void free_nodes(struct op *op);
void free_graphs(void);

/* ---- kernel.c */
unsigned living_modules(void);
void free_modules(void);

/* ---- capture.c */
struct capture {
  CUstreamCaptureMode mode;
  pthread_t thread;
  bool invalid;
  CUstream origin;
  uint64_t id;
  struct op *head, **tail;
  struct capture *next;
};
CUresult capture_forbids(void); /* an unsafe call of this thread; what it breaks is invalidated */
bool breaks_capture(CUstream s);   /* which is put work on */
unsigned open_captures(void);
void free_captures(void);

/* ---- late.c: writes of a card that wait for a flush */
void mirror(const struct end *to, size_t n); /* the device has written: the card's view follows */
int late_descriptor(struct mem *m);                   /* the card's view, as a file */
void drop_late(struct mem *m);
extern bool late_pcie;

/* ---- vmm.c, ipc.c, export.c */
unsigned living_handles(void);
unsigned living_mappings(void);
unsigned living_reservations(void);
void let_shared(struct mem *m); /* its owner frees it */
bool has_ipc_mode(const char *mode);
CUresult reservation_of(CUdeviceptr p, CUdeviceptr *at, size_t *size); /* the reserved range that p lies in */
void free_exports(void);
unsigned open_exports(void); /* descriptors of this process */
unsigned open_imports(void);
void free_vmm(void);
