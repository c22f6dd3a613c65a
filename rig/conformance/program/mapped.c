/* Memory that is mapped by handles, as torch's expandable segments and vLLM's sleep mode have it, and memory of pools. */
#include "groups.h"

#include <string.h>
#include <unistd.h>

static size_t grain;
static CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};

static int map_one(CUdeviceptr at, CUmemGenericAllocationHandle *h) {
  int r = (int)CU(cuMemCreate)(h, grain, &wanted, 0);
  return r ? r : (int)CU(cuMemMap)(at, grain, 0, *h, 0);
}
static int allow(CUdeviceptr at, size_t n) {
  CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  return (int)CU(cuMemSetAccess)(at, n, &access, 1);
}
static unsigned long long id_of(CUdeviceptr p) {
  unsigned long long id = 0;
  CU(cuPointerGetAttribute)(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, p);
  return id;
}

static unsigned long long block_of(CUdeviceptr p) {
  unsigned long long id = 0;
  CU(cuPointerGetAttribute)(&id, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID, p);
  return id;
}

void mapped(void) {
  open_device();
  if (!device_attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) {
    not_here(250, "memory can be mapped by handles", "the device cannot");
    return;
  }
  truth(250, "memory can be mapped by handles", true);
  bool fds = device_attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  wanted.requestedHandleTypes = fds ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
  wanted.allocFlags.gpuDirectRDMACapable = device_attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
  CU(cuMemGetAllocationGranularity)(&grain, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  truth(251, "the granularity is a power of two, and one of the host's page", grain >= 4096 && !(grain & (grain - 1)));
  CUdeviceptr at = 0, base = 0, device = 0;
  CUmemGenericAllocationHandle a = 0, b = 0, again = 0;
  size_t size = 0;
  CUcontext of = (CUcontext)1;
  fact(252, "cuMemCreate of a size that is no multiple of it", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemCreate)(&a, grain + 1, &wanted, 0));
  fact(253, "cuMemAddressReserve", 0, (int)CU(cuMemAddressReserve)(&at, 2 * grain, 0, 0, 0));
  fact(254, "cuMemMap of a new handle there", 0, map_one(at, &a));
  fact(255, "cuMemMap over a mapping", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemMap)(at, grain, 0, a, 0));
  map_one(at + grain, &b);
  fact(256, "cuMemSetAccess of two mappings at once", 0, allow(at, 2 * grain));
  CU(cuPointerGetAttribute)(&of, CU_POINTER_ATTRIBUTE_CONTEXT, at);
  truth(257, "mapped memory is of no context", !of);
  fact(258, "cuMemGetAddressRange of mapped memory", 0, (int)CU(cuMemGetAddressRange_v2)(&base, &size, at + grain + 100));
  truth(259, "gives the one mapping", base == at + grain && size == grain);
  CU(cuPointerGetAttribute)(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at);
  truth(260, "RANGE_SIZE gives the reservation", size == 2 * grain);
  CU(cuPointerGetAttribute)(&device, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, at);
  truth(261, "DEVICE_POINTER is the address", device == at);
  truth(262, "each mapping has a BUFFER_ID of its own", id_of(at) && id_of(at) != id_of(at + grain));
  fact(263, "a memset over the seam of two mappings", 0, (int)CU(cuMemsetD8_v2)(at + grain - 50, 3, 100));
  fact(264, "cuMemRetainAllocationHandle of an address within", 0, (int)CU(cuMemRetainAllocationHandle)(&again, (void *)(at + grain + 77)));
  CUmemAllocationProp got;
  memset(&got, 0, sizeof got);
  fact(265, "cuMemGetAllocationPropertiesFromHandle", 0, (int)CU(cuMemGetAllocationPropertiesFromHandle)(&got, again));
  truth(266, "gives the device, whether a card may reach it, and the kinds of handles", got.location.id == 0 && got.allocFlags.gpuDirectRDMACapable == wanted.allocFlags.gpuDirectRDMACapable && got.requestedHandleTypes == wanted.requestedHandleTypes);
  CU(cuMemRelease)(again);
  CUdeviceptr linear = device_memory(4096);
  fact(267, "cuMemRetainAllocationHandle of cuMemAlloc's memory", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemRetainAllocationHandle)(&again, (void *)linear));
  unsigned on = 1;
  strict(268, "SYNC_MEMOPS cannot be set for mapped memory", CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, (int)CU(cuPointerSetAttribute)(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, at));
  unsigned long long before = id_of(at), block = block_of(at);
  truth(279, "MEMORY_BLOCK_ID tells two handles apart", block && block != block_of(at + grain));
  fact(269, "cuMemUnmap of one mapping", 0, (int)CU(cuMemUnmap)(at, grain));
  fact(270, "cuPointerGetAttribute where nothing is mapped", CUDA_ERROR_INVALID_VALUE, (int)CU(cuPointerGetAttribute)(&device, CU_POINTER_ATTRIBUTE_BUFFER_ID, at));
  fact(271, "the handle can be mapped again", 0, (int)CU(cuMemMap)(at, grain, 0, a, 0) + allow(at, grain));
  truth(272, "and the same address has another BUFFER_ID", id_of(at) != before);
  truth(286, "and the same MEMORY_BLOCK_ID as before", block_of(at) == block);
  unsigned char byte = 0;
  CU(cuMemcpyDtoH_v2)(&byte, at + grain - 1, 1);
  number_fact(273, "with the handle's old bytes", 3, byte);
  int fd = -1;
  if (!fds) {
    not_here(274, "a handle can be exported as a file descriptor", "the device cannot");
  } else {
    fact(274, "a handle can be exported as a file descriptor", 0, (int)CU(cuMemExportToShareableHandle)(&fd, a, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    fact(275, "and imported in the same process", 0, (int)CU(cuMemImportFromShareableHandle)(&again, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    CU(cuMemRelease)(again);
    close(fd);
  }
  fact(276, "cuMemRelease while it is mapped", 0, (int)CU(cuMemRelease)(a) + (int)CU(cuMemRelease)(b));
  fact(277, "the mapping lives on", 0, (int)CU(cuMemsetD8_v2)(at, 4, 100));
  fact(278, "cuMemUnmap of both, and cuMemAddressFree", 0, (int)CU(cuMemUnmap)(at, 2 * grain) + (int)CU(cuMemAddressFree)(at, 2 * grain));
}

void pools(void) {
  open_device();
  CUdeviceptr p = 0;
  CUstream s = new_stream();
  if (!device_attribute(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) || !CU(cuMemAllocAsync)) {
    not_here(280, "cuMemAllocAsync", "the device has no pools");
    return;
  }
  fact(280, "cuMemAllocAsync", 0, (int)CU(cuMemAllocAsync)(&p, 1 << 20, s));
  CU(cuStreamSynchronize)(s);
  CUcontext of = (CUcontext)1;
  unsigned type = 0;
  int device = -1;
  CUipcMemHandle h;
  CU(cuPointerGetAttribute)(&of, CU_POINTER_ATTRIBUTE_CONTEXT, p);
  CU(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p);
  CU(cuPointerGetAttribute)(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p);
  truth(281, "a pool's memory is of no context", !of);
  truth(282, "it is device memory of its device", type == CU_MEMORYTYPE_DEVICE && device == 0);
  fact(283, "it has no legacy IPC handle", CUDA_ERROR_INVALID_VALUE, (int)CU(cuIpcGetMemHandle)(&h, p));
  CUmemGenericAllocationHandle handle;
  fact(284, "cuMemRetainAllocationHandle of it", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemRetainAllocationHandle)(&handle, (void *)p));
  fact(285, "cuMemFreeAsync", 0, (int)CU(cuMemFreeAsync)(p, s) + (int)CU(cuStreamSynchronize)(s));
}
