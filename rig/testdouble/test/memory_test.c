/* Memory: untouchable, poisoned, with a tail that is watched; pointers that are what they are; mappings; exports. */
#include "test.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int write_error(CUdeviceptr p) {
  int ends[2];
  EXPECT(!pipe(ends));
  errno = 0;
  ssize_t n = write(ends[1], (void *)p, 1);
  int error = n < 0 ? errno : 0;
  close(ends[0]);
  close(ends[1]);
  return error;
}

void test_memory(void) {
  CUdeviceptr p, q;
  int active;
  unsigned flags;
  FAILS(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc_v2(&p, 100));
  OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
  EXPECT(!active);
  enter_device(0);
  OK(cuMemAlloc_v2(&p, 100));
  EXPECT(write_error(p) == EFAULT);
  EXPECT(((unsigned char *)kvgpu_alias(p))[99] == POISON);
  EXPECT(kvgpu_check() == 0);
  unsigned char *tail = (unsigned char *)kvgpu_alias(p) + 100;
  *tail = 1;
  fprintf(stderr, "one violation is expected here:\n");
  EXPECT(kvgpu_check() == 1);
  *tail = CANARY;
  violations = 0;
  char host[64];
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(host, p + 60, 64));
  OK(cuMemcpyDtoH_v2(host, p, 64));
  EXPECT((unsigned char)host[0] == POISON);
  OK(cuMemFree_v2(p));
  EXPECT(write_error(p) == EFAULT);
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(host, p, 64));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemcpy((CUdeviceptr)host, p, 64));
  kvgpu_reuse_addresses(1);
  OK(cuMemAlloc_v2(&q, 200));
  EXPECT(q == p);
  OK(cuMemFree_v2(q));
  kvgpu_reuse_addresses(0);
  leave_device(0);
}

void test_pointers(void) {
  CUcontext c = enter_device(1), of;
  CUdeviceptr p, again;
  unsigned long long id, next;
  unsigned type;
  int ordinal, local;
  void *host;
  OK(cuMemAlloc_v2(&p, 4096));
  OK(cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_CONTEXT, p + 1));
  OK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p));
  OK(cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, p));
  EXPECT(of == c && ordinal == 1);
  OK(cuMemFree_v2(p));
  kvgpu_reuse_addresses(1);
  OK(cuMemAlloc_v2(&again, 4096));
  kvgpu_reuse_addresses(0);
  OK(cuPointerGetAttribute(&next, CU_POINTER_ATTRIBUTE_BUFFER_ID, again));
  EXPECT(again == p && next > id);
  OK(cuMemFree_v2(again));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)&local));
  OK(cuMemHostAlloc(&host, 4096, CU_MEMHOSTALLOC_PORTABLE));
  OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)host));
  EXPECT(type == CU_MEMORYTYPE_HOST);
  OK(cuMemFreeHost(host));
  OK(cuMemAllocManaged(&p, 4096, CU_MEM_ATTACH_GLOBAL));
  OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_IS_MANAGED, p));
  EXPECT(type == 1 && *(unsigned char *)p == POISON);
  OK(cuMemFree_v2(p));
  leave_device(1);
}

static CUmemGenericAllocationHandle map(CUdeviceptr at) {
  CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
  wanted.allocFlags.gpuDirectRDMACapable = 1;
  CUmemGenericAllocationHandle h;
  OK(cuMemCreate(&h, GRAIN, &wanted, 0));
  OK(cuMemMap(at, GRAIN, 0, h, 0));
  return h;
}

static void allow(CUdeviceptr at, size_t n) {
  CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  OK(cuMemSetAccess(at, n, &access, 1));
}

void test_mapped(void) {
  CUdeviceptr at, base;
  size_t size;
  unsigned long long before, after;
  CUcontext of;
  enter_device(0);
  OK(cuMemAddressReserve(&at, 2 * GRAIN, 0, 0, 0));
  CUmemGenericAllocationHandle first = map(at), second = map(at + GRAIN), again;
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(at, 1, 10)); /* no access yet */
  allow(at, 2 * GRAIN);
  OK(cuMemsetD8_v2(at, 1, 10));
  OK(cuMemsetD8_v2(at + GRAIN - 5, 1, 10)); /* over the seam of two mappings */
  EXPECT(*(char *)kvgpu_alias(at + GRAIN - 1) == 1 && *(char *)kvgpu_alias(at + GRAIN + 4) == 1 && *(unsigned char *)kvgpu_alias(at + GRAIN + 5) == POISON);
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(at + 2 * GRAIN - 5, 1, 10));
  OK(cuMemGetAddressRange_v2(&base, &size, at + GRAIN + 1));
  EXPECT(base == at + GRAIN && size == GRAIN);
  OK(cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at));
  OK(cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_CONTEXT, at));
  OK(cuPointerGetAttribute(&before, CU_POINTER_ATTRIBUTE_BUFFER_ID, at));
  EXPECT(size == 2 * GRAIN && !of);
  OK(cuMemRetainAllocationHandle(&again, (void *)(at + GRAIN + 7)));
  EXPECT(again == second);
  OK(cuMemRelease(again));
  OK(cuMemUnmap(at, GRAIN));
  EXPECT(write_error(at) == EFAULT);
  OK(cuMemMap(at, GRAIN, 0, first, 0)); /* as after a sleep */
  allow(at, GRAIN);
  OK(cuPointerGetAttribute(&after, CU_POINTER_ATTRIBUTE_BUFFER_ID, at));
  EXPECT(after != before && *(char *)kvgpu_alias(at) == 1);
  OK(cuMemUnmap(at, 2 * GRAIN));
  OK(cuMemRelease(first));
  OK(cuMemRelease(second));
  OK(cuMemAddressFree(at, 2 * GRAIN));
  leave_device(0);
}

static void allow_on(int device, CUdeviceptr at, unsigned flags) {
  CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}, .flags = flags};
  OK(cuMemSetAccess(at, GRAIN, &access, 1));
}

/* A handle's descriptor is mapped a second time. The memory is on the handle's own device. Only devices that were allowed to may use it.
   It lasts as long as somebody has it. */
void test_imported(void) {
  CUdeviceptr at, second;
  CUmemGenericAllocationHandle again;
  CUmemAllocationProp is;
  int fd, stranger = memfd_create("stranger", MFD_CLOEXEC);
  unsigned char byte = 0;
  enter_device(0);
  OK(cuMemAddressReserve(&at, GRAIN, 0, 0, 0));
  OK(cuMemAddressReserve(&second, 2 * GRAIN, 0, 0, 0));
  CUmemGenericAllocationHandle h = map(at);
  allow(at, GRAIN);
  OK(cuMemsetD8_v2(at + 7, 5, 1));
  OK(cuMemExportToShareableHandle(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  EXPECT(!ftruncate(stranger, (off_t)GRAIN));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemImportFromShareableHandle(&again, (void *)(intptr_t)stranger, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  leave_device(0);
  enter_device(1);
  OK(cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  close(fd);
  OK(cuMemGetAllocationPropertiesFromHandle(&is, again));
  EXPECT(is.location.id == 0 && is.allocFlags.gpuDirectRDMACapable == 1);
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemMap(second, 2 * GRAIN, 0, again, 0));
  OK(cuMemMap(second, GRAIN, 0, again, 0));
  OK(cuMemRelease(again));
  allow_on(0, second, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(&byte, second + 7, 1)); /* device 1 may not */
  allow_on(1, second, CU_MEM_ACCESS_FLAGS_PROT_READ);
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(second + 7, 6, 1));
  OK(cuMemUnmap(at, GRAIN));
  OK(cuMemRelease(h));
  OK(cuMemcpyDtoH_v2(&byte, second + 7, 1));
  EXPECT(byte == 5);
  OK(cuMemUnmap(second, GRAIN));
  OK(cuMemAddressFree(at, GRAIN));
  OK(cuMemAddressFree(second, 2 * GRAIN));
  close(stranger);
  leave_device(1);
}

/* Two mappings exported as one, from within the first into the second; then with late writes of the card. */
void test_export(void) {
  CUdeviceptr at;
  int fd;
  size_t size;
  enter_device(0);
  OK(cuMemAddressReserve(&at, 2 * GRAIN, 0, 0, 0));
  CUmemGenericAllocationHandle first = map(at), second = map(at + GRAIN);
  allow(at, 2 * GRAIN);
  FAILS(CUDA_ERROR_INVALID_VALUE, cuMemGetHandleForAddressRange(&fd, at + 100, HOST_PAGE, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
  OK(cuMemGetHandleForAddressRange(&fd, at + HOST_PAGE, GRAIN, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
  EXPECT(lseek(fd, 0, SEEK_END) == (off_t)GRAIN);
  char *card = kvgpu_map_dmabuf(fd, &size);
  EXPECT(card && size == GRAIN);
  EXPECT(kvgpu_count("dmabufs") == 1);
  card[0] = 7, card[GRAIN - 1] = 8;
  EXPECT(*(char *)kvgpu_alias(at + HOST_PAGE) == 7 && *(char *)kvgpu_alias(at + HOST_PAGE + GRAIN - 1) == 8);
  munmap(card, size);
  close(fd);
  EXPECT(!kvgpu_count("dmabufs"));
  OK(cuMemUnmap(at, 2 * GRAIN));
  OK(cuMemRelease(first));
  OK(cuMemRelease(second));
  OK(cuMemAddressFree(at, 2 * GRAIN));

  kvgpu_late_pcie(1);
  OK(cuMemAlloc_v2(&at, HOST_PAGE));
  OK(cuMemGetHandleForAddressRange(&fd, at, HOST_PAGE, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
  card = kvgpu_map_dmabuf(fd, &size);
  card[5] = 9;
  unsigned char seen;
  OK(cuMemcpyDtoH_v2(&seen, at + 5, 1));
  EXPECT(seen == POISON);
  OK(cuFlushGPUDirectRDMAWrites(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER));
  OK(cuMemcpyDtoH_v2(&seen, at + 5, 1));
  EXPECT(seen == 9);
  OK(cuMemsetD8_v2(at, 3, 100)); /* the card reads what the device has written */
  EXPECT(card[5] == 3);
  munmap(card, size);
  close(fd);
  kvgpu_late_pcie(0);
  OK(cuMemFree_v2(at));
  leave_device(0);
}
