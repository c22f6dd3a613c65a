/*
 * The part of libibverbs' binary interface that kvconn uses, declared anew: the
 * library is opened at run time, and kvconn builds without its headers. Names
 * begin with kv_ and KV_, so that abi_test.go can hold every declaration
 * against the library's own headers in one translation unit.
 *
 * Members that kvconn does not read or write are gaps.
 */
#ifndef KVCONN_VERBS_ABI_H
#define KVCONN_VERBS_ABI_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct kv_ibv_pd;
struct kv_ibv_port_attr_old; /* a shorter kv_ibv_port_attr */

/* ---- devices and their ports ---- */

/* Made by the library: a prefix is enough, as for all objects below that kvconn holds by pointer only. */
struct kv_ibv_device {
  void *gap0[2];
  int32_t gap3;
  int32_t transport_type;
  char gap1[64];
  char dev_name[64];
  char gap2[256];
  char ibdev_path[256];
};

struct kv_ibv_device_attr {
  char fw_ver[64];
  uint64_t gap0[2];
  uint64_t max_mr_size;
  uint64_t gap1;
  uint32_t gap2[3];
  int32_t max_qp, max_qp_wr;
  uint32_t gap3;
  int32_t max_sge;
  int32_t gap4;
  int32_t max_cq, max_cqe, max_mr, max_pd;
  int32_t gap5[20];
  uint8_t gap6[3];
  uint8_t phys_port_cnt;
};

struct kv_ibv_port_attr {
  uint32_t state;
  uint32_t gap0;
  uint32_t active_mtu;
  int32_t gid_tbl_len;
  uint32_t gap1[4];
  uint16_t gap2;
  uint16_t lid;
  uint16_t gap6;
  uint8_t gap3[5];
  uint8_t active_width, active_speed;
  uint8_t gap4;
  uint8_t link_layer;
  uint8_t gap5[3];
};

union kv_ibv_gid {
  uint8_t raw[16];
  uint64_t gap[2]; /* aligns it */
};

struct kv_ibv_gid_entry {
  union kv_ibv_gid gid;
  uint32_t gid_index, port_num, gid_type, ndev_ifindex;
};

/* ---- memory ---- */

struct kv_ibv_mr {
  void *gap0[3];
  size_t gap1;
  uint32_t gap2;
  uint32_t lkey, rkey;
};

enum {
  KV_IBV_ACCESS_REMOTE_WRITE = 2,
  KV_IBV_ACCESS_OPTIONAL_RANGE = 0x3ff00000, /* flags that a kernel may ignore: bits 20 to 29 */
};

/* ---- requests and completions ---- */

struct kv_ibv_sge {
  uint64_t addr;
  uint32_t length, lkey;
};

struct kv_ibv_send_wr {
  uint64_t wr_id;
  struct kv_ibv_send_wr *next;
  struct kv_ibv_sge *sg_list;
  int32_t num_sge;
  uint32_t opcode;
  uint32_t send_flags;
  uint32_t imm_data; /* network order */
  uint64_t remote_addr;
  uint32_t rkey;
  uint32_t gap0;
  uint64_t gap1[9]; /* of other opcodes */
};
enum { KV_IBV_WR_RDMA_WRITE = 0, KV_IBV_WR_RDMA_WRITE_WITH_IMM = 1 };
enum { KV_IBV_SEND_SIGNALED = 2 };

struct kv_ibv_recv_wr {
  uint64_t wr_id;
  struct kv_ibv_recv_wr *next;
  struct kv_ibv_sge *sg_list;
  int32_t num_sge;
};

struct kv_ibv_wc {
  uint64_t wr_id;
  uint32_t status;
  uint32_t opcode;
  uint32_t vendor_err;
  uint32_t byte_len;
  uint32_t imm_data; /* network order */
  uint32_t qp_num;
  uint32_t gap0;
  uint32_t wc_flags;
  uint32_t gap1[2];
};
enum { KV_IBV_WC_SUCCESS = 0, KV_IBV_WC_WITH_IMM = 2 };

/* ---- completion queues and queue pairs ---- */

struct kv_ibv_context;

struct kv_ibv_comp_channel {
  void *gap0;
  int fd;
};

struct kv_ibv_cq {
  struct kv_ibv_context *context;
  void *gap0[2];
  uint32_t gap1;
  int cqe;
};

struct kv_ibv_qp {
  struct kv_ibv_context *context;
  void *gap0[5];
  uint32_t gap1;
  uint32_t qp_num;
};

struct kv_ibv_qp_cap {
  uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, gap0;
};

struct kv_ibv_qp_init_attr {
  void *gap0;
  struct kv_ibv_cq *send_cq, *recv_cq;
  void *gap1;
  struct kv_ibv_qp_cap cap;
  uint32_t qp_type;
  int32_t gap2;
};
enum { KV_IBV_QPT_RC = 2 };

struct kv_ibv_ah_attr {
  struct {
    union kv_ibv_gid dgid;
    uint32_t gap0;
    uint8_t sgid_index, hop_limit, traffic_class;
  } grh;
  uint16_t dlid;
  uint8_t sl, src_path_bits;
  uint8_t gap0;
  uint8_t is_global, port_num;
};

struct kv_ibv_qp_attr {
  uint32_t qp_state;
  uint32_t gap0;
  uint32_t path_mtu;
  uint32_t gap1[2];
  uint32_t rq_psn, sq_psn, dest_qp_num;
  uint32_t qp_access_flags;
  struct kv_ibv_qp_cap gap2;
  struct kv_ibv_ah_attr ah_attr;
  struct kv_ibv_ah_attr gap3;
  uint16_t pkey_index;
  uint16_t gap4;
  uint8_t gap5[4];
  uint8_t min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry;
  uint8_t gap6[2];
  uint32_t gap7;
};
enum { /* the states */
  KV_IBV_QPS_RESET = 0,
  KV_IBV_QPS_INIT = 1,
  KV_IBV_QPS_RTR = 2,
  KV_IBV_QPS_RTS = 3,
  KV_IBV_QPS_SQD = 4,
  KV_IBV_QPS_SQE = 5,
  KV_IBV_QPS_ERR = 6,
};
enum { /* the members that a change of state sets */
  KV_IBV_QP_STATE = 1 << 0,
  KV_IBV_QP_ACCESS_FLAGS = 1 << 3,
  KV_IBV_QP_PKEY_INDEX = 1 << 4,
  KV_IBV_QP_PORT = 1 << 5,
  KV_IBV_QP_AV = 1 << 7,
  KV_IBV_QP_PATH_MTU = 1 << 8,
  KV_IBV_QP_TIMEOUT = 1 << 9,
  KV_IBV_QP_RETRY_CNT = 1 << 10,
  KV_IBV_QP_RNR_RETRY = 1 << 11,
  KV_IBV_QP_RQ_PSN = 1 << 12,
  KV_IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
  KV_IBV_QP_MIN_RNR_TIMER = 1 << 15,
  KV_IBV_QP_SQ_PSN = 1 << 16,
  KV_IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
  KV_IBV_QP_DEST_QPN = 1 << 20,
};

/* ---- events ---- */

struct kv_ibv_async_event {
  union {
    struct kv_ibv_qp *qp;
    int port_num;
  } element;
  uint32_t event_type;
};
enum {
  KV_IBV_EVENT_QP_FATAL = 1,
  KV_IBV_EVENT_QP_REQ_ERR = 2,
  KV_IBV_EVENT_QP_ACCESS_ERR = 3,
  KV_IBV_EVENT_COMM_EST = 4,
  KV_IBV_EVENT_SQ_DRAINED = 5,
  KV_IBV_EVENT_PATH_MIG = 6,
  KV_IBV_EVENT_PATH_MIG_ERR = 7,
  KV_IBV_EVENT_PORT_ACTIVE = 9,
  KV_IBV_EVENT_PORT_ERR = 10,
  KV_IBV_EVENT_LID_CHANGE = 11,
  KV_IBV_EVENT_PKEY_CHANGE = 12,
  KV_IBV_EVENT_SM_CHANGE = 13,
  KV_IBV_EVENT_QP_LAST_WQE_REACHED = 16,
  KV_IBV_EVENT_CLIENT_REREGISTER = 17,
  KV_IBV_EVENT_GID_CHANGE = 18,
};

/* ---- an opened device, and the driver's functions in it ---- */

/* The data path calls the driver through these slots; the library exports no function for them. */
#define KV_IBV_SLOTS(X)                                                                             \
  X(poll_cq, int, (struct kv_ibv_cq *, int, struct kv_ibv_wc *))                                    \
  X(req_notify_cq, int, (struct kv_ibv_cq *, int))                                                  \
  X(post_send, int, (struct kv_ibv_qp *, struct kv_ibv_send_wr *, struct kv_ibv_send_wr **))        \
  X(post_recv, int, (struct kv_ibv_qp *, struct kv_ibv_recv_wr *, struct kv_ibv_recv_wr **))
#define KV_IBV_SLOT(name, result, arguments) typedef result kv_ibv_##name arguments;
KV_IBV_SLOTS(KV_IBV_SLOT)
#undef KV_IBV_SLOT

struct kv_ibv_context {
  void *gap0;
  void (*gap1[11])(void);
  kv_ibv_poll_cq *poll_cq;
  kv_ibv_req_notify_cq *req_notify_cq;
  void (*gap2[12])(void);
  kv_ibv_post_send *post_send;
  kv_ibv_post_recv *post_recv;
  void (*gap3[5])(void);
  int gap4;
  int async_fd;
  int num_comp_vectors;
  pthread_mutex_t gap5;
  void *extended; /* all bits set: a kv_ibv_extension ends with this context */
};

/*
 * What newer drivers put in front of a context. It grows at its beginning, so
 * size says whether query_port, the first member that is declared here, exists.
 */
#define KV_IBV_QUERY_PORT(X) X(int, (struct kv_ibv_context *, uint8_t, struct kv_ibv_port_attr *, size_t))
struct kv_ibv_extension {
#define KV_IBV_MEMBER(result, arguments) result(*query_port) arguments;
  KV_IBV_QUERY_PORT(KV_IBV_MEMBER)
#undef KV_IBV_MEMBER
  void (*gap0[38])(void);
  size_t size; /* of the whole, the context included */
  struct kv_ibv_context context;
};

/* ---- the functions that the library exports ---- */

/*
 * X(name, symbol, version, result, arguments). The version of the symbol is
 * named, because a look-up without one could give the function of an early
 * libibverbs, which takes other structs.
 */
#define KV_IBV_NEEDED(X)                                                                                                       \
  X(get_device_list, ibv_get_device_list, "IBVERBS_1.1", struct kv_ibv_device **, (int *))                                     \
  X(free_device_list, ibv_free_device_list, "IBVERBS_1.1", void, (struct kv_ibv_device **))                                    \
  X(get_device_name, ibv_get_device_name, "IBVERBS_1.1", const char *, (struct kv_ibv_device *))                               \
  X(open_device, ibv_open_device, "IBVERBS_1.1", struct kv_ibv_context *, (struct kv_ibv_device *))                            \
  X(close_device, ibv_close_device, "IBVERBS_1.1", int, (struct kv_ibv_context *))                                             \
  X(query_device, ibv_query_device, "IBVERBS_1.1", int, (struct kv_ibv_context *, struct kv_ibv_device_attr *))                \
  X(query_port, ibv_query_port, "IBVERBS_1.1", int, (struct kv_ibv_context *, uint8_t, struct kv_ibv_port_attr_old *))         \
  X(query_gid, ibv_query_gid, "IBVERBS_1.1", int, (struct kv_ibv_context *, uint8_t, int, union kv_ibv_gid *))                 \
  X(alloc_pd, ibv_alloc_pd, "IBVERBS_1.1", struct kv_ibv_pd *, (struct kv_ibv_context *))                                      \
  X(dealloc_pd, ibv_dealloc_pd, "IBVERBS_1.1", int, (struct kv_ibv_pd *))                                                      \
  X(reg_mr, ibv_reg_mr, "IBVERBS_1.1", struct kv_ibv_mr *, (struct kv_ibv_pd *, void *, size_t, int))                          \
  X(dereg_mr, ibv_dereg_mr, "IBVERBS_1.1", int, (struct kv_ibv_mr *))                                                          \
  X(create_comp_channel, ibv_create_comp_channel, "IBVERBS_1.0", struct kv_ibv_comp_channel *, (struct kv_ibv_context *))      \
  X(destroy_comp_channel, ibv_destroy_comp_channel, "IBVERBS_1.0", int, (struct kv_ibv_comp_channel *))                        \
  X(create_cq, ibv_create_cq, "IBVERBS_1.1", struct kv_ibv_cq *,                                                               \
    (struct kv_ibv_context *, int, void *, struct kv_ibv_comp_channel *, int))                                                 \
  X(destroy_cq, ibv_destroy_cq, "IBVERBS_1.1", int, (struct kv_ibv_cq *))                                                      \
  X(get_cq_event, ibv_get_cq_event, "IBVERBS_1.1", int, (struct kv_ibv_comp_channel *, struct kv_ibv_cq **, void **))          \
  X(ack_cq_events, ibv_ack_cq_events, "IBVERBS_1.1", void, (struct kv_ibv_cq *, unsigned))                                     \
  X(create_qp, ibv_create_qp, "IBVERBS_1.1", struct kv_ibv_qp *, (struct kv_ibv_pd *, struct kv_ibv_qp_init_attr *))           \
  X(modify_qp, ibv_modify_qp, "IBVERBS_1.1", int, (struct kv_ibv_qp *, struct kv_ibv_qp_attr *, int))                          \
  X(query_qp, ibv_query_qp, "IBVERBS_1.1", int,                                                                                \
    (struct kv_ibv_qp *, struct kv_ibv_qp_attr *, int, struct kv_ibv_qp_init_attr *))                                          \
  X(destroy_qp, ibv_destroy_qp, "IBVERBS_1.1", int, (struct kv_ibv_qp *))                                                      \
  X(get_async_event, ibv_get_async_event, "IBVERBS_1.1", int, (struct kv_ibv_context *, struct kv_ibv_async_event *))          \
  X(ack_async_event, ibv_ack_async_event, "IBVERBS_1.1", void, (struct kv_ibv_async_event *))

/* Newer libraries have these; kvconn can do without. */
#define KV_IBV_OPTIONAL(X)                                                                                                     \
  X(reg_mr_iova2, ibv_reg_mr_iova2, "IBVERBS_1.8", struct kv_ibv_mr *, (struct kv_ibv_pd *, void *, size_t, uint64_t, unsigned)) \
  X(reg_dmabuf_mr, ibv_reg_dmabuf_mr, "IBVERBS_1.12", struct kv_ibv_mr *,                                                      \
    (struct kv_ibv_pd *, uint64_t, size_t, uint64_t, int, int))                                                                \
  X(query_gid_table, _ibv_query_gid_table, "IBVERBS_1.11", ssize_t,                                                            \
    (struct kv_ibv_context *, struct kv_ibv_gid_entry *, size_t, uint32_t, size_t))

#endif
