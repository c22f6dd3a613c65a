/* kvconn's own kernel, which copies pieces that lie apart: the very text that kvconn has in it. */
#include "kernel.h"

#include <string.h>

#include "groups.h"

__asm__(".section .rodata\nkernel_text: .incbin \"cuda/internal/driver/copy.ptx\"\n.byte 0\n.previous");
extern const char kernel_text[];

enum { MOST = MOST_PIECES, PIECE = 4096 };

static CUmodule module;
static CUfunction function;
static CUstream stream;

bool load_kernel(void) { return !CU(cuModuleLoadData)(&module, kernel_text) && !CU(cuModuleGetFunction)(&function, module, "kvconn_copy"); }

int launch_kernel(struct table *t, unsigned blocks, CUstream s) {
  void *arguments[] = {t};
  return (int)CU(cuLaunchKernel)(function, blocks, 1, 1, 256, 1, 1, 0, s, arguments, NULL);
}

static int launch(struct table *t, unsigned blocks) { return launch_kernel(t, blocks, stream); }

/* Of the text as it is, so that the page tells which one has run on a GPU. */
static long long checksum(void) {
  uint32_t sum = 2166136261u;
  for (const char *p = kernel_text; *p; p++) sum = (sum ^ (unsigned char)*p) * 16777619u;
  return sum;
}

static bool all_are(const unsigned char *p, size_t n, unsigned char value) {
  for (size_t i = 0; i < n; i++) {
    if (p[i] != value) return false;
  }
  return true;
}

/* Every second piece of the device's memory, the last one first; what lies between stays. */
static bool gather(CUdeviceptr p, CUdeviceptr q, unsigned char *pinned) {
  struct table t = {.count = MOST};
  for (unsigned i = 0; i < MOST; i++) {
    CU(cuMemsetD8Async)(p + 2 * i * PIECE, (unsigned char)(i + 1), PIECE, stream);
    t.from[i] = p + 2 * i * PIECE, t.to[i] = q + 2 * (MOST - 1 - i) * PIECE, t.bytes[i] = PIECE;
  }
  CU(cuMemsetD8Async)(q, 0xAA, 2 * MOST * PIECE, stream);
  if (launch(&t, 32) || CU(cuMemcpyDtoHAsync_v2)(pinned, q, 2 * MOST * PIECE, stream) || CU(cuStreamSynchronize)(stream)) return false;
  bool right = true;
  for (unsigned i = 0; i < MOST; i++) {
    right &= all_are(pinned + 2 * i * PIECE, PIECE, (unsigned char)(MOST - i)) && all_are(pinned + (2 * i + 1) * PIECE, PIECE, 0xAA);
  }
  return right;
}

/* Places and sizes that are no multiples of anything, from pinned memory and back to it. */
static bool odd(CUdeviceptr p, unsigned char *pinned) {
  struct table to = {.count = 100}, back = {.count = 100};
  unsigned char *home = pinned + MOST * PIECE;
  size_t from = 1, at = 3;
  for (unsigned i = 0; i < 100; i++) {
    to.bytes[i] = back.bytes[i] = 1 + 37 * i % 3000;
    to.from[i] = (CUdeviceptr)pinned + from, to.to[i] = back.from[i] = p + at, back.to[i] = (CUdeviceptr)home + from;
    from += to.bytes[i] + 1, at += to.bytes[i] + 2;
  }
  for (size_t i = 0; i < from; i++) pinned[i] = (unsigned char)(i * 7 + i / 256);
  memset(home, 0, from);
  if (launch(&to, 7) || launch(&back, 100) || CU(cuStreamSynchronize)(stream)) return false;
  bool right = true;
  size_t next = 1;
  for (unsigned i = 0; i < 100; i++) {
    right &= !memcmp(home + next, pinned + next, to.bytes[i]) && !home[next - 1];
    next += to.bytes[i] + 1;
  }
  return right;
}

void kernels(void) {
  CUfunction none;
  CUmodule m;
  open_device();
  stream = new_stream();
  int loaded = (int)CU(cuModuleLoadData)(&module, kernel_text);
  fact(361, "cuModuleLoadData of kvconn's copy kernel", 0, loaded);
  if (loaded) return; /* then kvconn does without it */
  told(362, "which text has the checksum", checksum());
  truth(363, "cuModuleLoadData of what is no code fails", CU(cuModuleLoadData)(&m, "not a module") != 0);
  fact(364, "cuModuleGetFunction of the kernel", 0, (int)CU(cuModuleGetFunction)(&function, module, "kvconn_copy"));
  fact(365, "cuModuleGetFunction of a name that it lacks", CUDA_ERROR_NOT_FOUND, (int)CU(cuModuleGetFunction)(&none, module, "kvconn_move"));
  CUdeviceptr p = device_memory(2 * MOST * PIECE), q = device_memory(2 * MOST * PIECE);
  unsigned char *pinned = pinned_memory(2 * MOST * PIECE);
  truth(366, "it copies 128 pieces within the device, after what the stream had before, and nothing else", gather(p, q, pinned));
  truth(367, "and odd pieces between the device and pinned memory", odd(p, pinned));
  struct table t = {.from = {p}, .to = {(CUdeviceptr)pinned}, .bytes = {PIECE}, .count = 1};
  struct gate g;
  shut(&g, stream);
  fact(368, "cuLaunchKernel on a busy stream returns", 0, launch(&t, 1));
  fact(369, "and the stream is not done", CUDA_ERROR_NOT_READY, (int)CU(cuStreamQuery)(stream));
  open_gate(&g);
  fact(370, "until the kernel is", 0, (int)CU(cuStreamSynchronize)(stream));
  t.count = 0;
  fact(371, "a launch with no piece", 0, launch(&t, 1) + (int)CU(cuStreamSynchronize)(stream));
  fact(372, "cuLaunchKernel of no blocks", CUDA_ERROR_INVALID_VALUE, launch(&t, 0));
  fact(373, "cuModuleUnload", 0, (int)CU(cuModuleUnload)(module));
}

/* A kernel that reads where nothing lies is the end of the context. */
void kernels_astray(void) {
  open_device();
  stream = new_stream();
  if (!load_kernel()) {
    not_here(374, "cuLaunchKernel with a piece that was freed says nothing of it", "the driver does not take the kernel");
    return;
  }
  CUdeviceptr gone = device_memory(64 << 20);
  CU(cuMemFree_v2)(gone);
  struct table t = {.from = {gone}, .to = {(CUdeviceptr)pinned_memory(PIECE)}, .bytes = {PIECE}, .count = 1};
  fact(374, "cuLaunchKernel with a piece that was freed says nothing of it", 0, launch(&t, 1));
  fact(375, "the stream ends with it", CUDA_ERROR_ILLEGAL_ADDRESS, (int)CU(cuStreamSynchronize)(stream));
  CUdeviceptr more;
  fact(376, "and so does every later call", CUDA_ERROR_ILLEGAL_ADDRESS, (int)CU(cuMemAlloc_v2)(&more, PIECE));
}
