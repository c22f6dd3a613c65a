/* Memory and events of another process of the same host: a handle names the process and its descriptor, which is taken from there, if the
 * kernel allows it. KVGPU_IPC=foreign: as in another PID namespace; hidden: the peer's device is not visible; apart: devices have no way to
 * each other. Who opens memory locks its range in the file, so that the owner sees that it is open: the kernel ends the lock with the
 * process. */
#include "double.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

struct ticket { /* lies in the 64 bytes of a CUipcMemHandle */
  int pid, fd, physical;
  int64_t offset;
  uint64_t size, id, inode;
};
_Static_assert(sizeof(struct ticket) <= CU_IPC_HANDLE_SIZE, "a handle has 64 bytes");

bool has_ipc_mode(const char *mode) {
  const char *given = getenv("KVGPU_IPC");
  return given && !strcmp(given, mode);
}

unsigned open_imports(void) {
  unsigned n = 0;
  for (const struct mem *m = memories; m; m = m->next) n += m->opens;
  return n;
}

static uint64_t inode_of(int fd) {
  struct stat told;
  return fstat(fd, &told) ? 0 : told.st_ino;
}

static struct flock whole(const struct mem *m, short type) { return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = m->fd_offset, .l_len = (off_t)m->room}; }

/* What another process reads of freed memory is undefined: here it is poison. */
void let_shared(struct mem *m) {
  struct flock range = whole(m, F_WRLCK);
  if (m->kind != LINEAR && m->kind != EXPOSED) return;
  if (fcntl(m->fd, F_OFD_GETLK, &range) || range.l_type == F_UNLCK) return;
  violation("memory at %#llx was freed while another process had it open", (unsigned long long)m->at);
  if (m->kind == LINEAR) memset(m->alias, POISON, m->len);
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr p) {
  BEGIN(CONTEXT | UNSAFE);
  const struct mem *m = find_memory(p);
  REQUIRE(out && m && (m->kind == LINEAR || m->kind == EXPOSED), CUDA_ERROR_INVALID_VALUE);
  memset(out, 0, sizeof *out);
  memcpy(out, &(struct ticket){getpid(), m->fd, devices[m->dev].physical, m->fd_offset, m->len, m->id, inode_of(m->fd)}, sizeof(struct ticket));
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuIpcGetEventHandle(CUipcEventHandle *out, CUevent e) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(out && is_event(e), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(e->shared, CUDA_ERROR_INVALID_HANDLE);
  memset(out, 0, sizeof *out);
  memcpy(out, &(struct ticket){getpid(), e->fd, devices[e->ctx->dev].physical, 0, HOST_PAGE, 0, inode_of(e->fd)}, sizeof(struct ticket));
  return leave(CUDA_SUCCESS);
}

/* Opens the descriptor's file anew. The new descriptor has an open file description of its own, and so has locks of its own. */
static int anew(int fd) {
  char link[40];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  int own = open(link, O_RDWR | O_CLOEXEC);
  close(fd);
  return own;
}

static CUresult take(const struct ticket *t, int *fd) {
  if (t->pid == getpid() || has_ipc_mode("foreign")) return CUDA_ERROR_INVALID_CONTEXT;
  if (has_ipc_mode("hidden")) return CUDA_ERROR_INVALID_VALUE;
  int process = (int)syscall(SYS_pidfd_open, t->pid, 0);
  if (process < 0) return CUDA_ERROR_INVALID_CONTEXT;
  *fd = (int)syscall(SYS_pidfd_getfd, process, t->fd, 0);
  int error = errno;
  close(process);
  if (*fd < 0) return error == EBADF ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_CONTEXT;
  if (inode_of(*fd) != t->inode) { /* what the handle named is gone */
    close(*fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  *fd = anew(*fd);
  return *fd < 0 ? CUDA_ERROR_MAP_FAILED : CUDA_SUCCESS;
}

static struct mem *opened_before(CUcontext ctx, const struct ticket *t) {
  for (struct mem *m = memories; m; m = m->next) {
    if (m->kind == IMPORTED && m->ctx == ctx && m->inode == t->inode && m->fd_offset == t->offset) return m;
  }
  return NULL;
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
  REQUIRE(dev == ctx->dev || !has_ipc_mode("apart"), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
  CUresult r = take(&t, &fd);
  if (r) return leave(r);
  struct mem *m = opened_before(ctx, &t);
  if (m) {
    close(fd);
    m->opens++;
    *out = m->at;
    return leave(CUDA_SUCCESS);
  }
  m = map_file(dev, ctx, fd, t.offset, t.size, IMPORTED, take_retired(t.size), NULL);
  if (!m) close(fd);
  REQUIRE(m, CUDA_ERROR_MAP_FAILED);
  m->rdma = false;
  m->readers = m->writers = 1u << ctx->dev;
  m->inode = t.inode;
  m->opens = 1;
  struct flock range = whole(m, F_RDLCK);
  if (fcntl(fd, F_OFD_SETLK, &range)) violation("memory of process %d cannot be marked as open: %s", t.pid, strerror(errno));
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

/* Whether a real driver waits for what uses the memory is not said anywhere: the double reports it, and waits. */
EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr p) {
  BEGIN(CONTEXT | UNSAFE | AFTER_ERROR);
  struct mem *m = find_memory(p);
  REQUIRE(m && m->kind == IMPORTED && m->at == p, CUDA_ERROR_INVALID_VALUE);
  if (--m->opens) return leave(CUDA_SUCCESS);
  if (m->in_flight) violation("another process's memory at %#llx was closed while %u operations used it", (unsigned long long)p, m->in_flight);
  await_memory(m);
  drop_memory(m);
  return leave(CUDA_SUCCESS);
}
