#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shim_lib.h"

#define SAME(ours, theirs)                                                                         \
  _Static_assert(offsetof(struct vb_gid, ours) == offsetof(struct kv_ibv_gid_entry, theirs) &&     \
                     sizeof(((struct vb_gid *)0)->ours) == sizeof(((struct kv_ibv_gid_entry *)0)->theirs), \
                 "vb_gid." #ours)
SAME(gid, gid);
SAME(index, gid_index);
SAME(port, port_num);
SAME(type, gid_type);
SAME(ifindex, ndev_ifindex);
_Static_assert(sizeof(struct vb_gid) == sizeof(struct kv_ibv_gid_entry), "vb_gid");

/* ---- devices and ports ---- */

int vb_devices(struct vb_device **list, int *n) {
  int found = 0;
  *n = 0;
  *list = NULL;
  errno = 0;
  struct kv_ibv_device **all = vb_lib.get_device_list(&found);
  if (all == NULL) return vb_failed();
  struct vb_device *out = calloc(found + 1, sizeof *out);
  if (out == NULL) {
    vb_lib.free_device_list(all);
    return ENOMEM;
  }
  for (int i = 0; i < found; i++) {
    struct kv_ibv_device *d = all[i];
    snprintf(out[i].name, sizeof out[i].name, "%s", vb_lib.get_device_name(d));
    snprintf(out[i].file, sizeof out[i].file, "%s", d->dev_name);
    snprintf(out[i].sys_path, sizeof out[i].sys_path, "%s", d->ibdev_path);
    out[i].transport = d->transport_type;
  }
  vb_lib.free_device_list(all);
  *list = out;
  *n = found;
  return 0;
}

struct kv_ibv_context *vb_open(const char *name) {
  struct kv_ibv_context *ctx = NULL;
  struct kv_ibv_device **all = vb_lib.get_device_list(NULL);
  if (all == NULL) return NULL;
  int err = ENODEV;
  for (struct kv_ibv_device **d = all; *d != NULL; d++) {
    if (strcmp(vb_lib.get_device_name(*d), name) != 0) continue;
    errno = 0;
    ctx = vb_lib.open_device(*d);
    err = ctx == NULL ? vb_failed() : vb_nonblocking(ctx->async_fd);
    break;
  }
  vb_lib.free_device_list(all);
  if (ctx != NULL && err != 0) {
    vb_lib.close_device(ctx);
    ctx = NULL;
  }
  errno = err;
  return ctx;
}

int vb_close(struct kv_ibv_context *ctx) { return vb_code(vb_lib.close_device(ctx)); }
int vb_async_fd(struct kv_ibv_context *ctx) { return ctx->async_fd; }

int vb_query_device(struct kv_ibv_context *ctx, struct vb_attr *a) {
  struct kv_ibv_device_attr d;
  memset(&d, 0, sizeof d);
  int err = vb_code(vb_lib.query_device(ctx, &d));
  if (err != 0) return err;
  *a = (struct vb_attr){
      .max_mr_size = d.max_mr_size, .max_mr = d.max_mr,   .max_pd = d.max_pd,
      .max_qp = d.max_qp,           .max_qp_wr = d.max_qp_wr, .max_sge = d.max_sge,
      .max_cq = d.max_cq,           .max_cqe = d.max_cqe, .ports = d.phys_port_cnt,
      .vectors = ctx->num_comp_vectors,
  };
  snprintf(a->firmware, sizeof a->firmware, "%.*s", (int)sizeof d.fw_ver, d.fw_ver);
  return 0;
}

/* The driver's query_port, or NULL where the driver is too old to have one. */
static struct kv_ibv_extension *with_query_port(struct kv_ibv_context *ctx) {
  if ((uintptr_t)ctx->extended != UINTPTR_MAX) return NULL;
  struct kv_ibv_extension *x = (void *)((char *)ctx - offsetof(struct kv_ibv_extension, context));
  return x->size >= sizeof *x && x->query_port != NULL ? x : NULL;
}

int vb_query_port(struct kv_ibv_context *ctx, int port, struct vb_port *p) {
  struct kv_ibv_port_attr a;
  memset(&a, 0, sizeof a);
  struct kv_ibv_extension *x = with_query_port(ctx);
  int err = x != NULL ? x->query_port(ctx, port, &a, sizeof a)
                      : vb_lib.query_port(ctx, port, (struct kv_ibv_port_attr_old *)&a);
  if (err != 0) return vb_code(err);
  *p = (struct vb_port){
      .state = a.state, .link_layer = a.link_layer, .active_mtu = a.active_mtu, .gids = a.gid_tbl_len,
      .lid = a.lid, .width = a.active_width, .speed = a.active_speed,
  };
  return 0;
}

int vb_gid_table(struct kv_ibv_context *ctx, struct vb_gid *list, int max, int *n) {
  errno = 0;
  ssize_t found = vb_lib.query_gid_table(ctx, (struct kv_ibv_gid_entry *)list, max, 0, sizeof *list);
  *n = found < 0 ? 0 : (int)found;
  return found < 0 ? vb_code((int)found) : 0;
}

int vb_query_gid(struct kv_ibv_context *ctx, int port, int index, uint8_t gid[16]) {
  union kv_ibv_gid g;
  errno = 0;
  if (vb_lib.query_gid(ctx, port, index, &g) != 0) return vb_failed();
  memcpy(gid, g.raw, sizeof g.raw);
  return 0;
}

int vb_next_event(struct kv_ibv_context *ctx, struct vb_event *e) {
  struct kv_ibv_async_event a;
  int rc;
  do {
    errno = 0;
    rc = vb_lib.get_async_event(ctx, &a);
  } while (rc != 0 && errno == EINTR); /* the poller tells of new events only, so none may be left */
  if (rc != 0) return vb_failed();
  *e = (struct vb_event){.type = a.event_type};
  switch (a.event_type) {
  case KV_IBV_EVENT_QP_FATAL:
  case KV_IBV_EVENT_QP_REQ_ERR:
  case KV_IBV_EVENT_QP_ACCESS_ERR:
  case KV_IBV_EVENT_COMM_EST:
  case KV_IBV_EVENT_SQ_DRAINED:
  case KV_IBV_EVENT_PATH_MIG:
  case KV_IBV_EVENT_PATH_MIG_ERR:
  case KV_IBV_EVENT_QP_LAST_WQE_REACHED:
    e->qp = a.element.qp->qp_num; /* the queue pair is there until the event is acknowledged: ibv_destroy_qp waits for that */
    break;
  case KV_IBV_EVENT_PORT_ACTIVE:
  case KV_IBV_EVENT_PORT_ERR:
  case KV_IBV_EVENT_LID_CHANGE:
  case KV_IBV_EVENT_PKEY_CHANGE:
  case KV_IBV_EVENT_SM_CHANGE:
  case KV_IBV_EVENT_CLIENT_REREGISTER:
  case KV_IBV_EVENT_GID_CHANGE:
    e->port = a.element.port_num;
    break;
  default:
    break;
  }
  vb_lib.ack_async_event(&a);
  return 0;
}

/* ---- memory ---- */

struct kv_ibv_pd *vb_alloc_pd(struct kv_ibv_context *ctx) { return vb_lib.alloc_pd(ctx); }
int vb_dealloc_pd(struct kv_ibv_pd *pd) { return vb_gone(vb_lib.dealloc_pd(pd)); }

struct kv_ibv_mr *vb_register(struct kv_ibv_pd *pd, uintptr_t addr, uint64_t length, uint32_t access) {
  /* Only this entry masks what the kernel does not know of the optional flags. */
  if (access & KV_IBV_ACCESS_OPTIONAL_RANGE) return vb_lib.reg_mr_iova2(pd, (void *)addr, length, addr, access);
  return vb_lib.reg_mr(pd, (void *)addr, length, (int)access);
}
struct kv_ibv_mr *vb_register_dmabuf(struct kv_ibv_pd *pd, int fd, uint64_t offset, uint64_t length, uint64_t iova, uint32_t access) {
  if (vb_lib.reg_dmabuf_mr == NULL) return errno = ENOSYS, NULL;
  return vb_lib.reg_dmabuf_mr(pd, offset, length, iova, fd, (int)(access & ~(uint32_t)KV_IBV_ACCESS_OPTIONAL_RANGE));
}
int vb_deregister(struct kv_ibv_mr *mr) { return vb_gone(vb_lib.dereg_mr(mr)); }
void vb_keys(struct kv_ibv_mr *mr, uint32_t *lkey, uint32_t *rkey) {
  *lkey = mr->lkey;
  *rkey = mr->rkey;
}
