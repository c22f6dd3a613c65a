/* LD_PRELOAD for end-to-end tests with a real engine on the CPU. Its large allocations (posix_memalign, which torch uses) come from memory
 * files, and kvgpu_engine_expose gives them a second address: device memory of the double, which nobody but the double can touch. The engine
 * computes at the one address, kvconn is told only the other. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define PAGE ((size_t)4096)

EXPORT uint64_t kvgpu_engine_expose(void *at, int device);

struct large {
  char *at;
  size_t size;
  int fd;
  uint64_t device_address; /* of its first byte, once it is exposed */
};
static struct large *larges;
static size_t count, room;
static size_t smallest = (size_t)32 << 20;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int (*real_posix_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

/* KVGPU_ENGINE_LEAST: the smallest allocation, in bytes, that is made of a file. */
__attribute__((constructor)) static void start(void) {
  const char *given = getenv("KVGPU_ENGINE_LEAST");
  if (given) smallest = strtoull(given, NULL, 0);
}

/* The table is mapped, not allocated: it is used within malloc's own functions. */
static int remember(char *at, size_t size, int fd) {
  if (count == room) {
    size_t more = room ? 2 * room : 128;
    struct large *table = mmap(NULL, more * sizeof *table, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (table == MAP_FAILED) return -1;
    for (size_t i = 0; i < count; i++) table[i] = larges[i];
    if (larges) munmap(larges, room * sizeof *larges);
    larges = table;
    room = more;
  }
  larges[count++] = (struct large){at, size, fd, 0};
  return 0;
}

static int map_large(void **out, size_t size) {
  int fd = memfd_create("kvgpu-engine", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)size)) {
    if (fd >= 0) close(fd);
    return ENOMEM;
  }
  char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  pthread_mutex_lock(&lock);
  int error = at == MAP_FAILED || remember(at, size, fd);
  pthread_mutex_unlock(&lock);
  if (error) {
    if (at != MAP_FAILED) munmap(at, size);
    close(fd);
    return ENOMEM;
  }
  *out = at;
  return 0;
}

EXPORT int posix_memalign(void **out, size_t alignment, size_t size) {
  if (size >= smallest && alignment <= PAGE) return map_large(out, (size + PAGE - 1) / PAGE * PAGE);
  if (!real_posix_memalign) real_posix_memalign = (__typeof__(real_posix_memalign))dlsym(RTLD_NEXT, "posix_memalign");
  return real_posix_memalign(out, alignment, size);
}

EXPORT void free(void *at) {
  struct large gone = {0};
  if (at && (uintptr_t)at % PAGE == 0) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++) {
      if (larges[i].at != at) continue;
      gone = larges[i];
      larges[i] = larges[--count];
      break;
    }
    pthread_mutex_unlock(&lock);
  }
  if (gone.at) { /* the double keeps the file for as long as it is exposed */
    munmap(gone.at, gone.size);
    close(gone.fd);
    return;
  }
  if (!real_free) real_free = (__typeof__(real_free))dlsym(RTLD_NEXT, "free");
  real_free(at);
}

/* The device address of a byte of a large allocation; 0 if it is none, or the double (KVCONN_LIBCUDA) is not loaded and initialized. */
EXPORT uint64_t kvgpu_engine_expose(void *at, int device) {
  const char *name = getenv("KVCONN_LIBCUDA");
  void *driver = name ? dlopen(name, RTLD_NOW | RTLD_NOLOAD) : NULL;
  uint64_t (*expose)(int, int, int64_t, size_t) = driver ? (uint64_t(*)(int, int, int64_t, size_t))dlsym(driver, "kvgpu_expose") : NULL;
  uint64_t out = 0;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; expose && i < count; i++) {
    struct large *l = &larges[i];
    if ((char *)at < l->at || (char *)at >= l->at + l->size) continue;
    if (!l->device_address) l->device_address = expose(device, l->fd, 0, l->size);
    if (l->device_address) out = l->device_address + (uint64_t)((char *)at - l->at);
  }
  pthread_mutex_unlock(&lock);
  if (driver) dlclose(driver);
  return out;
}
