/* What a pointer is. */
#include "double.h"

#include <string.h>

static CUresult of_device(const struct mem *m, CUpointer_attribute attribute, void *out) {
  switch (attribute) {
  case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = m->ctx; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = CU_MEMORYTYPE_DEVICE; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)out = 0; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)out = m->id; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)out = m->kind == MANAGED; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = m->dev; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned *)out = m->kind == LINEAR || m->kind == EXPOSED; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)out = m->at; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = m->len; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned *)out = 1; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)out = m->handle_types; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(unsigned *)out = m->rdma; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: *(unsigned long long *)out = m->kind == MAPPED ? m->handle : m->id; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)out = m->kind == POOLED ? (CUmemoryPool)&devices[m->dev] : NULL; return CUDA_SUCCESS;
  default: return CUDA_ERROR_INVALID_VALUE;
  }
}

static CUresult of_host(const struct pin *q, CUpointer_attribute attribute, CUdeviceptr p, void *out) {
  switch (attribute) {
  case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = q->ctx; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = CU_MEMORYTYPE_HOST; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = p; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(void **)out = (void *)p; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)out = q->id; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)out = 0; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = q->ctx->dev; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned *)out = 0; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)out = (CUdeviceptr)q->at; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = q->len; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned *)out = 1; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)out = 0; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(unsigned *)out = 0; return CUDA_SUCCESS;
  default: return CUDA_ERROR_INVALID_VALUE;
  }
}

static CUresult attribute_of(CUdeviceptr p, CUpointer_attribute attribute, void *out) {
  struct mem *m = find_memory(p);
  if (m && m->kind == MANAGED && (attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER || attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)) {
    *(CUdeviceptr *)out = p;
    return CUDA_SUCCESS;
  }
  if (m && attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    *(CUdeviceptr *)out = p;
    return CUDA_SUCCESS;
  }
  if (m && attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR && m->kind == MAPPED) return reservation_of(p, out, NULL);
  if (m && attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE && m->kind == MAPPED) return reservation_of(p, NULL, out);
  if (m) return of_device(m, attribute, out);
  struct pin *q = find_pin((void *)p);
  return q ? of_host(q, attribute, p, out) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr p) {
  BEGIN(0);
  REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
  return leave(attribute_of(p, attribute, out));
}

/* Asked for several, an unknown pointer is no error: each answer is a zero of its size. */
static void clear(CUpointer_attribute attribute, void *out) {
  switch (attribute) {
  case CU_POINTER_ATTRIBUTE_CONTEXT:
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
  case CU_POINTER_ATTRIBUTE_HOST_POINTER:
  case CU_POINTER_ATTRIBUTE_BUFFER_ID:
  case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
  case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
  case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: memset(out, 0, 8); return;
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = -2; return;
  default: memset(out, 0, 4);
  }
}

EXPORT CUresult cuPointerGetAttributes(unsigned int n, CUpointer_attribute *attributes, void **out, CUdeviceptr p) {
  BEGIN(0);
  REQUIRE(n && attributes && out, CUDA_ERROR_INVALID_VALUE);
  for (unsigned i = 0; i < n; i++) {
    REQUIRE((unsigned)attributes[i] > 0 && (unsigned)attributes[i] <= CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, CUDA_ERROR_INVALID_VALUE);
    if (attribute_of(p, attributes[i], out[i])) clear(attributes[i], out[i]);
  }
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr p) {
  BEGIN(0);
  const struct mem *m = find_memory(p);
  REQUIRE(value && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS && m, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(m->kind == LINEAR, CUDA_ERROR_INVALID_VALUE); /* it cannot be set for mapped memory */
  return leave(CUDA_SUCCESS);
}
