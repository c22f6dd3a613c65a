/*
 * kvconn: carries the KV caches of LLM requests between engines, so that prefill and decode can
 * run on different machines.
 *
 * Copyright the kvconn authors. SPDX-License-Identifier: Apache-2.0
 *
 * This header is the whole contract of libkvconn.so. One transfer, in short:
 *
 *   both      kvconn_open, kvconn_register_kv_caches
 *   prefill   kvconn_announce (the request is known), kvconn_offer (these blocks hold it)
 *   decode    kvconn_claim (the request is known), kvconn_start_load (put it into these blocks)
 *   both      kvconn_get_finished until the transfer's completion is there; from then on the
 *             blocks are the engine's again
 *
 * Rules that hold for every call:
 *
 * - Threads: every function may be called from any thread.
 * - Waiting: only kvconn_open, kvconn_register_kv_caches, kvconn_alloc, kvconn_free, kvconn_withdraw and kvconn_close
 *   wait, each at most as long as its comment says. kvconn_main runs until its command has ended. All other functions
 *   take a lock for microseconds. kvconn_pending and an empty kvconn_get_finished do not enter the library's Go part.
 * - Memory: strings, arrays and structs belong to the caller. The library copies them before the call returns. The
 *   registered KV memory must stay mapped until kvconn_close has returned. The library frees only its own memory. An
 *   address that it returns (kvconn_pending_address, kvconn_written_address) can be used until kvconn_close, and not
 *   in a forked child. After kvconn_close the address stays mapped, but may belong to another agent, or to none.
 * - Results: a call returns KVCONN_OK (0) or a code of enum kvconn_status. If it fails, kvconn_last_error gives a
 *   text that names the wrong value and the remedy.
 * - Handles are numbers. Every call with a handle that was closed, or never opened, returns KVCONN_ERR_HANDLE.
 * - fork: in the child of a process that has loaded the library, every call returns KVCONN_ERR_FORKED. So load the
 *   library after the fork.
 * - Signals and output: the library installs no handler for SIGINT, SIGTERM or SIGCHLD and writes nothing to stdout
 *   or stderr. Its own panics do not reach the host: the call returns KVCONN_ERR_INTERNAL.
 * - Growth: the caller says the size of each struct (struct_size, or completion_size), which is at least the size in
 *   this header. A later header may add fields at a struct's end. A caller built with a later header works with this
 *   library if it leaves those fields 0, and gets KVCONN_ERR_INVALID if it does not. kvconn_blocks never changes. No
 *   function is ever removed or changed within one KVCONN_ABI_VERSION. Fields that are named reserved must be 0.
 */
#ifndef KVCONN_H
#define KVCONN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVCONN_ABI_VERSION 1       /* raised when a function or struct changes in a way that breaks callers */
#define KVCONN_VERSION "0.1.0"     /* of this header; kvconn_version tells the library's */
#define KVCONN_TRANSFER_ID_MAX 128 /* longest transfer_id, in bytes without the ending NUL */

/* Results of calls (0 to 19) and codes of completions (0, and from 20 on). */
enum kvconn_status {
  KVCONN_OK = 0,
  KVCONN_ERR_INVALID = 1,        /* an argument or the configuration is wrong */
  KVCONN_ERR_HANDLE = 2,         /* the handle is not open */
  KVCONN_ERR_CLOSED = 3,         /* the agent is closing */
  KVCONN_ERR_NOT_REGISTERED = 4, /* kvconn_register_kv_caches comes first */
  KVCONN_ERR_DUPLICATE = 5,      /* this transfer_id is under way already */
  KVCONN_ERR_OVERLOAD = 6,       /* as many transfers as max_transfers allows are under way or uncollected */
  KVCONN_ERR_FORKED = 7,         /* called in a child made by fork */
  KVCONN_ERR_ADDRESS = 8,        /* a port is in use, or an address cannot be reached */
  KVCONN_ERR_BUFFER = 9,         /* the caller's buffer is too small */
  KVCONN_ERR_INTERNAL = 10,      /* a defect of the library; the agent is unusable */
  KVCONN_ERR_SYSTEM = 11,        /* the system refused something, or has not got the configured transport */

  KVCONN_CANCELLED = 20,      /* this engine cancelled, by kvconn_cancel */
  KVCONN_PEER_CANCELLED = 21, /* the other engine cancelled */
  KVCONN_PEER_LOST = 22,      /* the other agent is gone, stopped or restarted */
  KVCONN_NOT_OFFERED = 23,    /* nobody offered the transfer in early_load_s */
  KVCONN_EXPIRED = 24,        /* nobody loaded the offer in lease_s */
  KVCONN_REFUSED = 25,        /* layouts or prompts differ, the transfer was loaded before, or a limit is reached */
  KVCONN_UNREACHABLE = 26,    /* the bootstrap address or the engine was not found, or no bytes get through */
  KVCONN_FAILED = 27,         /* the bytes could not be moved, or the GPU memory was mapped anew: see kvconn_offer */
  KVCONN_AGENT_CLOSED = 28    /* an engine, this or the other, called kvconn_close */
};

typedef uint64_t kvconn_agent; /* the handle of an open agent, never 0 */

/* What the block ids of a group stand for. All regions of a group have the same kind. If the kinds of
   two engines differ, they refuse each other. */
enum kvconn_index_kind {
  KVCONN_INDEX_BLOCK = 0, /* blocks of the prompt, one after the other */
  KVCONN_INDEX_ROW = 1,   /* a row of a table that has one for each request */
  KVCONN_INDEX_SLOT = 2   /* a slot that holds the whole state of one request */
};
/* Rings of n entries (n below 2^24), one after the other. Position p of the prompt lies in entry p modulo n. The
   field first of kvconn_blocks counts these positions. After a ring's last entry comes its entry 0. */
#define KVCONN_INDEX_RING(n) (3u | (uint32_t)(n) << 8)

/* Where a region lies. Device memory is what CUDA gave this process on one GPU; the library checks that. */
enum kvconn_memory { KVCONN_MEMORY_HOST = 0, KVCONN_MEMORY_DEVICE = 1 };

/*
 * A memory range that holds a piece of every block of one KV cache group: the K, V, fused KV,
 * latent or state of one layer, or one head of it. Block i lies at address + i * block_stride.
 * Addresses, strides and lengths are multiples of 4. Regions of one group must not overlap;
 * strided views of one storage may interleave. The library pairs the two engines' regions by
 * group and name, in any order.
 *
 * The fields from tokens to head_stride describe the inside of a block. If all of them are 0, the block is opaque:
 * the library copies it whole, between blocks of equal length. Otherwise a block holds tokens * heads items of one
 * size. This size is a multiple of 4, and equal on both sides. The item of token t and of the region's h-th head
 * lies at t * token_stride + h * head_stride. Items lie densely, in one of two orders:
 *   NHD, token after token: head_stride is one item, token_stride is heads items;
 *   HND, head after head: token_stride is one item, head_stride is tokens items.
 * A latent (MLA) has one head. Regions of one group have equal tokens.
 *
 * With these fields the two sides may differ:
 * - The tokens of a block, if one side's number divides the other's.
 * - The order. Each item is then copied by itself.
 * - The heads. A region holds the model's heads from first_head on, of total_heads. If both
 *   fields are 0, it holds all. Regions of a group may share a name if they hold different
 *   heads.
 */
typedef struct kvconn_region {
  uint32_t struct_size;  /* sizeof(struct kvconn_region) */
  uint32_t group;        /* KV cache group, from 0 without a gap, below 16 */
  const char *name;      /* 1 to 256 bytes */
  uint64_t address;      /* of block 0 */
  uint64_t block_stride; /* bytes from one block to the next */
  uint64_t block_bytes;  /* bytes of a block, at most block_stride */
  uint32_t num_blocks;
  uint32_t index_kind;   /* what the group's block ids stand for: enum kvconn_index_kind */
  uint32_t tokens;       /* of a block, at most 2^20. 0: the block is opaque, and all fields up to head_stride are 0 */
  uint32_t heads;        /* at least 1 unless opaque */
  uint32_t first_head;   /* first_head + heads is at most total_heads */
  uint32_t total_heads;  /* of the model, at most 65536 */
  uint64_t token_stride; /* bytes */
  uint64_t head_stride;  /* bytes */
  uint32_t memory;       /* enum kvconn_memory; the other engine's may be another */
  uint32_t reserved;     /* 0 */
} kvconn_region;

/* The block ids of one KV cache group, in the prompt's order. */
typedef struct kvconn_blocks {
  const uint32_t *ids; /* each below num_blocks of the group's regions */
  uint32_t count;      /* at most 262144 */
  uint32_t first;      /* position in the prompt of ids[0], in blocks of this side; an offer
                          does not hold what lies before it */
} kvconn_blocks;

/*
 * Prefill's half of a transfer: these blocks hold it.
 *
 * prompt, here and below, is the prompt's fingerprint, such as a hash of its tokens, or 0 for
 * none. If offer and load have different ones, a router has mixed two requests up: both halves
 * end with KVCONN_REFUSED, and the library writes no byte.
 *
 * after, here and below, is a moment of kvconn_moment. Before it has passed, the library reads
 * nothing of an offer and writes nothing of a load. 0: the engine has waited for its streams
 * itself.
 */
typedef struct kvconn_offer_request {
  uint32_t struct_size;
  uint32_t num_groups;
  const char *transfer_id; /* 1 to KVCONN_TRANSFER_ID_MAX bytes */
  const kvconn_blocks *groups;
  uint64_t token; /* comes back in the completion */
  uint64_t prompt;
  uint64_t after;
} kvconn_offer_request;

/* Blocks of a transfer that are ready while prefill still works on the request. */
typedef struct kvconn_partial_offer {
  uint32_t struct_size;
  uint32_t num_groups;
  const char *transfer_id;
  const kvconn_blocks *groups; /* these blocks follow those of earlier calls; the library reads
                                  first only in the call that gives a group its first blocks */
  const uint32_t *ready;       /* for each group: how many blocks are ready, from the prompt's start */
  uint64_t prompt;             /* give it in each call, else blocks may go to a load of another
                                  prompt. A later call with another value returns KVCONN_ERR_INVALID */
  const uint32_t *computing;   /* for each group: how many blocks will be ready, counted as in ready,
                                  when the step after this call has written a region, see
                                  kvconn_written_address. NULL: the step computes nothing of this
                                  transfer */
  uint64_t after;              /* the moment of the blocks that are ready */
} kvconn_partial_offer;

/* Decode's half of a transfer: put it into these blocks. A load without any block tells the
   prefill engine that decode needs nothing of the transfer. A load names the engine; the library
   finds out which of the engine's ranks has what this agent needs. A load has one completion. */
typedef struct kvconn_load_request {
  uint32_t struct_size;
  uint32_t num_groups;
  const char *transfer_id;
  const char *bootstrap_addr; /* "http://host:port" of the prefill engine */
  const char *engine_id;      /* of that engine; each dp rank has its own. NULL: the only engine there */
  const kvconn_blocks *groups;
  uint64_t token; /* comes back in the completion */
  /* For each group: how many tokens of the prompt, from its start, the library copies, rounded
     up to a whole block of the side whose blocks are smaller. With NULL or 0 it copies as many
     as fit into the blocks, and the prefill engine must have them. Opaque groups ignore
     tokens. */
  const uint32_t *tokens;
  uint64_t prompt; /* 0: take what prefill has */
  uint64_t after;  /* the moment after which no work of the engine reads or writes what the blocks held before */
} kvconn_load_request;

/*
 * Of which kind a completion is. KVCONN_SIDE_DEMAND: if a prefill engine has the setting
 * report_demands, each announced transfer gets this completion before its offer's. If it comes
 * because decode has blocks and asks for the transfer, the code is KVCONN_OK, and blocks is the
 * first block of group 0 that decode asks for. If the engine offers the transfer, or a part of it,
 * before that, the code is KVCONN_OK and blocks is 0. Any other code says why the transfer has
 * ended.
 *
 * KVCONN_SIDE_CLAIM: if a decode engine has the setting report_claims, a claim gets this
 * completion when a load of it could only fail: the prefill engine is gone, has ended or
 * refused the transfer, or claim_s went by. The completion comes once and never with KVCONN_OK.
 * A claim that was loaded or cancelled before gets no such completion.
 */
enum kvconn_side { KVCONN_SIDE_LOAD = 1, KVCONN_SIDE_OFFER = 2, KVCONN_SIDE_DEMAND = 3, KVCONN_SIDE_CLAIM = 4 };

/* How one half of a transfer ended. Each accepted offer and load gets one. */
typedef struct kvconn_completion {
  uint64_t token;
  int32_t code;         /* KVCONN_OK, or a code from 20 on */
  int32_t side;         /* enum kvconn_side */
  uint64_t bytes;       /* that were moved */
  uint64_t wait_ns;     /* of a load: its time since the call, less transfer_ns; of an offer: until sending begins */
  uint64_t transfer_ns; /* how long bytes were under way. A load by tcp also counts bytes of other loads from the same
                         * agent. Loads by tcp and local, and offers by tcp, leave out the time in which decode had all
                         * that prefill had computed. All others count from the first byte to the last */
  uint32_t blocks;
  uint32_t segments; /* contiguous runs in this side's memory; if the plan is large, the parts that it was cut into */
  char transport[8]; /* the one that moved the bytes, "local", "rdma" or "tcp"; empty if none was chosen */
  char transfer_id[KVCONN_TRANSFER_ID_MAX + 8]; /* NUL-terminated */
  char reason[320];                             /* NUL-terminated; empty if OK */
} kvconn_completion;

/* KVCONN_ABI_VERSION of the library; its version as text; the name of a status, such as
   "peer-lost". The texts are never NULL and not to be freed. */
uint32_t kvconn_abi_version(void);
const char *kvconn_version(void);
const char *kvconn_status_name(int32_t status);

/*
 * Opens an agent. A process may have 64 open. config_json is a JSON object with the keys of docs/configuration.md.
 * role is required, and so is engine_id unless role is bootstrap. An unknown key is an error. When the call returns,
 * a prefill engine's agent serves its bootstrap port. The call waits at most twice connect_timeout_s, and up to ten
 * seconds more for the embedded server to start; with bootstrap_join it waits at most join_timeout_s for the first
 * rank. On failure *agent is 0.
 */
int32_t kvconn_open(const char *config_json, kvconn_agent *agent);

/*
 * Gives the agent the engine's paged KV memory, once, before any transfer. When the call returns, decode engines find
 * a prefill agent. The call waits for the registry at most connect_timeout_s, with bootstrap_join at most
 * join_timeout_s. The call refuses memory that is not mapped or not readable, and for the roles decode and both also
 * memory that is not writable. If the configuration says "transport": "rdma" and this machine has no usable rdma, the
 * call returns KVCONN_ERR_SYSTEM with the reason; kvconn doctor tells more.
 */
int32_t kvconn_register_kv_caches(kvconn_agent agent, const kvconn_region *regions, size_t num_regions);

/*
 * Allocates host memory for KV caches, which decode engines of the same host map: the fastest way between two
 * processes. An engine may use the memory for anything else too. The memory is zeroed, and all its pages are there.
 * It begins at a multiple of a page, and of 2 MiB if it has 2 MiB or more. The call takes as long as the kernel needs
 * to clear the memory. If 1024 allocations exist already, the result is KVCONN_ERR_OVERLOAD. If the host or the
 * process's cgroup has not got the bytes, the result is KVCONN_ERR_SYSTEM. On failure *address is NULL.
 *
 * The memory belongs to the process and to no agent. kvconn_free takes its address once, and ignores NULL. If an agent
 * has registered the memory that is freed, it stays until kvconn_close of that agent has returned, but no agent can
 * register it anew. A child made by fork that touches the memory gets SIGSEGV.
 */
int32_t kvconn_alloc(uint64_t bytes, void **address);
int32_t kvconn_free(void *address);

/* Marks the work that a CUDA stream has been given up to now: *moment passes when the GPU has done this work. region
   is any region on the stream's GPU. stream is a CUstream or cudaStream_t, NULL for the default one. The call waits for
   nothing. If 4096 moments of a GPU have not passed, the result is KVCONN_ERR_OVERLOAD. While the stream is captured
   into a graph, the result is KVCONN_ERR_INVALID. */
int32_t kvconn_moment(kvconn_agent agent, uint32_t region, void *stream, uint64_t *moment);

/*
 * Prefill: the engine knows these requests and works on them. So decode engines that load them wait as long as this
 * work takes. An announcement ends by an offer or a cancel; with report_demands also by a KVCONN_SIDE_DEMAND with an
 * error.
 *
 * This call and all below with the argument accepted take the batch in order, up to the first element that they
 * refuse. *accepted is the number of elements that were taken; accepted may be NULL.
 */
int32_t kvconn_announce(kvconn_agent agent, const char *const *transfer_ids, size_t count, size_t *accepted);

/* Prefill: these blocks hold these transfers. The blocks must stay unchanged until the completion. The completion
   comes when a decode engine has loaded the transfer, when the transfer was cancelled or failed, or when no decode
   engine has claimed or loaded it within lease_s. If the engine has mapped GPU memory anew, offers and loads that
   began before fail. Until they have ended, calls for new ones fail too: repeat the call. */
int32_t kvconn_offer(kvconn_agent agent, const kvconn_offer_request *offers, size_t count, size_t *accepted);

/*
 * Prefill: blocks of these transfers are ready while the engine still works on the requests. The call announces the
 * transfers too. More calls may follow, and then the offer with all blocks. Ready blocks that a decode engine has asked
 * for move at once. So chunks or layers of a prompt move while the engine computes the next ones. With regions
 * (num_regions ascending indices of kvconn_register_kv_caches) the blocks are ready in these regions only. The blocks
 * must stay unchanged until kvconn_withdraw has returned or, after the offer, until its completion. If a transfer has
 * ended meanwhile, this call succeeds; the offer's completion says how the transfer ended.
 */
int32_t kvconn_offer_partial(kvconn_agent agent, const kvconn_partial_offer *parts, size_t count,
                             const uint32_t *regions, size_t num_regions, size_t *accepted);

/*
 * Prefill: the address of an array with one byte for each region, in the order of kvconn_register_kv_caches. With
 * these bytes a step says which regions it has written, without a call for each layer. The engine sets a region's
 * byte to 1 when the blocks that the last kvconn_offer_partial called computing are ready there. C, C++ and Go store
 * the byte atomically with release order, after all threads that write the region have been joined. In an interpreter
 * such as Python's a plain store will do.
 *
 * The agent reads the bytes soon after and sets them to 0. The agent's next kvconn_offer_partial, kvconn_offer,
 * kvconn_withdraw or kvconn_cancel ends the step: the agent then reads the bytes a last time. Outside of steps, and
 * beyond the registered regions, the bytes mean nothing.
 *
 * The result is NULL, with a reason for kvconn_last_error, if the handle is not open, or if the kernel refuses
 * membarrier(2), without which the agent might read a cache in host memory before all its stores are seen. The
 * engine then calls kvconn_offer_partial for each layer. kvconn_written_after and kvconn_written_on need no
 * membarrier(2).
 */
volatile uint8_t *kvconn_written_address(kvconn_agent agent);

/* Prefill: says of regions in device memory what a byte of kvconn_written_address says of one in host memory. The
   engine has queued all work of the step that writes these regions, and the moment passes when this work is done.
   kvconn_written_on takes the moment itself, of a stream of the first region's GPU. */
int32_t kvconn_written_after(kvconn_agent agent, const uint32_t *regions, size_t num_regions, uint64_t moment);
int32_t kvconn_written_on(kvconn_agent agent, const uint32_t *regions, size_t num_regions, void *stream);

/*
 * Prefill: takes back what kvconn_offer_partial gave, of requests that the engine preempts or gives up. Unless the
 * engine cancels the transfer too, decode engines load it anew when it, or a part of it, is offered again. The call
 * waits until nothing reads the blocks any more: a second or two at most when a peer takes no bytes, and longer while a
 * GPU's driver does not answer. If it returns KVCONN_ERR_SYSTEM after timeout_ms, the blocks must not be used again
 * while the agent is open. An unknown id is no error. If an id was offered, the result is KVCONN_ERR_INVALID; the call
 * takes the others back nevertheless.
 */
int32_t kvconn_withdraw(kvconn_agent agent, const char *const *transfer_ids, size_t count, uint32_t timeout_ms);

/*
 * Decode: the engine will load these transfers as soon as it has blocks for them. Until then the prefill engine keeps
 * them, within claim_s. A claim has num_groups 0 and no completion of its own. A claim ends by kvconn_start_load or
 * kvconn_cancel of the id. If the prefill engine ends meanwhile, the load fails at once. To claim a transfer that is
 * claimed or loaded already is no error.
 *
 * With report_claims a claim also ends by a KVCONN_SIDE_CLAIM, which has the claim's token. After this completion a
 * cancel changes nothing, a load fails with the same code and reason, and a new claim is for another request.
 */
int32_t kvconn_claim(kvconn_agent agent, const kvconn_load_request *claims, size_t count, size_t *accepted);

/* Decode: loads these transfers. The blocks belong to the transfer until its completion. After the completion no byte
   of the transfer can land in them. The prefill engine need not know the request yet. */
int32_t kvconn_start_load(kvconn_agent agent, const kvconn_load_request *loads, size_t count, size_t *accepted);

/* Ends this agent's halves of transfers early, and tells the other side. Each half still gets its completion, with
   KVCONN_CANCELLED unless it had ended. A prefill agent remembers a cancelled id that it does not know: it refuses a
   later load of that transfer, and ends an offer of it at once. */
int32_t kvconn_cancel(kvconn_agent agent, const char *const *transfer_ids, size_t count, const char *reason,
                      size_t *accepted);

/* The number of completions that wait to be collected, or a negated status. */
int32_t kvconn_pending(kvconn_agent agent);

/* The address of the number that kvconn_pending returns, for a caller that cannot afford even a call: 32 bits that
   change atomically. These bits are also not 0 when kvconn_pending would return an error. The result is NULL when the
   handle is not open. */
const volatile uint32_t *kvconn_pending_address(kvconn_agent agent);

/* Moves up to capacity completions out, and their number to *count. The call never waits. completion_size is the
   caller's sizeof(struct kvconn_completion). */
int32_t kvconn_get_finished(kvconn_agent agent, kvconn_completion *completions, size_t completion_size,
                            size_t capacity, size_t *count);

/* A file descriptor for poll, select or epoll that is readable while completions wait, or a negated status. Do not
   read from it. kvconn_close closes it. */
int32_t kvconn_event_fd(kvconn_agent agent);

/* The agent's counters as a JSON object, NUL-terminated. *length (may be NULL) is its length, also when
   KVCONN_ERR_BUFFER says that capacity is too small. */
int32_t kvconn_stats(kvconn_agent agent, char *buffer, size_t capacity, size_t *length);

/* The text of this thread's last failed call, which names the wrong value and the remedy. The text ends with a NUL
   and is cut off at capacity or after 1023 bytes. Like errno, it has a meaning only after a call of the same
   thread has failed. */
int32_t kvconn_last_error(char *buffer, size_t capacity);

/* The "http://host:port" of the bootstrap port that this agent serves or has joined; else empty. */
int32_t kvconn_bootstrap_address(kvconn_agent agent, char *buffer, size_t capacity);

/*
 * Log records wait in a bounded ring of the library, which drops and counts the oldest. kvconn_next_log takes one
 * record as a JSON object and returns its length, 0 if there is none. The members level, time, logger and msg are in
 * each record; others may follow. kvconn_log_fd is readable while records wait.
 */
int32_t kvconn_log_fd(void);
int32_t kvconn_next_log(char *buffer, size_t capacity);

/*
 * Ends every transfer with the code KVCONN_AGENT_CLOSED, waits until no byte can land any more, and frees the agent.
 * Completions that are not collected are lost with the handle. The call takes at most close_timeout_s, and fifteen
 * seconds more if the embedded server does not stop, or if a transport does not end. At its end the event fd
 * becomes readable once more and is closed; the handle is stale.
 *
 * If a GPU or the kernel does not answer, the call cannot promise that no byte lands. The call returns within the same
 * time, with KVCONN_ERR_SYSTEM, and the handle is stale all the same. The reason has the device's number and, if they
 * are known, the regions to which copies have not ended. A transfer whose blocks may still be written has no
 * completion. The library and that GPU may still read and write all registered memory, on the host too. So the engine
 * must not free or use any of it again while the process lives. The library keeps its own pinned memory, since the GPU
 * may still use that too.
 */
int32_t kvconn_close(kvconn_agent agent);

/* Runs the kvconn command (demo, bench, proxy …) as main() would, for wheels whose only binary is this library, and
   returns its exit status. The command takes SIGINT and SIGTERM, and may write to stdout and stderr. */
int32_t kvconn_main(int32_t argc, const char *const *argv);

#ifdef __cplusplus
}
#endif
#endif /* KVCONN_H */
