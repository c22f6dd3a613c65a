/* dma-buf export: what a network card registers. The descriptor tells its size by lseek, as a dma-buf does. Its bytes are mapped by
 * kvgpu_map_dmabuf only, which a double of libibverbs calls: so byte 0 is the range's, and a range may lie in several files. */
#include "double.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct segment {
  int fd;
  int64_t offset;
  size_t size;
};
struct exported { /* keeps the pages, also when the memory is unmapped or freed: then they are stale, and no fault */
  ino_t inode;
  dev_t filesystem;
  size_t size, count;
  struct segment *segments;
  struct exported *next;
};
static struct exported *exports;

void free_exports(void) {
  while (exports) {
    struct exported *e = exports;
    exports = e->next;
    for (size_t i = 0; i < e->count; i++) close(e->segments[i].fd);
    free(e->segments);
    free(e);
  }
}

/* The range is covered by mappings, without a gap, of the context's device and fit for RDMA. */
static CUresult check_range(CUcontext ctx, CUdeviceptr p, size_t n, size_t *count) {
  for (size_t done = 0; done < n; ++*count) {
    const struct mem *m = find_memory(p + done);
    if (!m || m->kind == MANAGED || m->kind == IMPORTED) return CUDA_ERROR_INVALID_VALUE;
    if (m->dev != ctx->dev) return CUDA_ERROR_INVALID_CONTEXT;
    if (!m->rdma) return CUDA_ERROR_NOT_SUPPORTED;
    size_t left = m->room - (size_t)(p + done - m->at);
    if (m->kind == POOLED || (m->kind != MAPPED && n - done > left)) return CUDA_ERROR_INVALID_VALUE;
    done += left;
  }
  return CUDA_SUCCESS;
}

static int add_export(CUdeviceptr p, size_t n, size_t count) {
  int fd = memfd_create("kvgpu-dmabuf", MFD_CLOEXEC);
  struct stat told;
  if (fd < 0 || ftruncate(fd, (off_t)n) || fstat(fd, &told)) return -1;
  struct exported *e = calloc(1, sizeof *e);
  *e = (struct exported){.inode = told.st_ino, .filesystem = told.st_dev, .size = n, .segments = calloc(count, sizeof *e->segments), .next = exports};
  for (size_t done = 0; done < n;) {
    struct mem *m = find_memory(p + done);
    size_t within = (size_t)(p + done - m->at), left = m->room - within;
    size_t size = left < n - done ? left : n - done;
    int from = late_pcie ? late_descriptor(m) : m->fd;
    e->segments[e->count++] = (struct segment){fcntl(from, F_DUPFD_CLOEXEC, 3), (late_pcie ? 0 : m->fd_offset) + (int64_t)within, size};
    done += size;
  }
  exports = e;
  return fd;
}

EXPORT CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr p, size_t n, CUmemRangeHandleType type, unsigned long long flags) {
  BEGIN(CONTEXT | UNSAFE);
  size_t count = 0;
  REQUIRE(out && n && type == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(!flags, CUDA_ERROR_NOT_SUPPORTED);
  REQUIRE(p % HOST_PAGE == 0 && n % HOST_PAGE == 0, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(devices[ctx->dev].attributes[CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED], CUDA_ERROR_NOT_SUPPORTED);
  CUresult r = check_range(ctx, p, n, &count);
  if (r) return leave(r);
  int fd = add_export(p, n, count);
  REQUIRE(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
  *(int *)out = fd;
  return leave(CUDA_SUCCESS);
}

static struct exported *find_export(int fd) {
  struct stat told;
  if (fstat(fd, &told)) return NULL;
  for (struct exported *e = exports; e; e = e->next) {
    if (e->inode == told.st_ino && e->filesystem == told.st_dev) return e;
  }
  return NULL;
}

unsigned open_exports(void) {
  unsigned n = 0;
  DIR *all = opendir("/proc/self/fd");
  for (struct dirent *entry; all && (entry = readdir(all));) n += find_export(atoi(entry->d_name)) != NULL;
  if (all) closedir(all);
  return n;
}

static bool map_segments(const struct exported *e, char *at) {
  for (size_t i = 0; i < e->count; at += e->segments[i++].size) {
    const struct segment *s = &e->segments[i];
    if (mmap(at, s->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, s->fd, s->offset) == MAP_FAILED) return false;
  }
  return true;
}

EXPORT void *kvgpu_map_dmabuf(int fd, size_t *size) {
  pthread_mutex_lock(&world);
  const struct exported *e = find_export(fd);
  char *at = e ? mmap(NULL, e->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
  if (at != MAP_FAILED && !map_segments(e, at)) {
    munmap(at, e->size);
    at = MAP_FAILED;
  }
  if (at != MAP_FAILED) *size = e->size;
  pthread_mutex_unlock(&world);
  return at == MAP_FAILED ? NULL : at;
}
