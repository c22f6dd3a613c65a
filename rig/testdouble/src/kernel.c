/* Modules, and one kernel: kvconn's own, which copies pieces. A real driver compiles the text and runs it; the double looks whether the text
 * has the kernel, and does what it is for. */
#include "double.h"

#include <stdlib.h>
#include <string.h>

#define PIECES 128
struct table { /* the kernel's argument */
  CUdeviceptr from[PIECES], to[PIECES];
  uint32_t bytes[PIECES];
  uint32_t count, unused;
};

struct CUfunc_st {
  CUmodule module;
};
struct CUmod_st {
  uint64_t magic;
  CUcontext ctx;
  struct CUfunc_st copy;
  CUmodule next;
};
#define MODULE_ALIVE 0x6d6f64756c65u

static CUmodule modules; /* those that were unloaded too: their handles are found to be bad */
static unsigned alive;

unsigned living_modules(void) { return alive; }

void free_modules(void) {
  while (modules) {
    CUmodule m = modules;
    modules = m->next;
    free(m);
  }
}

static bool is_module(CUcontext ctx, CUmodule module) {
  for (CUmodule m = modules; m; m = m->next) {
    if (m == module) return m->magic == MODULE_ALIVE && m->ctx == ctx;
  }
  return false;
}

void end_modules(CUcontext ctx) {
  for (CUmodule m = modules; m; m = m->next) {
    if (m->ctx == ctx && m->magic == MODULE_ALIVE) m->magic = 0, alive--;
  }
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(module && image, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(strstr(image, "\n.version "), CUDA_ERROR_INVALID_IMAGE);
  REQUIRE(strstr(image, "\n.target ") && strstr(image, "\n.address_size 64\n") && strstr(image, ".visible .entry kvconn_copy("), CUDA_ERROR_INVALID_PTX);
  CUmodule m = calloc(1, sizeof *m);
  *m = (struct CUmod_st){.magic = MODULE_ALIVE, .ctx = ctx, .copy = {m}, .next = modules};
  modules = m, alive++;
  *module = m;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuModuleUnload(CUmodule module) {
  BEGIN(CONTEXT | UNSAFE);
  REQUIRE(is_module(ctx, module), CUDA_ERROR_INVALID_HANDLE);
  module->magic = 0, alive--;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  BEGIN(CONTEXT);
  REQUIRE(function && name, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_module(ctx, module), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(!strcmp(name, "kvconn_copy"), CUDA_ERROR_NOT_FOUND);
  *function = &module->copy;
  return leave(CUDA_SUCCESS);
}

static bool is_function(CUcontext ctx, CUfunction f) {
  for (CUmodule m = modules; m; m = m->next) {
    if (f == &m->copy) return is_module(ctx, m);
  }
  return false;
}

static void nothing(void *argument) { (void)argument; }

/* A kernel's addresses are looked at by the device alone: a bad one is the end of the context when the stream gets there, and the call does
 * not say so. */
static CUresult copy_pieces(CUstream s, const struct table *t) {
  struct piece pieces[PIECES];
  size_t n = 0;
  for (uint32_t i = 0; i < t->count; i++) {
    if (!t->bytes[i]) continue;
    pieces[n].n = t->bytes[i];
    if (device_end(t->to[i], t->bytes[i], true, &pieces[n].to) || device_end(t->from[i], t->bytes[i], false, &pieces[n].from)) {
      return put_op(s, &(struct op){.what = CALL, .call = nothing, .fails = CUDA_ERROR_ILLEGAL_ADDRESS});
    }
    n++;
  }
  return n ? put_copy(s, pieces, n) : CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z, unsigned shared, CUstream handle,
                               void **arguments, void **extra) {
  BEGIN(CONTEXT);
  CUstream s;
  REQUIRE(is_function(ctx, f), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(x && y && z && threads && threads_y && threads_z && arguments && arguments[0] && !extra, CUDA_ERROR_INVALID_VALUE);
  REQUIRE((uint64_t)threads * threads_y * threads_z <= 1024, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(y == 1 && z == 1 && threads_y == 1 && threads_z == 1 && !shared, CUDA_ERROR_INVALID_VALUE); /* the double's own limit */
  CUresult r = find_stream(ctx, handle, &s);
  const struct table *t = arguments[0];
  REQUIRE(!r, r);
  REQUIRE(t->count <= PIECES, CUDA_ERROR_LAUNCH_FAILED); /* a real one reads beyond its argument */
  return leave(copy_pieces(s, t));
}
