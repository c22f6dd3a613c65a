/* Late PCIe. What a network card writes into exported memory is seen by kernels and copies after a flush only. So the card gets a file of
 * its own; `seen` is that file as the device last saw it, and a flush carries over what differs. */
#include "double.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

bool late_pcie;
static unsigned lates;

struct late {
  int fd;
  char *card, *seen;
};

__attribute__((constructor)) static void read_late(void) {
  const char *given = getenv("KVGPU_LATE_PCIE");
  late_pcie = given && !strcmp(given, "1");
}

EXPORT void kvgpu_late_pcie(int on) {
  pthread_mutex_lock(&world);
  late_pcie = on;
  pthread_mutex_unlock(&world);
}

int late_descriptor(struct mem *m) {
  if (m->late) return m->late->fd;
  int fd = memfd_create("kvgpu-card", MFD_CLOEXEC);
  if (fd < 0) return -1;
  char *card = ftruncate(fd, (off_t)m->room) ? MAP_FAILED : mmap(NULL, m->room, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (card == MAP_FAILED) {
    close(fd);
    return -1;
  }
  struct late *late = malloc(sizeof *late);
  *late = (struct late){fd, card, malloc(m->room)};
  memcpy(late->card, m->alias, m->room);
  memcpy(late->seen, m->alias, m->room);
  m->late = late;
  lates++;
  return fd;
}

void drop_late(struct mem *m) {
  if (!m->late) return;
  munmap(m->late->card, m->room);
  close(m->late->fd);
  free(m->late->seen);
  free(m->late);
  m->late = NULL;
  lates--;
}

void mirror(const struct end *to, size_t n) {
  if (!lates) return;
  for (struct mem *m = NULL; (m = next_overlap(m, to->p, n));) {
    if (!m->late) continue;
    size_t begin = to->p > m->at ? (size_t)(to->p - m->at) : 0, end = to->p + n < m->at + m->len ? (size_t)(to->p + n - m->at) : m->len;
    move_bytes(m->late->card + begin, m->alias + begin, end - begin);
    move_bytes(m->late->seen + begin, m->alias + begin, end - begin);
  }
}

__attribute__((no_sanitize("thread"))) static void flush(struct mem *m) {
  struct late *late = m->late;
  for (size_t i = 0; i < m->room; i++) {
    char c = *(volatile char *)&late->card[i];
    if (c == late->seen[i]) continue;
    late->seen[i] = c;
    m->alias[i] = c;
  }
}

EXPORT CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope) {
  BEGIN(CONTEXT);
  REQUIRE(target == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(scope == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER || scope == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(devices[ctx->dev].attributes[CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS] & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST, CUDA_ERROR_NOT_SUPPORTED);
  for (struct mem *m = memories; m; m = m->next) {
    if (m->late && m->dev == ctx->dev) flush(m);
  }
  return leave(CUDA_SUCCESS);
}
