/*
 * The part of CUDA's driver interface that kvconn uses, declared anew: the
 * library is opened at run time, and kvconn builds without its headers.
 * abi_test.go holds every declaration against the real cuda.h of two majors in
 * one translation unit. For that the tags of pointers are cuda.h's.
 *
 * Enums are unsigned ints.
 */
#ifndef KVCONN_CUDA_ABI_H
#define KVCONN_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef unsigned kv_result;
typedef int kv_device;
typedef unsigned long long kv_ptr;    /* a device address */
typedef unsigned long long kv_handle; /* of an allocation */
typedef struct CUctx_st *kv_context;
typedef struct CUstream_st *kv_stream;
typedef struct CUevent_st *kv_event;
typedef struct CUmod_st *kv_module;
typedef struct CUfunc_st *kv_function;

struct kv_uuid {
  char bytes[16];
};

/* Where a copy's end lies; all zero: the driver finds out. */
struct kv_location {
  unsigned type;
  int id;
};
struct kv_copy_attributes {
  unsigned source_order;
  struct kv_location source, destination;
  unsigned flags;
};

/* Of memory that was made by handles (VMM). */
struct kv_memory_properties {
  unsigned type;
  unsigned handle_types;
  struct kv_location location;
  void *gap0;
  unsigned char gap1;
  unsigned char rdma;
  unsigned short usage;
  unsigned char gap2[4];
};

/* Which device may use mapped memory, and how. */
struct kv_access {
  struct kv_location location;
  unsigned flags;
};

/* Names an allocation to other processes. */
struct kv_ipc_handle {
  char bytes[64];
};

enum {
  KV_SUCCESS = 0,
  KV_INVALID_VALUE = 1,
  KV_OUT_OF_MEMORY = 2,
  KV_NOT_INITIALIZED = 3,
  KV_DEINITIALIZED = 4,
  KV_DEVICE_UNAVAILABLE = 46,
  KV_NO_DEVICE = 100,
  KV_INVALID_DEVICE = 101,
  KV_INVALID_CONTEXT = 201,
  KV_ECC_UNCORRECTABLE = 214,
  KV_PEER_ACCESS_UNSUPPORTED = 217,
  KV_NVLINK_UNCORRECTABLE = 220,
  KV_CONTAINED = 226,
  KV_INVALID_HANDLE = 400,
  KV_NOT_FOUND = 500,
  KV_NOT_READY = 600,
  KV_ILLEGAL_ADDRESS = 700,
  KV_LAUNCH_TIMEOUT = 702,
  KV_CONTEXT_IS_DESTROYED = 709,
  KV_ASSERT = 710,
  KV_TOO_MANY_PEERS = 711,
  KV_HARDWARE_STACK_ERROR = 714,
  KV_ILLEGAL_INSTRUCTION = 715,
  KV_MISALIGNED_ADDRESS = 716,
  KV_INVALID_ADDRESS_SPACE = 717,
  KV_INVALID_PC = 718,
  KV_LAUNCH_FAILED = 719,
  KV_NOT_PERMITTED = 800,
  KV_NOT_SUPPORTED = 801,
  KV_MPS_CLIENT_TERMINATED = 810,
  KV_CAPTURE_UNSUPPORTED = 900,
  KV_CAPTURE_INVALIDATED = 901,
  KV_CAPTURE_IMPLICIT = 906,
  KV_EXTERNAL_DEVICE = 911,
  KV_UNKNOWN = 999,
};

enum { /* of pointers */
  KV_POINTER_CONTEXT = 1,
  KV_POINTER_MEMORY_TYPE = 2,
  KV_POINTER_BUFFER_ID = 7,
  KV_POINTER_IS_MANAGED = 8,
  KV_POINTER_DEVICE = 9,
  KV_POINTER_RDMA_CAPABLE = 15,
  KV_POINTER_POOL = 17,
  KV_POINTER_BLOCK_ID = 20, /* of the physical memory; known since 12.3 */
};
enum { KV_MEMORY_HOST = 1, KV_MEMORY_DEVICE = 2 };
enum { KV_LOCATION_DEVICE = 1 };

enum { /* of devices */
  KV_DEVICE_UNIFIED_ADDRESSING = 41,
  KV_DEVICE_COMPUTE_MAJOR = 75,
  KV_DEVICE_COMPUTE_MINOR = 76,
  KV_DEVICE_RDMA_SUPPORTED = 116,
  KV_DEVICE_FLUSH_OPTIONS = 117,
  KV_DEVICE_WRITES_ORDERING = 118,
  KV_DEVICE_DMA_BUF_SUPPORTED = 124,
};

enum { KV_CAPTURE_RELAXED = 2, KV_CAPTURE_NONE = 0 };
enum { KV_STREAM_NON_BLOCKING = 1 };
enum { KV_EVENT_BLOCKING_SYNC = 1, KV_EVENT_DISABLE_TIMING = 2 };
enum { KV_HOST_PORTABLE = 1 };
enum { KV_SOURCE_ORDER_STREAM = 1 };
enum { KV_RANGE_DMA_BUF = 1 };
enum { KV_HANDLE_FILE = 1 }; /* a POSIX file descriptor */
enum { KV_ACCESS_READ_WRITE = 3 };
enum { KV_IPC_PEER_ACCESS = 1 };
enum { KV_FLUSH_CURRENT_CONTEXT = 0, KV_FLUSH_TO_OWNER = 100, KV_FLUSH_OPTION_HOST = 1, KV_ORDERED_FOR_OWNER = 100 };

/*
 * X(our name, the symbol, arguments). A symbol's name never changes its
 * signature: a later form gets a new suffix. So dlsym of the very name is safe,
 * and cuGetProcAddress, which gives the newest form that the asked version
 * knows, is not needed. Our names are those that HIP's calls could have too.
 */
#define KV_GPU_NEEDED(X)                                                                          \
  X(init, cuInit, (unsigned))                                                                     \
  X(driver_version, cuDriverGetVersion, (int *))                                                  \
  X(error_name, cuGetErrorName, (kv_result, const char **))                                       \
  X(error_text, cuGetErrorString, (kv_result, const char **))                                     \
  X(device_count, cuDeviceGetCount, (int *))                                                      \
  X(device_get, cuDeviceGet, (kv_device *, int))                                                  \
  X(device_name, cuDeviceGetName, (char *, int, kv_device))                                       \
  X(device_uuid, cuDeviceGetUuid_v2, (struct kv_uuid *, kv_device))                               \
  X(device_pci, cuDeviceGetPCIBusId, (char *, int, kv_device))                                    \
  X(device_attribute, cuDeviceGetAttribute, (int *, unsigned, kv_device))                         \
  X(primary_state, cuDevicePrimaryCtxGetState, (kv_device, unsigned *, int *))                    \
  X(primary_retain, cuDevicePrimaryCtxRetain, (kv_context *, kv_device))                          \
  X(primary_release, cuDevicePrimaryCtxRelease_v2, (kv_device))                                   \
  X(context_push, cuCtxPushCurrent_v2, (kv_context))                                              \
  X(context_pop, cuCtxPopCurrent_v2, (kv_context *))                                              \
  X(capture_mode, cuThreadExchangeStreamCaptureMode, (unsigned *))                                \
  X(pointer_attribute, cuPointerGetAttribute, (void *, unsigned, kv_ptr))                         \
  X(memory_range, cuMemGetAddressRange_v2, (kv_ptr *, size_t *, kv_ptr))                          \
  X(memory_retain, cuMemRetainAllocationHandle, (kv_handle *, void *))                            \
  X(memory_release, cuMemRelease, (kv_handle))                                                    \
  X(memory_properties, cuMemGetAllocationPropertiesFromHandle, (struct kv_memory_properties *, kv_handle)) \
  X(memory_alloc, cuMemAlloc_v2, (kv_ptr *, size_t))                                              \
  X(memory_free, cuMemFree_v2, (kv_ptr))                                                          \
  X(host_alloc, cuMemHostAlloc, (void **, size_t, unsigned))                                      \
  X(host_free, cuMemFreeHost, (void *))                                                           \
  X(stream_create, cuStreamCreate, (kv_stream *, unsigned))                                       \
  X(stream_destroy, cuStreamDestroy_v2, (kv_stream))                                              \
  X(stream_capturing, cuStreamIsCapturing, (kv_stream, unsigned *))                               \
  X(stream_id, cuStreamGetId, (kv_stream, unsigned long long *))                                  \
  X(event_create, cuEventCreate, (kv_event *, unsigned))                                          \
  X(event_destroy, cuEventDestroy_v2, (kv_event))                                                 \
  X(event_record, cuEventRecord, (kv_event, kv_stream))                                           \
  X(event_query, cuEventQuery, (kv_event))                                                        \
  X(event_wait, cuEventSynchronize, (kv_event))                                                   \
  X(copy_to_host, cuMemcpyDtoHAsync_v2, (void *, kv_ptr, size_t, kv_stream))                      \
  X(copy_to_device, cuMemcpyHtoDAsync_v2, (kv_ptr, const void *, size_t, kv_stream))

/* What follows flush_writes is for memory of other processes, and what follows copy_on_device for the copy kernel. copy_batch is the form of driver 12.8, with the number of the failed copy; 13 calls its own form cuMemcpyBatchAsync_v2. */
#define KV_GPU_OPTIONAL(X)                                                                        \
  X(copy_batch, cuMemcpyBatchAsync,                                                               \
    (kv_ptr *, kv_ptr *, size_t *, size_t, struct kv_copy_attributes *, size_t *, size_t, size_t *, kv_stream)) \
  X(memory_export, cuMemGetHandleForAddressRange, (void *, kv_ptr, size_t, unsigned, unsigned long long)) \
  X(flush_writes, cuFlushGPUDirectRDMAWrites, (unsigned, unsigned))                               \
  X(ipc_get, cuIpcGetMemHandle, (struct kv_ipc_handle *, kv_ptr))                                 \
  X(ipc_open, cuIpcOpenMemHandle_v2, (kv_ptr *, struct kv_ipc_handle, unsigned))                  \
  X(ipc_close, cuIpcCloseMemHandle, (kv_ptr))                                                     \
  X(handle_export, cuMemExportToShareableHandle, (void *, kv_handle, unsigned, unsigned long long)) \
  X(handle_import, cuMemImportFromShareableHandle, (kv_handle *, void *, unsigned))               \
  X(address_reserve, cuMemAddressReserve, (kv_ptr *, size_t, size_t, kv_ptr, unsigned long long)) \
  X(address_free, cuMemAddressFree, (kv_ptr, size_t))                                             \
  X(memory_map, cuMemMap, (kv_ptr, size_t, size_t, kv_handle, unsigned long long))                \
  X(memory_unmap, cuMemUnmap, (kv_ptr, size_t))                                                   \
  X(memory_access, cuMemSetAccess, (kv_ptr, size_t, const struct kv_access *, size_t))            \
  X(copy_on_device, cuMemcpyDtoDAsync_v2, (kv_ptr, kv_ptr, size_t, kv_stream))                    \
  X(module_load, cuModuleLoadData, (kv_module *, const void *))                                   \
  X(module_unload, cuModuleUnload, (kv_module))                                                   \
  X(module_function, cuModuleGetFunction, (kv_function *, kv_module, const char *))               \
  X(launch, cuLaunchKernel,                                                                       \
    (kv_function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, kv_stream, void **, void **))

#endif
