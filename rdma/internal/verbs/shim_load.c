#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#include "shim_lib.h"

struct vb_table vb_lib;

/*
 * ibv_fork_init is left out on purpose. It would take registered memory, which
 * is the engine's KV pool, away from every child that the host forks
 * (MADV_DONTFORK). Since Linux 5.12 a fork copies pinned pages by itself.
 */
int vb_load(const char *name, char *reason, int size) {
  void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL); /* never closed: its drivers keep state in the process */
  if (handle == NULL) {
    const char *why = dlerror();
    snprintf(reason, size, "%s", why != NULL ? why : name);
    return ENOENT;
  }
  struct vb_table t;
#define GET(name, symbol, version, result, arguments) t.name = (result(*) arguments)dlvsym(handle, #symbol, version);
  KV_IBV_NEEDED(GET)
  KV_IBV_OPTIONAL(GET)
#define CHECK(ours, symbol, version, result, arguments)                            \
  if (t.ours == NULL) {                                                            \
    snprintf(reason, size, "%s has no %s of version %s", name, #symbol, version); \
    dlclose(handle);                                                               \
    return ENOSYS;                                                                 \
  }
  KV_IBV_NEEDED(CHECK)
  vb_lib = t;
  return 0;
}

int vb_has_relaxed_ordering(void) { return vb_lib.reg_mr_iova2 != NULL; }
int vb_has_gid_table(void) { return vb_lib.query_gid_table != NULL; }
