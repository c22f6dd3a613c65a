/* Virtual memory management: reserved addresses, allocations that are handles, and mappings of one at the other. */
#include "double.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define VMM_FILE "kvgpu-vmm-%d-%u" /* the device's number when none is hidden, and whether it is for RDMA */

struct handle {
  CUmemGenericAllocationHandle number;
  CUmemAllocationProp properties;
  size_t size;
  int fd;
  unsigned references; /* of the caller, and of mappings */
  unsigned owned;      /* the caller's */
  uint64_t id;
  struct handle *next;
};
struct reservation {
  CUdeviceptr at;
  size_t size;
  char *alias; /* so that neighbours are neighbours there too */
  struct reservation *next;
};
static struct handle *handles;
static struct reservation *reservations;
static CUmemGenericAllocationHandle numbers = (CUmemGenericAllocationHandle)1 << 40; /* none is a BUFFER_ID */

static struct handle *find_handle(CUmemGenericAllocationHandle number) {
  for (struct handle *h = handles; h; h = h->next) {
    if (h->number == number) return h;
  }
  return NULL;
}

static struct handle *add_handle(const CUmemAllocationProp *properties, size_t size, int fd) {
  struct handle *h = calloc(1, sizeof *h);
  *h = (struct handle){.number = numbers++, .properties = *properties, .size = size, .fd = fd, .references = 1, .owned = 1, .next = handles};
  handles = h;
  return h;
}

static void let_handle(struct handle *h) {
  if (--h->references) return;
  for (struct handle **p = &handles; *p; p = &(*p)->next) {
    if (*p != h) continue;
    *p = h->next;
    break;
  }
  close(h->fd);
  free(h);
}

unsigned living_handles(void) {
  unsigned n = 0;
  for (const struct handle *h = handles; h; h = h->next) n += h->owned;
  return n;
}

unsigned living_mappings(void) {
  unsigned n = 0;
  for (const struct mem *m = memories; m; m = m->next) n += m->kind == MAPPED;
  return n;
}

unsigned living_reservations(void) {
  unsigned n = 0;
  for (const struct reservation *r = reservations; r; r = r->next) n++;
  return n;
}

void free_vmm(void) {
  while (handles) {
    handles->references = 1;
    let_handle(handles);
  }
  while (reservations) {
    struct reservation *r = reservations;
    reservations = r->next;
    munmap((void *)r->at, r->size);
    munmap(r->alias, r->size);
    free(r);
  }
}

static struct reservation *find_reservation(CUdeviceptr p, size_t n) {
  for (struct reservation *r = reservations; r; r = r->next) {
    if (p >= r->at && n <= r->size && p - r->at <= r->size - n) return r;
  }
  return NULL;
}

CUresult reservation_of(CUdeviceptr p, CUdeviceptr *at, size_t *size) {
  const struct reservation *r = find_reservation(p, 1);
  if (!r) return CUDA_ERROR_INVALID_VALUE;
  if (at) *at = r->at;
  if (size) *size = r->size;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
  BEGIN(UNSAFE);
  REQUIRE(out && size && size % GRAIN == 0 && !flags && (alignment & (alignment - 1)) == 0 && alignment <= GRAIN, CUDA_ERROR_INVALID_VALUE);
  (void)wanted; /* a wish */
  char *at = reserve(size), *alias = reserve(size);
  REQUIRE(at && alias, CUDA_ERROR_OUT_OF_MEMORY);
  struct reservation *r = calloc(1, sizeof *r);
  *r = (struct reservation){(CUdeviceptr)at, size, alias, reservations};
  reservations = r;
  *out = r->at;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
  BEGIN(UNSAFE);
  for (const struct mem *m = memories; m; m = m->next) REQUIRE(m->at + m->room <= at || m->at >= at + size, CUDA_ERROR_INVALID_VALUE);
  for (struct reservation **p = &reservations; *p; p = &(*p)->next) {
    struct reservation *r = *p;
    if (r->at != at || r->size != size) continue;
    *p = r->next; /* the addresses stay untouchable for ever */
    munmap(r->alias, r->size);
    free(r);
    return leave(CUDA_SUCCESS);
  }
  return leave(CUDA_ERROR_INVALID_VALUE);
}

static bool is_usable(const CUmemAllocationProp *p) {
  return p && p->type == CU_MEM_ALLOCATION_TYPE_PINNED && p->location.type == CU_MEM_LOCATION_TYPE_DEVICE && p->location.id >= 0 && p->location.id < device_count;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option) {
  BEGIN(0);
  REQUIRE(out && (unsigned)option <= CU_MEM_ALLOC_GRANULARITY_RECOMMENDED && is_usable(properties), CUDA_ERROR_INVALID_VALUE);
  *out = GRAIN;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *properties, unsigned long long flags) {
  BEGIN(UNSAFE);
  REQUIRE(out && size && size % GRAIN == 0 && !flags && is_usable(properties), CUDA_ERROR_INVALID_VALUE);
  REQUIRE(!(properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), CUDA_ERROR_NOT_SUPPORTED);
  char name[40];
  snprintf(name, sizeof name, VMM_FILE, devices[properties->location.id].physical, properties->allocFlags.gpuDirectRDMACapable);
  int fd = memfd_create(name, MFD_CLOEXEC);
  char *bytes = fd < 0 || ftruncate(fd, (off_t)size) ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (bytes == MAP_FAILED && fd >= 0) close(fd);
  REQUIRE(bytes != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  memset(bytes, POISON, size);
  munmap(bytes, size);
  *out = add_handle(properties, size, fd)->number;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle number) {
  BEGIN(UNSAFE | AFTER_ERROR);
  struct handle *h = find_handle(number);
  REQUIRE(h && h->owned, CUDA_ERROR_INVALID_VALUE);
  h->owned--;
  let_handle(h);
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle number, unsigned long long flags) {
  BEGIN(UNSAFE);
  struct handle *h = find_handle(number);
  REQUIRE(h && !flags && !offset && size && size % GRAIN == 0 && size <= h->size && at % GRAIN == 0, CUDA_ERROR_INVALID_VALUE);
  const struct reservation *r = find_reservation(at, size);
  REQUIRE(r, CUDA_ERROR_INVALID_VALUE);
  for (const struct mem *m = memories; m; m = m->next) REQUIRE(m->at + m->room <= at || m->at >= at + size, CUDA_ERROR_INVALID_VALUE);
  int fd = fcntl(h->fd, F_DUPFD_CLOEXEC, 3);
  struct mem *m = fd < 0 ? NULL : map_file(h->properties.location.id, NULL, fd, 0, size, MAPPED, at, r->alias + (at - r->at));
  REQUIRE(m, CUDA_ERROR_OUT_OF_MEMORY);
  m->readers = m->writers = 0; /* until cuMemSetAccess */
  m->rdma = h->properties.allocFlags.gpuDirectRDMACapable;
  m->handle_types = h->properties.requestedHandleTypes;
  m->handle = number;
  h->references++;
  return leave(CUDA_SUCCESS);
}

static struct mem *mapped_within(CUdeviceptr at, size_t size) {
  for (struct mem *m = memories; m; m = m->next) {
    if (m->kind == MAPPED && m->at >= at && m->at < at + size) return m;
  }
  return NULL;
}

/* Whole mappings only. A real driver does not wait for what uses them: the double reports it, and waits. */
EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  BEGIN(UNSAFE | AFTER_ERROR);
  size_t covered = 0;
  for (const struct mem *m = memories; m; m = m->next) {
    bool inside = m->at >= at && m->at + m->len <= at + size;
    REQUIRE(inside || m->at + m->len <= at || m->at >= at + size, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!inside || m->kind == MAPPED, CUDA_ERROR_INVALID_VALUE);
    covered += inside ? m->len : 0;
  }
  REQUIRE(covered == size, CUDA_ERROR_INVALID_VALUE);
  for (struct mem *m; (m = mapped_within(at, size));) {
    if (m->in_flight) violation("memory at %#llx was unmapped while %u operations used it", (unsigned long long)m->at, m->in_flight);
    await_memory(m);
    struct handle *h = find_handle(m->handle);
    drop_memory(m);
    if (h) let_handle(h);
  }
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *access, size_t count) {
  BEGIN(UNSAFE);
  REQUIRE(access && count, CUDA_ERROR_INVALID_VALUE);
  size_t covered = 0;
  for (struct mem *m = memories; m; m = m->next) {
    if (m->kind != MAPPED || m->at < at || m->at + m->len > at + size) continue;
    covered += m->len;
    for (size_t i = 0; i < count; i++) {
      int dev = access[i].location.id;
      if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) continue;
      REQUIRE(dev >= 0 && dev < device_count && (dev == m->dev || !has_ipc_mode("apart")), CUDA_ERROR_INVALID_DEVICE);
      unsigned bit = 1u << dev;
      m->readers = (m->readers & ~bit) | (access[i].flags & CU_MEM_ACCESS_FLAGS_PROT_READ ? bit : 0);
      m->writers = (m->writers & ~bit) | (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? bit : 0);
    }
  }
  return leave(covered == size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *p) {
  BEGIN(UNSAFE);
  struct mem *m = find_memory((CUdeviceptr)p);
  struct handle *h = m && m->kind == MAPPED ? find_handle(m->handle) : NULL;
  REQUIRE(out && h, CUDA_ERROR_INVALID_VALUE);
  h->references++;
  h->owned++;
  *out = h->number;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out, CUmemGenericAllocationHandle number) {
  BEGIN(0);
  const struct handle *h = find_handle(number);
  REQUIRE(out && h, CUDA_ERROR_INVALID_VALUE);
  *out = h->properties;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle number, CUmemAllocationHandleType type, unsigned long long flags) {
  BEGIN(UNSAFE);
  const struct handle *h = find_handle(number);
  REQUIRE(out && h && !flags, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && h->properties.requestedHandleTypes & type, CUDA_ERROR_INVALID_VALUE);
  int fd = fcntl(h->fd, F_DUPFD_CLOEXEC, 3);
  REQUIRE(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
  *(int *)out = fd;
  return leave(CUDA_SUCCESS);
}

/* Which device a file's memory lies on, by its name: -1 if it is none of cuMemCreate's, -2 if the device is not visible here. */
static int device_of_file(int fd, unsigned *rdma) {
  char link[40], name[80] = "";
  int physical;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (readlink(link, name, sizeof name - 1) < 0 || sscanf(name, "/memfd:" VMM_FILE, &physical, rdma) != 2) return -1;
  for (int i = 0; i < device_count && !has_ipc_mode("hidden"); i++) {
    if (devices[i].physical == physical) return i;
  }
  return -2;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *shared, CUmemAllocationHandleType type) {
  BEGIN(UNSAFE);
  REQUIRE(out && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
  unsigned rdma = 0;
  int dev = device_of_file((int)(intptr_t)shared, &rdma);
  REQUIRE(dev != -1, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(dev >= 0, CUDA_ERROR_NOT_SUPPORTED);
  int fd = fcntl((int)(intptr_t)shared, F_DUPFD_CLOEXEC, 3);
  off_t size = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
  if (fd >= 0 && size <= 0) close(fd);
  REQUIRE(size > 0, CUDA_ERROR_INVALID_VALUE);
  CUmemAllocationProp p = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev}};
  p.allocFlags.gpuDirectRDMACapable = (unsigned char)rdma;
  *out = add_handle(&p, (size_t)size, fd)->number;
  return leave(CUDA_SUCCESS);
}
