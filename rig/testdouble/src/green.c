/* Green contexts: a part of a device's multiprocessors, here always all of them. A green context's streams are its own, as another context's
 * are: no driver says that an event of the primary context can be recorded on them, so the double refuses it. */
#include "double.h"

#if CUDA_VERSION >= 12050 && !defined(KVGPU_OLD)
static struct CUdevResourceDesc_st {
  int dev;
} whole[DEVICES_MAX];

EXPORT CUresult cuDeviceGetDevResource(CUdevice dev, CUdevResource *out, CUdevResourceType type) {
  BEGIN(0);
  REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(dev >= 0 && dev < device_count, CUDA_ERROR_INVALID_DEVICE);
  REQUIRE(type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
  *out = (CUdevResource){.type = type};
  out->_internal_padding[0] = (unsigned char)dev;
  out->sm.smCount = (unsigned)devices[dev].attributes[CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT];
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources, unsigned int n) {
  BEGIN(0);
  REQUIRE(out && resources && n, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(n == 1, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
  REQUIRE(resources->type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
  int dev = resources->_internal_padding[0];
  REQUIRE(dev < device_count, CUDA_ERROR_INVALID_VALUE);
  whole[dev].dev = dev;
  *out = &whole[dev];
  return leave(CUDA_SUCCESS);
}

static CUcontext context_of(CUgreenCtx g) {
  CUcontext c = (CUcontext)g;
  return c && is_context(c) && c->green ? c : NULL;
}

EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc desc, CUdevice dev, unsigned int flags) {
  BEGIN(UNSAFE);
  REQUIRE(out && flags == CU_GREEN_CTX_DEFAULT_STREAM, CUDA_ERROR_INVALID_VALUE); /* older drivers want the flag */
  REQUIRE(dev >= 0 && dev < device_count, CUDA_ERROR_INVALID_DEVICE);
  REQUIRE(desc == &whole[dev] && desc->dev == dev, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(!devices[dev].sticky, devices[dev].sticky);
  retain_primary(dev);
  CUcontext c = new_context(dev, 0);
  c->green = true;
  *out = (CUgreenCtx)c;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx g) {
  BEGIN(UNSAFE | AFTER_ERROR);
  CUcontext c = context_of(g);
  REQUIRE(c, CUDA_ERROR_INVALID_CONTEXT);
  end_context(c);
  release_primary(c->dev);
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxFromGreenCtx(CUcontext *out, CUgreenCtx g) {
  BEGIN(0);
  REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
  CUcontext c = context_of(g);
  REQUIRE(c, CUDA_ERROR_INVALID_CONTEXT);
  *out = c;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuGreenCtxStreamCreate(CUstream *out, CUgreenCtx g, unsigned int flags, int priority) {
  BEGIN(UNSAFE);
  REQUIRE(out && flags == CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
  CUcontext c = context_of(g);
  REQUIRE(c, CUDA_ERROR_INVALID_CONTEXT);
  *out = new_stream(c, flags, priority);
  return leave(CUDA_SUCCESS);
}
#endif
