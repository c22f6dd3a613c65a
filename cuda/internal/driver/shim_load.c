#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>

#include "shim_lib.h"

struct kvg_table kvg_lib;
static int with_batch;

/* The library is never closed: the driver has threads and keeps state in the process. */
int kvg_load(const char *name, char *reason, int size) {
  void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    const char *why = dlerror();
    snprintf(reason, size, "%s", why != NULL ? why : name);
    return ENOENT;
  }
  struct kvg_table t;
#define GET(ours, symbol, arguments) t.ours = (kv_result(*) arguments)dlsym(handle, #symbol);
  KV_GPU_NEEDED(GET)
  KV_GPU_OPTIONAL(GET)
#define CHECK(ours, symbol, arguments)                  \
  if (t.ours == NULL) {                                 \
    snprintf(reason, size, "%s has no %s", name, #symbol); \
    return ENOSYS;                                      \
  }
  KV_GPU_NEEDED(CHECK)
  kvg_lib = t;
  with_batch = t.copy_batch != NULL;
  return 0;
}

int kvg_in_process(const char *name) {
  void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == NULL) return 0;
  dlclose(handle); /* the count, not the library */
  return 1;
}

int kvg_has_batch(void) { return with_batch; }
void kvg_use_batch(int on) { with_batch = on && kvg_lib.copy_batch != NULL; }

const char *kvg_call(uint32_t call) {
  static const char *const names[] = {
      "",
#define NAME(ours, symbol, arguments) #symbol,
      KV_GPU_NEEDED(NAME) KV_GPU_OPTIONAL(NAME)};
  return call < sizeof names / sizeof *names ? names[call] : "";
}

void kvg_describe(uint32_t code, const char **name, const char **text) {
  *name = *text = NULL;
  kvg_lib.error_name(code, name);
  kvg_lib.error_text(code, text);
  if (*name == NULL) *name = "";
  if (*text == NULL) *text = "";
}

int kvg_version(int *version) { return (int)kvg_lib.driver_version(version); }

kvg_status kvg_start(void) {
  struct kvg_entry e;
  kvg_relax(&e); /* fails before the start if nobody else has started the driver: then nothing is captured */
  kvg_status s = KVG_TRY(init, 0);
  kvg_restore(&e);
  return s;
}

void kvg_relax(struct kvg_entry *e) {
  e->mode = KV_CAPTURE_RELAXED;
#ifdef KVCONN_FAULTS
  if (kvg_fault("gpu-capture-mode")) e->mode = 0; /* global: what a thread begins with */
#endif
  if (kvg_lib.capture_mode(&e->mode) != KV_SUCCESS) e->mode = KV_CAPTURE_RELAXED; /* the driver ends: nothing is captured */
}

void kvg_restore(struct kvg_entry *e) { kvg_lib.capture_mode(&e->mode); }

kvg_status kvg_enter(kv_context context, struct kvg_entry *e) {
  kvg_relax(e);
#ifdef KVCONN_FAULTS
  if (kvg_fault("gpu-push")) return KVG_DONE;
#endif
  kvg_status s = KVG_TRY(context_push, context);
  if (s.code != 0) kvg_restore(e);
  return s;
}

void kvg_leave(struct kvg_entry *e) {
  kv_context ours;
#ifdef KVCONN_FAULTS
  if (kvg_fault("gpu-push") || kvg_fault("gpu-pop")) {
    kvg_restore(e);
    return;
  }
#endif
  kvg_lib.context_pop(&ours);
  kvg_restore(e);
}
