#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#include "shim_lib.h"

_Static_assert(offsetof(struct vb_sge, addr) == offsetof(struct kv_ibv_sge, addr) &&
                   offsetof(struct vb_sge, length) == offsetof(struct kv_ibv_sge, length) &&
                   offsetof(struct vb_sge, lkey) == offsetof(struct kv_ibv_sge, lkey) &&
                   sizeof(struct vb_sge) == sizeof(struct kv_ibv_sge),
               "vb_sge");
_Static_assert(sizeof(struct vb_write) == 32 && sizeof(struct vb_completion) == 32, "no padding");
_Static_assert((int)VB_RESET == (int)KV_IBV_QPS_RESET && (int)VB_RTS == (int)KV_IBV_QPS_RTS && (int)VB_ERR == (int)KV_IBV_QPS_ERR, "states");

/* ---- completion queues ---- */

struct vb_cq {
  struct kv_ibv_comp_channel *channel;
  struct kv_ibv_cq *cq;
  unsigned unacked; /* events taken and not acknowledged; ibv_destroy_cq waits for each */
};

/* An acknowledgement takes a mutex: many events share one. */
enum { ACK_BATCH = 64 };

struct vb_cq *vb_create_cq(struct kv_ibv_context *ctx, int depth, int vector) {
  struct vb_cq *q = calloc(1, sizeof *q);
  if (q == NULL) return NULL;
  errno = 0;
  q->channel = vb_lib.create_comp_channel(ctx);
  if (q->channel == NULL) goto free;
  int err = vb_nonblocking(q->channel->fd);
  if (err != 0) {
    errno = err;
    goto channel;
  }
  q->cq = vb_lib.create_cq(ctx, depth, NULL, q->channel, vector);
  if (q->cq != NULL) return q;
channel:
  err = vb_failed();
  vb_lib.destroy_comp_channel(q->channel);
  errno = err;
free:
  err = vb_failed();
  free(q);
  errno = err;
  return NULL;
}

int vb_destroy_cq(struct vb_cq *q) {
  if (q->unacked > 0) vb_lib.ack_cq_events(q->cq, q->unacked);
  q->unacked = 0;
  int err = vb_gone(vb_lib.destroy_cq(q->cq));
  if (err != 0) return err; /* EBUSY: a queue pair still uses it; nothing is freed */
  err = vb_code(vb_lib.destroy_comp_channel(q->channel));
  free(q);
  return err;
}

int vb_cq_fd(struct vb_cq *q) { return q->channel->fd; }
int vb_cq_depth(struct vb_cq *q) { return q->cq->cqe; }
int vb_arm(struct vb_cq *q) { return vb_code(q->cq->context->req_notify_cq(q->cq, 0)); }

int vb_take_events(struct vb_cq *q) {
  int n = 0, err;
  for (;;) {
    struct kv_ibv_cq *cq;
    void *context;
    errno = 0;
    if (vb_lib.get_cq_event(q->channel, &cq, &context) != 0) {
      err = vb_failed();
      if (err == EINTR) continue;
      break;
    }
    n++;
    if (++q->unacked == ACK_BATCH) {
      vb_lib.ack_cq_events(q->cq, q->unacked);
      q->unacked = 0;
    }
  }
  return n > 0 || err == EAGAIN ? n : -err;
}

int vb_poll(struct vb_cq *q, struct vb_completion *out, int max) {
  struct kv_ibv_wc wc[32];
  int n = 0;
  while (n < max) {
    int want = max - n < 32 ? max - n : 32;
    int got = q->cq->context->poll_cq(q->cq, want, wc);
    if (got < 0) return n > 0 ? n : -vb_code(got);
    for (int i = 0; i < got; i++) {
      struct vb_completion *c = &out[n++];
      *c = (struct vb_completion){
          .id = wc[i].wr_id, .status = wc[i].status, .qp = wc[i].qp_num, .vendor = wc[i].vendor_err};
      if (wc[i].status != KV_IBV_WC_SUCCESS) continue; /* nothing else is valid then */
      c->opcode = wc[i].opcode;
      c->bytes = wc[i].byte_len;
      if (wc[i].wc_flags & KV_IBV_WC_WITH_IMM) c->imm = ntohl(wc[i].imm_data);
    }
    if (got < want) break;
  }
  return n;
}

/* ---- queue pairs ---- */

struct vb_qp {
  struct kv_ibv_qp *qp;
  int depth;      /* of wr */
  int max_pieces;
  struct kv_ibv_send_wr wr[]; /* each linked to the next */
};

struct vb_qp *vb_create_qp(struct kv_ibv_pd *pd, struct vb_cq *cq, struct vb_caps *caps) {
  struct vb_qp *q = calloc(1, sizeof *q + caps->send_depth * sizeof q->wr[0]);
  if (q == NULL) return NULL;
  struct kv_ibv_qp_init_attr a = {
      .send_cq = cq->cq,
      .recv_cq = cq->cq,
      .qp_type = KV_IBV_QPT_RC,
      .cap = {.max_send_wr = caps->send_depth,
              .max_recv_wr = caps->receive_depth,
              .max_send_sge = caps->pieces,
              .max_recv_sge = 1},
  };
  errno = 0;
  q->qp = vb_lib.create_qp(pd, &a);
  if (q->qp == NULL) {
    int err = vb_failed();
    free(q);
    errno = err;
    return NULL;
  }
  q->depth = caps->send_depth;
  q->max_pieces = a.cap.max_send_sge;
  for (int i = 0; i + 1 < q->depth; i++) q->wr[i].next = &q->wr[i + 1];
  *caps = (struct vb_caps){a.cap.max_send_wr, a.cap.max_recv_wr, a.cap.max_send_sge};
  return q;
}

static int null_post(struct kv_ibv_qp *qp, struct kv_ibv_send_wr *wr, struct kv_ibv_send_wr **bad) {
  (void)qp, (void)wr, (void)bad;
  return 0;
}

struct vb_qp *vb_null_qp(const struct vb_caps *caps) {
  struct null {
    struct kv_ibv_context context;
    struct kv_ibv_qp qp;
    size_t chain; /* aligns what follows */
  };
  size_t own = sizeof(struct vb_qp) + caps->send_depth * sizeof(struct kv_ibv_send_wr);
  struct vb_qp *q = calloc(1, own + sizeof(struct null));
  if (q == NULL) return NULL;
  struct null *n = (struct null *)((char *)q + own);
  n->context.post_send = null_post;
  n->qp.context = &n->context;
  q->qp = &n->qp;
  q->depth = caps->send_depth;
  q->max_pieces = caps->pieces;
  for (int i = 0; i + 1 < q->depth; i++) q->wr[i].next = &q->wr[i + 1];
  return q;
}

int vb_destroy_qp(struct vb_qp *q) {
  int err = vb_gone(vb_lib.destroy_qp(q->qp));
  if (err == 0) free(q);
  return err;
}

uint32_t vb_qp_number(struct vb_qp *q) { return q->qp->qp_num; }

int vb_modify(struct vb_qp *q, int state, const struct vb_route *p) {
  struct kv_ibv_qp_attr a;
  memset(&a, 0, sizeof a);
  a.qp_state = state;
  int mask = KV_IBV_QP_STATE;
  switch (state) {
  case KV_IBV_QPS_INIT:
    a.pkey_index = p->pkey_index;
    a.port_num = p->port;
    a.qp_access_flags = p->remote_write ? KV_IBV_ACCESS_REMOTE_WRITE : 0;
    mask |= KV_IBV_QP_PKEY_INDEX | KV_IBV_QP_PORT | KV_IBV_QP_ACCESS_FLAGS;
    break;
  case KV_IBV_QPS_RTR:
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
      a.ah_attr.grh.sgid_index = p->sgid_index;
      a.ah_attr.grh.hop_limit = p->hop_limit;
      a.ah_attr.grh.traffic_class = p->traffic_class;
    }
    mask |= KV_IBV_QP_AV | KV_IBV_QP_PATH_MTU | KV_IBV_QP_DEST_QPN | KV_IBV_QP_RQ_PSN | KV_IBV_QP_MAX_DEST_RD_ATOMIC | KV_IBV_QP_MIN_RNR_TIMER;
    break;
  case KV_IBV_QPS_RTS:
    a.sq_psn = p->sq_psn;
    a.timeout = p->timeout;
    a.retry_cnt = p->retry;
    a.rnr_retry = p->rnr_retry;
    mask |= KV_IBV_QP_SQ_PSN | KV_IBV_QP_TIMEOUT | KV_IBV_QP_RETRY_CNT | KV_IBV_QP_RNR_RETRY | KV_IBV_QP_MAX_QP_RD_ATOMIC;
    break;
  default: /* reset and error take nothing */
    break;
  }
  return vb_code(vb_lib.modify_qp(q->qp, &a, mask));
}

int vb_state(struct vb_qp *q, int *state) {
  struct kv_ibv_qp_attr a;
  struct kv_ibv_qp_init_attr init;
  int err = vb_code(vb_lib.query_qp(q->qp, &a, KV_IBV_QP_STATE, &init));
  if (err == 0) *state = a.qp_state;
  return err;
}

struct vb_posted vb_post(struct vb_qp *q, const struct vb_write *w, int n, const struct vb_sge *sge, int pieces) {
  if (n == 0) return (struct vb_posted){0, 0};
  if (n > q->depth) return (struct vb_posted){0, EINVAL};
  for (int i = 0; i < n; i++) {
    if (w[i].pieces > q->max_pieces || w[i].first > (uint32_t)pieces || w[i].pieces > (uint32_t)pieces - w[i].first)
      return (struct vb_posted){0, EINVAL};
    struct kv_ibv_send_wr *r = &q->wr[i];
    r->wr_id = w[i].id;
    r->sg_list = (struct kv_ibv_sge *)(sge + w[i].first); /* Go's memory perhaps: only for this call, which copies it */
    r->num_sge = w[i].pieces;
    r->send_flags = w[i].flags & VB_SIGNALED ? KV_IBV_SEND_SIGNALED : 0;
    r->remote_addr = w[i].remote_addr;
    r->rkey = w[i].remote_key;
    if (w[i].flags & VB_WITH_IMM) {
      r->opcode = KV_IBV_WR_RDMA_WRITE_WITH_IMM;
      r->imm_data = htonl(w[i].imm);
    } else {
      r->opcode = KV_IBV_WR_RDMA_WRITE;
    }
  }
  struct kv_ibv_send_wr *last = &q->wr[n - 1], *next = last->next, *bad = NULL;
  last->next = NULL;
  int err = vb_code(q->qp->context->post_send(q->qp, q->wr, &bad));
  last->next = next;
  if (err == 0) return (struct vb_posted){n, 0};
  return (struct vb_posted){bad != NULL ? (int32_t)(bad - q->wr) : 0, err};
}

struct vb_posted vb_post_receives(struct vb_qp *q, uint64_t id, int n) {
  struct kv_ibv_recv_wr wr[64];
  memset(wr, 0, sizeof wr); /* no pieces: a write with immediate puts nothing there */
  for (int i = 0; i < 64; i++) wr[i].wr_id = id;
  for (int done = 0; done < n;) {
    int now = n - done < 64 ? n - done : 64;
    for (int i = 0; i < now; i++) wr[i].next = i + 1 < now ? &wr[i + 1] : NULL;
    struct kv_ibv_recv_wr *bad = NULL;
    int err = vb_code(q->qp->context->post_recv(q->qp, wr, &bad));
    if (err != 0) return (struct vb_posted){done + (bad != NULL ? (int32_t)(bad - wr) : 0), err};
    done += now;
  }
  return (struct vb_posted){n, 0};
}
