#define _GNU_SOURCE
#include "shim.h"

#include <arpa/inet.h>
#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SAME(a, fa, b, fb)                                                                            \
  _Static_assert(offsetof(a, fa) == offsetof(b, fb) && sizeof(((a *)0)->fa) == sizeof(((b *)0)->fb), \
                 #a "." #fa " and " #b "." #fb " differ")
SAME(struct vb_sge, addr, struct ibv_sge, addr);
SAME(struct vb_sge, length, struct ibv_sge, length);
SAME(struct vb_sge, lkey, struct ibv_sge, lkey);
_Static_assert(sizeof(struct vb_sge) == sizeof(struct ibv_sge), "vb_sge");
SAME(struct vb_gid, gid, struct ibv_gid_entry, gid);
SAME(struct vb_gid, index, struct ibv_gid_entry, gid_index);
SAME(struct vb_gid, port, struct ibv_gid_entry, port_num);
SAME(struct vb_gid, type, struct ibv_gid_entry, gid_type);
SAME(struct vb_gid, ifindex, struct ibv_gid_entry, ndev_ifindex);
_Static_assert(sizeof(struct vb_gid) == sizeof(struct ibv_gid_entry), "vb_gid");
_Static_assert(sizeof(struct vb_write) == 32 && sizeof(struct vb_completion) == 32, "no padding");
_Static_assert((int)VB_RESET == (int)IBV_QPS_RESET && (int)VB_RTS == (int)IBV_QPS_RTS && (int)VB_ERR == (int)IBV_QPS_ERR, "states");

/*
 * The library's functions: our name, theirs, the version of the symbol. dlsym
 * without a version could give the 1.0 one of an early libibverbs, with other
 * structs. ibv_fork_init is left out on purpose: it would take registered
 * memory, the engine's KV pool, away from every child that the host forks
 * (MADV_DONTFORK); since Linux 5.12 a fork copies pinned pages by itself.
 */
#define NEEDED(X)                                                    \
  X(get_device_list, ibv_get_device_list, "IBVERBS_1.1")             \
  X(free_device_list, ibv_free_device_list, "IBVERBS_1.1")           \
  X(get_device_name, ibv_get_device_name, "IBVERBS_1.1")             \
  X(get_device_guid, ibv_get_device_guid, "IBVERBS_1.1")             \
  X(open_device, ibv_open_device, "IBVERBS_1.1")                     \
  X(close_device, ibv_close_device, "IBVERBS_1.1")                   \
  X(query_device, ibv_query_device, "IBVERBS_1.1")                   \
  X(query_port, ibv_query_port, "IBVERBS_1.1")                       \
  X(query_gid, ibv_query_gid, "IBVERBS_1.1")                         \
  X(query_pkey, ibv_query_pkey, "IBVERBS_1.1")                       \
  X(alloc_pd, ibv_alloc_pd, "IBVERBS_1.1")                           \
  X(dealloc_pd, ibv_dealloc_pd, "IBVERBS_1.1")                       \
  X(reg_mr, ibv_reg_mr, "IBVERBS_1.1")                               \
  X(dereg_mr, ibv_dereg_mr, "IBVERBS_1.1")                           \
  X(create_comp_channel, ibv_create_comp_channel, "IBVERBS_1.0")     \
  X(destroy_comp_channel, ibv_destroy_comp_channel, "IBVERBS_1.0")   \
  X(create_cq, ibv_create_cq, "IBVERBS_1.1")                         \
  X(destroy_cq, ibv_destroy_cq, "IBVERBS_1.1")                       \
  X(get_cq_event, ibv_get_cq_event, "IBVERBS_1.1")                   \
  X(ack_cq_events, ibv_ack_cq_events, "IBVERBS_1.1")                 \
  X(create_qp, ibv_create_qp, "IBVERBS_1.1")                         \
  X(modify_qp, ibv_modify_qp, "IBVERBS_1.1")                         \
  X(query_qp, ibv_query_qp, "IBVERBS_1.1")                           \
  X(destroy_qp, ibv_destroy_qp, "IBVERBS_1.1")                       \
  X(get_async_event, ibv_get_async_event, "IBVERBS_1.1")             \
  X(ack_async_event, ibv_ack_async_event, "IBVERBS_1.1")
#define OPTIONAL(X)                                                  \
  X(reg_mr_iova2, ibv_reg_mr_iova2, "IBVERBS_1.8")                   \
  X(query_gid_table, _ibv_query_gid_table, "IBVERBS_1.11")

#define FIELD(ours, theirs, version) __typeof__(theirs) *ours;
struct table {
  NEEDED(FIELD)
  OPTIONAL(FIELD)
};
static struct table lib;

int vb_load(const char *name, char *reason, int size) {
  void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL); /* never closed: its drivers keep state in the process */
  if (handle == NULL) {
    const char *why = dlerror();
    snprintf(reason, size, "%s", why != NULL ? why : name);
    return ENOENT;
  }
  struct table t;
#define GET(ours, theirs, version) t.ours = (__typeof__(theirs) *)dlvsym(handle, #theirs, version);
  NEEDED(GET)
  OPTIONAL(GET)
#define CHECK(ours, theirs, version)                                           \
  if (t.ours == NULL) {                                                        \
    snprintf(reason, size, "%s has no %s of version %s", name, #theirs, version); \
    dlclose(handle);                                                           \
    return ENOSYS;                                                             \
  }
  NEEDED(CHECK)
  lib = t;
  return 0;
}

int vb_has_relaxed_ordering(void) { return lib.reg_mr_iova2 != NULL; }
int vb_has_gid_table(void) { return lib.query_gid_table != NULL; }

/* errno where a function of the library has failed; never 0. */
static int failed(void) { return errno != 0 ? errno : EIO; }

/* The status of functions that are documented to return errno, and return -1 or its negative with some drivers. */
static int code(int rc) { return rc == -1 ? failed() : rc < 0 ? -rc : rc; }

/*
 * The status of giving an object back. EIO: the device was taken out of the
 * machine, and the kernel has freed the object already; the library's few bytes
 * for it are lost.
 */
static int gone(int rc) { return code(rc) == EIO ? 0 : code(rc); }

static int nonblocking(int fd) {
  int flags = fcntl(fd, F_GETFL);
  return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? failed() : 0;
}

/* ---- devices and ports ---- */

int vb_devices(struct vb_device **list, int *n) {
  int found = 0;
  *n = 0;
  *list = NULL;
  errno = 0;
  struct ibv_device **all = lib.get_device_list(&found);
  if (all == NULL) return failed();
  struct vb_device *out = calloc(found + 1, sizeof *out);
  if (out == NULL) {
    lib.free_device_list(all);
    return ENOMEM;
  }
  for (int i = 0; i < found; i++) {
    struct ibv_device *d = all[i];
    snprintf(out[i].name, sizeof out[i].name, "%s", lib.get_device_name(d));
    snprintf(out[i].file, sizeof out[i].file, "%s", d->dev_name);
    snprintf(out[i].sys_path, sizeof out[i].sys_path, "%s", d->ibdev_path);
    out[i].guid = lib.get_device_guid(d);
    out[i].node_type = d->node_type;
    out[i].transport = d->transport_type;
  }
  lib.free_device_list(all);
  *list = out;
  *n = found;
  return 0;
}

struct ibv_context *vb_open(const char *name) {
  struct ibv_context *ctx = NULL;
  struct ibv_device **all = lib.get_device_list(NULL);
  if (all == NULL) return NULL;
  int err = ENODEV;
  for (struct ibv_device **d = all; *d != NULL; d++) {
    if (strcmp(lib.get_device_name(*d), name) != 0) continue;
    errno = 0;
    ctx = lib.open_device(*d);
    err = ctx == NULL ? failed() : nonblocking(ctx->async_fd);
    break;
  }
  lib.free_device_list(all);
  if (ctx != NULL && err != 0) {
    lib.close_device(ctx);
    ctx = NULL;
  }
  errno = err;
  return ctx;
}

int vb_close(struct ibv_context *ctx) { return code(lib.close_device(ctx)); }
int vb_async_fd(struct ibv_context *ctx) { return ctx->async_fd; }

int vb_query_device(struct ibv_context *ctx, struct vb_attr *a) {
  struct ibv_device_attr d;
  memset(&d, 0, sizeof d);
  int err = code(lib.query_device(ctx, &d));
  if (err != 0) return err;
  *a = (struct vb_attr){
      .max_mr_size = d.max_mr_size, .max_mr = d.max_mr,   .max_pd = d.max_pd,
      .max_qp = d.max_qp,           .max_qp_wr = d.max_qp_wr, .max_sge = d.max_sge,
      .max_cq = d.max_cq,           .max_cqe = d.max_cqe, .ports = d.phys_port_cnt,
      .vectors = ctx->num_comp_vectors, .vendor_id = d.vendor_id, .vendor_part = d.vendor_part_id,
  };
  snprintf(a->firmware, sizeof a->firmware, "%.*s", (int)sizeof d.fw_ver, d.fw_ver);
  return 0;
}

/* verbs.h's own ___ibv_query_port, which would need the library at link time. */
int vb_query_port(struct ibv_context *ctx, int port, struct vb_port *p) {
  struct ibv_port_attr a;
  memset(&a, 0, sizeof a);
  struct verbs_context *v = verbs_get_ctx_op(ctx, query_port);
  int err = v != NULL ? v->query_port(ctx, port, &a, sizeof a)
                      : lib.query_port(ctx, port, (struct _compat_ibv_port_attr *)&a);
  if (err != 0) return code(err);
  *p = (struct vb_port){
      .state = a.state, .link_layer = a.link_layer, .active_mtu = a.active_mtu, .gids = a.gid_tbl_len,
      .pkeys = a.pkey_tbl_len, .lid = a.lid, .sm_lid = a.sm_lid, .max_message = a.max_msg_sz,
      .width = a.active_width, .speed = a.active_speed,
  };
  return 0;
}

int vb_gid_table(struct ibv_context *ctx, struct vb_gid *list, int max, int *n) {
  errno = 0;
  ssize_t found = lib.query_gid_table(ctx, (struct ibv_gid_entry *)list, max, 0, sizeof *list);
  *n = found < 0 ? 0 : (int)found;
  return found < 0 ? code((int)found) : 0;
}

int vb_query_gid(struct ibv_context *ctx, int port, int index, uint8_t gid[16]) {
  union ibv_gid g;
  errno = 0;
  if (lib.query_gid(ctx, port, index, &g) != 0) return failed();
  memcpy(gid, g.raw, sizeof g.raw);
  return 0;
}

int vb_query_pkey(struct ibv_context *ctx, int port, int index, uint32_t *pkey) {
  __be16 k;
  errno = 0;
  if (lib.query_pkey(ctx, port, index, &k) != 0) return failed();
  *pkey = ntohs(k);
  return 0;
}

int vb_next_event(struct ibv_context *ctx, struct vb_event *e) {
  struct ibv_async_event a;
  int rc;
  do {
    errno = 0;
    rc = lib.get_async_event(ctx, &a);
  } while (rc != 0 && errno == EINTR); /* the poller tells of new events only, so none may be left */
  if (rc != 0) return failed();
  *e = (struct vb_event){.type = a.event_type};
  switch (a.event_type) {
  case IBV_EVENT_QP_FATAL:
  case IBV_EVENT_QP_REQ_ERR:
  case IBV_EVENT_QP_ACCESS_ERR:
  case IBV_EVENT_COMM_EST:
  case IBV_EVENT_SQ_DRAINED:
  case IBV_EVENT_PATH_MIG:
  case IBV_EVENT_PATH_MIG_ERR:
  case IBV_EVENT_QP_LAST_WQE_REACHED:
    e->qp = a.element.qp->qp_num; /* there until the event is acknowledged: ibv_destroy_qp waits for that */
    break;
  case IBV_EVENT_PORT_ACTIVE:
  case IBV_EVENT_PORT_ERR:
  case IBV_EVENT_LID_CHANGE:
  case IBV_EVENT_PKEY_CHANGE:
  case IBV_EVENT_SM_CHANGE:
  case IBV_EVENT_CLIENT_REREGISTER:
  case IBV_EVENT_GID_CHANGE:
    e->port = a.element.port_num;
    break;
  default:
    break;
  }
  lib.ack_async_event(&a);
  return 0;
}

/* ---- memory ---- */

struct ibv_pd *vb_alloc_pd(struct ibv_context *ctx) { return lib.alloc_pd(ctx); }
int vb_dealloc_pd(struct ibv_pd *pd) { return gone(lib.dealloc_pd(pd)); }

struct ibv_mr *vb_register(struct ibv_pd *pd, uintptr_t addr, uint64_t length, uint32_t access) {
  /* Only this entry masks what the kernel does not know of the optional flags. */
  if (access & IBV_ACCESS_OPTIONAL_RANGE) return lib.reg_mr_iova2(pd, (void *)addr, length, addr, access);
  return (lib.reg_mr)(pd, (void *)addr, length, (int)access);
}
int vb_deregister(struct ibv_mr *mr) { return gone(lib.dereg_mr(mr)); }
void vb_keys(struct ibv_mr *mr, uint32_t *lkey, uint32_t *rkey) {
  *lkey = mr->lkey;
  *rkey = mr->rkey;
}

/* ---- completion queues ---- */

struct vb_cq {
  struct ibv_comp_channel *channel;
  struct ibv_cq *cq;
  unsigned unacked; /* events taken and not acknowledged; ibv_destroy_cq waits for each */
};

/* An acknowledgement takes a mutex: many events share one. */
enum { ACK_BATCH = 64 };

struct vb_cq *vb_create_cq(struct ibv_context *ctx, int depth, int vector) {
  struct vb_cq *q = calloc(1, sizeof *q);
  if (q == NULL) return NULL;
  errno = 0;
  q->channel = lib.create_comp_channel(ctx);
  if (q->channel == NULL) goto free;
  int err = nonblocking(q->channel->fd);
  if (err != 0) {
    errno = err;
    goto channel;
  }
  q->cq = lib.create_cq(ctx, depth, NULL, q->channel, vector);
  if (q->cq != NULL) return q;
channel:
  err = failed();
  lib.destroy_comp_channel(q->channel);
  errno = err;
free:
  err = failed();
  free(q);
  errno = err;
  return NULL;
}

int vb_destroy_cq(struct vb_cq *q) {
  if (q->unacked > 0) lib.ack_cq_events(q->cq, q->unacked);
  q->unacked = 0;
  int err = gone(lib.destroy_cq(q->cq));
  if (err != 0) return err; /* EBUSY: a queue pair still uses it; nothing is freed */
  err = code(lib.destroy_comp_channel(q->channel));
  free(q);
  return err;
}

int vb_cq_fd(struct vb_cq *q) { return q->channel->fd; }
int vb_cq_depth(struct vb_cq *q) { return q->cq->cqe; }
int vb_arm(struct vb_cq *q) { return code(ibv_req_notify_cq(q->cq, 0)); }

int vb_take_events(struct vb_cq *q) {
  int n = 0, err;
  for (;;) {
    struct ibv_cq *cq;
    void *context;
    errno = 0;
    if (lib.get_cq_event(q->channel, &cq, &context) != 0) {
      err = failed();
      if (err == EINTR) continue;
      break;
    }
    n++;
    if (++q->unacked == ACK_BATCH) {
      lib.ack_cq_events(q->cq, q->unacked);
      q->unacked = 0;
    }
  }
  return n > 0 || err == EAGAIN ? n : -err;
}

int vb_poll(struct vb_cq *q, struct vb_completion *out, int max) {
  struct ibv_wc wc[32];
  int n = 0;
  while (n < max) {
    int want = max - n < 32 ? max - n : 32;
    int got = ibv_poll_cq(q->cq, want, wc);
    if (got < 0) return n > 0 ? n : -code(got);
    for (int i = 0; i < got; i++) {
      struct vb_completion *c = &out[n++];
      *c = (struct vb_completion){
          .id = wc[i].wr_id, .status = wc[i].status, .qp = wc[i].qp_num, .vendor = wc[i].vendor_err};
      if (wc[i].status != IBV_WC_SUCCESS) continue; /* nothing else is valid then */
      c->opcode = wc[i].opcode;
      c->bytes = wc[i].byte_len;
      if (wc[i].wc_flags & IBV_WC_WITH_IMM) c->imm = ntohl(wc[i].imm_data);
    }
    if (got < want) break;
  }
  return n;
}

/* ---- queue pairs ---- */

struct vb_qp {
  struct ibv_qp *qp;
  int depth;      /* of wr */
  int max_pieces;
  struct ibv_send_wr wr[]; /* each linked to the next */
};

struct vb_qp *vb_create_qp(struct ibv_pd *pd, struct vb_cq *cq, struct vb_caps *caps) {
  struct vb_qp *q = calloc(1, sizeof *q + caps->send_depth * sizeof q->wr[0]);
  if (q == NULL) return NULL;
  struct ibv_qp_init_attr a = {
      .send_cq = cq->cq,
      .recv_cq = cq->cq,
      .qp_type = IBV_QPT_RC,
      .cap = {.max_send_wr = caps->send_depth,
              .max_recv_wr = caps->receive_depth,
              .max_send_sge = caps->pieces,
              .max_recv_sge = 1,
              .max_inline_data = caps->inline_bytes},
  };
  errno = 0;
  q->qp = lib.create_qp(pd, &a);
  if (q->qp == NULL) {
    int err = failed();
    free(q);
    errno = err;
    return NULL;
  }
  q->depth = caps->send_depth;
  q->max_pieces = a.cap.max_send_sge;
  for (int i = 0; i + 1 < q->depth; i++) q->wr[i].next = &q->wr[i + 1];
  *caps = (struct vb_caps){a.cap.max_send_wr, a.cap.max_recv_wr, a.cap.max_send_sge, a.cap.max_inline_data};
  return q;
}

static int null_post(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
  (void)qp, (void)wr, (void)bad;
  return 0;
}

struct vb_qp *vb_null_qp(const struct vb_caps *caps) {
  struct null {
    struct ibv_context context;
    struct ibv_qp qp;
    size_t chain; /* aligns what follows */
  };
  size_t own = sizeof(struct vb_qp) + caps->send_depth * sizeof(struct ibv_send_wr);
  struct vb_qp *q = calloc(1, own + sizeof(struct null));
  if (q == NULL) return NULL;
  struct null *n = (struct null *)((char *)q + own);
  n->context.ops.post_send = null_post;
  n->qp.context = &n->context;
  q->qp = &n->qp;
  q->depth = caps->send_depth;
  q->max_pieces = caps->pieces;
  for (int i = 0; i + 1 < q->depth; i++) q->wr[i].next = &q->wr[i + 1];
  return q;
}

int vb_destroy_qp(struct vb_qp *q) {
  int err = gone(lib.destroy_qp(q->qp));
  if (err == 0) free(q);
  return err;
}

uint32_t vb_qp_number(struct vb_qp *q) { return q->qp->qp_num; }

int vb_modify(struct vb_qp *q, int state, const struct vb_path *p) {
  struct ibv_qp_attr a;
  memset(&a, 0, sizeof a);
  a.qp_state = state;
  int mask = IBV_QP_STATE;
  switch (state) {
  case IBV_QPS_INIT:
    a.pkey_index = p->pkey_index;
    a.port_num = p->port;
    a.qp_access_flags = p->remote_write ? IBV_ACCESS_REMOTE_WRITE : 0;
    mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    break;
  case IBV_QPS_RTR:
    a.path_mtu = p->mtu;
    a.dest_qp_num = p->dest_qp;
    a.rq_psn = p->rq_psn;
    a.min_rnr_timer = p->min_rnr_timer;
    a.ah_attr.dlid = p->dlid;
    a.ah_attr.sl = p->sl;
    a.ah_attr.src_path_bits = p->path_bits;
    a.ah_attr.port_num = p->port;
    a.ah_attr.is_global = p->global;
    if (p->global) {
      memcpy(a.ah_attr.grh.dgid.raw, p->dgid, sizeof p->dgid);
      a.ah_attr.grh.flow_label = p->flow_label;
      a.ah_attr.grh.sgid_index = p->sgid_index;
      a.ah_attr.grh.hop_limit = p->hop_limit;
      a.ah_attr.grh.traffic_class = p->traffic_class;
    }
    mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    break;
  case IBV_QPS_RTS:
    a.sq_psn = p->sq_psn;
    a.timeout = p->timeout;
    a.retry_cnt = p->retry;
    a.rnr_retry = p->rnr_retry;
    mask |= IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    break;
  default: /* reset and error take nothing */
    break;
  }
  return code(lib.modify_qp(q->qp, &a, mask));
}

int vb_state(struct vb_qp *q, int *state) {
  struct ibv_qp_attr a;
  struct ibv_qp_init_attr init;
  int err = code(lib.query_qp(q->qp, &a, IBV_QP_STATE, &init));
  if (err == 0) *state = a.qp_state;
  return err;
}

struct vb_posted vb_post(struct vb_qp *q, const struct vb_write *w, int n, const struct vb_sge *sge, int pieces) {
  if (n == 0) return (struct vb_posted){0, 0};
  if (n > q->depth) return (struct vb_posted){0, EINVAL};
  for (int i = 0; i < n; i++) {
    if (w[i].pieces > q->max_pieces || w[i].first > (uint32_t)pieces || w[i].pieces > (uint32_t)pieces - w[i].first)
      return (struct vb_posted){0, EINVAL};
    struct ibv_send_wr *r = &q->wr[i];
    r->wr_id = w[i].id;
    r->sg_list = (struct ibv_sge *)(sge + w[i].first); /* Go's memory perhaps: only for this call, which copies it */
    r->num_sge = w[i].pieces;
    r->send_flags = (w[i].flags & VB_SIGNALED ? IBV_SEND_SIGNALED : 0) | (w[i].flags & VB_INLINE ? IBV_SEND_INLINE : 0);
    r->wr.rdma.remote_addr = w[i].remote_addr;
    r->wr.rdma.rkey = w[i].remote_key;
    if (w[i].flags & VB_WITH_IMM) {
      r->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      r->imm_data = htonl(w[i].imm);
    } else {
      r->opcode = IBV_WR_RDMA_WRITE;
    }
  }
  struct ibv_send_wr *last = &q->wr[n - 1], *next = last->next, *bad = NULL;
  last->next = NULL;
  int err = code(ibv_post_send(q->qp, q->wr, &bad));
  last->next = next;
  if (err == 0) return (struct vb_posted){n, 0};
  return (struct vb_posted){bad != NULL ? (int32_t)(bad - q->wr) : 0, err};
}

struct vb_posted vb_post_receives(struct vb_qp *q, uint64_t id, int n) {
  struct ibv_recv_wr wr[64];
  memset(wr, 0, sizeof wr); /* no pieces: a write with immediate puts nothing there */
  for (int i = 0; i < 64; i++) wr[i].wr_id = id;
  for (int done = 0; done < n;) {
    int now = n - done < 64 ? n - done : 64;
    for (int i = 0; i < now; i++) wr[i].next = i + 1 < now ? &wr[i + 1] : NULL;
    struct ibv_recv_wr *bad = NULL;
    int err = code(ibv_post_recv(q->qp, wr, &bad));
    if (err != 0) return (struct vb_posted){done + (bad != NULL ? (int32_t)(bad - wr) : 0), err};
    done += now;
  }
  return (struct vb_posted){n, 0};
}
