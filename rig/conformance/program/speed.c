/* kvgpu-facts --speed: what copies through pinned memory and within the device cost on this machine: one large, each piece by a call, in batches, or by kvconn's kernel; and copies
 * between two processes. As JSON. Pieces lie apart on the device, as the blocks of a cache do, and side by side in pinned memory. */
#include "kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define BATCH_MAX 512
#define PIECE_MAX ((size_t)64 << 10) /* of the kernel */
#define BLOCKS 32                    /* of threads, as kvconn has it */
#define REPEATS 5

static CUstream stream;
static CUdeviceptr device, other;
static char *pinned;
static size_t total;

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

enum way { ONE, EACH, BATCH, KERNEL };
static const char *const ways[] = {"one copy", "a call each", "batches", "kernel"};
enum direction { TO_HOST, TO_DEVICE, WITHIN };
static const char *const directions[] = {"host", "device", "the same device"};

/* Where a piece comes from, and where it goes: within the device both lie apart, the last one first. */
static void place(enum direction to, size_t piece, size_t i, CUdeviceptr *from, CUdeviceptr *into) {
  CUdeviceptr apart = device + 2 * i * piece, beside = (CUdeviceptr)(pinned + i * piece);
  *from = to == TO_DEVICE ? beside : apart;
  *into = to == WITHIN ? other + 2 * (total / piece - 1 - i) * piece : to == TO_DEVICE ? apart : beside;
}

static int copy_one(enum direction to, CUdeviceptr from, CUdeviceptr into, size_t n) {
  if (to == WITHIN) return (int)CU(cuMemcpyDtoDAsync_v2)(into, from, n, stream);
  return (int)(to == TO_DEVICE ? CU(cuMemcpyHtoDAsync_v2)(into, (void *)from, n, stream) : CU(cuMemcpyDtoHAsync_v2)((void *)into, from, n, stream));
}

static int copy_batches(enum direction direction, size_t piece) {
  static CUdeviceptr to[BATCH_MAX], from[BATCH_MAX];
  static size_t sizes[BATCH_MAX];
  CUmemcpyAttributes in_order = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
  size_t first = 0, bad = 0;
  for (size_t done = 0; done < total / piece;) {
    size_t n = 0;
    for (; n < BATCH_MAX && done < total / piece; n++, done++) place(direction, piece, done, &from[n], &to[n]), sizes[n] = piece;
    CUresult r = CU(cuMemcpyBatchAsync)(to, from, sizes, n, &in_order, &first, 1, &bad, stream);
    if (r) return (int)r;
  }
  return 0;
}

static int copy_by_kernel(enum direction direction, size_t piece) {
  struct table t = {.count = 0};
  int r = 0;
  for (size_t i = 0; i < total / piece && !r; i++) {
    CUdeviceptr from, to;
    place(direction, piece, i, &from, &to);
    for (size_t off = 0; off < piece && !r; off += PIECE_MAX) {
      t.from[t.count] = from + off, t.to[t.count] = to + off, t.bytes[t.count] = (uint32_t)(piece - off < PIECE_MAX ? piece - off : PIECE_MAX);
      if (++t.count < MOST_PIECES) continue;
      r = launch_kernel(&t, BLOCKS, stream);
      t.count = 0;
    }
  }
  return r || !t.count ? r : launch_kernel(&t, BLOCKS, stream);
}

static int copy_all(enum way way, enum direction to, size_t piece) {
  if (way == BATCH) return copy_batches(to, piece);
  if (way == KERNEL) return copy_by_kernel(to, piece);
  int r = 0;
  for (size_t i = 0; i < total / piece && !r; i++) {
    CUdeviceptr from, into;
    place(to, piece, i, &from, &into);
    r = copy_one(to, from, into, piece);
  }
  return r;
}

/* The best of some runs, and what their submission costs the caller. */
static bool measure(enum way way, enum direction to, size_t piece) {
  static const char *comma = "";
  double best = 1e9, submit = 1e9;
  for (int i = 0; i <= REPEATS; i++) { /* the first warms up */
    double begin = seconds();
    if (copy_all(way, to, piece)) return false;
    double submitted = seconds();
    if (CU(cuStreamSynchronize)(stream)) return false;
    double end = seconds();
    if (i && end - begin < best) best = end - begin;
    if (i && submitted - begin < submit) submit = submitted - begin;
  }
  printf("%s\n    {\"way\": \"%s\", \"to\": \"%s\", \"piece\": %zu, \"GB_s\": %.2f, \"submit_us_a_piece\": %.3f}", comma, ways[way], directions[to], piece, (double)total / best / 1e9,
         submit * 1e6 / (double)(total / piece));
  comma = ",";
  return true;
}

static double microseconds_a_record(void) {
  enum { TIMES = 1000 };
  CUevent e;
  if (CU(cuEventCreate)(&e, CU_EVENT_DISABLE_TIMING)) return -1;
  double begin = seconds();
  for (int i = 0; i < TIMES; i++) CU(cuEventRecord)(e, stream);
  double took = seconds() - begin;
  CU(cuStreamSynchronize)(stream);
  CU(cuEventDestroy_v2)(e);
  return took * 1e6 / TIMES;
}

int run_speed(void) {
  char name[100] = "";
  open_device();
  CU(cuDeviceGetName)(name, sizeof name, 0);
  total = (size_t)(is_double ? 1 : 64) << 20; /* the double's figures mean nothing: it only shows that this runs */
  stream = new_stream();
  device = device_memory(2 * total);
  other = device_memory(2 * total);
  pinned = pinned_memory(total);
  bool kernel = load_kernel();
  printf("{\n  \"device\": \"%s\", \"driver\": %d, \"double\": %s,\n  \"us_a_record\": %.3f,\n  \"copies\": [", name, driver_version, is_double ? "true" : "false", microseconds_a_record());
  bool ok = true;
  for (enum direction to = TO_HOST; to <= WITHIN; to++) {
    ok &= measure(ONE, to, total);
    for (size_t piece = 4096; piece <= (size_t)1 << 20; piece *= 4) {
      ok &= measure(EACH, to, piece);
      if (CU(cuMemcpyBatchAsync)) ok &= measure(BATCH, to, piece);
      if (kernel) ok &= measure(KERNEL, to, piece);
    }
  }
  printf("\n  ],\n  \"two_processes\": [");
  CUdeviceptr shared = device_memory(total);
  if (ask_peer_for_speed(shared)) fprintf(stderr, "kvgpu-facts: another process could not copy from and to this one's memory\n"); /* a container may forbid it: no failure */
  printf("\n  ]\n}\n");
  return !ok;
}
