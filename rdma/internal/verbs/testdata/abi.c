/*
 * Compiled by TestABI and never run: abi.h beside the library's own headers.
 * The compiler names each declaration that differs.
 */
#define _GNU_SOURCE
#include <infiniband/verbs.h>

#include "../abi.h"

#define OFFSETS(ours, a, theirs, b)                                                 \
  _Static_assert(offsetof(ours, a) == offsetof(theirs, b), #ours "." #a ": offset"); \
  _Static_assert(sizeof(((ours *)0)->a) == sizeof(((theirs *)0)->b), #ours "." #a ": size")
#define MEMBER(type, member) OFFSETS(struct kv_##type, member, struct type, member)
#define SIZE(type) _Static_assert(sizeof(struct kv_##type) == sizeof(struct type), #type ": size")
#define VALUE(name) _Static_assert((long)KV_##name == (long)name, #name)

/* Objects of the library: prefixes. */
MEMBER(ibv_device, transport_type);
MEMBER(ibv_device, dev_name);
MEMBER(ibv_device, ibdev_path);
MEMBER(ibv_mr, lkey);
MEMBER(ibv_mr, rkey);
MEMBER(ibv_comp_channel, fd);
MEMBER(ibv_cq, context);
MEMBER(ibv_cq, cqe);
MEMBER(ibv_qp, context);
MEMBER(ibv_qp, qp_num);

/* Structs that kvconn allocates: whole. */
SIZE(ibv_device_attr);
MEMBER(ibv_device_attr, fw_ver);
MEMBER(ibv_device_attr, max_mr_size);
MEMBER(ibv_device_attr, max_qp);
MEMBER(ibv_device_attr, max_qp_wr);
MEMBER(ibv_device_attr, max_sge);
MEMBER(ibv_device_attr, max_cq);
MEMBER(ibv_device_attr, max_cqe);
MEMBER(ibv_device_attr, max_mr);
MEMBER(ibv_device_attr, max_pd);
MEMBER(ibv_device_attr, phys_port_cnt);
/* Newer ones are longer: ibv_query_port says how long its caller's is. */
_Static_assert(sizeof(struct ibv_port_attr) >= sizeof(struct kv_ibv_port_attr), "size of ibv_port_attr");
MEMBER(ibv_port_attr, state);
MEMBER(ibv_port_attr, active_mtu);
MEMBER(ibv_port_attr, gid_tbl_len);
MEMBER(ibv_port_attr, lid);
MEMBER(ibv_port_attr, active_width);
MEMBER(ibv_port_attr, active_speed);
MEMBER(ibv_port_attr, link_layer);
_Static_assert(sizeof(union kv_ibv_gid) == sizeof(union ibv_gid), "ibv_gid: size");
_Static_assert(_Alignof(union kv_ibv_gid) == _Alignof(union ibv_gid), "ibv_gid: alignment");
OFFSETS(union kv_ibv_gid, raw, union ibv_gid, raw);
SIZE(ibv_gid_entry);
MEMBER(ibv_gid_entry, gid);
MEMBER(ibv_gid_entry, gid_index);
MEMBER(ibv_gid_entry, port_num);
MEMBER(ibv_gid_entry, gid_type);
MEMBER(ibv_gid_entry, ndev_ifindex);
SIZE(ibv_sge);
MEMBER(ibv_sge, addr);
MEMBER(ibv_sge, length);
MEMBER(ibv_sge, lkey);
SIZE(ibv_send_wr);
MEMBER(ibv_send_wr, wr_id);
MEMBER(ibv_send_wr, next);
MEMBER(ibv_send_wr, sg_list);
MEMBER(ibv_send_wr, num_sge);
MEMBER(ibv_send_wr, opcode);
MEMBER(ibv_send_wr, send_flags);
MEMBER(ibv_send_wr, imm_data);
OFFSETS(struct kv_ibv_send_wr, remote_addr, struct ibv_send_wr, wr.rdma.remote_addr);
OFFSETS(struct kv_ibv_send_wr, rkey, struct ibv_send_wr, wr.rdma.rkey);
SIZE(ibv_recv_wr);
MEMBER(ibv_recv_wr, wr_id);
MEMBER(ibv_recv_wr, next);
MEMBER(ibv_recv_wr, sg_list);
MEMBER(ibv_recv_wr, num_sge);
SIZE(ibv_wc);
MEMBER(ibv_wc, wr_id);
MEMBER(ibv_wc, status);
MEMBER(ibv_wc, opcode);
MEMBER(ibv_wc, vendor_err);
MEMBER(ibv_wc, byte_len);
MEMBER(ibv_wc, imm_data);
MEMBER(ibv_wc, qp_num);
MEMBER(ibv_wc, wc_flags);
SIZE(ibv_qp_cap);
MEMBER(ibv_qp_cap, max_send_wr);
MEMBER(ibv_qp_cap, max_recv_wr);
MEMBER(ibv_qp_cap, max_send_sge);
MEMBER(ibv_qp_cap, max_recv_sge);
SIZE(ibv_qp_init_attr);
MEMBER(ibv_qp_init_attr, send_cq);
MEMBER(ibv_qp_init_attr, recv_cq);
MEMBER(ibv_qp_init_attr, cap);
MEMBER(ibv_qp_init_attr, qp_type);
SIZE(ibv_ah_attr);
MEMBER(ibv_ah_attr, grh.dgid);
MEMBER(ibv_ah_attr, grh.sgid_index);
MEMBER(ibv_ah_attr, grh.hop_limit);
MEMBER(ibv_ah_attr, grh.traffic_class);
MEMBER(ibv_ah_attr, dlid);
MEMBER(ibv_ah_attr, sl);
MEMBER(ibv_ah_attr, src_path_bits);
MEMBER(ibv_ah_attr, is_global);
MEMBER(ibv_ah_attr, port_num);
SIZE(ibv_qp_attr);
MEMBER(ibv_qp_attr, qp_state);
MEMBER(ibv_qp_attr, path_mtu);
MEMBER(ibv_qp_attr, rq_psn);
MEMBER(ibv_qp_attr, sq_psn);
MEMBER(ibv_qp_attr, dest_qp_num);
MEMBER(ibv_qp_attr, qp_access_flags);
MEMBER(ibv_qp_attr, ah_attr);
MEMBER(ibv_qp_attr, pkey_index);
MEMBER(ibv_qp_attr, min_rnr_timer);
MEMBER(ibv_qp_attr, port_num);
MEMBER(ibv_qp_attr, timeout);
MEMBER(ibv_qp_attr, retry_cnt);
MEMBER(ibv_qp_attr, rnr_retry);
SIZE(ibv_async_event);
MEMBER(ibv_async_event, element.qp);
MEMBER(ibv_async_event, element.port_num);
MEMBER(ibv_async_event, event_type);

/* The context, its slots, and the extension before it, which grows at its beginning. */
#define IN_CONTEXT(member, theirs) OFFSETS(struct kv_ibv_context, member, struct ibv_context, theirs)
SIZE(ibv_context);
IN_CONTEXT(async_fd, async_fd);
IN_CONTEXT(num_comp_vectors, num_comp_vectors);
IN_CONTEXT(extended, abi_compat);
#define SLOT(name, result, arguments) IN_CONTEXT(name, ops.name);
KV_IBV_SLOTS(SLOT)
#define FROM_END(type, member) (sizeof(type) - offsetof(type, member))
_Static_assert(FROM_END(struct kv_ibv_extension, query_port) == FROM_END(struct verbs_context, query_port), "query_port: place");
_Static_assert(FROM_END(struct kv_ibv_extension, size) == FROM_END(struct verbs_context, sz), "size: place");
_Static_assert(FROM_END(struct kv_ibv_extension, context) == FROM_END(struct verbs_context, context), "context: place");
_Static_assert((uintptr_t)__VERBS_ABI_IS_EXTENDED == UINTPTR_MAX, "the mark of an extended context");

VALUE(IBV_ACCESS_REMOTE_WRITE);
VALUE(IBV_ACCESS_OPTIONAL_RANGE);
VALUE(IBV_WR_RDMA_WRITE);
VALUE(IBV_WR_RDMA_WRITE_WITH_IMM);
VALUE(IBV_SEND_SIGNALED);
VALUE(IBV_WC_SUCCESS);
VALUE(IBV_WC_WITH_IMM);
VALUE(IBV_QPT_RC);
VALUE(IBV_QPS_RESET);
VALUE(IBV_QPS_INIT);
VALUE(IBV_QPS_RTR);
VALUE(IBV_QPS_RTS);
VALUE(IBV_QPS_SQD);
VALUE(IBV_QPS_SQE);
VALUE(IBV_QPS_ERR);
VALUE(IBV_QP_STATE);
VALUE(IBV_QP_ACCESS_FLAGS);
VALUE(IBV_QP_PKEY_INDEX);
VALUE(IBV_QP_PORT);
VALUE(IBV_QP_AV);
VALUE(IBV_QP_PATH_MTU);
VALUE(IBV_QP_TIMEOUT);
VALUE(IBV_QP_RETRY_CNT);
VALUE(IBV_QP_RNR_RETRY);
VALUE(IBV_QP_RQ_PSN);
VALUE(IBV_QP_MAX_QP_RD_ATOMIC);
VALUE(IBV_QP_MIN_RNR_TIMER);
VALUE(IBV_QP_SQ_PSN);
VALUE(IBV_QP_MAX_DEST_RD_ATOMIC);
VALUE(IBV_QP_DEST_QPN);
VALUE(IBV_EVENT_QP_FATAL);
VALUE(IBV_EVENT_QP_REQ_ERR);
VALUE(IBV_EVENT_QP_ACCESS_ERR);
VALUE(IBV_EVENT_COMM_EST);
VALUE(IBV_EVENT_SQ_DRAINED);
VALUE(IBV_EVENT_PATH_MIG);
VALUE(IBV_EVENT_PATH_MIG_ERR);
VALUE(IBV_EVENT_PORT_ACTIVE);
VALUE(IBV_EVENT_PORT_ERR);
VALUE(IBV_EVENT_LID_CHANGE);
VALUE(IBV_EVENT_PKEY_CHANGE);
VALUE(IBV_EVENT_SM_CHANGE);
VALUE(IBV_EVENT_QP_LAST_WQE_REACHED);
VALUE(IBV_EVENT_CLIENT_REREGISTER);
VALUE(IBV_EVENT_GID_CHANGE);

/* Signatures: from here on the names of abi.h's structs stand for the library's. */
#define kv_ibv_device ibv_device
#define kv_ibv_device_attr ibv_device_attr
#define kv_ibv_port_attr ibv_port_attr
#define kv_ibv_port_attr_old _compat_ibv_port_attr
#define kv_ibv_gid ibv_gid
#define kv_ibv_gid_entry ibv_gid_entry
#define kv_ibv_pd ibv_pd
#define kv_ibv_mr ibv_mr
#define kv_ibv_send_wr ibv_send_wr
#define kv_ibv_recv_wr ibv_recv_wr
#define kv_ibv_wc ibv_wc
#define kv_ibv_comp_channel ibv_comp_channel
#define kv_ibv_cq ibv_cq
#define kv_ibv_qp ibv_qp
#define kv_ibv_qp_attr ibv_qp_attr
#define kv_ibv_qp_init_attr ibv_qp_init_attr
#define kv_ibv_async_event ibv_async_event
#define kv_ibv_context ibv_context
#define SAME(text, theirs, result, arguments) \
  _Static_assert(__builtin_types_compatible_p(__typeof__(theirs), result arguments), text ": signature");
#define FUNCTION(name, symbol, version, result, arguments) SAME(#symbol, symbol, result, arguments)
KV_IBV_NEEDED(FUNCTION)
KV_IBV_OPTIONAL(FUNCTION)
#define SLOT_TYPE(name, result, arguments) SAME(#name, *((struct ibv_context *)0)->ops.name, result, arguments)
KV_IBV_SLOTS(SLOT_TYPE)
#define QUERY_PORT(result, arguments) SAME("query_port", *((struct verbs_context *)0)->query_port, result, arguments)
KV_IBV_QUERY_PORT(QUERY_PORT)
