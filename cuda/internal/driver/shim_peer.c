/* Memory of another process of this host: what its owner gives away, and how another process opens it. */
#include <fcntl.h>
#include <string.h>

#include "shim_lib.h"

_Static_assert(KVG_IPC_BYTES == sizeof(struct kv_ipc_handle), "the size of a handle");

#define NEED(name) \
  if (kvg_lib.name == NULL) return (kvg_status){KVG_ABSENT, KVG_CALL_##name}

kvg_status kvg_ipc_get(struct kvg_device *d, uint64_t base, void *handle) {
  struct kvg_entry e;
  struct kv_ipc_handle h;
  NEED(ipc_get);
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(ipc_get, &h, base);
  if (s.code == 0) memcpy(handle, &h, sizeof h);
  kvg_leave(&e);
  return s;
}

/* What was opened at an address: from there to its end. Only memory that is mapped by handles needs the block to be told from another. */
static kvg_status describe(uint64_t addr, int mapped, struct kvg_memory *out) {
  kv_ptr base = 0;
  size_t size = 0;
  *out = (struct kvg_memory){.device = -1};
  kvg_status s = KVG_TRY(memory_range, &base, &size, addr);
  if (s.code == 0) s = KVG_TRY(pointer_attribute, &out->id, KV_POINTER_BUFFER_ID, addr);
  if (s.code == 0 && mapped && kvg_lib.pointer_attribute(&out->block, KV_POINTER_BLOCK_ID, addr) != KV_SUCCESS) out->block = 0;
  if (s.code == 0 && kvg_lib.pointer_attribute(&out->device, KV_POINTER_DEVICE, addr) != KV_SUCCESS) out->device = -1;
  if (s.code == 0) out->base = addr, out->size = base + size - addr;
  return s;
}

kvg_status kvg_ipc_open(struct kvg_device *d, const void *handle, struct kvg_memory *out) {
  struct kvg_entry e;
  struct kv_ipc_handle h;
  kv_ptr at = 0;
  NEED(ipc_open);
  NEED(ipc_close);
  memcpy(&h, handle, sizeof h);
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(ipc_open, &at, h, KV_IPC_PEER_ACCESS);
  if (s.code == 0) {
    s = describe(at, 0, out);
    if (s.code != 0) kvg_lib.ipc_close(at);
  }
  kvg_leave(&e);
  return s;
}

kvg_status kvg_ipc_close(struct kvg_device *d, uint64_t base) {
  struct kvg_entry e;
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(ipc_close, base);
  kvg_leave(&e);
  return s;
}

kvg_status kvg_file_get(struct kvg_device *d, uint64_t addr, int *fd) {
  struct kvg_entry e;
  kv_handle handle;
  NEED(handle_export);
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(memory_retain, &handle, (void *)(uintptr_t)addr);
  if (s.code == 0) {
    s = KVG_TRY(handle_export, fd, handle, KV_HANDLE_FILE, 0);
    if (s.code == 0) fcntl(*fd, F_SETFD, FD_CLOEXEC);
    kvg_lib.memory_release(handle);
  }
  kvg_leave(&e);
  return s;
}

static kvg_status map_at(struct kvg_device *d, kv_handle handle, kv_ptr at, uint64_t bytes) {
  /* There is no way to map it for reading only that all drivers are known to have. kvconn never writes there. */
  struct kv_access access = {.location = {.type = KV_LOCATION_DEVICE, .id = d->ordinal}, .flags = KV_ACCESS_READ_WRITE};
  kvg_status s = KVG_TRY(memory_map, at, bytes, 0, handle, 0);
  if (s.code != 0) return s;
  s = KVG_TRY(memory_access, at, bytes, &access, 1);
  if (s.code != 0) kvg_lib.memory_unmap(at, bytes);
  return s;
}

/* The mapping keeps the memory when the handle is released. */
static kvg_status map(struct kvg_device *d, kv_handle handle, uint64_t bytes, struct kvg_memory *out) {
  kv_ptr at = 0;
  kvg_status s = KVG_TRY(address_reserve, &at, bytes, 0, 0, 0);
  if (s.code != 0) return s;
  s = map_at(d, handle, at, bytes);
  if (s.code == 0) {
    s = describe(at, 1, out);
    if (s.code != 0) kvg_lib.memory_unmap(at, bytes);
  }
  if (s.code != 0) kvg_lib.address_free(at, bytes);
  return s;
}

kvg_status kvg_file_open(struct kvg_device *d, int fd, uint64_t bytes, struct kvg_memory *out) {
  struct kvg_entry e;
  kv_handle handle;
  NEED(handle_import);
  NEED(address_reserve);
  NEED(address_free);
  NEED(memory_map);
  NEED(memory_unmap);
  NEED(memory_access);
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(handle_import, &handle, (void *)(intptr_t)fd, KV_HANDLE_FILE);
  if (s.code == 0) {
    s = map(d, handle, bytes, out);
    kvg_lib.memory_release(handle);
  }
  kvg_leave(&e);
  return s;
}

kvg_status kvg_file_close(struct kvg_device *d, uint64_t base, uint64_t bytes) {
  struct kvg_entry e;
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(memory_unmap, base, bytes);
  if (s.code == 0) s = KVG_TRY(address_free, base, bytes);
  kvg_leave(&e);
  return s;
}
