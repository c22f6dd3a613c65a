/* The driver as a whole: start, version, errors by name, symbols by version. */
#include "double.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* KVGPU_DRIVER=12020: what cuDriverGetVersion says, and which symbols cuGetProcAddress knows. */
static int driver_version(void) {
  const char *given = getenv("KVGPU_DRIVER");
#ifdef KVGPU_OLD
  return given ? atoi(given) : 12020;
#else
  return given ? atoi(given) : CUDA_VERSION;
#endif
}

EXPORT CUresult cuInit(unsigned int flags) {
  BEGIN(BEFORE_INIT);
  REQUIRE(!flags, CUDA_ERROR_INVALID_VALUE);
  if (is_initialized()) return leave(CUDA_SUCCESS);
  make_devices();
  REQUIRE(device_count, CUDA_ERROR_NO_DEVICE);
  make_primaries();
  set_initialized();
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDriverGetVersion(int *version) {
  BEGIN(BEFORE_INIT);
  REQUIRE(version, CUDA_ERROR_INVALID_VALUE);
  *version = driver_version();
  return leave(CUDA_SUCCESS);
}

static const struct {
  CUresult code;
  const char *name, *text;
} errors[] = {
#define ERROR(code, text) {code, #code, text}
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR(CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    ERROR(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    ERROR(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, "PTX JIT compiler library not found"),
    ERROR(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "the provided PTX was compiled with an unsupported toolchain."),
    ERROR(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
    ERROR(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    ERROR(CUDA_ERROR_HARDWARE_STACK_ERROR, "hardware stack error"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
#undef ERROR
};

static CUresult describe(CUresult code, const char **name, const char **text) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
    if (errors[i].code != code) continue;
    if (name) *name = errors[i].name;
    if (text) *text = errors[i].text;
    return CUDA_SUCCESS;
  }
  if (name) *name = NULL;
  if (text) *text = NULL;
  return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char **name) { return name ? describe(code, name, NULL) : CUDA_ERROR_INVALID_VALUE; }
EXPORT CUresult cuGetErrorString(CUresult code, const char **text) { return text ? describe(code, NULL, text) : CUDA_ERROR_INVALID_VALUE; }

/* KVGPU_HIDE="cuMemcpyBatchAsync,cuX": names that this driver is too old for. dlsym still finds them: an old library is built for that. */
static bool is_hidden(const char *name) {
  size_t length = strlen(name);
  for (const char *p = getenv("KVGPU_HIDE"); p && *p; p += strcspn(p, ","), p += *p == ',') {
    if (strcspn(p, ",") == length && !strncmp(p, name, length)) return true;
  }
  return false;
}

/* The newest form of a function that a version has. The table says since which version only where that
   matters to callers. */
static const struct {
  const char *name, *symbol;
  int since;
} forms[] = {
    {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", 13000},
    {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync", 12080},
    {"cuCtxSetFlags", "cuCtxSetFlags", 12010},
    {"cuMemGetHandleForAddressRange", "cuMemGetHandleForAddressRange", 11070},
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
    {"cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v2", 11030},
};

static void *own_symbol(const char *symbol) {
  static const char here;
  Dl_info self;
  void *library = dladdr(&here, &self) ? dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD) : NULL;
  void *found = library ? dlsym(library, symbol) : NULL;
  if (library) dlclose(library);
  return found;
}

static void *find_symbol(const char *name, int version, CUdriverProcAddressQueryResult *status) {
  static const char *const suffixes[] = {"_v3", "_v2", ""};
  bool known = false;
  void *found = NULL;
  for (size_t i = 0; !found && i < sizeof forms / sizeof *forms; i++) {
    if (strcmp(forms[i].name, name)) continue;
    known = true;
    if (version >= forms[i].since) found = own_symbol(forms[i].symbol);
  }
  for (size_t i = 0; !known && !found && i < sizeof suffixes / sizeof *suffixes; i++) {
    char symbol[160];
    if (snprintf(symbol, sizeof symbol, "%s%s", name, suffixes[i]) < (int)sizeof symbol) found = own_symbol(symbol);
  }
  *status = found ? CU_GET_PROC_ADDRESS_SUCCESS : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return found;
}

/* What is not there is a success with NULL: the status tells. */
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
  BEGIN(BEFORE_INIT);
  REQUIRE(name && function && flags <= 2, CUDA_ERROR_INVALID_VALUE);
  int known = driver_version();
  leave(CUDA_SUCCESS); /* the loader's lock is never taken within ours */
  CUdriverProcAddressQueryResult unasked;
  if (!status) status = &unasked;
  *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  *function = is_hidden(name) ? NULL : find_symbol(name, version < known ? version : known, status);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags) {
  CUdriverProcAddressQueryResult status;
  CUresult r = cuGetProcAddress_v2(name, function, version, flags, &status);
  return r || *function ? r : CUDA_ERROR_NOT_FOUND;
}
