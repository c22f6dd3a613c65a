/* Facts about the CUDA driver that kvconn rests on. A fact has a number that stays, a sentence, what is expected and what the library at
 * hand says. Facts stand in groups; each group runs in a process of its own, so that none spoils another's. */
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define __CUDA_API_VERSION_INTERNAL 1
#include <cuda.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The functions, by their symbols. One that the library lacks is NULL. */
#define FUNCTIONS(F)                                                                                                                               \
  F(cuInit) F(cuDriverGetVersion) F(cuGetErrorName) F(cuGetErrorString) F(cuGetProcAddress_v2) F(cuDeviceGetCount) F(cuDeviceGet) F(cuDeviceGetName) \
  F(cuDeviceGetUuid) F(cuDeviceGetUuid_v2) F(cuDeviceGetPCIBusId) F(cuDeviceGetByPCIBusId) F(cuDeviceGetAttribute) F(cuDeviceTotalMem_v2)           \
  F(cuDevicePrimaryCtxRetain) F(cuDevicePrimaryCtxRelease_v2) F(cuDevicePrimaryCtxGetState) F(cuCtxCreate_v2) F(cuCtxDestroy_v2)                    \
  F(cuCtxPushCurrent_v2) F(cuCtxPopCurrent_v2) F(cuCtxSetCurrent) F(cuCtxGetCurrent) F(cuCtxGetDevice) F(cuCtxSynchronize)                          \
  F(cuMemAlloc_v2) F(cuMemFree_v2) F(cuMemGetInfo_v2) F(cuMemGetAddressRange_v2) F(cuMemHostAlloc) F(cuMemFreeHost) F(cuMemHostRegister_v2)         \
  F(cuMemHostUnregister) F(cuMemHostGetDevicePointer_v2) F(cuMemAllocManaged) F(cuPointerGetAttribute) F(cuPointerGetAttributes)                    \
  F(cuPointerSetAttribute) F(cuStreamCreate) F(cuStreamDestroy_v2) F(cuStreamQuery) F(cuStreamSynchronize) F(cuStreamWaitEvent) F(cuStreamGetCtx) F(cuStreamGetId)   \
  F(cuStreamGetFlags) F(cuStreamIsCapturing) F(cuStreamBeginCapture_v2) F(cuStreamEndCapture) F(cuThreadExchangeStreamCaptureMode) F(cuGraphDestroy) F(cuGraphInstantiateWithFlags) F(cuGraphLaunch) F(cuGraphExecDestroy) \
  F(cuLaunchHostFunc) F(cuModuleLoadData) F(cuModuleUnload) F(cuModuleGetFunction) F(cuLaunchKernel) F(cuEventCreate) F(cuEventDestroy_v2) F(cuEventRecord) F(cuEventQuery) F(cuEventSynchronize) F(cuEventElapsedTime)            \
  F(cuMemcpyDtoHAsync_v2) F(cuMemcpyHtoDAsync_v2) F(cuMemcpyDtoDAsync_v2) F(cuMemcpyAsync) F(cuMemcpyDtoH_v2) F(cuMemcpyHtoD_v2) F(cuMemcpy2DAsync_v2) \
  F(cuMemcpyBatchAsync) F(cuMemsetD8Async) F(cuMemsetD32Async) F(cuMemsetD8_v2) F(cuMemAddressReserve) F(cuMemAddressFree) F(cuMemCreate)           \
  F(cuMemRelease) F(cuMemMap) F(cuMemUnmap) F(cuMemSetAccess) F(cuMemGetAllocationGranularity) F(cuMemRetainAllocationHandle)                       \
  F(cuMemGetAllocationPropertiesFromHandle) F(cuMemExportToShareableHandle) F(cuMemImportFromShareableHandle) F(cuMemAllocAsync) F(cuMemFreeAsync)  \
  F(cuIpcGetMemHandle) F(cuIpcOpenMemHandle_v2) F(cuIpcCloseMemHandle) F(cuIpcGetEventHandle) F(cuIpcOpenEventHandle) F(cuMemGetHandleForAddressRange) F(cuFlushGPUDirectRDMAWrites) \
  F(cuDeviceGetDevResource) F(cuDevResourceGenerateDesc) F(cuGreenCtxCreate) F(cuGreenCtxDestroy) F(cuCtxFromGreenCtx) F(cuGreenCtxStreamCreate)
#define DECLARE(name) extern __typeof__(&name) p_##name;
FUNCTIONS(DECLARE)
#undef DECLARE
#define CU(name) (p_##name)

extern bool is_double;     /* the library is the tests' own */
extern int driver_version; /* what it says before cuInit */
extern int no_device;      /* not 0: cuInit does not succeed */
extern int device_attribute(CUdevice_attribute a); /* of device 0 */

/* ---- saying a fact */
void fact(int number, const char *sentence, int expected, int got); /* CUresults */
/* A driver may be more forgiving than the double, which answers `expected`: it may also answer `or_else`. */
void strict(int number, const char *sentence, int expected, int or_else, int got);
void truth(int number, const char *sentence, bool holds);
void number_fact(int number, const char *sentence, long long expected, long long got);
void told(int number, const char *sentence, long long value); /* nothing is expected: the value is what is wanted */
void not_here(int number, const char *sentence, const char *reason);

/* ---- what groups share */
CUcontext open_device(void);  /* cuInit, retain device 0, make it current; the group ends if it cannot */
CUdeviceptr device_memory(size_t n);
void *pinned_memory(size_t n);
CUstream new_stream(void); /* non-blocking */
/* Runs a call in a thread of its own, without a context. */
int in_thread(int (*call)(void *), void *argument);
/* A gate: work queued behind it waits until it opens. */
struct gate {
  int open, passed;
};
void shut(struct gate *g, CUstream s);
void open_gate(struct gate *g);
void let_time_pass(void); /* long enough for what ought not to happen */
bool eventually(bool (*holds)(void *), void *argument); /* within seconds; false: it never did */

struct group {
  const char *name;
  void (*run)(void);
  bool without_device; /* can be run where cuInit finds none */
};
extern const struct group groups[];
extern const size_t group_count;
/* A process that a group starts ends by itself after so long: else this program would wait for what it still might print. */
#define PEER_SECONDS 30
/* The second half of a group that needs another process: `--peer NAME ARGUMENT`. */
int run_peer(const char *name, const char *argument);
int run_owned(const char *name, const char *argument); /* peers.c's; -1: none of that name */
const char *own_path(void);
int run_speed(void);
/* Another process opens the allocation at p, and prints what copies between the two cost: objects of JSON, with commas. Not 0: it could not. */
int ask_peer_for_speed(CUdeviceptr p);
int measure_ipc(CUipcMemHandle h); /* that process */
