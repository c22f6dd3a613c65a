/*
 * The copy kernel: many pieces that lie apart go in one launch. On an H100 the driver's own copies cost about half a microsecond a piece
 * between a device and the host, and 3.8 within a device, however small a piece is.
 */
#include <pthread.h>

#include "shim_lib.h"

/* What copy.ptx has written into it. */
enum { PIECES = 128, BLOCKS = 32, THREADS = 256 };
struct table {
  kv_ptr from[PIECES], to[PIECES];
  uint32_t bytes[PIECES];
  uint32_t count, unused;
};
_Static_assert(offsetof(struct table, to) == 1024 && offsetof(struct table, bytes) == 2048 && offsetof(struct table, count) == 2560 && sizeof(struct table) == 2568, "copy.ptx");

/* A larger piece goes as several, so that the blocks of threads have equal work. */
enum { PIECE_BYTES = 64 << 10 };
/*
 * The pieces of a batch may be so large in the mean: larger ones go by the driver's own copies, which take no processor of the device and
 * are about as fast. At 64 KiB to the host's memory the kernel moved no more by tcp than batches, and held up a decode step on the same device
 * by a third. If a place or a size is no multiple of 16 the kernel copies byte by byte, which pays for tiny pieces alone.
 */
enum { HOST_MEAN = 32 << 10, DEVICE_MEAN = 2 << 20, ODD_MEAN = 2 << 10 };

static const char *text; /* copy.ptx */

void kvg_kernel_text(const char *ptx) { text = ptx; }

/* The driver compiles it for the device, and keeps what it made in the user's cache. Without it the driver's own copies do all. */
void kvg_kernel_open(struct kvg_device *d) {
  if (text == NULL || kvg_lib.module_load == NULL || kvg_lib.module_function == NULL || kvg_lib.module_unload == NULL || kvg_lib.launch == NULL) {
    d->no_kernel = (kvg_status){KVG_ABSENT, KVG_CALL_module_load};
    return;
  }
  d->no_kernel = KVG_TRY(module_load, &d->module, text);
  if (d->no_kernel.code != 0) return;
  d->no_kernel = KVG_TRY(module_function, &d->kernel, d->module, "kvconn_copy");
  if (d->no_kernel.code != 0) kvg_kernel_close(d);
}

void kvg_kernel_close(struct kvg_device *d) {
  if (d->module != NULL) kvg_lib.module_unload(d->module);
  d->module = NULL, d->kernel = NULL;
}

kvg_status kvg_no_kernel(struct kvg_device *d) { return d->no_kernel; }

int kvg_kernel_suits(const struct kvg_device *d, const kv_ptr *from, const kv_ptr *to, const size_t *sizes, int n, int host) {
  size_t bytes = 0;
  kv_ptr bits = 0;
  if (d->kernel == NULL || n < 2) return 0;
  for (int i = 0; i < n; i++) bytes += sizes[i], bits |= from[i] | to[i] | sizes[i];
  size_t most = bits & 15 ? ODD_MEAN : host ? HOST_MEAN : DEVICE_MEAN;
  return bytes <= most * (size_t)n;
}

static kvg_status launch(struct kvg_device *d, kv_stream stream, struct table *t) {
  void *arguments[] = {t};
#ifdef KVCONN_FAULTS
  if (kvg_fault("gpu-kernel-piece")) t->count--;
#endif
  kvg_status s = KVG_TRY(launch, d->kernel, t->count < BLOCKS ? t->count : BLOCKS, 1, 1, THREADS, 1, 1, 0, stream, arguments, NULL);
  t->count = 0;
  return s;
}

kvg_status kvg_kernel_copy(struct kvg_device *d, kv_stream stream, const kv_ptr *from, const kv_ptr *to, const size_t *sizes, int n) {
  struct table t;
  t.count = t.unused = 0;
  kvg_status s = KVG_DONE;
  for (int i = 0; i < n && s.code == 0; i++) {
    for (size_t off = 0; off < sizes[i] && s.code == 0; off += PIECE_BYTES) {
      size_t left = sizes[i] - off;
      t.from[t.count] = from[i] + off, t.to[t.count] = to[i] + off;
      t.bytes[t.count] = left < PIECE_BYTES ? (uint32_t)left : PIECE_BYTES;
      if (++t.count == PIECES) s = launch(d, stream, &t);
    }
  }
  return s.code == 0 && t.count > 0 ? launch(d, stream, &t) : s;
}
