/* Devices: how many (KVGPU_DEVICES), which are visible (CUDA_VISIBLE_DEVICES), what they are. */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int device_count;
struct device devices[DEVICES_MAX];

static void set_attributes(int *a, int physical) {
  a[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = 9;
  a[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR] = 0;
  a[CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT] = 132;
  a[CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT] = 3;
  a[CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING] = 1;
  a[CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY] = 1;
  a[CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY] = 1;
  a[CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID] = 0;
  a[CU_DEVICE_ATTRIBUTE_PCI_BUS_ID] = 0x17 + 0x20 * physical;
  a[CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED] = 1;
  a[CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED] = 1;
  a[CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED] = 1;
  a[CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED] = 1;
  a[CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS] = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST;
  a[CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING] = CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE;
  a[CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED] = 1;
  a[CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED] = 1;
  a[CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED] = 1;
}

static void add_device(int physical) {
  struct device *d = &devices[device_count++];
  d->physical = physical;
  set_attributes(d->attributes, physical);
}

static bool is_device(CUdevice d) { return d >= 0 && d < device_count; }

/* KVGPU_FAIL_OPERATION="0:100:700": device, which operation, code. */
static void read_failing_operation(void) {
  const char *given = getenv("KVGPU_FAIL_OPERATION");
  int dev, code;
  unsigned long long nth;
  if (!given) return;
  if (sscanf(given, "%d:%llu:%d", &dev, &nth, &code) == 3 && is_device(dev) && nth && code) {
    devices[dev].operations_left = nth;
    devices[dev].failure = (CUresult)code;
  } else {
    violation("KVGPU_FAIL_OPERATION: \"%s\" is not DEVICE:NTH:CODE", given);
  }
}

/* The first number that names no device hides itself and all that follow, as with a real driver. The instance "MIG-0" is the whole device 0. */
void make_devices(void) {
  const char *given = getenv("KVGPU_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
  int there = given ? atoi(given) : 2;
  if (there > DEVICES_MAX) there = DEVICES_MAX;
  device_count = 0;
  for (int i = 0; !visible && i < there; i++) add_device(i);
  bool seen[DEVICES_MAX] = {false};
  for (const char *p = visible; p && *p;) {
    char *after;
    if (!strncmp(p, "MIG-", 4)) p += 4;
    long i = strtol(p, &after, 10);
    if (after == p || i < 0 || i >= there || seen[i]) break;
    seen[i] = true;
    add_device((int)i);
    p = *after == ',' ? after + 1 : after;
  }
  read_failing_operation();
  /* KVGPU_ATTRIBUTES="124=0,118=100" for all devices: numbers of CU_DEVICE_ATTRIBUTE_... */
  for (const char *p = getenv("KVGPU_ATTRIBUTES"); p && *p;) {
    char *after;
    unsigned long number = strtoul(p, &after, 10);
    if (*after != '=' || number >= ATTRIBUTES_MAX) {
      violation("KVGPU_ATTRIBUTES: \"%s\" is not NUMBER=VALUE", p);
      break;
    }
    int value = (int)strtol(after + 1, &after, 10);
    for (int i = 0; i < device_count; i++) devices[i].attributes[number] = value;
    p = *after == ',' ? after + 1 : after;
  }
}

EXPORT int kvgpu_attribute(int device, int attribute, int value) {
  if (attribute < 0 || attribute >= ATTRIBUTES_MAX) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&world);
  bool ok = is_device(device);
  if (ok) devices[device].attributes[attribute] = value;
  pthread_mutex_unlock(&world);
  return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult failing_operation(int dev) {
  struct device *d = &devices[dev];
  if (!d->operations_left || --d->operations_left) return CUDA_SUCCESS;
  d->sticky = d->failure;
  return d->sticky;
}

EXPORT int kvgpu_fail_operation(int device, uint64_t nth, int code) {
  if (!nth || !code) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&world);
  bool ok = is_device(device);
  if (ok) devices[device].operations_left = nth, devices[device].failure = (CUresult)code;
  pthread_mutex_unlock(&world);
  return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT void kvgpu_stick(int device, int code) {
  pthread_mutex_lock(&world);
  if (is_device(device)) devices[device].sticky = (CUresult)code;
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&world);
}

EXPORT void kvgpu_halt(int device, int on) {
  pthread_mutex_lock(&world);
  if (is_device(device)) devices[device].halted = on;
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&world);
}

EXPORT CUresult cuDeviceGetCount(int *count) {
  BEGIN(0);
  REQUIRE(count, CUDA_ERROR_INVALID_VALUE);
  *count = device_count;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  BEGIN(0);
  REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_device(ordinal), CUDA_ERROR_INVALID_DEVICE);
  *device = ordinal;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetName(char *name, int len, CUdevice dev) {
  BEGIN(0);
  REQUIRE(name && len > 0, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_device(dev), CUDA_ERROR_INVALID_DEVICE);
  snprintf(name, (size_t)len, "kvgpu double %d", devices[dev].physical);
  return leave(CUDA_SUCCESS);
}

static void write_uuid(CUuuid *uuid, CUdevice dev) {
  memcpy(uuid->bytes, "kvgpu-double-00", 16);
  uuid->bytes[15] = (char)devices[dev].physical;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) {
  BEGIN(0);
  REQUIRE(uuid, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_device(dev), CUDA_ERROR_INVALID_DEVICE);
  write_uuid(uuid, dev);
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev) {
  BEGIN(0);
  REQUIRE(uuid, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_device(dev), CUDA_ERROR_INVALID_DEVICE);
  write_uuid(uuid, dev);
  return leave(CUDA_SUCCESS);
}

static void write_place(char *out, size_t len, CUdevice dev) {
  const int *a = devices[dev].attributes;
  snprintf(out, len, "%04X:%02X:%02X.0", (unsigned)a[CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID], (unsigned)a[CU_DEVICE_ATTRIBUTE_PCI_BUS_ID], (unsigned)a[CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID]);
}

EXPORT CUresult cuDeviceGetPCIBusId(char *place, int len, CUdevice dev) {
  BEGIN(0);
  REQUIRE(place && len > 0, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_device(dev), CUDA_ERROR_INVALID_DEVICE);
  write_place(place, (size_t)len, dev);
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *dev, const char *place) {
  BEGIN(0);
  REQUIRE(dev && place, CUDA_ERROR_INVALID_VALUE);
  for (int i = 0; i < device_count; i++) {
    char own[16];
    write_place(own, sizeof own, i);
    if (strcasecmp(own, place)) continue;
    *dev = i;
    return leave(CUDA_SUCCESS);
  }
  return leave(CUDA_ERROR_INVALID_DEVICE);
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice dev) {
  BEGIN(0);
  REQUIRE(value && (unsigned)attribute > 0 && (unsigned)attribute < CU_DEVICE_ATTRIBUTE_MAX && (unsigned)attribute < ATTRIBUTES_MAX, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_device(dev), CUDA_ERROR_INVALID_DEVICE);
  *value = devices[dev].attributes[attribute];
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
  BEGIN(0);
  REQUIRE(bytes, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_device(dev), CUDA_ERROR_INVALID_DEVICE);
  *bytes = (size_t)80 << 30;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer) {
  BEGIN(0);
  REQUIRE(can, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(is_device(dev) && is_device(peer), CUDA_ERROR_INVALID_DEVICE);
  *can = dev != peer && !has_ipc_mode("apart");
  return leave(CUDA_SUCCESS);
}
