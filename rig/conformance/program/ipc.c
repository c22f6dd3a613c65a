/* What copies between two processes of a host cost, of which one has opened the other's memory. The other process prints JSON itself. */
#include "fact.h"

#include <stdio.h>
#include <time.h>

#define REPEATS 5
#define PIECES 512 /* so many are given to the driver before it is waited for */

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* The best of some runs that copy all of it, piece by piece: from the other process's memory, or into it. */
static int copy_all(CUdeviceptr theirs, CUdeviceptr mine, size_t total, size_t piece, bool read, CUstream stream, double *best) {
  *best = 1e9;
  for (int i = 0; i <= REPEATS; i++) { /* the first warms up */
    double begin = seconds();
    for (size_t at = 0, n = 0; at < total; at += piece) {
      CUresult r = CU(cuMemcpyDtoDAsync_v2)(read ? mine + at : theirs + at, read ? theirs + at : mine + at, piece, stream);
      if (!r && ++n % PIECES == 0) r = CU(cuStreamSynchronize)(stream);
      if (r) return (int)r;
    }
    CUresult r = CU(cuStreamSynchronize)(stream);
    if (r) return (int)r;
    double took = seconds() - begin;
    if (i && took < *best) *best = took;
  }
  return 0;
}

int measure_ipc(CUipcMemHandle h) {
  CUdeviceptr theirs, base;
  size_t total;
  open_device();
  CUresult r = CU(cuIpcOpenMemHandle_v2)(&theirs, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (r) return printf("{\"error\": \"cuIpcOpenMemHandle: %d\"}", (int)r), 1;
  if (CU(cuMemGetAddressRange_v2)(&base, &total, theirs)) return printf("{\"error\": \"cuMemGetAddressRange\"}"), 2;
  CUdeviceptr mine = device_memory(total);
  CUstream stream = new_stream();
  const char *comma = "";
  for (int read = 0; read < 2; read++) {
    for (size_t piece = is_double ? total : 65536; piece <= total; piece *= 16) {
      double best;
      int code = copy_all(theirs, mine, total, piece, read, stream, &best);
      if (code) return printf("%s{\"error\": \"a copy: %d\"}", comma, code), 3;
      printf("%s\n    {\"way\": \"%s\", \"piece\": %zu, \"GB_s\": %.2f}", comma, read ? "read" : "write", piece, (double)total / best / 1e9);
      comma = ",";
    }
  }
  return CU(cuIpcCloseMemHandle)(theirs) ? 4 : 0;
}
