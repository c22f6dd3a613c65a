/*
 * One slot per open agent. Slots are static, so that kvconn_pending may read a
 * slot's count while another thread closes the agent; the ring is only touched
 * under the slot's lock.
 */
#include "slots.h"

#include <linux/membarrier.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

struct slot {
  _Atomic uint64_t handle; /* 0: free; the low bits are the slot's index + 1 */
  _Atomic uint32_t count;
  _Atomic uint32_t shown; /* what kvconn_pending_address points to: count, or not 0 to make the host ask */
  pthread_mutex_t lock;
  kvconn_completion *ring;
  uint32_t size;     /* of ring, a power of two; grows up to capacity */
  uint32_t capacity; /* most completions that may wait */
  uint32_t head;
  int event_fd;
  uint32_t num_regions;
  pthread_mutex_t devices_lock; /* guards the devices and who is in their functions; taken within lock, and never held for long */
  pthread_cond_t left;          /* inside has become 0 */
  struct slot_device *devices;  /* NULL: all regions lie in host memory, or the agent closes */
  int closing;                  /* devices come too late */
  uint32_t inside;              /* threads in the devices' functions, which may wait for the driver */
  uint64_t opened;              /* counts the agents that have had the slot */
  uint8_t *device_of;          /* of each region; 0: host memory */
  uint64_t *after;             /* the moment of each region's mark */
  _Atomic uint8_t written[KVCONN_MAX_REGIONS]; /* the step's marks: the host stores a value that is not 0, without the lock */
};

enum { INDEX_BITS = 8, FIRST_SIZE = 64 };

/* The handle of a slot whose agent is closed while a thread is in its devices' functions. No agent has it. */
static const uint64_t LEFT_BEHIND = 1u << INDEX_BITS;

static struct slot slots[KVCONN_MAX_AGENTS];
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t generation;
static _Atomic int poisoned;

__attribute__((constructor)) static void init_slots(void) {
  for (int i = 0; i < KVCONN_MAX_AGENTS; i++) {
    pthread_mutex_init(&slots[i].lock, NULL);
    pthread_mutex_init(&slots[i].devices_lock, NULL);
    pthread_cond_init(&slots[i].left, NULL);
  }
}

static struct slot *find(kvconn_agent agent) {
  uint64_t i = agent & ((1u << INDEX_BITS) - 1);
  if (i == 0 || i > KVCONN_MAX_AGENTS) return NULL;
  struct slot *s = &slots[i - 1];
  return atomic_load_explicit(&s->handle, memory_order_acquire) == agent ? s : NULL;
}

/* The slot with its lock held, or NULL. */
static struct slot *acquire(kvconn_agent agent) {
  struct slot *s = find(agent);
  if (s == NULL) return NULL;
  pthread_mutex_lock(&s->lock);
  if (atomic_load(&s->handle) == agent) return s;
  pthread_mutex_unlock(&s->lock); /* closed while we waited */
  return NULL;
}

/* Sets the count; the slot's lock is held. */
static void set_count(struct slot *s, uint32_t n) {
  atomic_store_explicit(&s->count, n, memory_order_release);
  if (!atomic_load(&poisoned)) atomic_store_explicit(&s->shown, n, memory_order_release);
}

static void wake(struct slot *s) {
  if (s->event_fd < 0) return; /* the agent is closed, and the number may be another file's by now */
  ssize_t ignored = write(s->event_fd, &(uint64_t){1}, 8); /* fails only when the counter is full, and then it is readable */
  (void)ignored;
}

void slots_poison(void) {
  atomic_store(&poisoned, 1);
  for (int i = 0; i < KVCONN_MAX_AGENTS; i++) {
    struct slot *s = &slots[i];
    pthread_mutex_lock(&s->lock);
    if (atomic_load(&s->handle) != 0) {
      atomic_store(&s->shown, 1);
      wake(s);
    }
    pthread_mutex_unlock(&s->lock);
  }
}

int slots_poisoned(void) { return atomic_load_explicit(&poisoned, memory_order_relaxed); }

kvconn_agent slot_open(uint32_t capacity) {
  kvconn_agent agent = 0;
  pthread_mutex_lock(&table_lock);
  for (int i = 0; i < KVCONN_MAX_AGENTS && agent == 0; i++) {
    struct slot *s = &slots[i];
    if (atomic_load(&s->handle) != 0) continue;
    pthread_mutex_lock(&s->lock);
    s->ring = malloc(FIRST_SIZE * sizeof *s->ring);
    s->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->ring == NULL || s->event_fd < 0) {
      free(s->ring);
      if (s->event_fd >= 0) close(s->event_fd);
      pthread_mutex_unlock(&s->lock);
      break;
    }
    s->size = FIRST_SIZE;
    s->capacity = capacity;
    s->head = 0;
    s->num_regions = 0;
    pthread_mutex_lock(&s->devices_lock);
    s->closing = 0;
    s->opened++;
    pthread_mutex_unlock(&s->devices_lock);
    set_count(s, 0);
    agent = ++generation << INDEX_BITS | (uint64_t)(i + 1);
    atomic_store_explicit(&s->handle, agent, memory_order_release);
    pthread_mutex_unlock(&s->lock);
  }
  pthread_mutex_unlock(&table_lock);
  return agent;
}

void slot_close(kvconn_agent agent) {
  struct slot *s = acquire(agent);
  if (s == NULL) return;
  set_count(s, 0);
  wake(s); /* a thread that polls must not wait for ever */
  close(s->event_fd);
  s->event_fd = -1;
  free(s->ring);
  s->ring = NULL;
  free(s->device_of);
  free(s->after);
  s->device_of = NULL;
  s->after = NULL;
  pthread_mutex_lock(&s->devices_lock);
  atomic_store(&s->handle, s->inside > 0 ? LEFT_BEHIND : 0); /* last: slot_open may take it from here on */
  pthread_mutex_unlock(&s->devices_lock);
  pthread_mutex_unlock(&s->lock);
}

/* Doubles the ring and lays it out from 0 on. */
static int grow(struct slot *s) {
  kvconn_completion *ring = malloc(2 * (size_t)s->size * sizeof *ring);
  if (ring == NULL) return -1;
  uint32_t tail = s->size - s->head; /* from head to the end of the old ring */
  memcpy(ring, s->ring + s->head, tail * sizeof *ring);
  memcpy(ring + tail, s->ring, s->head * sizeof *ring);
  free(s->ring);
  s->ring = ring;
  s->size *= 2;
  s->head = 0;
  return 0;
}

int slot_push(kvconn_agent agent, const kvconn_completion *c) {
  struct slot *s = acquire(agent);
  if (s == NULL) return -1;
  uint32_t n = atomic_load(&s->count);
  int rc = -1;
  if (n < s->capacity && (n < s->size || grow(s) == 0)) {
    s->ring[(s->head + n) & (s->size - 1)] = *c;
    set_count(s, n + 1);
    if (n == 0) wake(s);
    rc = 0;
  }
  pthread_mutex_unlock(&s->lock);
  return rc;
}

int slot_count(kvconn_agent agent) {
  struct slot *s = find(agent);
  return s == NULL ? -1 : (int)atomic_load_explicit(&s->count, memory_order_acquire);
}

const volatile uint32_t *slot_count_address(kvconn_agent agent) {
  struct slot *s = find(agent);
  _Static_assert(sizeof s->shown == sizeof(uint32_t), "an atomic counter is a plain number in memory");
  return s == NULL ? NULL : (const volatile uint32_t *)&s->shown;
}

int slot_take(kvconn_agent agent, kvconn_completion *out, size_t size, size_t capacity, size_t *count) {
  *count = 0;
  struct slot *s = acquire(agent);
  if (s == NULL) return KVCONN_ERR_HANDLE;
  uint32_t n = atomic_load(&s->count);
  size_t take = n < capacity ? n : capacity;
  for (size_t i = 0; i < take; i++) {
    char *to = (char *)out + i * size;
    memcpy(to, &s->ring[s->head], sizeof *out);
    memset(to + sizeof *out, 0, size - sizeof *out); /* a newer caller's struct is longer */
    s->head = (s->head + 1) & (s->size - 1);
  }
  set_count(s, n - (uint32_t)take);
  if (take > 0 && take == n) {
    uint64_t value;
    ssize_t ignored = read(s->event_fd, &value, 8);
    (void)ignored;
  }
  pthread_mutex_unlock(&s->lock);
  *count = take;
  return KVCONN_OK;
}

int slot_event_fd(kvconn_agent agent) {
  struct slot *s = acquire(agent);
  if (s == NULL) return -KVCONN_ERR_HANDLE;
  int fd = s->event_fd;
  pthread_mutex_unlock(&s->lock);
  return fd;
}

void slot_set_regions(kvconn_agent agent, uint32_t num_regions) {
  struct slot *s = acquire(agent);
  if (s == NULL) return;
  s->num_regions = num_regions;
  for (uint32_t i = 0; i < num_regions; i++) atomic_store(&s->written[i], 0);
  pthread_mutex_unlock(&s->lock);
}

uint32_t slot_regions(kvconn_agent agent) {
  struct slot *s = acquire(agent);
  if (s == NULL) return 0;
  uint32_t n = s->num_regions;
  pthread_mutex_unlock(&s->lock);
  return n;
}

/*
 * A host stores a region's bytes, and then a mark by a plain store. Not every processor shows stores in their order; an
 * x86 does not for stores that go past the caches. So the agent, when it has seen a mark, sends every thread of the
 * process through a barrier before it reads the bytes.
 */
static int can_order_stores(void) { return syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0; }
static int order_stores(void) { return syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) == 0; }

volatile uint8_t *slot_written_address(kvconn_agent agent) {
  struct slot *s = find(agent);
  _Static_assert(sizeof s->written == KVCONN_MAX_REGIONS, "atomic bytes are plain bytes in memory");
  return s == NULL || !can_order_stores() ? NULL : (volatile uint8_t *)s->written;
}

/* Of a region in slot_take_written's list: its mark has a moment. */
static const uint32_t HAS_MOMENT = 1u << 31;
_Static_assert(KVCONN_MAX_REGIONS <= 1u << 31, "a region's number leaves room for HAS_MOMENT");

size_t slot_take_written(kvconn_agent agent, uint32_t *regions, uint64_t *moments, size_t capacity) {
  struct slot *s = acquire(agent);
  if (s == NULL) return 0;
  size_t found = 0, stored = 0;
  for (uint32_t i = 0; i < s->num_regions && found < capacity; i++)
    if (atomic_load_explicit(&s->written[i], memory_order_relaxed) != 0 && atomic_exchange(&s->written[i], 0) != 0) {
      moments[found] = s->after == NULL ? 0 : s->after[i];
      stored += moments[found] == 0;
      regions[found] = i | (moments[found] == 0 ? 0 : HAS_MOMENT);
      found++;
      if (s->after != NULL) s->after[i] = 0;
    }
  pthread_mutex_unlock(&s->lock);
  /* A moment orders a device's work, and no store of the host's needs to be seen. */
  int ordered = stored == 0 || order_stores();
  size_t kept = 0;
  for (size_t k = 0; k < found; k++)
    if (ordered || regions[k] & HAS_MOMENT) { /* what cannot be read yet goes with the offer */
      moments[kept] = moments[k];
      regions[kept++] = regions[k] & ~HAS_MOMENT;
    }
  return kept;
}

int slot_mark_written(kvconn_agent agent, const uint32_t *regions, size_t num_regions, uint64_t moment) {
  struct slot *s = acquire(agent);
  if (s == NULL) return -1;
  int result = 0;
  for (size_t i = 0; i < num_regions && result == 0; i++)
    if (regions[i] >= s->num_regions || s->device_of == NULL || s->device_of[regions[i]] == 0) result = -2;
  for (size_t i = 0; i < num_regions && result == 0; i++) {
    s->after[regions[i]] = moment;
    atomic_store(&s->written[regions[i]], 1);
  }
  pthread_mutex_unlock(&s->lock);
  return result;
}

int slot_set_devices(kvconn_agent agent, const uint8_t *of_region, const struct slot_device *devices, uint32_t num_devices) {
  struct slot *s = acquire(agent);
  if (s == NULL) return -1;
  int result = 0;
  pthread_mutex_lock(&s->devices_lock);
  if (s->closing) {
    result = -1;
  } else {
    s->devices = malloc(num_devices * sizeof *devices);
    s->device_of = malloc(s->num_regions);
    s->after = calloc(s->num_regions, sizeof *s->after);
    if (s->devices == NULL || s->device_of == NULL || s->after == NULL) {
      free(s->devices);
      s->devices = NULL;
      result = -2;
    } else {
      memcpy(s->devices, devices, num_devices * sizeof *devices);
      memcpy(s->device_of, of_region, s->num_regions);
    }
  }
  pthread_mutex_unlock(&s->devices_lock);
  pthread_mutex_unlock(&s->lock);
  return result;
}

uint32_t slot_forget_devices(kvconn_agent agent, uint64_t *opened) {
  struct slot *s = find(agent);
  if (s == NULL) return 0;
  pthread_mutex_lock(&s->devices_lock);
  free(s->devices); /* marks and their moments stay: the agent may still take them */
  s->devices = NULL;
  s->closing = 1;
  *opened = s->opened;
  uint32_t inside = s->inside;
  pthread_mutex_unlock(&s->devices_lock);
  return inside;
}

void slot_wait_left(kvconn_agent agent, uint64_t opened) {
  struct slot *s = &slots[(agent & ((1u << INDEX_BITS) - 1)) - 1]; /* no other agent gets it before the threads have left */
  pthread_mutex_lock(&s->devices_lock);
  while (s->inside > 0 && s->opened == opened) pthread_cond_wait(&s->left, &s->devices_lock);
  pthread_mutex_unlock(&s->devices_lock);
}

/* Whether a thread may go into a region's device's function. If so it must come out again. */
static int go_in(struct slot *s, kvconn_agent agent, uint32_t region, struct slot_device *device) {
  pthread_mutex_lock(&s->devices_lock);
  int may = s->devices != NULL && atomic_load(&s->handle) == agent && region < s->num_regions && s->device_of[region] > 0;
  if (may) {
    *device = s->devices[s->device_of[region] - 1];
    s->inside++;
  }
  pthread_mutex_unlock(&s->devices_lock);
  return may;
}

static void come_out(struct slot *s) {
  pthread_mutex_lock(&s->devices_lock);
  if (--s->inside == 0) {
    pthread_cond_broadcast(&s->left);
    if (atomic_load(&s->handle) == LEFT_BEHIND) atomic_store(&s->handle, 0);
  }
  pthread_mutex_unlock(&s->devices_lock);
}

int slot_moment(kvconn_agent agent, uint32_t region, uintptr_t stream, uint64_t *moment) {
  struct slot *s = find(agent);
  struct slot_device device;
  if (s == NULL || !go_in(s, agent, region, &device)) return 0;
  int made = device.record(device.argument, stream, moment).code == 0; /* without a lock: the driver may stand still */
  come_out(s);
  return made;
}
