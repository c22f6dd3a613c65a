/* What each call passes before it does anything: a counter, injected faults, and the rules that hold for all functions. */
#include "double.h"

#include <stdlib.h>
#include <string.h>

pthread_mutex_t world = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t progress = PTHREAD_COND_INITIALIZER, recorded = PTHREAD_COND_INITIALIZER;
bool gone;
__thread bool in_host_function;

static bool initialized; /* a fork's child has no driver */
static struct site *sites;

struct fault {
  char *function;
  unsigned left;
  CUresult code;
  struct fault *next;
};
static struct fault *faults;

static void forget_in_child(void) { initialized = false; }
static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_in_child); }

bool is_initialized(void) { return initialized; }
void set_initialized(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, watch_forks);
  initialized = true;
}

static CUresult injected(const char *function) {
  for (struct fault **f = &faults; *f; f = &(*f)->next) {
    if (strcmp((*f)->function, function) || --(*f)->left) continue;
    struct fault *hit = *f;
    CUresult code = hit->code;
    *f = hit->next;
    free(hit->function);
    free(hit);
    return code;
  }
  return CUDA_SUCCESS;
}

static void add_fault(const char *function, size_t length, unsigned nth, int code) {
  struct fault *f = calloc(1, sizeof *f);
  f->function = strndup(function, length);
  f->left = nth;
  f->code = (CUresult)code;
  f->next = faults;
  faults = f;
}

EXPORT int kvgpu_fail(const char *function, unsigned nth, int code) {
  if (!nth || !code) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&world);
  add_fault(function, strlen(function), nth, code);
  pthread_mutex_unlock(&world);
  return CUDA_SUCCESS;
}

/* KVGPU_FAIL="cuMemcpyDtoHAsync_v2:3:719,cuEventRecord:1:2": function, which call, code. */
__attribute__((constructor)) static void read_faults(void) {
  const char *p = getenv("KVGPU_FAIL");
  while (p && *p) {
    const char *colon = strchr(p, ':');
    if (!colon) break;
    char *after;
    unsigned nth = (unsigned)strtoul(colon + 1, &after, 10);
    int code = *after == ':' ? (int)strtol(after + 1, &after, 10) : 0;
    if (!nth || !code) break;
    add_fault(p, (size_t)(colon - p), nth, code);
    p = *after == ',' ? after + 1 : after;
  }
  if (p && *p) violation("KVGPU_FAIL: \"%s\" is not FUNCTION:NTH:CODE", p);
}

static char *blocked; /* the function whose calls wait */
static unsigned waiting;
static pthread_cond_t unblocked = PTHREAD_COND_INITIALIZER;

EXPORT void kvgpu_block(const char *function) {
  pthread_mutex_lock(&world);
  free(blocked);
  blocked = function ? strdup(function) : NULL;
  pthread_cond_broadcast(&unblocked);
  pthread_mutex_unlock(&world);
}

uint64_t blocked_calls(void) { return waiting; }

static CUresult check(struct site *site, unsigned rules, CUcontext *ctx) {
  if (!site->listed) {
    site->listed = true;
    site->next = sites;
    sites = site;
  }
  site->calls++;
  if (gone) return CUDA_ERROR_DEINITIALIZED;
  if (in_host_function) return CUDA_ERROR_NOT_PERMITTED;
  if (!(rules & BEFORE_INIT) && !is_initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  CUresult fault = injected(site->name);
  if (fault) return fault;
  *ctx = current_context();
  if (rules & CONTEXT) {
    if (!*ctx) return CUDA_ERROR_INVALID_CONTEXT;
    if (!(*ctx)->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  }
  if (*ctx && !(rules & (AFTER_ERROR | BEFORE_INIT)) && devices[(*ctx)->dev].sticky) return devices[(*ctx)->dev].sticky;
  return rules & UNSAFE ? capture_forbids() : CUDA_SUCCESS;
}

CUresult enter(struct site *site, unsigned rules, CUcontext *ctx) {
  pthread_mutex_lock(&world);
  waiting++;
  while (blocked && !gone && !strcmp(site->name, blocked)) pthread_cond_wait(&unblocked, &world);
  waiting--;
  CUresult refused = check(site, rules, ctx);
  if (refused) pthread_mutex_unlock(&world);
  return refused;
}

CUresult leave(CUresult result) {
  pthread_mutex_unlock(&world);
  return result;
}

uint64_t calls_of(const char *name) {
  uint64_t all = 0;
  for (const struct site *s = sites; s; s = s->next) {
    if (name && !strcmp(s->name, name)) return s->calls;
    all += s->calls;
  }
  return name ? UINT64_MAX : all;
}

/* A process that ends, or unloads the library, finds its threads stopped and all that the double holds given back. */
__attribute__((destructor)) static void unload(void) {
  pthread_mutex_lock(&world);
  gone = true;
  free(blocked);
  blocked = NULL;
  pthread_cond_broadcast(&unblocked);
  pthread_mutex_unlock(&world);
  stop_streams();
  while (faults) {
    struct fault *f = faults;
    faults = f->next;
    free(f->function);
    free(f);
  }
}
