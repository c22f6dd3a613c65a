/* Memory and events of another process of the same host: a handle names the process and its descriptor, which is taken from there, if the
 * kernel allows it. KVGPU_IPC=foreign: as in another PID namespace; KVGPU_IPC=hidden: the peer's device is not visible. */
#include "double.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct ticket { /* lies in the 64 bytes of a CUipcMemHandle */
  int pid, fd, physical;
  int64_t offset;
  uint64_t size, id;
};
_Static_assert(sizeof(struct ticket) <= CU_IPC_HANDLE_SIZE, "a handle has 64 bytes");

unsigned open_imports(void) {
  unsigned n = 0;
  for (const struct mem *m = memories; m; m = m->next) n += m->kind == IMPORTED;
  return n;
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr p) {
  BEGIN(CONTEXT | UNSAFE);
  const struct mem *m = find_memory(p);
  REQUIRE(out && m && (m->kind == LINEAR || m->kind == EXPOSED), CUDA_ERROR_INVALID_VALUE);
  memset(out, 0, sizeof *out);
  memcpy(out, &(struct ticket){getpid(), m->fd, devices[m->dev].physical, m->fd_offset, m->len, m->id}, sizeof(struct ticket));
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuIpcGetEventHandle(CUipcEventHandle *out, CUevent e) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(out && is_event(e), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(e->shared, CUDA_ERROR_INVALID_HANDLE);
  memset(out, 0, sizeof *out);
  memcpy(out, &(struct ticket){getpid(), e->fd, devices[e->ctx->dev].physical, 0, HOST_PAGE, 0}, sizeof(struct ticket));
  return leave(CUDA_SUCCESS);
}

static CUresult take(const struct ticket *t, int *fd) {
  const char *mode = getenv("KVGPU_IPC");
  if (t->pid == getpid() || (mode && !strcmp(mode, "foreign"))) return CUDA_ERROR_INVALID_CONTEXT;
  if (mode && !strcmp(mode, "hidden")) return CUDA_ERROR_INVALID_VALUE;
  int process = (int)syscall(SYS_pidfd_open, t->pid, 0);
  if (process < 0) return CUDA_ERROR_INVALID_CONTEXT;
  *fd = (int)syscall(SYS_pidfd_getfd, process, t->fd, 0);
  close(process);
  return *fd < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) {
  BEGIN(CONTEXT | UNSAFE);
  struct ticket t;
  int fd = -1;
  REQUIRE(out && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE);
  memcpy(&t, &handle, sizeof t);
  int dev = -1;
  for (int i = 0; i < device_count; i++) dev = devices[i].physical == t.physical ? i : dev;
  REQUIRE(dev >= 0 && t.pid > 0 && t.size, CUDA_ERROR_INVALID_VALUE);
  CUresult r = take(&t, &fd);
  if (r) return leave(r);
  struct mem *m = map_file(dev, ctx, fd, t.offset, t.size, IMPORTED, 0, NULL);
  if (!m) close(fd);
  REQUIRE(m, CUDA_ERROR_MAP_FAILED);
  m->rdma = false;
  *out = m->at;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle handle) {
  BEGIN(CONTEXT | UNSAFE);
  struct ticket t;
  int fd = -1;
  memcpy(&t, &handle, sizeof t);
  REQUIRE(out && t.pid > 0 && t.size == HOST_PAGE, CUDA_ERROR_INVALID_VALUE);
  CUresult r = take(&t, &fd);
  if (r) return leave(r);
  *out = new_event(ctx, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING, fd);
  if (!*out) close(fd);
  return leave(*out ? CUDA_SUCCESS : CUDA_ERROR_MAP_FAILED);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr p) {
  BEGIN(CONTEXT | UNSAFE | AFTER_ERROR);
  struct mem *m = find_memory(p);
  REQUIRE(m && m->kind == IMPORTED && m->at == p, CUDA_ERROR_INVALID_VALUE);
  await_memory(m);
  drop_memory(m);
  return leave(CUDA_SUCCESS);
}
