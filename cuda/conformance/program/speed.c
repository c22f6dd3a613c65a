/* kvgpu-facts --speed: what copies through pinned memory cost on this machine: one large, each piece by a call, or in batches; and copies
 * between two processes. As JSON. Pieces lie apart on the device, as the blocks of a cache do, and side by side in pinned memory. */
#include "fact.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define BATCH_MAX 512
#define REPEATS 5

static CUstream stream;
static CUdeviceptr device;
static char *pinned;
static size_t total;

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

enum way { ONE, EACH, BATCH };
static const char *const ways[] = {"one copy", "a call each", "batches"};

static int copy_one(bool to_device, CUdeviceptr on_device, char *on_host, size_t n) {
  return (int)(to_device ? CU(cuMemcpyHtoDAsync_v2)(on_device, on_host, n, stream) : CU(cuMemcpyDtoHAsync_v2)(on_host, on_device, n, stream));
}

static int copy_batches(bool to_device, size_t piece) {
  static CUdeviceptr to[BATCH_MAX], from[BATCH_MAX];
  static size_t sizes[BATCH_MAX];
  CUmemcpyAttributes in_order = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
  size_t first = 0, bad = 0;
  for (size_t done = 0; done < total / piece;) {
    size_t n = 0;
    for (; n < BATCH_MAX && done < total / piece; n++, done++) {
      CUdeviceptr apart = device + 2 * done * piece, beside = (CUdeviceptr)(pinned + done * piece);
      to[n] = to_device ? apart : beside, from[n] = to_device ? beside : apart, sizes[n] = piece;
    }
    CUresult r = CU(cuMemcpyBatchAsync)(to, from, sizes, n, &in_order, &first, 1, &bad, stream);
    if (r) return (int)r;
  }
  return 0;
}

static int copy_all(enum way way, bool to_device, size_t piece) {
  if (way == ONE) return copy_one(to_device, device, pinned, total);
  if (way == BATCH) return copy_batches(to_device, piece);
  int r = 0;
  for (size_t i = 0; i < total / piece && !r; i++) r = copy_one(to_device, device + 2 * i * piece, pinned + i * piece, piece);
  return r;
}

/* The best of some runs, and what their submission costs the caller. */
static bool measure(enum way way, bool to_device, size_t piece, const char *comma) {
  double best = 1e9, submit = 1e9;
  for (int i = 0; i <= REPEATS; i++) { /* the first warms up */
    double begin = seconds();
    if (copy_all(way, to_device, piece)) return false;
    double submitted = seconds();
    if (CU(cuStreamSynchronize)(stream)) return false;
    double end = seconds();
    if (i && end - begin < best) best = end - begin;
    if (i && submitted - begin < submit) submit = submitted - begin;
  }
  printf("%s\n    {\"way\": \"%s\", \"to\": \"%s\", \"piece\": %zu, \"GB_s\": %.2f, \"submit_us_a_piece\": %.3f}", comma, ways[way], to_device ? "device" : "host", way == ONE ? total : piece, (double)total / best / 1e9,
         submit * 1e6 / (double)(way == ONE ? 1 : total / piece));
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
  pinned = pinned_memory(total);
  printf("{\n  \"device\": \"%s\", \"driver\": %d, \"double\": %s,\n  \"us_a_record\": %.3f,\n  \"copies\": [", name, driver_version, is_double ? "true" : "false", microseconds_a_record());
  bool ok = true, first = true;
  for (int to_device = 0; to_device < 2; to_device++) {
    ok &= measure(ONE, to_device, total, first ? "" : ",");
    first = false;
    for (size_t piece = 4096; piece <= (size_t)1 << 20; piece *= 4) {
      ok &= measure(EACH, to_device, piece, ",");
      if (CU(cuMemcpyBatchAsync)) ok &= measure(BATCH, to_device, piece, ",");
    }
  }
  printf("\n  ],\n  \"two_processes\": [");
  CUdeviceptr shared = device_memory(total);
  if (ask_peer_for_speed(shared)) fprintf(stderr, "kvgpu-facts: another process could not copy from and to this one's memory\n"); /* a container may forbid it: no failure */
  printf("\n  ]\n}\n");
  return !ok;
}
