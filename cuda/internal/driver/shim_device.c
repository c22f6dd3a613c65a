#include <stdlib.h>

#include "shim_lib.h"

kvg_status kvg_count(int *n) {
  struct kvg_entry e;
  kvg_relax(&e);
  kvg_status s = KVG_TRY(device_count, n);
  kvg_restore(&e);
  return s;
}

static kvg_status inform(int ordinal, struct kvg_info *out) {
  kv_device d;
  struct kv_uuid uuid;
  unsigned flags;
  kvg_status s = KVG_TRY(device_get, &d, ordinal);
  if (s.code == 0) s = KVG_TRY(device_name, out->name, sizeof out->name, d);
  if (s.code == 0) s = KVG_TRY(device_uuid, &uuid, d);
  if (s.code == 0) s = KVG_TRY(device_pci, out->pci, sizeof out->pci, d);
  if (s.code == 0) s = KVG_TRY(primary_state, d, &flags, &out->active);
  if (s.code != 0) return s;
  for (int i = 0; i < 16; i++) out->uuid[i] = (uint8_t)uuid.bytes[i];
  const struct {
    int32_t *to;
    unsigned which;
  } attributes[] = {
      {&out->major, KV_DEVICE_COMPUTE_MAJOR},          {&out->minor, KV_DEVICE_COMPUTE_MINOR},
      {&out->unified, KV_DEVICE_UNIFIED_ADDRESSING},   {&out->rdma, KV_DEVICE_RDMA_SUPPORTED},
      {&out->flush_options, KV_DEVICE_FLUSH_OPTIONS},  {&out->writes_ordering, KV_DEVICE_WRITES_ORDERING},
      {&out->dma_buf, KV_DEVICE_DMA_BUF_SUPPORTED},
  };
  for (unsigned i = 0; i < sizeof attributes / sizeof *attributes; i++) /* 0 where the driver does not know it */
    if (kvg_lib.device_attribute(attributes[i].to, attributes[i].which, d) != KV_SUCCESS) *attributes[i].to = 0;
  return KVG_DONE;
}

kvg_status kvg_inform(int ordinal, struct kvg_info *out) {
  struct kvg_entry e;
  kvg_relax(&e);
  kvg_status s = inform(ordinal, out);
  kvg_restore(&e);
  return s;
}

/* Takes part in a primary context that is active. To retain an inactive one would make it: half a gigabyte on the device. */
static kvg_status take_primary(int ordinal, kv_device *d, kv_context *context) {
  unsigned flags;
  int active = 0;
  struct kvg_entry e;
  kvg_relax(&e);
  kvg_status s = KVG_TRY(device_get, d, ordinal);
  if (s.code == 0) s = KVG_TRY(primary_state, *d, &flags, &active);
#ifdef KVCONN_FAULTS
  if (kvg_fault("gpu-context-made")) active = 1;
#endif
  if (s.code == 0 && !active) s = KVG_OWN(KVG_INACTIVE);
  if (s.code == 0) s = KVG_TRY(primary_retain, context, *d);
  kvg_restore(&e);
  return s;
}

static kvg_status leave_primary(kv_device d) {
  struct kvg_entry e;
  kvg_relax(&e);
  kvg_status s = KVG_TRY(primary_release, d);
  kvg_restore(&e);
  return s;
}

/* No two open handles have the same number. The numbers of their moments are never given twice. */
static pthread_mutex_t numbers_lock = PTHREAD_MUTEX_INITIALIZER;
static char numbers[256];
static int take_number(void) {
  pthread_mutex_lock(&numbers_lock);
  int n = 1;
  while (n < 256 && numbers[n]) n++;
  if (n < 256) numbers[n] = 1;
  pthread_mutex_unlock(&numbers_lock);
  return n < 256 ? n : 0;
}
static void give_number(int n) {
  pthread_mutex_lock(&numbers_lock);
  numbers[n] = 0;
  pthread_mutex_unlock(&numbers_lock);
}

kvg_status kvg_open(int ordinal, int moments, int kernel, struct kvg_device **out) {
  struct kvg_device *d = calloc(1, sizeof *d);
  if (d == NULL) return KVG_OWN(KVG_NO_MEMORY);
  kvg_status s = take_primary(ordinal, &d->ordinal, &d->context);
  if (s.code != 0) {
    free(d);
    return s;
  }
  d->number = take_number();
  if (d->number == 0 || !kvg_moments_open(d, moments)) {
    if (d->number != 0) give_number(d->number);
    leave_primary(d->ordinal);
    free(d);
    return KVG_OWN(KVG_NO_MEMORY);
  }
  struct kvg_entry e;
  if (kernel) d->no_kernel = kvg_enter(d->context, &e);
  if (kernel && d->no_kernel.code == 0) {
    kvg_kernel_open(d);
    kvg_leave(&e);
  }
  *out = d;
  return KVG_DONE;
}

kvg_status kvg_close(struct kvg_device *d) {
  pthread_mutex_lock(&d->lock);
  d->closed = 1;
  int waiters = d->waiters;
  pthread_mutex_unlock(&d->lock);
  if (waiters > 0) return KVG_OWN(KVG_BUSY);
  struct kvg_entry e;
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code == 0) kvg_kernel_close(d);
  kvg_moments_close(d); /* after a sticky error the calls fail, and the context's end frees all */
  if (s.code == 0) kvg_leave(&e);
  kvg_status r = leave_primary(d->ordinal);
  give_number(d->number);
  free(d);
  return kvg_first(s, r);
}

/* A device's address, in the device's context. */
static kvg_status locate_there(uint64_t addr, kv_context primary, struct kvg_memory *out) {
  kv_context owner = NULL;
  size_t size;
  kv_ptr base;
  unsigned rdma = 0;
  kvg_status s = KVG_TRY(pointer_attribute, &owner, KV_POINTER_CONTEXT, addr);
  if (s.code != 0) return s;
  if (owner != NULL) {
    out->kind = owner == primary ? KVG_ALLOCATED : KVG_OTHER_CONTEXT;
  } else {
    kv_handle handle;
    void *pool = NULL;
    if (kvg_lib.memory_retain(&handle, (void *)(uintptr_t)addr) == KV_SUCCESS) {
      struct kv_memory_properties p = {0};
      s = KVG_TRY(memory_properties, &p, handle);
      s = kvg_first(s, KVG_TRY(memory_release, handle));
      if (s.code != 0) return s;
      out->kind = p.location.type == KV_LOCATION_DEVICE ? KVG_VMM : KVG_ELSEWHERE;
      out->files = (p.handle_types & KV_HANDLE_FILE) != 0;
    } else if (kvg_lib.pointer_attribute(&pool, KV_POINTER_POOL, addr) == KV_SUCCESS && pool != NULL) {
      out->kind = KVG_POOL;
    } else {
      out->kind = KVG_ODD;
    }
  }
  s = KVG_TRY(memory_range, &base, &size, addr);
  if (s.code == 0) s = KVG_TRY(pointer_attribute, &out->id, KV_POINTER_BUFFER_ID, addr);
  if (s.code != 0) return s;
  out->base = base, out->size = size;
  if (out->kind != KVG_VMM || kvg_lib.pointer_attribute(&out->block, KV_POINTER_BLOCK_ID, addr) != KV_SUCCESS) out->block = 0;
  if (kvg_lib.pointer_attribute(&rdma, KV_POINTER_RDMA_CAPABLE, addr) != KV_SUCCESS) rdma = 0;
  out->rdma = (int32_t)rdma;
  return KVG_DONE;
}

/* Says whose the address is, asked in any context. */
static kvg_status locate_any(uint64_t addr, kv_context any, struct kvg_memory *out) {
  (void)any;
  unsigned type = 0, managed = 0;
  kvg_status s = KVG_TRY(pointer_attribute, &type, KV_POINTER_MEMORY_TYPE, addr);
  if (s.code == KV_INVALID_VALUE) {
    out->kind = KVG_PAGEABLE;
    return KVG_DONE;
  }
  if (s.code != 0) return s;
  if (kvg_lib.pointer_attribute(&managed, KV_POINTER_IS_MANAGED, addr) == KV_SUCCESS && managed) {
    out->kind = KVG_MANAGED;
    return KVG_DONE;
  }
  out->kind = type == KV_MEMORY_HOST ? KVG_HOST : type == KV_MEMORY_DEVICE ? KVG_ALLOCATED : KVG_ODD;
  return out->kind == KVG_ALLOCATED ? KVG_TRY(pointer_attribute, &out->device, KV_POINTER_DEVICE, addr) : KVG_DONE;
}

/* What an address is, told by one device. KVG_INACTIVE if that has no context. */
static kvg_status locate_by(int ordinal, uint64_t addr, kvg_status (*ask)(uint64_t, kv_context, struct kvg_memory *), struct kvg_memory *out) {
  kv_device d;
  kv_context context;
  struct kvg_entry e;
  kvg_status s = take_primary(ordinal, &d, &context);
  if (s.code != 0) return s;
  s = kvg_enter(context, &e);
  if (s.code == 0) {
    s = ask(addr, context, out);
    kvg_leave(&e);
  }
  leave_primary(d);
  return s;
}

kvg_status kvg_locate(uint64_t addr, struct kvg_memory *out) {
  int devices = 0;
  kvg_status s = kvg_count(&devices);
  if (s.code != 0) return s;
  *out = (struct kvg_memory){.device = -1};
  s = KVG_OWN(KVG_INACTIVE);
  for (int i = 0; i < devices && s.code == KVG_INACTIVE; i++) s = locate_by(i, addr, locate_any, out);
  if (s.code != 0 || out->kind != KVG_ALLOCATED) return s;
  return locate_by(out->device, addr, locate_there, out);
}

static kvg_status is_same(const struct kvg_piece *p, int *same) {
  unsigned long long id = 0, block = 0;
  *same = 0;
  kvg_status s = KVG_TRY(pointer_attribute, &id, KV_POINTER_BUFFER_ID, p->addr);
  if (s.code == 0 && p->block != 0) s = KVG_TRY(pointer_attribute, &block, KV_POINTER_BLOCK_ID, p->addr);
  if (s.code == KV_INVALID_VALUE) return KVG_DONE; /* nothing is there any more */
  *same = s.code == 0 && id == p->id && block == p->block;
  return s;
}

kvg_status kvg_same(struct kvg_device *d, const struct kvg_piece *pieces, int n, int *same) {
  struct kvg_entry e;
  int is = 1;
  *same = 0;
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  while (*same < n && s.code == 0 && is) {
    s = is_same(&pieces[*same], &is);
    if (is) ++*same;
  }
  kvg_leave(&e);
  return s;
}

kvg_status kvg_export(struct kvg_device *d, uint64_t addr, uint64_t bytes, int *fd) {
  struct kvg_entry e;
  if (kvg_lib.memory_export == NULL) return (kvg_status){KVG_ABSENT, KVG_CALL_memory_export};
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(memory_export, fd, addr, bytes, KV_RANGE_DMA_BUF, 0);
  kvg_leave(&e);
  return s;
}

kvg_status kvg_flush(struct kvg_device *d) {
  struct kvg_entry e;
  if (kvg_lib.flush_writes == NULL) return (kvg_status){KVG_ABSENT, KVG_CALL_flush_writes};
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(flush_writes, KV_FLUSH_CURRENT_CONTEXT, KV_FLUSH_TO_OWNER);
  kvg_leave(&e);
  return s;
}

kvg_status kvg_alloc(struct kvg_device *d, uint64_t bytes, uint64_t *addr) {
  struct kvg_entry e;
  kv_ptr p = 0;
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(memory_alloc, &p, bytes);
  *addr = p;
  kvg_leave(&e);
  return s;
}

kvg_status kvg_free(struct kvg_device *d, uint64_t addr) {
  struct kvg_entry e;
  kvg_status s = kvg_enter(d->context, &e);
  if (s.code != 0) return s;
  s = KVG_TRY(memory_free, addr);
  kvg_leave(&e);
  return s;
}
