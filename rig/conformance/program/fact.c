/* How a fact is said, and what groups share. */
#include "fact.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void say(int number, const char *sentence, const char *expected, const char *got, const char *verdict) {
  printf("{\"fact\": %d, \"says\": \"%s\", \"expected\": \"%s\", \"got\": \"%s\", \"verdict\": \"%s\"}\n", number, sentence, expected, got, verdict);
  fflush(stdout);
}

static const char *name_of(int code, char out[80]) {
  const char *name = NULL;
  if (CU(cuGetErrorName)((CUresult)code, &name) || !name) name = "";
  snprintf(out, 80, "%d %s", code, !strncmp(name, "CUDA_ERROR_", 11) ? name + 11 : code ? name : "SUCCESS");
  return out;
}

void fact(int number, const char *sentence, int expected, int got) {
  char e[80], g[80];
  say(number, sentence, name_of(expected, e), name_of(got, g), expected == got ? "holds" : "differs");
}

void strict(int number, const char *sentence, int expected, int or_else, int got) {
  char e[80], o[80], g[80], both[200];
  snprintf(both, sizeof both, "%s; a driver may also answer %s", name_of(expected, e), name_of(or_else, o));
  say(number, sentence, both, name_of(got, g), got == expected || (got == or_else && !is_double) ? "holds" : "differs");
}

void truth(int number, const char *sentence, bool holds) { say(number, sentence, "yes", holds ? "yes" : "no", holds ? "holds" : "differs"); }

void number_fact(int number, const char *sentence, long long expected, long long got) {
  char e[40], g[40];
  snprintf(e, sizeof e, "%lld", expected);
  snprintf(g, sizeof g, "%lld", got);
  say(number, sentence, e, g, expected == got ? "holds" : "differs");
}

void told(int number, const char *sentence, long long value) {
  char g[40];
  snprintf(g, sizeof g, "%lld", value);
  say(number, sentence, "", g, "told");
}

void not_here(int number, const char *sentence, const char *reason) { say(number, sentence, "", reason, "not applicable"); }

static void must(const char *what, int code) {
  if (!code) return;
  char name[80];
  fprintf(stderr, "kvgpu-facts: %s: %s\n", what, name_of(code, name));
  exit(3);
}

CUcontext open_device(void) {
  CUcontext c;
  must("cuInit", (int)CU(cuInit)(0));
  must("cuDevicePrimaryCtxRetain", (int)CU(cuDevicePrimaryCtxRetain)(&c, 0));
  must("cuCtxPushCurrent", (int)CU(cuCtxPushCurrent_v2)(c));
  return c;
}

int device_attribute(CUdevice_attribute a) {
  int value = 0;
  return CU(cuDeviceGetAttribute)(&value, a, 0) ? 0 : value;
}

CUdeviceptr device_memory(size_t n) {
  CUdeviceptr p;
  must("cuMemAlloc", (int)CU(cuMemAlloc_v2)(&p, n));
  return p;
}

void *pinned_memory(size_t n) {
  void *p;
  must("cuMemHostAlloc", (int)CU(cuMemHostAlloc)(&p, n, CU_MEMHOSTALLOC_PORTABLE));
  return p;
}

CUstream new_stream(void) {
  CUstream s;
  must("cuStreamCreate", (int)CU(cuStreamCreate)(&s, CU_STREAM_NON_BLOCKING));
  return s;
}

struct asked {
  int (*call)(void *);
  void *argument;
  int result;
};

static void *run_asked(void *a) {
  struct asked *asked = a;
  asked->result = asked->call(asked->argument);
  return NULL;
}

int in_thread(int (*call)(void *), void *argument) {
  struct asked a = {call, argument, -1};
  pthread_t t;
  if (pthread_create(&t, NULL, run_asked, &a)) return -1;
  pthread_join(t, NULL);
  return a.result;
}

static void nap(void) {
  struct timespec t = {0, 1000000};
  nanosleep(&t, NULL);
}

/* Called by the stream: no CUDA call may be made here, so it only looks. */
static void stand_at(void *argument) {
  struct gate *g = argument;
  while (!__atomic_load_n(&g->open, __ATOMIC_ACQUIRE)) nap();
  __atomic_store_n(&g->passed, 1, __ATOMIC_RELEASE);
}

void shut(struct gate *g, CUstream s) {
  *g = (struct gate){0, 0};
  must("cuLaunchHostFunc", (int)CU(cuLaunchHostFunc)(s, stand_at, g));
}

void open_gate(struct gate *g) { __atomic_store_n(&g->open, 1, __ATOMIC_RELEASE); }

void let_time_pass(void) {
  for (int i = 0; i < 20; i++) nap();
}

bool eventually(bool (*holds)(void *), void *argument) {
  for (int i = 0; i < 5000; i++, nap()) {
    if (holds(argument)) return true;
  }
  return false;
}
