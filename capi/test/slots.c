/* What slots.h says of the marks of written regions, of an agent that has regions in host memory and on a device; and of its close, and of
   poison, while a thread takes a moment. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../slots.h"

enum { REGIONS = 6, CAPACITY = 16 };

static int failures;

#define EXPECT(condition)                                                                  \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);        \
      failures++;                                                                          \
    }                                                                                      \
  } while (0)

static struct slot_status record(void *argument, uintptr_t stream, uint64_t *moment) {
  *moment = (uintptr_t)argument + stream;
  return (struct slot_status){0, 0};
}

/* Whether just these marks are there, in this order, and are gone then. */
static int taken(kvconn_agent agent, size_t count, const uint32_t *regions, const uint64_t *moments) {
  uint32_t r[CAPACITY];
  uint64_t m[CAPACITY];
  return slot_take_written(agent, r, m, CAPACITY) == count && memcmp(r, regions, count * sizeof *r) == 0 &&
         memcmp(m, moments, count * sizeof *m) == 0 && slot_take_written(agent, r, m, CAPACITY) == 0;
}

/* Refuses membarrier(2) from now on, as the filters of some containers do. */
static int refuse_membarrier(void) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof code / sizeof *code, code};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static pthread_mutex_t stands = PTHREAD_MUTEX_INITIALIZER; /* held while the driver does not answer */
static _Atomic int inside;

static struct slot_status record_slowly(void *argument, uintptr_t stream, uint64_t *moment) {
  (void)argument;
  inside = 1;
  pthread_mutex_lock(&stands);
  pthread_mutex_unlock(&stands);
  *moment = stream;
  return (struct slot_status){0, 0};
}

static void *takes_a_moment(void *agent) {
  uint64_t moment = 0;
  EXPECT(slot_moment(*(kvconn_agent *)agent, 1, 7, &moment) && moment == 7);
  return NULL;
}

/* A thread that takes a moment of an agent, and is in the device's function. */
static pthread_t goes_in(kvconn_agent *agent, const uint8_t *of_region) {
  const struct slot_device device = {record_slowly, NULL};
  pthread_t engine;
  slot_set_regions(*agent, REGIONS);
  EXPECT(slot_set_devices(*agent, of_region, &device, 1) == 0);
  inside = 0;
  EXPECT(pthread_create(&engine, NULL, takes_a_moment, agent) == 0);
  while (!inside) sched_yield();
  return engine;
}

/* Opens all slots that are free, and closes them again, but not the one that agent had: the result is that one's new agent, or 0. */
static kvconn_agent again(kvconn_agent agent) {
  kvconn_agent all[KVCONN_MAX_AGENTS], found = 0;
  int n = 0;
  for (kvconn_agent a; (a = slot_open(CAPACITY)) != 0;) {
    if ((a & 0xff) == (agent & 0xff)) {
      found = a;
    } else {
      all[n++] = a;
    }
  }
  while (n > 0) slot_close(all[--n]);
  return found;
}

/* A thread takes a moment, and the driver does not answer. Nothing else of the agent waits for it, neither a report nor a close.
   But the slot is nobody else's until the thread has left. */
static void closes_beside_a_moment(const uint8_t *of_region) {
  kvconn_agent agent = slot_open(CAPACITY);
  pthread_mutex_lock(&stands);
  pthread_t engine = goes_in(&agent, of_region);
  uint64_t opened = 0, moment = 0;
  EXPECT(slot_forget_devices(agent, &opened) == 1);
  EXPECT(!slot_moment(agent, 1, 8, &moment) && slot_set_devices(agent, of_region, &(struct slot_device){record, NULL}, 1) == -1);
  EXPECT(slot_push(agent, &(kvconn_completion){.token = 1}) == 0 && slot_count(agent) == 1);
  slot_close(agent);
  EXPECT(slot_count(agent) == -1 && again(agent) == 0);
  pthread_mutex_unlock(&stands);
  slot_wait_left(agent, opened);
  EXPECT(pthread_join(engine, NULL) == 0);

  kvconn_agent next = again(agent);
  EXPECT(next != 0);
  if (next == 0) return;
  pthread_mutex_lock(&stands);
  engine = goes_in(&next, of_region);
  slot_wait_left(agent, opened); /* not for the next agent's */
  pthread_mutex_unlock(&stands);
  EXPECT(pthread_join(engine, NULL) == 0 && slot_forget_devices(next, &opened) == 0);
  slot_close(next);
}

/* An agent is closed while a thread takes a moment, and its event's number is another file's then. Poison writes nothing into that file. */
static void poison_beside_a_moment(const uint8_t *of_region) {
  kvconn_agent agent = slot_open(CAPACITY);
  int event = slot_event_fd(agent), ends[2];
  uint64_t opened = 0, byte = 0;
  EXPECT(event >= 0 && pipe(ends) == 0);
  pthread_mutex_lock(&stands);
  pthread_t engine = goes_in(&agent, of_region);
  slot_forget_devices(agent, &opened);
  slot_close(agent);
  EXPECT(dup2(ends[1], event) == event && close(ends[1]) == 0);
  slots_poison();
  EXPECT(close(event) == 0 && read(ends[0], &byte, sizeof byte) == 0 && close(ends[0]) == 0);
  pthread_mutex_unlock(&stands);
  EXPECT(pthread_join(engine, NULL) == 0);
}

static void marks(const uint8_t *of_region) {
  const struct slot_device device = {record, NULL};
  kvconn_agent agent = slot_open(CAPACITY);
  EXPECT(agent != 0);
  slot_set_regions(agent, REGIONS);
  EXPECT(slot_set_devices(agent, of_region, &device, 1) == 0);
  volatile uint8_t *written = slot_written_address(agent);
  if (written == NULL) {
    fputs("## marks of host memory: NOT RUN: membarrier(2) is refused here\n", stderr);
    return;
  }

  uint64_t moment = 0;
  EXPECT(slot_moment(agent, 1, 7, &moment) && moment == 7);
  EXPECT(!slot_moment(agent, 0, 7, &moment) && !slot_moment(agent, REGIONS, 7, &moment));

  /* The order is that of the regions, whatever their memory, and not that in which they were marked. */
  EXPECT(slot_mark_written(agent, (const uint32_t[]){5}, 1, 9) == 0);
  EXPECT(slot_mark_written(agent, (const uint32_t[]){3, 1}, 2, 8) == 0);
  written[4] = 1;
  written[0] = 1;
  EXPECT(taken(agent, 5, (const uint32_t[]){0, 1, 3, 4, 5}, (const uint64_t[]){0, 8, 8, 0, 9}));

  /* What is marked again counts from its newest moment. A list with one region in host memory marks nothing. */
  EXPECT(slot_mark_written(agent, (const uint32_t[]){1}, 1, 10) == 0);
  EXPECT(slot_mark_written(agent, (const uint32_t[]){1}, 1, 11) == 0);
  EXPECT(slot_mark_written(agent, (const uint32_t[]){3, 2}, 2, 12) == -2);
  EXPECT(slot_mark_written(agent, (const uint32_t[]){3, REGIONS}, 2, 12) == -2);
  EXPECT(taken(agent, 1, (const uint32_t[]){1}, (const uint64_t[]){11}));

  /* A store's mark of device memory has no moment, also where one before it had. */
  written[1] = 1;
  EXPECT(taken(agent, 1, (const uint32_t[]){1}, (const uint64_t[]){0}));

  /* Where nothing orders a host's stores its marks are lost, and the others keep their order. */
  EXPECT(refuse_membarrier());
  EXPECT(slot_written_address(agent) == NULL);
  EXPECT(slot_mark_written(agent, (const uint32_t[]){5, 1}, 2, 13) == 0);
  written[0] = written[4] = 1;
  EXPECT(taken(agent, 2, (const uint32_t[]){1, 5}, (const uint64_t[]){13, 13}));

  slot_close(agent);
  EXPECT(slot_mark_written(agent, (const uint32_t[]){1}, 1, 14) == -1 && slot_written_address(agent) == NULL);
}

int main(void) {
  const uint8_t of_region[REGIONS] = {0, 1, 0, 1, 0, 1};
  closes_beside_a_moment(of_region);
  marks(of_region);
  poison_beside_a_moment(of_region);
  return failures != 0;
}
