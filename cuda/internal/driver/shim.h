/*
 * What Go sees of libcuda: plain structs and functions. The library's own types
 * (abi.h) are known to the C files only.
 *
 * Every function that calls the library does so with the device's primary context
 * pushed and with the thread's capture mode relaxed, and leaves the thread as it was.
 */
#ifndef KVCONN_CUDA_SHIM_H
#define KVCONN_CUDA_SHIM_H

#include <stdint.h>

/* What a function ended with: 0, a CUresult, or one of our own codes; and which call of the library that was. */
typedef struct {
  uint32_t code, call;
} kvg_status;
enum {
  KVG_INACTIVE = 1 << 16, /* no primary context is active */
  KVG_ABSENT,             /* the driver has no such call */
  KVG_CAPTURING,          /* the stream is being captured */
  KVG_FULL,               /* too many moments have not passed */
  KVG_STREAMS,            /* on too many streams */
  KVG_UNKNOWN,            /* a moment that was never recorded, or of another handle */
  KVG_CLOSED,
  KVG_BUSY, /* somebody waits in the driver */
  KVG_NO_MEMORY,
};
const char *kvg_call(uint32_t call); /* "" of none */
void kvg_describe(uint32_t code, const char **name, const char **text);

/* Opens the library and fills the table of its functions. If the result is not 0,
   reason says why. */
int kvg_load(const char *name, char *reason, int size);
int kvg_in_process(const char *name); /* somebody has opened it; does not open it */
int kvg_has_batch(void);
void kvg_use_batch(int on); /* of tests */
void kvg_kernel_text(const char *ptx); /* is kept; before the first device is opened */
int kvg_version(int *version);
kvg_status kvg_start(void); /* cuInit */

struct kvg_info {
  char name[128];
  uint8_t uuid[16];
  char pci[32];
  int32_t major, minor, unified, rdma, flush_options, writes_ordering, dma_buf, active;
};
kvg_status kvg_count(int *n);
kvg_status kvg_inform(int ordinal, struct kvg_info *out);

/* What lies at an address, with the mapping around it. */
enum { KVG_PAGEABLE, KVG_HOST, KVG_MANAGED, KVG_ALLOCATED, KVG_POOL, KVG_VMM, KVG_OTHER_CONTEXT, KVG_ELSEWHERE, KVG_ODD };
struct kvg_memory {
  uint64_t base, size;
  uint64_t id, block; /* of the allocation, and of the physical memory: 0 where the driver does not tell */
  int32_t kind, device, rdma;
  int32_t files; /* mapped by a handle that another process may have as a file descriptor */
};
kvg_status kvg_locate(uint64_t addr, struct kvg_memory *out);

struct kvg_device; /* an agent's handle on a device */
kvg_status kvg_open(int ordinal, int moments, int kernel, struct kvg_device **out);
/* KVG_BUSY while somebody waits. It gives back all that the device has but its ring and its queues, which were given back before. */
kvg_status kvg_close(struct kvg_device *d);
kvg_status kvg_no_kernel(struct kvg_device *d); /* why the device has no copy kernel; 0: it has one */

struct kvg_piece { /* twin of Piece */
  uint64_t addr, id, block;
};
/* How many of n pieces are still the same memory, from the first on. */
kvg_status kvg_same(struct kvg_device *d, const struct kvg_piece *pieces, int n, int *same);
kvg_status kvg_export(struct kvg_device *d, uint64_t addr, uint64_t bytes, int *fd);
kvg_status kvg_flush(struct kvg_device *d);
/* Memory of the device that is ours, and gives it back. */
kvg_status kvg_alloc(struct kvg_device *d, uint64_t bytes, uint64_t *addr);
kvg_status kvg_free(struct kvg_device *d, uint64_t addr);

/*
 * Memory of another process of this host. Its owner exports an allocation by a handle of KVG_IPC_BYTES, a mapping by
 * a descriptor; another process opens it on its device. Of out, base, size, id and block are filled. Nothing uses
 * what is closed.
 */
enum { KVG_IPC_BYTES = 64 };
kvg_status kvg_ipc_get(struct kvg_device *d, uint64_t base, void *handle);
kvg_status kvg_ipc_open(struct kvg_device *d, const void *handle, struct kvg_memory *out);
kvg_status kvg_ipc_close(struct kvg_device *d, uint64_t base);
kvg_status kvg_file_get(struct kvg_device *d, uint64_t addr, int *fd);
kvg_status kvg_file_open(struct kvg_device *d, int fd, uint64_t bytes, struct kvg_memory *out);
kvg_status kvg_file_close(struct kvg_device *d, uint64_t base, uint64_t bytes);

uint64_t kvg_number(struct kvg_device *d); /* of the handle: the first byte of its moments */
kvg_status kvg_moment(struct kvg_device *d, uintptr_t stream, uint64_t *moment);
void *kvg_moment_entry(void); /* kvg_status (*)(void *device, uintptr_t stream, uint64_t *moment) */
kvg_status kvg_await(struct kvg_device *d, uint64_t moment);

kvg_status kvg_ring(struct kvg_device *d, uint64_t bytes, void **ring);
kvg_status kvg_ring_free(struct kvg_device *d, void *ring);

enum { KVG_MOST_RUNS = 256, KVG_MOST_BATCHES = 16 };
struct kvg_run { /* twin of Run */
  uint64_t addr, len;
};
struct kvg_queue; /* a stream of our own, of one direction */
kvg_status kvg_queue_open(struct kvg_device *d, int to_device, struct kvg_queue **out);
void kvg_queue_close(struct kvg_queue *q);
uintptr_t kvg_queue_stream(struct kvg_queue *q);
/*
 * Queues the copies between the runs and host, and then batch's event. *queued: the event
 * stands behind whatever was queued, also after an error. near: the runs are all in the
 * device's own memory.
 */
kvg_status kvg_copy(struct kvg_queue *q, int batch, uintptr_t host, const struct kvg_run *runs, int n, int near, int *queued);
struct kvg_pair { /* twin of Pair */
  uint64_t from, to, len;
};
/* The same between places that the device reaches; near: all of them are in its own memory. */
kvg_status kvg_copy_pairs(struct kvg_queue *q, int batch, const struct kvg_pair *pairs, int n, int near, int *queued);
kvg_status kvg_copied(struct kvg_queue *q, int batch); /* waits */

#endif
