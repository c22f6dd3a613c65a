/* Memory of one process in another: opened, read, closed, and what is so when its owner gives it back. The other process says its facts itself. */
#include "groups.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define SPOT 4096 /* where the byte lies that is looked for */
#define BYTE 42

/* The other process, and a socket over which the two take turns. */
struct peer {
  pid_t pid;
  int socket;
};

static struct peer start_peer(const char *what, const char *argument) {
  int ends[2];
  char both[300];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) exit(4);
  fcntl(ends[0], F_SETFD, FD_CLOEXEC);
  snprintf(both, sizeof both, "%d:%s", ends[1], argument);
  fflush(stdout);
  struct peer p = {fork(), ends[0]};
  if (!p.pid) {
    alarm(PEER_SECONDS); /* stays over exec */
    execl(own_path(), "kvgpu-facts", "--peer", what, both, (char *)NULL);
    _exit(250);
  }
  close(ends[1]);
  return p;
}

/* It is the other's turn; returns when it is ours again. */
static void turn(int socket) {
  char c = 0;
  if (send(socket, &c, 1, MSG_NOSIGNAL) == 1 && read(socket, &c, 1) < 0) c = 0;
}
static void await_turn(int socket) {
  char c;
  if (read(socket, &c, 1) < 0) c = 0;
}

/* Its status, or 1000 and the signal that ended it. */
static int end_of(struct peer *p) {
  int status = 0;
  close(p->socket);
  while (waitpid(p->pid, &status, 0) < 0 && errno == EINTR) continue;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}
static void ends_well(int number, const char *sentence, struct peer *p) { number_fact(number, sentence, 0, end_of(p)); }

static void mark(CUdeviceptr p) {
  CU(cuMemsetD8_v2)(p + SPOT, BYTE, 1);
  CU(cuCtxSynchronize)();
}

/* The byte, or 1000 and the error. */
static int look(CUdeviceptr p) {
  unsigned char byte = 0;
  int error = (int)CU(cuMemcpyDtoH_v2)(&byte, p + SPOT, 1);
  return error ? 1000 + error : byte;
}

static void name_handle(CUdeviceptr p, char *hex) {
  CUipcMemHandle h;
  memset(&h, 0, sizeof h);
  CU(cuIpcGetMemHandle)(&h, p);
  for (size_t i = 0; i < sizeof h; i++) sprintf(hex + 2 * i, "%02x", (unsigned)((const unsigned char *)&h)[i]);
}

static CUipcMemHandle handle_of(const char *hex) {
  CUipcMemHandle h;
  for (size_t i = 0; i < sizeof h; i++) {
    unsigned byte = 0;
    sscanf(hex + 2 * i, "%2x", &byte);
    ((unsigned char *)&h)[i] = (unsigned char)byte;
  }
  return h;
}

static int open_handle(CUdeviceptr *p, const char *hex) { return (int)CU(cuIpcOpenMemHandle_v2)(p, handle_of(hex), CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS); }

static int opened_twice(const char *hex) {
  CUcontext own = open_device(), of = NULL;
  CUdeviceptr p = 0, again = 0, base = 0, mine = device_memory(MIB);
  size_t size = 0;
  unsigned long long id = 0;
  CUstream s = new_stream();
  fact(322, "another process opens an allocation", 0, open_handle(&p, hex));
  fact(323, "and opens it again", 0, open_handle(&again, hex));
  truth(324, "which gives the same address", p && p == again);
  CU(cuMemGetAddressRange_v2)(&base, &size, p + SPOT);
  truth(325, "cuMemGetAddressRange of it gives that address and the size", base == p && size == 4 * MIB);
  CU(cuPointerGetAttribute)(&of, CU_POINTER_ATTRIBUTE_CONTEXT, p);
  CU(cuPointerGetAttribute)(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, p);
  truth(326, "it is of the context that opened it, and has a BUFFER_ID", of == own && id);
  fact(327, "cuMemcpyDtoDAsync from it into own memory", 0, (int)CU(cuMemcpyDtoDAsync_v2)(mine, p, 2 * SPOT, s));
  CU(cuStreamSynchronize)(s);
  number_fact(328, "which brings the byte", BYTE, look(mine));
  fact(329, "it is closed once", 0, (int)CU(cuIpcCloseMemHandle)(p));
  number_fact(330, "and can be read, since it was opened twice", BYTE, look(p));
  fact(331, "it is closed again", 0, (int)CU(cuIpcCloseMemHandle)(p));
  fact(332, "and nothing lies there", CUDA_ERROR_INVALID_VALUE, (int)CU(cuPointerGetAttribute)(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, p));
  return 0;
}

/* Its owner frees it in our turn to wait. What a driver does then is said nowhere. */
static int freed_while_open(const char *hex, int socket) {
  CUdeviceptr p = 0;
  open_device();
  if (open_handle(&p, hex)) return 1;
  turn(socket);
  told(337, "where it was freed by its owner, a process that has it open reads (42: what lay there; 1000 and more: the copy's error)", look(p));
  return 0;
}

static int freed_before(const char *hex) {
  CUdeviceptr p = 0;
  open_device();
  told(335, "the handle of an allocation that was freed before another process opens it", open_handle(&p, hex));
  return 0;
}

/* It owns memory, and is killed. */
static int owner(int socket) {
  char hex[2 * sizeof(CUipcMemHandle) + 1];
  open_device();
  CUdeviceptr p = device_memory(4 * MIB);
  mark(p);
  name_handle(p, hex);
  if (write(socket, hex, sizeof hex) == sizeof hex) pause();
  return 1;
}

static void owner_dies(void) {
  char hex[2 * sizeof(CUipcMemHandle) + 1];
  CUdeviceptr p = 0;
  struct peer other = start_peer("owner", "");
  bool named = read(other.socket, hex, sizeof hex) == sizeof hex;
  bool opened = named && !open_handle(&p, hex);
  kill(other.pid, SIGKILL);
  number_fact(355, "a process whose memory is open elsewhere is killed", 1000 + SIGKILL, end_of(&other));
  if (!opened) return;
  told(356, "a process that has it open reads (42: what lay there; 1000 and more: the copy's error)", look(p));
  told(357, "and closes it", (int)CU(cuIpcCloseMemHandle)(p));
}

/* A batch of which one copy begins where no allocation is. */
static int astray(const char *where) {
  open_device();
  CUdeviceptr p = device_memory(MIB), gone = p + MIB, to[2], from[2];
  if (!strcmp(where, "freed")) {
    gone = device_memory(64 * MIB);
    CU(cuMemFree_v2)(gone);
  } else if (!strcmp(where, "unmapped")) {
    CUmemAllocationProp of = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemGenericAllocationHandle h = 0;
    if (CU(cuMemAddressReserve)(&gone, 2 * MIB, 0, 0, 0) || CU(cuMemCreate)(&h, 2 * MIB, &of, 0) || CU(cuMemMap)(gone, 2 * MIB, 0, h, 0) || CU(cuMemUnmap)(gone, 2 * MIB)) return 1;
  }
  char *pinned = pinned_memory(2 * SPOT);
  size_t sizes[2] = {SPOT, SPOT}, first = 0, bad = 0;
  for (size_t i = 0; i < 2; i++) to[i] = (CUdeviceptr)pinned + i * SPOT, from[i] = i ? gone : p;
  CUmemcpyAttributes in_order = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
  return 100 + (int)CU(cuMemcpyBatchAsync)(to, from, sizes, 2, &in_order, &first, 1, &bad, new_stream());
}

static void goes_astray(int number, const char *sentence, const char *where) {
  struct peer other = start_peer("astray", where);
  number_fact(number, sentence, 1000 + SIGSEGV, end_of(&other));
}

/* A batch takes an address that is no allocation's for host memory. Each process ends by it: the number is 1000 and the signal. */
void batches_astray(void) {
  if (!CU(cuMemcpyBatchAsync)) {
    not_here(358, "a batch with one copy from freed memory ends the process", "the driver is older than CUDA 12.8");
    return;
  }
  goes_astray(358, "a batch with one copy from freed memory ends the process", "freed");
  goes_astray(359, "so does one from where nothing is mapped any more", "unmapped");
  goes_astray(360, "so does one that begins behind an allocation", "beyond");
}

/* The calls that a moment makes, on a stream that was destroyed. What a driver does then is said nowhere: it may end the process. */
static int on_destroyed(const char *call) {
  open_device();
  CUstream s = new_stream();
  CUstreamCaptureStatus capturing;
  CUevent e = NULL;
  CU(cuEventCreate)(&e, CU_EVENT_DISABLE_TIMING);
  CU(cuStreamDestroy_v2)(s);
  if (!strcmp(call, "capturing")) told(390, "cuStreamIsCapturing of a stream that was destroyed", (int)CU(cuStreamIsCapturing)(s, &capturing));
  else if (!strcmp(call, "record")) told(392, "cuEventRecord on a stream that was destroyed", (int)CU(cuEventRecord)(e, s));
  else told(394, "the next stream has the handle of one that was destroyed (1: yes)", new_stream() == s);
  return 0;
}

void destroyed_streams(void) {
  struct peer other = start_peer("destroyed", "capturing");
  told(391, "and the process ends with the status (1000 and more: a signal)", end_of(&other));
  other = start_peer("destroyed", "record");
  told(393, "and the process ends with the status (1000 and more: a signal)", end_of(&other));
  other = start_peer("destroyed", "handle");
  ends_well(395, "the process that looked at handles ends well", &other);
}

static size_t grain;
static CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
static void find_grain(void) { CU(cuMemGetAllocationGranularity)(&grain, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM); }
static int allow(CUdeviceptr at, CUmemAccess_flags flags) {
  CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}, .flags = flags};
  return (int)CU(cuMemSetAccess)(at, grain, &access, 1);
}
static int import(CUmemGenericAllocationHandle *h, int fd) {
  return (int)CU(cuMemImportFromShareableHandle)(h, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

static int imported(int fd, int socket) {
  CUmemGenericAllocationHandle h = 0, other = 0;
  CUmemAllocationProp is;
  CUdeviceptr at = 0;
  memset(&is, 0xff, sizeof is);
  open_device();
  find_grain();
  int stranger = open("/proc/self/exe", O_RDONLY);
  truth(343, "cuMemImportFromShareableHandle of another file fails", import(&other, stranger) != 0);
  close(stranger);
  fact(344, "another process imports a handle's descriptor", 0, import(&h, fd));
  close(fd);
  CU(cuMemGetAllocationPropertiesFromHandle)(&is, h);
  truth(345, "and is told the device", is.location.type == CU_MEM_LOCATION_TYPE_DEVICE && is.location.id == 0);
  CU(cuMemAddressReserve)(&at, 2 * grain, 0, 0, 0);
  strict(346, "it cannot map more than the handle has", CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, (int)CU(cuMemMap)(at, 2 * grain, 0, h, 0));
  fact(347, "it maps what the handle has, and lets its device read and write", 0, (int)CU(cuMemMap)(at, grain, 0, h, 0) + allow(at, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
  fact(348, "the handle is not needed any more", 0, (int)CU(cuMemRelease)(h));
  number_fact(349, "it reads the byte", BYTE, look(at));
  turn(socket);
  number_fact(350, "also when the owner has unmapped and released the memory", BYTE, look(at));
  told(351, "cuMemSetAccess for reading only", allow(at, CU_MEM_ACCESS_FLAGS_PROT_READ));
  told(352, "after which the process reads (1000 and more: the copy's error)", look(at));
  fact(353, "it unmaps the memory, and frees the addresses", 0, (int)CU(cuMemUnmap)(at, grain) + (int)CU(cuMemAddressFree)(at, 2 * grain));
  return 0;
}

/* The failure may be the context's end, so it has a process of its own. */
static int without_access(int fd) {
  CUmemGenericAllocationHandle h = 0;
  CUdeviceptr at = 0;
  open_device();
  find_grain();
  if (import(&h, fd) || CU(cuMemAddressReserve)(&at, grain, 0, 0, 0) || CU(cuMemMap)(at, grain, 0, h, 0)) return 1;
  truth(341, "memory that is mapped without cuMemSetAccess cannot be read", look(at) >= 1000);
  return 0;
}

int run_owned(const char *name, const char *argument) {
  const char *rest = strchr(argument, ':');
  if (!rest) return -1;
  int socket = atoi(argument), fd = atoi(++rest);
  if (!strcmp(name, "twice")) return opened_twice(rest);
  if (!strcmp(name, "freed-while-open")) return freed_while_open(rest, socket);
  if (!strcmp(name, "freed-before")) return freed_before(rest);
  if (!strcmp(name, "owner")) return owner(socket);
  if (!strcmp(name, "astray")) return astray(rest);
  if (!strcmp(name, "destroyed")) return on_destroyed(rest);
  if (!strcmp(name, "imported")) return imported(fd, socket);
  return strcmp(name, "without-access") ? -1 : without_access(fd);
}

void opened_elsewhere(void) {
  open_device();
  char hex[2 * sizeof(CUipcMemHandle) + 1];
  CUdeviceptr p = device_memory(4 * MIB);
  CUipcMemHandle h;
  int error = (int)CU(cuIpcGetMemHandle)(&h, p);
  if (error == CUDA_ERROR_NOT_SUPPORTED || error == CUDA_ERROR_OPERATING_SYSTEM) {
    not_here(322, "another process opens an allocation", "the system has no legacy IPC");
    return;
  }
  mark(p);
  name_handle(p, hex);
  struct peer other = start_peer("twice", hex);
  ends_well(333, "that process ends well", &other);
  fact(334, "the owner frees what no other process has open any more", 0, (int)CU(cuMemFree_v2)(p));
  other = start_peer("freed-before", hex);
  ends_well(336, "the process that opened it ends well", &other);
  p = device_memory(4 * MIB);
  mark(p);
  name_handle(p, hex);
  other = start_peer("freed-while-open", hex);
  await_turn(other.socket);
  CU(cuMemFree_v2)(p);
  turn(other.socket);
  told(338, "and ends with the status", end_of(&other));
  owner_dies();
}

void mapped_elsewhere(void) {
  open_device();
  if (!device_attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)) {
    not_here(344, "another process imports a handle's descriptor", "the device cannot");
    return;
  }
  find_grain();
  CUmemGenericAllocationHandle h = 0, plain = 0;
  CUdeviceptr at = 0;
  int fd = -1, none = -1;
  char number[20];
  CU(cuMemCreate)(&plain, grain, &wanted, 0);
  truth(339, "cuMemExportToShareableHandle of a handle that was not made for it fails", CU(cuMemExportToShareableHandle)(&none, plain, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != 0);
  CU(cuMemRelease)(plain);
  wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CU(cuMemAddressReserve)(&at, grain, 0, 0, 0);
  CU(cuMemCreate)(&plain, 2 * grain, &wanted, 0);
  strict(340, "cuMemMap of a part of a handle that does not begin at 0", CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, (int)CU(cuMemMap)(at, grain, grain, plain, 0));
  CU(cuMemRelease)(plain);
  CU(cuMemCreate)(&h, grain, &wanted, 0);
  CU(cuMemMap)(at, grain, 0, h, 0);
  allow(at, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  mark(at);
  CU(cuMemExportToShareableHandle)(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  fcntl(fd, F_SETFD, 0); /* the other process has it too */
  snprintf(number, sizeof number, "%d", fd);
  struct peer other = start_peer("without-access", number);
  ends_well(342, "the process that tried ends well", &other);
  other = start_peer("imported", number);
  await_turn(other.socket);
  close(fd);
  CU(cuMemUnmap)(at, grain);
  CU(cuMemRelease)(h);
  CU(cuMemAddressFree)(at, grain);
  turn(other.socket);
  ends_well(354, "that process ends well", &other);
}
