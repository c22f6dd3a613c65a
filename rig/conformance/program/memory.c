/* Allocations, host touches, what a pointer is. */
#include "groups.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

static int attribute(CUpointer_attribute a, CUdeviceptr p, void *out) { return (int)CU(cuPointerGetAttribute)(out, a, p); }
static unsigned flag(CUpointer_attribute a, CUdeviceptr p) {
  unsigned value = 99;
  return attribute(a, p, &value) ? 99 : value;
}
static unsigned long long buffer_id(CUdeviceptr p) {
  unsigned long long id = 0;
  return attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, p, &id) ? 0 : id;
}

void allocations(void) {
  CUcontext c = open_device(), of = NULL;
  CUdeviceptr p = device_memory(4 * MIB), q = device_memory(4 * MIB), base = 0;
  size_t size = 0, all = 0;
  int ordinal = -1;
  char stack;
  number_fact(70, "device memory has the memory type 2", CU_MEMORYTYPE_DEVICE, flag(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p));
  attribute(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p, &ordinal);
  number_fact(71, "and its device's number", 0, ordinal);
  attribute(CU_POINTER_ATTRIBUTE_CONTEXT, p, &of);
  truth(72, "and the context that it was allocated in", of == c);
  truth(73, "BUFFER_ID is one number for a whole allocation", buffer_id(p) && buffer_id(p) == buffer_id(p + 4 * MIB - 1));
  truth(74, "and another for another allocation", buffer_id(p) != buffer_id(q));
  fact(75, "cuMemGetAddressRange takes a pointer within", 0, (int)CU(cuMemGetAddressRange_v2)(&base, &size, p + 12345));
  truth(76, "and gives the allocation", base == p && size == 4 * MIB);
  fact(77, "cuMemGetAddressRange of host memory", CUDA_ERROR_NOT_FOUND, (int)CU(cuMemGetAddressRange_v2)(&base, &size, (CUdeviceptr)&stack));
  fact(78, "cuMemAlloc of nothing", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemAlloc_v2)(&base, 0));
  fact(79, "cuMemFree of a pointer within an allocation", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemFree_v2)(p + 4096));
  unsigned long long before = buffer_id(p);
  fact(80, "cuMemFree of the allocation", 0, (int)CU(cuMemFree_v2)(p));
  fact(81, "cuMemFree of it again", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemFree_v2)(p));
  fact(82, "cuPointerGetAttribute of freed memory", CUDA_ERROR_INVALID_VALUE, attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p, &ordinal));
  p = device_memory(4 * MIB);
  truth(83, "memory that is allocated later has a BUFFER_ID that was never used, whatever its address", buffer_id(p) != before && buffer_id(p) != buffer_id(q));
  CU(cuMemGetInfo_v2)(&size, &all);
  truth(84, "cuMemGetInfo tells less free than there is", size < all);
  fact(85, "cuMemFree of NULL is no error", 0, (int)CU(cuMemFree_v2)(0));
}

static sigjmp_buf back;
static void on_fault(int number) { siglongjmp(back, number); }

void host_touch(void) {
  open_device();
  CUdeviceptr p = device_memory(4 * MIB);
  char byte = 1;
  struct iovec remote = {(void *)p, 1}, local = {&byte, 1};
  int ends[2];
  signal(SIGSEGV, on_fault);
  signal(SIGBUS, on_fault);
  int touched = sigsetjmp(back, 1);
  if (!touched) byte = *(volatile char *)p;
  number_fact(90, "a load from device memory by the host is a SIGSEGV", SIGSEGV, touched);
  if (pipe(ends)) return;
  errno = 0;
  ssize_t n = write(ends[1], (void *)p, 1);
  number_fact(91, "write(2) from device memory is EFAULT (14)", EFAULT, n < 0 ? errno : 0);
  if (write(ends[1], &byte, 1) != 1) return;
  errno = 0;
  n = read(ends[0], (void *)p, 1);
  number_fact(92, "read(2) into device memory is EFAULT (14)", EFAULT, n < 0 ? errno : 0);
  errno = 0;
  n = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
  number_fact(93, "process_vm_readv of device memory is EFAULT (14)", EFAULT, n < 0 ? errno : 0);
}

void pointers(void) {
  CUcontext c = open_device(), of = NULL;
  CUdeviceptr device = 0, p = device_memory(4 * MIB), start = 0;
  size_t size = 0;
  int local;
  void *heap = malloc(64), *pinned = pinned_memory(MIB), *host = NULL;
  fact(100, "cuPointerGetAttribute of the stack", CUDA_ERROR_INVALID_VALUE, attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)&local, &local));
  fact(101, "cuPointerGetAttribute of the heap", CUDA_ERROR_INVALID_VALUE, attribute(CU_POINTER_ATTRIBUTE_CONTEXT, (CUdeviceptr)heap, &of));
  unsigned type = 77, managed = 77;
  CUpointer_attribute several[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED};
  void *into[] = {&type, &managed};
  fact(102, "cuPointerGetAttributes of the heap is no error", 0, (int)CU(cuPointerGetAttributes)(2, several, into, (CUdeviceptr)heap));
  number_fact(103, "and gives the memory type 0", 0, type);
  number_fact(104, "pinned memory has the memory type 1", CU_MEMORYTYPE_HOST, flag(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)pinned));
  attribute(CU_POINTER_ATTRIBUTE_CONTEXT, (CUdeviceptr)pinned, &of);
  truth(105, "and the context that it was allocated in", of == c);
  attribute(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, (CUdeviceptr)pinned, &device);
  truth(106, "its address on the device is the host's", device == (CUdeviceptr)pinned);
  attribute(CU_POINTER_ATTRIBUTE_HOST_POINTER, (CUdeviceptr)pinned + 5, &host);
  truth(107, "HOST_POINTER of a pointer within is that pointer", host == (char *)pinned + 5);
  fact(108, "device memory has no HOST_POINTER", CUDA_ERROR_INVALID_VALUE, attribute(CU_POINTER_ATTRIBUTE_HOST_POINTER, p, &host));
  fact(109, "cuMemHostAlloc of unknown flags", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemHostAlloc)(&host, MIB, 0x4000));
  fact(110, "cuMemFreeHost of what is not pinned", CUDA_ERROR_INVALID_VALUE, (int)CU(cuMemFreeHost)(heap));
  char *pages = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  fact(111, "cuMemHostRegister of the process's own pages", 0, (int)CU(cuMemHostRegister_v2)(pages, MIB, CU_MEMHOSTREGISTER_PORTABLE));
  fact(112, "cuMemHostRegister of them again", CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, (int)CU(cuMemHostRegister_v2)(pages, MIB, CU_MEMHOSTREGISTER_PORTABLE));
  number_fact(113, "registered pages have the memory type 1", CU_MEMORYTYPE_HOST, flag(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)pages + 9));
  fact(114, "cuMemHostUnregister", 0, (int)CU(cuMemHostUnregister)(pages));
  fact(115, "cuMemHostUnregister again", CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, (int)CU(cuMemHostUnregister)(pages));
  attribute(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, p + 77, &start);
  attribute(CU_POINTER_ATTRIBUTE_RANGE_SIZE, p, &size);
  truth(116, "RANGE_START_ADDR and RANGE_SIZE of cuMemAlloc's memory are the allocation", start == p && size == 4 * MIB);
  number_fact(117, "IS_MANAGED of cuMemAlloc's memory", 0, flag(CU_POINTER_ATTRIBUTE_IS_MANAGED, p));
  number_fact(118, "MAPPED of cuMemAlloc's memory", 1, flag(CU_POINTER_ATTRIBUTE_MAPPED, p));
  told(119, "IS_LEGACY_CUDA_IPC_CAPABLE of cuMemAlloc's memory (drivers are known that say 0)", flag(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, p));
  told(120, "IS_GPU_DIRECT_RDMA_CAPABLE of cuMemAlloc's memory", flag(CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, p));
  unsigned on = 1;
  fact(121, "SYNC_MEMOPS can be set for cuMemAlloc's memory", 0, (int)CU(cuPointerSetAttribute)(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p));
  const char *managed_says = "IS_MANAGED of cuMemAllocManaged's memory";
  if (!device_attribute(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY) || CU(cuMemAllocManaged)(&device, MIB, CU_MEM_ATTACH_GLOBAL)) not_here(122, managed_says, "the device has no managed memory");
  else number_fact(122, managed_says, 1, flag(CU_POINTER_ATTRIBUTE_IS_MANAGED, device));
}
