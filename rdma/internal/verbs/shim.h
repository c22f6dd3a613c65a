/*
 * What Go sees of libibverbs: plain structs and functions. The library's own
 * structs (abi.h) are known to the C files only.
 *
 * Functions that return int give 0 or an errno; those that return a pointer
 * give NULL and set errno.
 */
#ifndef KVCONN_VERBS_SHIM_H
#define KVCONN_VERBS_SHIM_H

#include <stdint.h>

struct kv_ibv_context;
struct kv_ibv_pd;
struct kv_ibv_mr;

/* Twins of types.go. */
struct vb_sge {
  uint64_t addr;
  uint32_t length;
  uint32_t lkey;
};
struct vb_write {
  uint64_t id;
  uint64_t remote_addr;
  uint32_t remote_key;
  uint32_t imm;
  uint32_t first;
  uint16_t pieces;
  uint16_t flags;
};
enum { VB_SIGNALED = 1, VB_WITH_IMM = 2 };
struct vb_completion {
  uint64_t id;
  uint32_t status;
  uint32_t opcode;
  uint32_t qp;
  uint32_t imm;
  uint32_t bytes;
  uint32_t vendor;
};

/* Opens the library and fills the table of its functions. If the result is not 0,
   reason says why. */
int vb_load(const char *name, char *reason, int size);
int vb_has_relaxed_ordering(void); /* ibv_reg_mr_iova2 is there */
int vb_has_gid_table(void);

struct vb_device {
  char name[64];       /* mlx5_0 */
  char file[64];       /* uverbs0, in /dev/infiniband */
  char sys_path[256];
  int32_t transport;
};
int vb_devices(struct vb_device **list, int *n); /* the list is the caller's to free() */
struct kv_ibv_context *vb_open(const char *name);
int vb_close(struct kv_ibv_context *ctx);
int vb_async_fd(struct kv_ibv_context *ctx);

struct vb_attr {
  uint64_t max_mr_size;
  int32_t max_mr, max_pd, max_qp, max_qp_wr, max_sge, max_cq, max_cqe;
  int32_t ports, vectors;
  char firmware[64];
};
int vb_query_device(struct kv_ibv_context *ctx, struct vb_attr *a);

struct vb_port {
  int32_t state, link_layer, active_mtu, gids;
  uint32_t lid;
  uint32_t width, speed; /* as coded by the InfiniBand specification */
};
int vb_query_port(struct kv_ibv_context *ctx, int port, struct vb_port *p);

struct vb_gid {
  uint8_t gid[16];
  uint32_t index, port, type, ifindex;
};
/* All entries of all ports that are not empty: at most max; *n is their count. */
int vb_gid_table(struct kv_ibv_context *ctx, struct vb_gid *list, int max, int *n);
int vb_query_gid(struct kv_ibv_context *ctx, int port, int index, uint8_t gid[16]);

struct vb_event {
  int32_t type;
  uint32_t port; /* of a port's event */
  uint32_t qp;   /* number, of a queue pair's event */
};
/* EAGAIN when there is none: the descriptor does not block. */
int vb_next_event(struct kv_ibv_context *ctx, struct vb_event *e);

struct kv_ibv_pd *vb_alloc_pd(struct kv_ibv_context *ctx);
int vb_dealloc_pd(struct kv_ibv_pd *pd);

struct kv_ibv_mr *vb_register(struct kv_ibv_pd *pd, uintptr_t addr, uint64_t length, uint32_t access);
/* length bytes of a dma-buf from offset on, named by iova. ENOSYS: the library is too old. */
struct kv_ibv_mr *vb_register_dmabuf(struct kv_ibv_pd *pd, int fd, uint64_t offset, uint64_t length, uint64_t iova, uint32_t access);
int vb_deregister(struct kv_ibv_mr *mr);
void vb_keys(struct kv_ibv_mr *mr, uint32_t *lkey, uint32_t *rkey);

struct vb_cq; /* with its completion channel */
struct vb_cq *vb_create_cq(struct kv_ibv_context *ctx, int depth, int vector);
int vb_destroy_cq(struct vb_cq *q);
int vb_cq_fd(struct vb_cq *q);
int vb_cq_depth(struct vb_cq *q);
int vb_arm(struct vb_cq *q);
/* Takes the events that wait in the channel. Returns how many, or a negative errno. */
int vb_take_events(struct vb_cq *q);
/* Fills the array out. Returns how many, or a negative errno. */
int vb_poll(struct vb_cq *q, struct vb_completion *out, int max);

struct vb_caps {
  uint32_t send_depth, receive_depth, pieces;
};
struct vb_qp; /* with the chain of work requests that posts are built in */
/* Writes back what the device gave. */
struct vb_qp *vb_create_qp(struct kv_ibv_pd *pd, struct vb_cq *cq, struct vb_caps *caps);
/* Of no device: posts go nowhere. One block of memory, for free(). */
struct vb_qp *vb_null_qp(const struct vb_caps *caps);
int vb_destroy_qp(struct vb_qp *q);
uint32_t vb_qp_number(struct vb_qp *q);

struct vb_route {
  uint8_t port, sl, traffic_class, hop_limit, sgid_index, global, path_bits, remote_write;
  uint8_t mtu; /* coded: 1 is 256, 5 is 4096 */
  uint8_t min_rnr_timer, timeout, retry, rnr_retry;
  uint16_t pkey_index, dlid;
  uint32_t dest_qp, rq_psn, sq_psn;
  uint8_t dgid[16];
};
enum { VB_RESET, VB_INIT, VB_RTR, VB_RTS, VB_SQD, VB_SQE, VB_ERR };
int vb_modify(struct vb_qp *q, int state, const struct vb_route *p);
int vb_state(struct vb_qp *q, int *state);

struct vb_posted {
  int32_t n, err;
};
/* One ibv_post_send of all n writes. A write whose pieces are not in the list is EINVAL and nothing is posted. */
struct vb_posted vb_post(struct vb_qp *q, const struct vb_write *w, int n, const struct vb_sge *sge, int pieces);
struct vb_posted vb_post_receives(struct vb_qp *q, uint64_t id, int n);

#endif
