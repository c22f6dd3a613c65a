#define _GNU_SOURCE
#include "ask.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

struct question {
  long call;
  volatile int survived;
};

// try_call is all that the child does. It shares the caller's memory, thread-local storage too, and the calling thread stands until it
// has ended. So it calls nothing but the kernel.
static int try_call(void *p) {
  struct question *q = p;
  // The core that its end leaves would be the engine's whole memory. A bound of 1 is the one that also keeps the kernel from
  // handing a core to a program.
  struct rlimit core = {1, 1};
  syscall(SYS_prlimit64, 0L, (long)RLIMIT_CORE, &core, 0L);
  syscall(q->call, 0L, 0L, 0L, 0L, 0L, 0L);
  q->survived = 1;
  syscall(SYS_exit, 0L);
  return 0;
}

// The child is no copy of the process: an engine has so much memory that the tables alone would take a second, and pinned pages
// would be copied. It is a process of its own, so that the kernel's signal does not end the engine. It sends no SIGCHLD, and a host that
// waits for any child of its own does not get it.
int callprobe_ask(long call, int hide) {
  char stack[16 << 10] __attribute__((aligned(16)));
  struct question q = {call, 0};
  sigset_t all, before;
  int shown = 0, failed = 0, status;
  pid_t child;
  // Kernels before 5.16 end, when one process dies with a core, all that share its memory. They do not if it may not be dumped.
  if (hide && (shown = prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)) != 0) {
    if (shown != 1) return shown < 0 ? -errno : -EPERM; // 2 cannot be set again
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0) return -errno;
  }
  sigfillset(&all); // no handler of the host's may run in the child
  pthread_sigmask(SIG_SETMASK, &all, &before);
  child = clone(try_call, stack + sizeof stack, CLONE_VM | CLONE_VFORK, &q);
  if (child < 0) failed = errno;
  while (child > 0 && waitpid(child, &status, __WALL) < 0 && errno == EINTR) {
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (shown == 1) prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
  if (failed != 0) return -failed;
  return q.survived ? 0 : 1;
}
