/* Device memory. It is a file in memory, mapped untouchable at the device address, and for reading and writing at an alias that only the
 * double knows: a load or store of the host ends in SIGSEGV, a system call in EFAULT. Freed addresses stay untouchable. */
#include "double.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

uint64_t next_id = 1;
struct mem *memories;
static bool reuse;

struct retired { /* addresses that were device memory */
  CUdeviceptr at;
  size_t room;
  struct retired *next;
};
static struct retired *retired;

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* What was found last, by grains: a batch asks for the same few over and over, a look at a cache for thousands in their order. */
enum { FOUND = 4096 };
static struct mem *found[FOUND];

struct mem *find_memory(CUdeviceptr p) {
  struct mem **last = &found[p / GRAIN % FOUND];
  if (*last && p >= (*last)->at && p < (*last)->at + (*last)->len) return *last;
  for (struct mem *m = memories; m; m = m->next) {
    if (p >= m->at && p < m->at + m->len) return *last = m;
  }
  return NULL;
}

bool was_device_memory(CUdeviceptr p) {
  for (const struct retired *r = retired; r; r = r->next) {
    if (p >= r->at && p < r->at + r->room) return true;
  }
  for (const struct mem *m = memories; m; m = m->next) {
    if (p >= m->at && p < m->at + m->room) return true;
  }
  return false;
}

struct mem *next_overlap(struct mem *m, CUdeviceptr p, size_t n) {
  for (m = m ? m->next : memories; m; m = m->next) {
    if (m->at < p + n && p < m->at + m->len) return m;
  }
  return NULL;
}

char *reserve(size_t len) {
  char *raw = mmap(NULL, len + GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return NULL;
  char *at = (char *)round_up((uintptr_t)raw, GRAIN);
  if (at > raw) munmap(raw, (size_t)(at - raw));
  munmap(at + len, (size_t)(raw + GRAIN - at));
  return at;
}

CUdeviceptr take_retired(size_t len) {
  size_t room = round_up(len, GRAIN);
  for (struct retired **r = &retired; reuse && *r; r = &(*r)->next) {
    if ((*r)->room != room) continue;
    struct retired *hit = *r;
    CUdeviceptr at = hit->at;
    *r = hit->next;
    free(hit);
    return at;
  }
  return 0;
}

/* With `at` the device's addresses are reserved already, with `alias` ours. The descriptor is taken over. */
struct mem *map_file(int dev, CUcontext ctx, int fd, int64_t offset, size_t len, enum kind kind, CUdeviceptr at, char *alias) {
  size_t room = kind == EXPOSED ? round_up(len, HOST_PAGE) : round_up(len, GRAIN);
  if (!at) at = (CUdeviceptr)reserve(room);
  if (!at) return NULL;
  alias = mmap(alias, room, PROT_READ | PROT_WRITE, MAP_SHARED | (alias ? MAP_FIXED : 0), fd, offset);
  if (alias == MAP_FAILED) return NULL;
  if (mmap((void *)at, room, kind == MANAGED ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_SHARED | MAP_FIXED, fd, offset) == MAP_FAILED) {
    munmap(alias, room);
    return NULL;
  }
  struct mem *m = calloc(1, sizeof *m);
  *m = (struct mem){.at = at, .len = len, .room = room, .alias = alias, .fd = fd, .fd_offset = offset, .dev = dev, .kind = kind, .ctx = ctx};
  m->id = next_id++;
  m->rdma = true;
  m->readers = m->writers = UINT32_MAX;
  m->next = memories;
  memories = m;
  return m;
}

struct mem *new_memory(int dev, CUcontext ctx, size_t len, enum kind kind) {
  size_t room = round_up(len, GRAIN);
  int fd = memfd_create("kvgpu", MFD_CLOEXEC);
  if (fd < 0) return NULL;
  struct mem *m = ftruncate(fd, (off_t)room) ? NULL : map_file(dev, ctx, fd, 0, len, kind, kind == LINEAR ? take_retired(len) : 0, NULL);
  if (!m) {
    close(fd);
    return NULL;
  }
  memset(m->alias, POISON, len);
  memset(m->alias + len, CANARY, room - len);
  return m;
}

void check_canary(const struct mem *m) {
  if (m->kind != LINEAR && m->kind != POOLED) return;
  for (size_t i = m->len; i < m->room; i++) {
    if ((unsigned char)m->alias[i] == CANARY) continue;
    violation("byte %zu behind the %zu bytes at %#llx was written", i - m->len, m->len, (unsigned long long)m->at);
    return;
  }
}

void await_memory(struct mem *m) {
  while (m->in_flight && !gone) pthread_cond_wait(&progress, &world);
}

void drop_memory(struct mem *m) {
  check_canary(m);
  memset(found, 0, sizeof found);
  for (struct mem **p = &memories; *p; p = &(*p)->next) {
    if (*p != m) continue;
    *p = m->next;
    break;
  }
  drop_late(m);
  mmap((void *)m->at, m->room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  close(m->fd);
  if (m->kind == MAPPED) { /* its addresses are the reservation's */
    mmap(m->alias, m->room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  } else {
    munmap(m->alias, m->room);
    struct retired *r = calloc(1, sizeof *r);
    *r = (struct retired){m->at, m->room, retired};
    retired = r;
  }
  free(m);
}

static struct mem *memory_of(CUcontext ctx) {
  for (struct mem *m = memories; m; m = m->next) {
    if (m->ctx == ctx && m->kind != EXPOSED) return m;
  }
  return NULL;
}

void end_memories(CUcontext ctx) {
  for (struct mem *m; (m = memory_of(ctx));) {
    await_memory(m);
    let_shared(m);
    drop_memory(m);
  }
}

void free_memories(void) {
  while (memories) drop_memory(memories);
  while (retired) {
    struct retired *r = retired;
    retired = r->next;
    free(r);
  }
}

EXPORT void kvgpu_reuse_addresses(int on) {
  pthread_mutex_lock(&world);
  reuse = on;
  pthread_mutex_unlock(&world);
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t n) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(out && n, CUDA_ERROR_INVALID_VALUE);
  struct mem *m = new_memory(ctx->dev, ctx, n, LINEAR);
  REQUIRE(m, CUDA_ERROR_OUT_OF_MEMORY);
  *out = m->at;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *out, size_t n, unsigned int flags) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(out && n && (flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST), CUDA_ERROR_INVALID_VALUE);
  struct mem *m = new_memory(ctx->dev, ctx, n, MANAGED);
  REQUIRE(m, CUDA_ERROR_OUT_OF_MEMORY);
  m->rdma = false;
  *out = m->at;
  return leave(CUDA_SUCCESS);
}

/* As the real one it waits for what uses the memory. */
EXPORT CUresult cuMemFree_v2(CUdeviceptr p) {
  BEGIN(CONTEXT | UNSAFE | AFTER_ERROR);
  if (!p) return leave(CUDA_SUCCESS);
  struct mem *m = find_memory(p);
  REQUIRE(m && m->at == p && (m->kind == LINEAR || m->kind == MANAGED || m->kind == POOLED), CUDA_ERROR_INVALID_VALUE);
  await_memory(m);
  let_shared(m);
  drop_memory(m);
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetInfo_v2(size_t *there, size_t *total) {
  BEGIN(CONTEXT);
  REQUIRE(there && total, CUDA_ERROR_INVALID_VALUE);
  *total = *there = (size_t)80 << 30;
  for (const struct mem *m = memories; m; m = m->next) *there -= m->dev == ctx->dev ? m->room : 0;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr p) {
  BEGIN(CONTEXT);
  const struct mem *m = find_memory(p);
  REQUIRE(m, CUDA_ERROR_NOT_FOUND);
  if (base) *base = m->at;
  if (size) *size = m->len;
  return leave(CUDA_SUCCESS);
}
