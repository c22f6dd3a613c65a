/* Counters for tests, and the report of what is left when the library goes. */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t living_streams(void) {
  uint64_t n = 0;
  for (CUstream s = streams; s; s = s->next) n += s->alive && s->ctx->legacy != s && s->ctx->per_thread != s;
  return n;
}

static uint64_t count_memories(void) {
  uint64_t n = 0;
  for (const struct mem *m = memories; m; m = m->next) n += m->kind != IMPORTED && m->kind != MAPPED && m->kind != EXPOSED;
  return n;
}

static uint64_t count_pins(void) {
  uint64_t n = 0;
  for (const struct pin *q = pins; q; q = q->next) n++;
  return n;
}

static uint64_t count(const char *what) {
  if (!strcmp(what, "streams")) return living_streams();
  if (!strcmp(what, "events")) return living_events;
  if (!strcmp(what, "modules")) return living_modules();
  if (!strcmp(what, "allocations")) return count_memories();
  if (!strcmp(what, "pinned")) return count_pins();
  if (!strcmp(what, "contexts")) return living_contexts();
  if (!strcmp(what, "handles")) return living_handles();
  if (!strcmp(what, "mapped")) return living_mappings();
  if (!strcmp(what, "reserved")) return living_reservations();
  if (!strcmp(what, "ipc")) return open_imports();
  if (!strcmp(what, "dmabufs")) return open_exports();
  if (!strcmp(what, "captures")) return open_captures();
  if (!strcmp(what, "queued")) return queued_operations();
  if (!strcmp(what, "stuck")) return stuck_operations();
  if (!strcmp(what, "blocked")) return blocked_calls();
  if (!strcmp(what, "violations")) return violations;
  return calls_of(strcmp(what, "calls") ? what : NULL);
}

EXPORT uint64_t kvgpu_count(const char *what) {
  pthread_mutex_lock(&world);
  uint64_t n = count(what);
  pthread_mutex_unlock(&world);
  return n;
}

EXPORT uint64_t kvgpu_check(void) {
  pthread_mutex_lock(&world);
  for (const struct mem *m = memories; m; m = m->next) check_canary(m);
  uint64_t n = violations;
  pthread_mutex_unlock(&world);
  return n;
}

EXPORT uint64_t kvgpu_expose(int device, int fd, int64_t offset, size_t size) {
  pthread_mutex_lock(&world);
  struct mem *m = NULL;
  int own = device >= 0 && device < device_count ? dup(fd) : -1;
  if (own >= 0) m = map_file(device, &primaries[device], own, offset, size, EXPOSED, 0, NULL);
  if (own >= 0 && !m) close(own);
  pthread_mutex_unlock(&world);
  return m ? m->at : 0;
}

EXPORT int kvgpu_hide(uint64_t address) {
  pthread_mutex_lock(&world);
  struct mem *m = find_memory(address);
  bool is_exposed = m && m->kind == EXPOSED && m->at == address;
  if (is_exposed) {
    await_memory(m);
    let_shared(m);
    drop_memory(m);
  }
  pthread_mutex_unlock(&world);
  return is_exposed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* What is left, on stderr, with the seed: KVGPU_LEAKS=report, or =exit to end with status 86. The last destructor to run. */
__attribute__((destructor(101))) static void report(void) {
  const char *how = getenv("KVGPU_LEAKS");
  static const char *const kinds[] = {"streams", "events", "modules", "allocations", "pinned", "handles", "mapped", "reserved", "ipc", "dmabufs", "captures", "violations"};
  char text[300] = "";
  for (size_t i = 0; how && i < sizeof kinds / sizeof *kinds; i++) {
    uint64_t n = kvgpu_count(kinds[i]);
    size_t used = strlen(text);
    if (n) snprintf(text + used, sizeof text - used, "%s%llu %s", used ? ", " : "", (unsigned long long)n, kinds[i]);
  }
  if (*text) fprintf(stderr, "kvgpu: left behind: %s (KVGPU_SEED=%llu)\n", text, (unsigned long long)kvgpu_seed());
  free_captures();
  free_graphs();
  free_modules();
  free_streams();
  free_events();
  free_contexts();
  free_pins();
  free_vmm();
  free_exports();
  free_memories();
  if (*text && !strcmp(how, "exit")) _exit(86);
}
