/* Opening, errors by name, symbols, devices. */
#include "groups.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/wait.h>
#include <unistd.h>

static int count_devices(void) {
  int n;
  return (int)CU(cuDeviceGetCount)(&n);
}

static void symbols(void) {
  void *f = (void *)1;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
  fact(12, "cuGetProcAddress of a name that no driver has is no error", 0, (int)CU(cuGetProcAddress_v2)("cuNoSuchCall", &f, driver_version, 0, &status));
  truth(13, "and gives NULL, with the status 'symbol not found'", !f && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  const char *old = "cuGetProcAddress of cuMemcpyBatchAsync as of CUDA 12.0 gives NULL, with the status 'version not sufficient'";
  const char *plain = "cuGetProcAddress of cuMemcpyBatchAsync as of CUDA 12.8 gives what dlsym gives";
  const char *newer = "cuGetProcAddress of cuMemcpyBatchAsync as of CUDA 13.0 gives another function, without failIdx";
  if (driver_version < 12080) {
    not_here(14, old, "the driver is older than 12.8"), not_here(15, plain, "the driver is older than 12.8");
  } else {
    CU(cuGetProcAddress_v2)("cuMemcpyBatchAsync", &f, 12000, 0, &status);
    truth(14, old, !f && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    CU(cuGetProcAddress_v2)("cuMemcpyBatchAsync", &f, 12080, 0, &status);
    truth(15, plain, f && f == (void *)CU(cuMemcpyBatchAsync));
  }
  if (driver_version < 13000) {
    not_here(16, newer, "the driver is older than 13.0");
  } else {
    CU(cuGetProcAddress_v2)("cuMemcpyBatchAsync", &f, 13000, 0, &status);
    truth(16, newer, f && f != (void *)CU(cuMemcpyBatchAsync));
  }
}

void before_start(void) {
  int version;
  unsigned type;
  CUcontext c;
  CUdeviceptr p;
  const char *text = "";
  fact(1, "cuDriverGetVersion answers before cuInit", 0, (int)CU(cuDriverGetVersion)(&version));
  fact(2, "cuDeviceGetCount does not before cuInit", CUDA_ERROR_NOT_INITIALIZED, count_devices());
  fact(3, "cuCtxGetCurrent does not before cuInit", CUDA_ERROR_NOT_INITIALIZED, (int)CU(cuCtxGetCurrent)(&c));
  fact(4, "cuMemAlloc does not before cuInit", CUDA_ERROR_NOT_INITIALIZED, (int)CU(cuMemAlloc_v2)(&p, 100));
  fact(5, "cuPointerGetAttribute does not before cuInit", CUDA_ERROR_NOT_INITIALIZED, (int)CU(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)&type));
  fact(6, "cuInit takes no flags", CUDA_ERROR_INVALID_VALUE, (int)CU(cuInit)(1));
  const char *succeeds = "cuInit succeeds where there is a device", *repeated = "cuInit may be repeated", *forked = "a fork's child has no driver";
  if (no_device) {
    not_here(7, succeeds, "no device"), not_here(8, repeated, "no device"), not_here(17, forked, "no device");
  } else {
    fact(7, succeeds, 0, (int)CU(cuInit)(0));
    fact(8, repeated, 0, (int)CU(cuInit)(0));
    pid_t child = fork();
    if (!child) alarm(PEER_SECONDS), _exit(count_devices());
    int status;
    waitpid(child, &status, 0);
    fact(17, forked, CUDA_ERROR_NOT_INITIALIZED, WIFEXITED(status) ? WEXITSTATUS(status) : -1);
  }
  CU(cuGetErrorName)(CUDA_ERROR_NO_DEVICE, &text);
  truth(9, "cuGetErrorName knows CUDA_ERROR_NO_DEVICE", text && !strcmp(text, "CUDA_ERROR_NO_DEVICE"));
  fact(10, "cuGetErrorName of a number that is no error", CUDA_ERROR_INVALID_VALUE, (int)CU(cuGetErrorName)((CUresult)987654, &text));
  CU(cuGetErrorString)(CUDA_ERROR_NO_DEVICE, &text);
  truth(11, "cuGetErrorString of it is 'no CUDA-capable device is detected'", text && !strcmp(text, "no CUDA-capable device is detected"));
  symbols();
}

static void hidden(int number, const char *sentence, const char *visible) {
  setenv("CUDA_VISIBLE_DEVICES", visible, 1);
  fact(number, sentence, CUDA_ERROR_NO_DEVICE, (int)CU(cuInit)(0));
}
void none_visible(void) { hidden(18, "with CUDA_VISIBLE_DEVICES empty there is no device", ""); }
void none_valid(void) { hidden(19, "with CUDA_VISIBLE_DEVICES=-1 there is no device", "-1"); }

static int bus(const char *place) {
  unsigned domain, bus = 0;
  return sscanf(place, "%x:%x:", &domain, &bus) == 2 ? (int)bus : -1;
}

void devices(void) {
  int n = 0, value;
  CUdevice d = -1;
  CUuuid uuid, second;
  char place[32] = "", name[100] = "";
  CU(cuInit)(0);
  CU(cuDeviceGetCount)(&n);
  truth(20, "there is at least one device", n >= 1);
  fact(21, "cuDeviceGet of the number behind the last", CUDA_ERROR_INVALID_DEVICE, (int)CU(cuDeviceGet)(&d, n));
  fact(22, "cuDeviceGet of the first is 0", 0, (int)CU(cuDeviceGet)(&d, 0) + d);
  CU(cuDeviceGetUuid_v2)(&uuid, 0);
  bool zero = true;
  for (int i = 0; i < 16; i++) zero &= !uuid.bytes[i];
  truth(23, "a device has a UUID that is not zero", !zero);
  if (n < 2) not_here(24, "two devices have different UUIDs", "there is one device");
  else truth(24, "two devices have different UUIDs", !CU(cuDeviceGetUuid_v2)(&second, 1) && memcmp(&uuid, &second, sizeof uuid));
  fact(25, "cuDeviceGetPCIBusId answers", 0, (int)CU(cuDeviceGetPCIBusId)(place, sizeof place, 0));
  truth(26, "as domain:bus:device.function in hexadecimal, the bus as its attribute", strlen(place) == 12 && place[4] == ':' && place[7] == ':' && place[10] == '.' && bus(place) == device_attribute(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID));
  fact(27, "cuDeviceGetByPCIBusId finds it again", 0, (int)CU(cuDeviceGetByPCIBusId)(&d, place) + d);
  fact(28, "cuDeviceGetAttribute of an unknown attribute", CUDA_ERROR_INVALID_VALUE, (int)CU(cuDeviceGetAttribute)(&value, (CUdevice_attribute)100000, 0));
  fact(29, "cuDeviceGetAttribute of an unknown device", CUDA_ERROR_INVALID_DEVICE, (int)CU(cuDeviceGetAttribute)(&value, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, n));
  number_fact(30, "addresses are unified", 1, device_attribute(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING));
  int order = device_attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
  truth(31, "the ordering of GPUDirect writes is none (0), owner (100) or all devices (200)", order == 0 || order == 100 || order == 200);
  told(32, "the ordering of GPUDirect writes", order);
  told(33, "the options to flush GPUDirect writes (1: by the host, 2: by memory operations)", device_attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS));
  told(34, "GPUDirect RDMA is supported", device_attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED));
  told(35, "dma-buf is supported", device_attribute(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED));
  fact(36, "cuDeviceGetName answers", 0, (int)CU(cuDeviceGetName)(name, sizeof name, 0));
}

void contexts(void) {
  unsigned flags;
  int active = -1, value;
  CUcontext a, b, c = (CUcontext)1;
  CUdeviceptr p;
  CUstream s;
  CUevent e;
  CU(cuInit)(0);
  CU(cuDevicePrimaryCtxGetState)(0, &flags, &active);
  number_fact(40, "a primary context is inactive until somebody retains it", 0, active);
  fact(41, "cuCtxGetCurrent without one is no error", 0, (int)CU(cuCtxGetCurrent)(&c));
  truth(42, "and gives NULL", !c);
  fact(43, "cuMemAlloc without a current context", CUDA_ERROR_INVALID_CONTEXT, (int)CU(cuMemAlloc_v2)(&p, 4096));
  fact(44, "cuStreamCreate without a current context", CUDA_ERROR_INVALID_CONTEXT, (int)CU(cuStreamCreate)(&s, 0));
  fact(45, "cuEventCreate without a current context", CUDA_ERROR_INVALID_CONTEXT, (int)CU(cuEventCreate)(&e, 0));
  fact(46, "cuCtxGetDevice without a current context", CUDA_ERROR_INVALID_CONTEXT, (int)CU(cuCtxGetDevice)(&value));
  fact(47, "cuCtxPopCurrent with an empty stack", CUDA_ERROR_INVALID_CONTEXT, (int)CU(cuCtxPopCurrent_v2)(&c));
  fact(48, "a release without a retain", CUDA_ERROR_INVALID_CONTEXT, (int)CU(cuDevicePrimaryCtxRelease_v2)(0));
  fact(49, "cuDevicePrimaryCtxRetain makes it", 0, (int)CU(cuDevicePrimaryCtxRetain)(&a, 0));
  CU(cuDevicePrimaryCtxGetState)(0, &flags, &active);
  number_fact(50, "and it is active", 1, active);
  CU(cuCtxGetCurrent)(&c);
  truth(51, "but not current", !c);
  CU(cuDevicePrimaryCtxRetain)(&b, 0);
  truth(52, "a second retain gives the same", a == b);
  fact(53, "cuCtxPushCurrent makes it current", 0, (int)CU(cuCtxPushCurrent_v2)(a));
  CU(cuCtxGetCurrent)(&c);
  truth(54, "as cuCtxGetCurrent says", c == a);
  strict(55, "cuCtxPushCurrent of NULL", CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE, (int)CU(cuCtxPushCurrent_v2)(NULL));
  CU(cuStreamCreate)(&s, CU_STREAM_NON_BLOCKING);
  CU(cuEventCreate)(&e, CU_EVENT_DISABLE_TIMING);
  CU(cuDevicePrimaryCtxRelease_v2)(0);
  CU(cuDevicePrimaryCtxGetState)(0, &flags, &active);
  number_fact(56, "after two retains and one release it is active", 1, active);
  CU(cuCtxPopCurrent_v2)(&c);
  truth(57, "cuCtxPopCurrent gives what was on top", c == a);
  strict(58, "cuEventQuery without a current context", CUDA_ERROR_INVALID_CONTEXT, 0, (int)CU(cuEventQuery)(e));
  strict(59, "cuStreamQuery without a current context", CUDA_ERROR_INVALID_CONTEXT, 0, (int)CU(cuStreamQuery)(s));
  strict(60, "cuEventRecord without a current context", CUDA_ERROR_INVALID_CONTEXT, 0, (int)CU(cuEventRecord)(e, s));
  fact(61, "cuPointerGetAttribute needs no current context", CUDA_ERROR_INVALID_VALUE, (int)CU(cuPointerGetAttribute)(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)&value));
  CU(cuCtxPushCurrent_v2)(a);
  CU(cuEventDestroy_v2)(e);
  CU(cuStreamDestroy_v2)(s);
  CU(cuCtxSetCurrent)(NULL);
  CU(cuCtxGetCurrent)(&c);
  truth(62, "cuCtxSetCurrent(NULL) takes the top off", !c);
  CU(cuDevicePrimaryCtxRelease_v2)(0);
  CU(cuDevicePrimaryCtxGetState)(0, &flags, &active);
  number_fact(63, "after the last release it is inactive", 0, active);
}

static int current_of_thread(void *unused) {
  CUcontext c = (CUcontext)1;
  (void)unused;
  CU(cuCtxGetCurrent)(&c);
  return c == NULL;
}
static int stream_of_thread(void *unused) {
  CUstream s;
  (void)unused;
  return (int)CU(cuStreamCreate)(&s, 0);
}

void threads(void) {
  open_device();
  truth(64, "a context that is current in one thread is not in another", in_thread(current_of_thread, NULL));
  fact(65, "so cuStreamCreate of another thread fails", CUDA_ERROR_INVALID_CONTEXT, in_thread(stream_of_thread, NULL));
}
