/* Memory that others reach: network cards by dma-buf, processes of the same host by IPC. */
#include "groups.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define EXPORT_RANGE(fd, p, n) ((int)CU(cuMemGetHandleForAddressRange)(&(fd), (p), (n), CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0))

static int flush(int scope) { return (int)CU(cuFlushGPUDirectRDMAWrites)(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, (CUflushGPUDirectRDMAWritesScope)scope); }

void exports(void) {
  open_device();
  bool host = device_attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS) & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST;
  const char *says = "cuFlushGPUDirectRDMAWrites answers where the options have 'by the host'";
  if (!CU(cuFlushGPUDirectRDMAWrites)) not_here(290, says, "the driver is older");
  else if (!host) not_here(290, says, "the options have it not");
  else fact(290, says, 0, flush(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER));
  if (!device_attribute(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) || !CU(cuMemGetHandleForAddressRange)) {
    not_here(291, "a range of device memory can be exported as a dma-buf", "the attribute says that dma-buf is not supported");
    return;
  }
  CUdeviceptr p = device_memory(8 * MIB);
  int fd = -1, second = -1, bad = -1;
  char stack[4096];
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  fact(291, "a range of device memory can be exported as a dma-buf", 0, EXPORT_RANGE(fd, p, 4 * MIB));
  number_fact(292, "lseek tells its size", 4 * (long long)MIB, (long long)lseek(fd, 0, SEEK_END));
  fact(293, "a range within an allocation too", 0, EXPORT_RANGE(second, p + page, page));
  truth(294, "as another descriptor", second != fd && second >= 0);
  number_fact(295, "of just that size", (long long)page, (long long)lseek(second, 0, SEEK_END));
  fact(296, "an address that is no multiple of the host's page", CUDA_ERROR_INVALID_VALUE, EXPORT_RANGE(bad, p + 100, page));
  fact(297, "a size that is no multiple of the host's page", CUDA_ERROR_INVALID_VALUE, EXPORT_RANGE(bad, p, 100));
  fact(298, "a range beyond the allocation", CUDA_ERROR_INVALID_VALUE, EXPORT_RANGE(bad, p + 8 * MIB - page, 64 * MIB));
  fact(299, "no bytes", CUDA_ERROR_INVALID_VALUE, EXPORT_RANGE(bad, p, 0));
  truth(300, "host memory is refused", EXPORT_RANGE(bad, (CUdeviceptr)stack / page * page, page) != 0);
  close(second);
  fact(301, "the memory can be freed while the descriptor is open", 0, (int)CU(cuMemFree_v2)(p));
  close(fd);
}

static void to_hex(const CUipcMemHandle *h, char *out) { /* of 2 * sizeof *h + 1 bytes */
  for (size_t i = 0; i < sizeof *h; i++) sprintf(out + 2 * i, "%02x", (unsigned)((const unsigned char *)h)[i]);
}

/* In another process: the status tells what happened. */
static int ask_peer(const char *what, const char *hex) {
  fflush(stdout);
  pid_t child = fork();
  if (!child) {
    alarm(PEER_SECONDS); /* stays over exec */
    execl(own_path(), "kvgpu-facts", "--peer", what, hex, (char *)NULL);
    _exit(250);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 251;
}

/* 0 all is well, 1 to 9 which step failed. */
static int open_and_read(CUipcMemHandle h) {
  CUdeviceptr p, q;
  unsigned char byte = 0;
  open_device();
  if (CU(cuIpcOpenMemHandle_v2)(&p, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)) return 1;
  if (CU(cuMemcpyDtoH_v2)(&byte, p + 4096, 1)) return 2;
  if (byte != 42) return 3;
  if (CU(cuMemsetD8_v2)(p + 4096, 43, 1)) return 4;
  if (CU(cuCtxSynchronize)()) return 5;
  if (CU(cuMemFree_v2)(p) != CUDA_ERROR_INVALID_VALUE) return 6;
  size_t size = 0;
  if (CU(cuMemGetAddressRange_v2)(&q, &size, p + 4096) || size < 4 * MIB) return 7;
  return CU(cuIpcCloseMemHandle)(p) ? 8 : 0;
}

/* 0 passed, 1 not ready, 2 to 4 another error. */
static int open_and_query(CUipcEventHandle h) {
  CUevent e;
  open_device();
  if (CU(cuIpcOpenEventHandle)(&e, h)) return 2;
  CUresult r = CU(cuEventQuery)(e);
  if (CU(cuEventDestroy_v2)(e)) return 3;
  return r == CUDA_SUCCESS ? 0 : r == CUDA_ERROR_NOT_READY ? 1 : 4;
}

static void events_of_two(void) {
  CUstream s = new_stream();
  CUevent e, plain;
  CUipcEventHandle h;
  CUipcMemHandle same;
  struct gate g;
  char hex[2 * sizeof h + 1];
  CU(cuEventCreate)(&plain, CU_EVENT_DISABLE_TIMING);
  CU(cuEventCreate)(&e, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS);
  truth(318, "cuIpcGetEventHandle of an event without the flag INTERPROCESS fails", CU(cuIpcGetEventHandle)(&h, plain) != CUDA_SUCCESS);
  fact(319, "cuIpcGetEventHandle of an event with it", 0, (int)CU(cuIpcGetEventHandle)(&h, e));
  memcpy(&same, &h, sizeof same);
  to_hex(&same, hex);
  shut(&g, s);
  CU(cuEventRecord)(e, s);
  number_fact(320, "another process opens it, and it has not passed while the stream is busy", 1, ask_peer("event", hex));
  open_gate(&g);
  CU(cuStreamSynchronize)(s);
  number_fact(321, "and has when the stream is done", 0, ask_peer("event", hex));
}

int run_peer(const char *name, const char *hex) {
  int other = run_owned(name, hex);
  if (other >= 0) return other;
  CUipcMemHandle h;
  for (size_t i = 0; i < sizeof h; i++) {
    unsigned byte;
    if (sscanf(hex + 2 * i, "%2x", &byte) != 1) return 240;
    ((unsigned char *)&h)[i] = (unsigned char)byte;
  }
  if (!strcmp(name, "read")) return open_and_read(h);
  if (!strcmp(name, "speed")) return measure_ipc(h);
  CUipcEventHandle e;
  memcpy(&e, &h, sizeof e);
  return strcmp(name, "event") ? 241 : open_and_query(e);
}

int ask_peer_for_speed(CUdeviceptr p) {
  CUipcMemHandle h;
  char hex[2 * sizeof h + 1];
  int error = (int)CU(cuIpcGetMemHandle)(&h, p);
  if (error) return printf("{\"error\": \"cuIpcGetMemHandle: %d\"}", error), 1;
  to_hex(&h, hex);
  return ask_peer("speed", hex);
}

void same_host(void) {
  open_device();
  CUdeviceptr p = device_memory(4 * MIB), q = 0;
  CUipcMemHandle h, second;
  char hex[2 * sizeof h + 1];
  unsigned char byte = 0;
  void *pinned = pinned_memory(4096);
  memset(&h, 0, sizeof h);
  int error = (int)CU(cuIpcGetMemHandle)(&h, p);
  if (error == CUDA_ERROR_NOT_SUPPORTED || error == CUDA_ERROR_OPERATING_SYSTEM) {
    not_here(310, "cuIpcGetMemHandle of cuMemAlloc's memory", "the system has no legacy IPC");
    return;
  }
  fact(310, "cuIpcGetMemHandle of cuMemAlloc's memory", 0, error);
  fact(311, "cuIpcGetMemHandle of a pointer within", 0, (int)CU(cuIpcGetMemHandle)(&second, p + 4096));
  fact(312, "cuIpcGetMemHandle of pinned memory", CUDA_ERROR_INVALID_VALUE, (int)CU(cuIpcGetMemHandle)(&second, (CUdeviceptr)pinned));
  fact(313, "a process cannot open its own handle", CUDA_ERROR_INVALID_CONTEXT, (int)CU(cuIpcOpenMemHandle_v2)(&q, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  fact(314, "cuIpcOpenMemHandle needs the flag LAZY_ENABLE_PEER_ACCESS", CUDA_ERROR_INVALID_VALUE, (int)CU(cuIpcOpenMemHandle_v2)(&q, h, 0));
  CU(cuMemsetD8_v2)(p + 4096, 42, 1);
  CU(cuCtxSynchronize)();
  to_hex(&h, hex);
  int step = ask_peer("read", hex);
  number_fact(315, "another process opens it at its base, reads and writes the bytes, cannot free them, and closes it", 0, step);
  CU(cuMemcpyDtoH_v2)(&byte, p + 4096, 1);
  if (step) not_here(316, "what it wrote is seen here", "the other process could not open it");
  else number_fact(316, "what it wrote is seen here", 43, byte);
  fact(317, "cuIpcCloseMemHandle of what was not opened", CUDA_ERROR_INVALID_VALUE, (int)CU(cuIpcCloseMemHandle)(p));
  events_of_two();
}
