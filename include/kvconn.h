/*
 * kvconn: carries the KV caches of LLM requests between engines, so that
 * prefill and decode can run on different machines.
 *
 * Copyright the kvconn authors. SPDX-License-Identifier: Apache-2.0
 *
 * This header is the whole contract of libkvconn.so. One transfer, in short:
 *
 *   both      kvconn_open, kvconn_register_kv_caches
 *   prefill   kvconn_announce (the request is known), kvconn_offer (these
 *             blocks hold it)
 *   decode    kvconn_claim (the request is known), kvconn_start_load (put it
 *             into these blocks)
 *   both      kvconn_get_finished until the transfer's completion is there;
 *             from then on the blocks are the engine's again
 *
 * Rules that hold for every call:
 *
 * - Threads: every function may be called from any thread.
 * - Waiting: only kvconn_open, kvconn_register_kv_caches, kvconn_retract and
 *   kvconn_close wait for anything, each at most as long as it says, and
 *   kvconn_main runs until its command has ended. The others take a lock for
 *   microseconds; kvconn_pending and an empty kvconn_get_finished do not even
 *   enter the library's Go part.
 * - Memory: strings, arrays and structs belong to the caller and are copied
 *   before the call returns. The registered KV memory must stay mapped until
 *   kvconn_close has returned. The library never frees what it did not make.
 * - Results: KVCONN_OK (0) or a code of enum kvconn_status; a text that names
 *   the value and the remedy comes from kvconn_last_error.
 * - Handles are numbers. One that was closed, or never opened, gets
 *   KVCONN_ERR_HANDLE, whatever the call.
 * - fork: a child of a process that has loaded the library gets
 *   KVCONN_ERR_FORKED from every call; load the library after the fork.
 * - The library installs no handler for SIGINT, SIGTERM or SIGCHLD, writes
 *   nothing to stdout or stderr, and lets no panic of its own reach the host:
 *   a call that fails inside gets KVCONN_ERR_INTERNAL.
 * - Growth: the size of each struct is said by the caller (struct_size, or
 *   completion_size). Fields are only added at the end, so a caller built with
 *   a newer header may have longer structs. kvconn_blocks never changes. No
 *   function is ever removed or changed within one KVCONN_ABI_VERSION. Fields
 *   that are named reserved must be 0; fields that a caller's older header does
 *   not have count as 0.
 */
#ifndef KVCONN_H
#define KVCONN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a function or struct changes in a way that breaks callers. */
#define KVCONN_ABI_VERSION 1

/* Of this header; kvconn_version tells the library's. */
#define KVCONN_VERSION "0.1.0"

/* Longest transfer_id, in bytes without the ending NUL. */
#define KVCONN_TRANSFER_ID_MAX 128

/* Results of calls (0 to 19) and codes of completions (0, and from 20 on). */
enum kvconn_status {
  KVCONN_OK = 0,
  KVCONN_ERR_INVALID = 1,        /* an argument or the configuration is wrong */
  KVCONN_ERR_HANDLE = 2,         /* the handle is not open */
  KVCONN_ERR_CLOSED = 3,         /* the agent is closing */
  KVCONN_ERR_NOT_REGISTERED = 4, /* kvconn_register_kv_caches comes first */
  KVCONN_ERR_DUPLICATE = 5,      /* this transfer_id is under way already */
  KVCONN_ERR_OVERLOAD = 6,       /* max_transfers are under way or uncollected */
  KVCONN_ERR_FORKED = 7,         /* called in a child made by fork */
  KVCONN_ERR_ADDRESS = 8,        /* a port is in use, or an address is not reached */
  KVCONN_ERR_BUFFER = 9,         /* the caller's buffer is too small */
  KVCONN_ERR_INTERNAL = 10,      /* a defect of the library; the agent is unusable */
  KVCONN_ERR_SYSTEM = 11,        /* the operating system refused something, or the
                                    transport that is asked for is not available */

  KVCONN_CANCELLED = 20,      /* kvconn_cancel on this side */
  KVCONN_PEER_CANCELLED = 21, /* the other engine cancelled */
  KVCONN_PEER_LOST = 22,      /* the other agent is gone, stopped or restarted */
  KVCONN_NOT_OFFERED = 23,    /* nobody offered the transfer in early_load_s */
  KVCONN_EXPIRED = 24,        /* nobody loaded the offer in lease_s */
  KVCONN_REFUSED = 25,        /* layouts or prompts differ, a second load, a limit */
  KVCONN_UNREACHABLE = 26,    /* bootstrap address or registry entry not found,
                                 or no transport's bytes get through */
  KVCONN_FAILED = 27,         /* the bytes could not be moved */
  KVCONN_AGENT_CLOSED = 28    /* kvconn_close on either side */
};

/* Names an open agent; 0 is never one. */
typedef uint64_t kvconn_agent;

/*
 * A memory range that holds a piece of every block of one KV cache group: one
 * layer's K, V, fused KV, latent or state, or one head of it. Block i lies at
 * address + i * block_stride and has block_bytes bytes. All numbers must be
 * multiples of 4. Regions of one group must not overlap; strided views of one
 * storage may interleave. The two engines' regions belong together by group and
 * name, whatever their order.
 *
 * The last six fields say what lies where in a block; all 0: it is opaque, and
 * is copied whole between blocks of equal length. Else it holds the items of
 * tokens × heads, each of block_bytes / (tokens * heads) bytes (a multiple of 4,
 * and equal on both sides): that of token t and the region's h-th head at
 * t * token_stride + h * head_stride. They lie densely, either token after token
 * (NHD: token_stride is heads items, head_stride one) or head after head (HND:
 * token_stride is one item, head_stride tokens of them). A latent (MLA) has one
 * head. Regions of one group have equal tokens.
 *
 * Then blocks may have unequal numbers of tokens on the two sides, if one divides
 * the other; the orders may differ, though each item is then a copy of its own;
 * and a region may hold some of the model's heads: those from first_head on, of
 * total_heads in all (both 0: it has all of them). Regions of a group may share a
 * name if they hold different heads of it.
 */
typedef struct kvconn_region {
  uint32_t struct_size;  /* sizeof(struct kvconn_region) */
  uint32_t group;        /* KV cache group, from 0 without a gap, below 16 */
  const char *name;      /* 1 to 256 bytes */
  uint64_t address;      /* of block 0 */
  uint64_t block_stride; /* bytes from one block to the next */
  uint64_t block_bytes;  /* bytes of a block, at most block_stride */
  uint32_t num_blocks;
  uint32_t reserved;     /* 0 */
  uint32_t tokens;       /* of a block, at most 2^20; 0: opaque, as all below */
  uint32_t heads;        /* at least 1 unless opaque */
  uint32_t first_head;   /* first_head + heads is at most total_heads */
  uint32_t total_heads;  /* of the model, at most 65536 */
  uint64_t token_stride; /* bytes */
  uint64_t head_stride;  /* bytes */
} kvconn_region;

/* The block ids of one KV cache group, in the prompt's order. */
typedef struct kvconn_blocks {
  const uint32_t *ids; /* each below num_blocks of the group's regions */
  uint32_t count;      /* at most 262144 */
  uint32_t first;      /* position in the prompt of ids[0], in blocks of this side;
                          what lies before it in an offer is not there */
} kvconn_blocks;

/* Prefill's half of a transfer: these blocks hold it. */
typedef struct kvconn_offer_request {
  uint32_t struct_size;
  uint32_t num_groups;
  const char *transfer_id; /* 1 to KVCONN_TRANSFER_ID_MAX bytes */
  const kvconn_blocks *groups;
  uint64_t token;  /* comes back in the completion */
  uint64_t prompt; /* fingerprint of what the blocks are the cache of, such as a hash of the prompt's
                      tokens; 0: not said. If the load says another, both halves end with
                      KVCONN_REFUSED and no byte is written: a router has mixed two requests up */
} kvconn_offer_request;

/* A part of a transfer that is there while prefill still works on the request. */
typedef struct kvconn_growth {
  uint32_t struct_size;
  uint32_t num_groups;
  const char *transfer_id;
  const kvconn_blocks *groups; /* that follow those which were given before; first counts with a group's first ones */
  const uint32_t *ready;       /* for each group: how many blocks of the prompt, from its start, are there */
  uint64_t prompt;             /* as of the offer; say it with each part, so that none is sent to who asks for
                                  another: to say another later is KVCONN_ERR_INVALID */
  const uint32_t *computing;   /* for each group, as ready: what will be there when the step that follows the call
                                  has written a region, see kvconn_written_address. NULL: it computes nothing of it */
} kvconn_growth;

/*
 * Decode's half of a transfer: put it into these blocks. With no block at all
 * it tells the prefill engine that nothing of it is needed. It names the engine:
 * from which of its ranks this one loads, and what from each, is found out; there
 * is one completion.
 */
typedef struct kvconn_load_request {
  uint32_t struct_size;
  uint32_t num_groups;
  const char *transfer_id;
  const char *bootstrap_addr; /* "http://host:port" of the prefill engine */
  const char *engine_id;      /* of the prefill engine, which says its dp rank too; NULL: the only one there */
  const kvconn_blocks *groups;
  uint64_t token;
  /* Tokens of the prompt, from its start, for each of num_groups; what lies in the
     blocks behind them is not copied, up to a whole block of the side whose blocks
     are smaller. NULL, 0, and in a group of opaque blocks any: all that the blocks
     have room for, which the prefill engine must then have. */
  const uint32_t *tokens;
  uint64_t prompt; /* as of the offer: fingerprint of what this is to be the cache of; 0: whatever prefill has */
} kvconn_load_request;

/*
 * With the setting report_wants of a prefill engine each announced transfer gets
 * a completion of KVCONN_SIDE_WANT before its offer: with KVCONN_OK when decode
 * has asked for it, that is, has blocks for it (blocks is then the first block of
 * group 0 that it asks for), or, with blocks 0, when the engine itself grows or
 * offers it first; else with why it has ended.
 *
 * With the setting report_claims of a decode engine a claim that a load could only
 * fail with gets a completion of KVCONN_SIDE_CLAIM, once and never with KVCONN_OK:
 * its prefill engine is gone, has ended or refused it, or claim_s went by. A claim
 * that is loaded or cancelled before gets none.
 */
enum kvconn_side { KVCONN_SIDE_LOAD = 1, KVCONN_SIDE_OFFER = 2, KVCONN_SIDE_WANT = 3, KVCONN_SIDE_CLAIM = 4 };

/* How one half of a transfer ended. Each accepted offer and load gets one. */
typedef struct kvconn_completion {
  uint64_t token;
  int32_t code;         /* KVCONN_OK, or a code from 20 on */
  int32_t side;         /* enum kvconn_side */
  uint64_t bytes;       /* moved */
  uint64_t wait_ns;     /* from the call to the first byte */
  uint64_t transfer_ns; /* from the first byte to the last */
  uint32_t blocks;
  uint32_t segments; /* contiguous runs in this side's memory */
  char transport[8]; /* that moved the bytes, "rdma" or "tcp"; empty if it came to none */
  char transfer_id[KVCONN_TRANSFER_ID_MAX + 8]; /* NUL-terminated */
  char reason[320];                             /* NUL-terminated; empty if OK */
} kvconn_completion;

/* KVCONN_ABI_VERSION of the library, and its version as text. */
uint32_t kvconn_abi_version(void);
const char *kvconn_version(void);

/* The name of a status, such as "peer-lost"; never NULL, not to be freed. */
const char *kvconn_status_name(int32_t status);

/*
 * Opens an agent; at most 64 are open at a time. config_json is a JSON object with the keys of the README's
 * table; role is required, and engine_id unless role is bootstrap; unknown keys
 * are errors. On a prefill engine the bootstrap port is served when the call
 * returns. Waits at most twice connect_timeout_s, and up to ten seconds more for
 * the embedded server to start; with bootstrap_join for the first rank, at most
 * join_timeout_s. On failure *agent is 0.
 */
int32_t kvconn_open(const char *config_json, kvconn_agent *agent);

/*
 * Gives the agent the engine's paged KV memory, once, before any transfer. A
 * prefill agent is findable when the call returns. Waits at most
 * connect_timeout_s for the registry, with bootstrap_join join_timeout_s. With "transport": "rdma" and no rdma on
 * this machine it is KVCONN_ERR_SYSTEM with the reason; kvconn doctor tells more.
 */
int32_t kvconn_register_kv_caches(kvconn_agent agent, const kvconn_region *regions, size_t num_regions);

/*
 * Prefill: these requests are known and being worked on, so decode engines that
 * load them wait as long as it takes. Ends by an offer or a cancel, with
 * report_wants also by a KVCONN_SIDE_WANT with an error. Batches are
 * taken in order up to the first that is refused; *accepted (may be NULL) says
 * how many were taken. So it is in the calls below that have *accepted.
 */
int32_t kvconn_announce(kvconn_agent agent, const char *const *transfer_ids, size_t count, size_t *accepted);

/*
 * Prefill: these blocks hold these transfers. They must stay unchanged until
 * the completion: a decode engine has loaded it, it was cancelled or failed, or
 * lease_s went by without one that claims or loads it.
 */
int32_t kvconn_offer(kvconn_agent agent, const kvconn_offer_request *offers, size_t count, size_t *accepted);

/*
 * Prefill: parts of these transfers are there, more will follow, and then the
 * offer, with all of their blocks: what a decode engine has asked for of them moves
 * at once. So chunks of a prompt are sent while the next are computed; or layers:
 * with regions (num_regions growing indices of kvconn_register_kv_caches), what is
 * ready is so in these only. It says that the request is known, as
 * kvconn_announce does. What is ready must stay unchanged until kvconn_retract has
 * returned or, after the offer, until its completion. That a transfer has ended
 * meanwhile is told by the offer's completion; here it is no error.
 */
int32_t kvconn_grow(kvconn_agent agent, const kvconn_growth *parts, size_t count, const uint32_t *regions, size_t num_regions, size_t *accepted);

/*
 * Prefill: where the step says which regions it has written, so that it needs no
 * call for each layer: a byte for each region, in the order of
 * kvconn_register_kv_caches, to be set to 1 when what the last kvconn_grow called
 * computing is there in it. From C, C++ or Go by an atomic store with release order,
 * when all threads that write the region have been joined; an interpreter's plain
 * store will do. The agent looks at the bytes, soon, and sets them to 0; a last time
 * when the next kvconn_grow, kvconn_offer, kvconn_retract or kvconn_cancel of this
 * agent is called, which ends the step. Without a step, and beyond the registered
 * regions, a byte says nothing.
 * The address is writable until the process ends; after kvconn_close, and in a
 * forked child, it must not be used: it may be another agent's, or seen by nobody.
 * NULL, with the reason for kvconn_last_error, when the handle is not open or
 * membarrier(2) is refused, by which the agent sees the cache as it was stored;
 * then kvconn_grow says each layer.
 */
volatile uint8_t *kvconn_written_address(kvconn_agent agent);

/*
 * Prefill: takes back what kvconn_grow gave, of requests that are preempted or
 * given up; decode engines load them anew when they grow again or are offered,
 * unless they are cancelled too. Waits until nothing reads the blocks any more: a
 * second or two at most where a peer takes no bytes. With KVCONN_ERR_SYSTEM, after
 * timeout_ms, they must not be used again while the agent is open. An id that is
 * not known is no error, one that is offered is KVCONN_ERR_INVALID; it does not
 * keep the others from being taken back.
 */
int32_t kvconn_retract(kvconn_agent agent, const char *const *transfer_ids, size_t count, uint32_t timeout_ms);

/*
 * Decode: these transfers will be loaded as soon as there are blocks for them;
 * until then they are kept, however long it takes, within claim_s. A claim has
 * num_groups 0 and no completion of its own. It ends by kvconn_start_load or
 * kvconn_cancel of the id; a load whose prefill engine went meanwhile fails at
 * once. To claim what is claimed or loaded already is no error. With report_claims
 * it ends by a KVCONN_SIDE_CLAIM too, which gives the claim's token back: then
 * nothing is owed, a cancel changes nothing, a load fails with the same code and
 * reason, and a claim is that of another request.
 */
int32_t kvconn_claim(kvconn_agent agent, const kvconn_load_request *claims, size_t count, size_t *accepted);

/*
 * Decode: loads these transfers. The blocks belong to the transfer until its
 * completion; after it no byte of the transfer can land in them any more. The
 * prefill engine need not know the request yet.
 */
int32_t kvconn_start_load(kvconn_agent agent, const kvconn_load_request *loads, size_t count, size_t *accepted);

/*
 * Ends this agent's halves of transfers early; each still gets its completion,
 * with KVCONN_CANCELLED unless it had ended, and the other side is told. An id
 * that is not known here is remembered on the prefill side: a load of it that
 * arrives later is refused, an offer of it ends at once.
 */
int32_t kvconn_cancel(kvconn_agent agent, const char *const *transfer_ids, size_t count, const char *reason, size_t *accepted);

/* The number of completions that wait to be collected; negative: a status. */
int32_t kvconn_pending(kvconn_agent agent);

/*
 * The address of the number that kvconn_pending gives, for a caller to whom even
 * a call is dear: 32 bits, changed atomically, readable until the process ends.
 * It is not 0 either when kvconn_pending has an error to tell. NULL when the
 * handle is not open. After kvconn_close, and in a forked child, it must not be
 * used: it may be another agent's, or never change.
 */
const volatile uint32_t *kvconn_pending_address(kvconn_agent agent);

/*
 * Moves up to capacity completions out; *count says how many. Never waits.
 * completion_size is sizeof(struct kvconn_completion) of the caller.
 */
int32_t kvconn_get_finished(kvconn_agent agent, kvconn_completion *completions, size_t completion_size, size_t capacity, size_t *count);

/*
 * A file descriptor that is readable while completions wait, for poll, select
 * or epoll; do not read from it. It is closed by kvconn_close. Negative: a status.
 */
int32_t kvconn_event_fd(kvconn_agent agent);

/*
 * The agent's counters as a JSON object, NUL-terminated. *length (may be NULL)
 * is its length, also when KVCONN_ERR_BUFFER says that capacity is too small.
 */
int32_t kvconn_stats(kvconn_agent agent, char *buffer, size_t capacity, size_t *length);

/*
 * The text of this thread's last failed call, NUL-terminated, cut off at
 * capacity or after 1023 bytes; it names the wrong value and the remedy. Like
 * errno it is only meaningful after a call of the same thread has failed.
 */
int32_t kvconn_last_error(char *buffer, size_t capacity);

/* The "http://host:port" that this agent serves or has joined; else empty. */
int32_t kvconn_bootstrap_address(kvconn_agent agent, char *buffer, size_t capacity);

/*
 * Log records wait in a bounded ring of the library (the oldest are dropped and
 * counted). kvconn_next_log takes one as a JSON object (level, time, logger,
 * msg, and what else the record says in further members beside these) and
 * returns its length, 0 if there is none; kvconn_log_fd is readable while there
 * are some.
 */
int32_t kvconn_log_fd(void);
int32_t kvconn_next_log(char *buffer, size_t capacity);

/*
 * Ends every transfer (their completions have the code KVCONN_AGENT_CLOSED, and
 * are lost with the handle if not collected), waits until no byte can land any
 * more, and frees the agent: at most close_timeout_s, and ten seconds more if
 * the embedded server does not stop. The handle is stale when it returns, and
 * its event fd, which becomes readable once more, is closed.
 */
int32_t kvconn_close(kvconn_agent agent);

/*
 * The kvconn command (demo, bench, proxy …) as main() would run it; for wheels
 * whose only binary is this library. Returns the exit status. It takes SIGINT
 * and SIGTERM, and may write to stdout and stderr.
 */
int32_t kvconn_main(int32_t argc, const char *const *argv);

#ifdef __cplusplus
}
#endif
#endif /* KVCONN_H */
