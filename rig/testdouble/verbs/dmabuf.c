/* A libibverbs for tests (KVCONN_LIBIBVERBS): it needs the real one, and takes from it what has to do with device memory of the driver
 * double. Soft RDMA devices register no dma-buf, and no memory that the host cannot touch: so a dma-buf of the double is mapped and registered
 * as host memory, named by the device's address. Everything else is found in the real library.
 *
 * KVGPU_VERBS=nodmabuf: dma-bufs are refused, as by a card whose driver has none. =peermem: memory of the double can be registered by its
 * address, as with nvidia-peermem. Several words are separated by commas. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct ibv_pd;
struct ibv_mr;

#define EXPORT __attribute__((visibility("default")))
#define PAGE 4096u

EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *at, size_t length, int access);
EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *at, size_t length, uint64_t iova, unsigned access);
EXPORT int ibv_dereg_mr(struct ibv_mr *mr);

static struct {
  struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
  struct ibv_mr *(*reg_mr_iova2)(struct ibv_pd *, void *, size_t, uint64_t, unsigned);
  int (*dereg_mr)(struct ibv_mr *);
  void *(*map_dmabuf)(int, size_t *);
  void *(*alias)(uint64_t);
} real;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
struct mapping { /* lives as long as its registration */
  struct ibv_mr *mr;
  char *at;
  size_t size;
  struct mapping *next;
};
static struct mapping *mappings;

/* Each time anew: the driver may come later than the first registration. */
static void load(void) {
  pthread_mutex_lock(&lock);
  void *verbs = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);
  const char *name = getenv("KVCONN_LIBCUDA");
  void *driver = name && *name ? dlopen(name, RTLD_NOW | RTLD_NOLOAD) : NULL; /* there if somebody has device memory */
  if (verbs) {
    real.reg_mr = (__typeof__(real.reg_mr))dlvsym(verbs, "ibv_reg_mr", "IBVERBS_1.1");
    real.reg_mr_iova2 = (__typeof__(real.reg_mr_iova2))dlvsym(verbs, "ibv_reg_mr_iova2", "IBVERBS_1.8");
    real.dereg_mr = (__typeof__(real.dereg_mr))dlvsym(verbs, "ibv_dereg_mr", "IBVERBS_1.1");
  }
  if (driver) {
    real.map_dmabuf = (__typeof__(real.map_dmabuf))dlsym(driver, "kvgpu_map_dmabuf");
    real.alias = (__typeof__(real.alias))dlsym(driver, "kvgpu_alias");
  }
  if (verbs) dlclose(verbs);
  if (driver) dlclose(driver);
  pthread_mutex_unlock(&lock);
}

static int is_set(const char *word) {
  const char *given = getenv("KVGPU_VERBS");
  return given && strstr(given, word) != NULL;
}

/* errno as the kernel's: a descriptor that is none, a card without dma-buf, offset and address that differ within a page, beyond the end. */
EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  load();
  if (is_set("nodmabuf")) return errno = EOPNOTSUPP, NULL;
  if (fcntl(fd, F_GETFD) < 0) return errno = EBADF, NULL;
  if ((offset ^ iova) & (PAGE - 1)) return errno = EINVAL, NULL;
  size_t size = 0;
  char *at = real.map_dmabuf && real.reg_mr_iova2 ? real.map_dmabuf(fd, &size) : NULL;
  if (!at || length > size || offset > size - length) {
    if (at) munmap(at, size);
    return errno = EINVAL, NULL;
  }
  struct ibv_mr *mr = real.reg_mr_iova2(pd, at + offset, length, iova, (unsigned)access);
  if (!mr) {
    int why = errno;
    munmap(at, size);
    return errno = why, NULL;
  }
  struct mapping *m = malloc(sizeof *m);
  pthread_mutex_lock(&lock);
  *m = (struct mapping){mr, at, size, mappings};
  mappings = m;
  pthread_mutex_unlock(&lock);
  return mr;
}

/* With peermem a card reaches device memory by its address. Without, the kernel answers EFAULT by itself, since the pages are untouchable. */
static char *reachable(void *at) {
  char *alias = is_set("peermem") && real.alias ? real.alias((uintptr_t)at) : NULL;
  return alias ? alias : at;
}

EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *at, size_t length, int access) {
  load();
  char *to = reachable(at);
  return to == at ? real.reg_mr(pd, at, length, access) : real.reg_mr_iova2(pd, to, length, (uintptr_t)at, (unsigned)access);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *at, size_t length, uint64_t iova, unsigned access) {
  load();
  return real.reg_mr_iova2(pd, reachable(at), length, iova, access);
}

EXPORT int ibv_dereg_mr(struct ibv_mr *mr) {
  struct mapping *gone = NULL;
  load();
  pthread_mutex_lock(&lock);
  for (struct mapping **m = &mappings; *m; m = &(*m)->next) {
    if ((*m)->mr != mr) continue;
    gone = *m;
    *m = gone->next;
    break;
  }
  pthread_mutex_unlock(&lock);
  int error = real.dereg_mr(mr);
  if (gone) munmap(gone->at, gone->size);
  free(gone);
  return error;
}
