/*
 * The public functions. Each refuses to enter Go in a forked child, where the
 * Go runtime has lost its threads and would hang, and keeps the text of a
 * failure for kvconn_last_error of the same thread.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"
#include "slots.h"

#define PUBLIC __attribute__((visibility("default")))

static _Atomic int forked;

/* The last error of each thread. Not __thread: that would need a symbol of the
   dynamic loader, and libc is all that the library asks for. */
static pthread_key_t error_key;
enum { ERROR_SIZE = 1024 };

static void after_fork_in_child(void) { atomic_store(&forked, 1); }

__attribute__((constructor)) static void init_shim(void) {
  pthread_atfork(NULL, NULL, after_fork_in_child);
  pthread_key_create(&error_key, free);
}

static int32_t fail(int32_t status, const char *text) {
  char *mine = pthread_getspecific(error_key);
  if (mine == NULL) {
    mine = malloc(ERROR_SIZE);
    pthread_setspecific(error_key, mine);
  }
  if (mine != NULL) snprintf(mine, ERROR_SIZE, "%s", text);
  return status;
}

static int in_fork(void) { return atomic_load_explicit(&forked, memory_order_relaxed); }

static int32_t fail_forked(void) {
  return fail(KVCONN_ERR_FORKED, "called in a child made by fork after libkvconn was loaded; load it after the fork, or use spawn");
}

static int32_t fail_handle(void) { return fail(KVCONN_ERR_HANDLE, "the handle is not open: it was closed, or kvconn_open did not return it"); }

static int32_t fail_poisoned(void) {
  return fail(KVCONN_ERR_INTERNAL, "a defect of kvconn was contained; the library is unusable in this process, its log says more");
}

/* Takes over the text that the Go half has allocated. */
static int32_t done(int32_t status, char *text) {
  if (text != NULL) {
    fail(status, text);
    free(text);
  }
  return status;
}

#define ENTER() \
  if (in_fork()) return fail_forked(); \
  char *text = NULL

/* More than any engine has in one step; a count over it is a mistake. */
enum { MAX_BATCH = 1 << 20 };

#define NEED(condition, message) \
  if (!(condition)) return fail(KVCONN_ERR_INVALID, message)

PUBLIC uint32_t kvconn_abi_version(void) { return KVCONN_ABI_VERSION; }

PUBLIC const char *kvconn_version(void) { return KVCONN_VERSION; }

PUBLIC const char *kvconn_status_name(int32_t status) {
  switch (status) {
    case KVCONN_OK: return "ok";
    case KVCONN_ERR_INVALID: return "invalid";
    case KVCONN_ERR_HANDLE: return "handle";
    case KVCONN_ERR_CLOSED: return "closed";
    case KVCONN_ERR_NOT_REGISTERED: return "not-registered";
    case KVCONN_ERR_DUPLICATE: return "duplicate";
    case KVCONN_ERR_OVERLOAD: return "overload";
    case KVCONN_ERR_FORKED: return "forked";
    case KVCONN_ERR_ADDRESS: return "address";
    case KVCONN_ERR_BUFFER: return "buffer";
    case KVCONN_ERR_INTERNAL: return "internal";
    case KVCONN_ERR_SYSTEM: return "system";
    case KVCONN_CANCELLED: return "cancelled";
    case KVCONN_PEER_CANCELLED: return "peer-cancelled";
    case KVCONN_PEER_LOST: return "peer-lost";
    case KVCONN_NOT_OFFERED: return "not-offered";
    case KVCONN_EXPIRED: return "expired";
    case KVCONN_REFUSED: return "refused";
    case KVCONN_UNREACHABLE: return "unreachable";
    case KVCONN_FAILED: return "failed";
    case KVCONN_AGENT_CLOSED: return "agent-closed";
  }
  return "unknown";
}

PUBLIC int32_t kvconn_last_error(char *buffer, size_t capacity) {
  if (buffer == NULL || capacity == 0) return KVCONN_ERR_INVALID;
  const char *mine = pthread_getspecific(error_key);
  snprintf(buffer, capacity, "%s", mine == NULL ? "" : mine);
  return KVCONN_OK;
}

PUBLIC int32_t kvconn_open(const char *config_json, kvconn_agent *agent) {
  ENTER();
  NEED(agent != NULL, "agent is NULL");
  *agent = 0;
  NEED(config_json != NULL, "config_json is NULL");
  int32_t status = go_open((char *)config_json, agent, &text);
  return done(status, text);
}

PUBLIC int32_t kvconn_register_kv_caches(kvconn_agent agent, const kvconn_region *regions, size_t num_regions) {
  ENTER();
  NEED((regions != NULL || num_regions == 0) && num_regions <= MAX_BATCH, "regions is NULL, or num_regions is over 1048576");
  int32_t status = go_register(agent, (kvconn_region *)regions, num_regions, &text);
  return done(status, text);
}

PUBLIC int32_t kvconn_alloc(uint64_t bytes, void **address) {
  ENTER();
  NEED(address != NULL, "address is NULL");
  *address = NULL;
  int32_t status = go_alloc(bytes, address, &text);
  return done(status, text);
}

PUBLIC int32_t kvconn_free(void *address) {
  ENTER();
  if (address == NULL) return KVCONN_OK;
  int32_t status = go_free(address, &text);
  return done(status, text);
}

PUBLIC int32_t kvconn_announce(kvconn_agent agent, const char *const *transfer_ids, size_t count, size_t *accepted) {
  ENTER();
  NEED((transfer_ids != NULL || count == 0) && count <= MAX_BATCH, "transfer_ids is NULL, or count is over 1048576");
  size_t taken = 0;
  int32_t status = go_announce(agent, (char **)transfer_ids, count, &taken, &text);
  if (accepted != NULL) *accepted = taken;
  return done(status, text);
}

PUBLIC int32_t kvconn_offer(kvconn_agent agent, const kvconn_offer_request *offers, size_t count, size_t *accepted) {
  ENTER();
  NEED((offers != NULL || count == 0) && count <= MAX_BATCH, "offers is NULL, or count is over 1048576");
  size_t taken = 0;
  int32_t status = go_offer(agent, (kvconn_offer_request *)offers, count, &taken, &text);
  if (accepted != NULL) *accepted = taken;
  return done(status, text);
}

PUBLIC int32_t kvconn_offer_partial(kvconn_agent agent, const kvconn_partial_offer *parts, size_t count, const uint32_t *regions, size_t num_regions, size_t *accepted) {
  ENTER();
  NEED((parts != NULL || count == 0) && count <= MAX_BATCH, "parts is NULL, or count is over 1048576");
  NEED((regions != NULL || num_regions == 0) && num_regions <= MAX_BATCH, "regions is NULL, or num_regions is over 1048576");
  size_t taken = 0;
  int32_t status = go_offer_partial(agent, (kvconn_partial_offer *)parts, count, (uint32_t *)regions, num_regions, &taken, &text);
  if (accepted != NULL) *accepted = taken;
  return done(status, text);
}

PUBLIC int32_t kvconn_withdraw(kvconn_agent agent, const char *const *transfer_ids, size_t count, uint32_t timeout_ms) {
  ENTER();
  NEED((transfer_ids != NULL || count == 0) && count <= MAX_BATCH, "transfer_ids is NULL, or count is over 1048576");
  int32_t status = go_withdraw(agent, (char **)transfer_ids, count, timeout_ms, &text);
  return done(status, text);
}

PUBLIC int32_t kvconn_claim(kvconn_agent agent, const kvconn_load_request *claims, size_t count, size_t *accepted) {
  ENTER();
  NEED((claims != NULL || count == 0) && count <= MAX_BATCH, "claims is NULL, or count is over 1048576");
  size_t taken = 0;
  int32_t status = go_claim(agent, (kvconn_load_request *)claims, count, &taken, &text);
  if (accepted != NULL) *accepted = taken;
  return done(status, text);
}

PUBLIC int32_t kvconn_start_load(kvconn_agent agent, const kvconn_load_request *loads, size_t count, size_t *accepted) {
  ENTER();
  NEED((loads != NULL || count == 0) && count <= MAX_BATCH, "loads is NULL, or count is over 1048576");
  size_t taken = 0;
  int32_t status = go_start_load(agent, (kvconn_load_request *)loads, count, &taken, &text);
  if (accepted != NULL) *accepted = taken;
  return done(status, text);
}

PUBLIC int32_t kvconn_cancel(kvconn_agent agent, const char *const *transfer_ids, size_t count, const char *reason, size_t *accepted) {
  ENTER();
  NEED((transfer_ids != NULL || count == 0) && count <= MAX_BATCH, "transfer_ids is NULL, or count is over 1048576");
  size_t taken = 0;
  int32_t status = go_cancel(agent, (char **)transfer_ids, count, (char *)reason, &taken, &text);
  if (accepted != NULL) *accepted = taken;
  return done(status, text);
}

PUBLIC int32_t kvconn_pending(kvconn_agent agent) {
  if (in_fork()) return -fail_forked();
  if (slots_poisoned()) return -fail_poisoned();
  int n = slot_count(agent);
  return n >= 0 ? n : -fail_handle();
}

PUBLIC const volatile uint32_t *kvconn_pending_address(kvconn_agent agent) {
  if (in_fork()) {
    fail_forked();
    return NULL;
  }
  const volatile uint32_t *address = slot_count_address(agent);
  if (address == NULL) fail_handle();
  return address;
}

PUBLIC volatile uint8_t *kvconn_written_address(kvconn_agent agent) {
  if (in_fork()) {
    fail_forked();
    return NULL;
  }
  volatile uint8_t *address = slot_written_address(agent);
  if (address == NULL) slot_count(agent) < 0 ? fail_handle() : fail(KVCONN_ERR_SYSTEM, "membarrier(2) is refused: let the container use it, or say each layer by kvconn_offer_partial");
  return address;
}

PUBLIC int32_t kvconn_moment(kvconn_agent agent, uint32_t region, void *stream, uint64_t *moment) {
  ENTER();
  NEED(moment != NULL, "moment is NULL");
  if (slots_poisoned()) return fail_poisoned();
  if (slot_moment(agent, region, (uintptr_t)stream, moment)) return KVCONN_OK;
  *moment = 0;
  int32_t status = go_moment(agent, region, (uintptr_t)stream, moment, &text); /* go_moment says why not */
  return done(status, text);
}

PUBLIC int32_t kvconn_written_after(kvconn_agent agent, const uint32_t *regions, size_t num_regions, uint64_t moment) {
  if (in_fork()) return fail_forked();
  NEED(regions != NULL || num_regions == 0, "regions is NULL");
  if (slots_poisoned()) return fail_poisoned();
  switch (slot_mark_written(agent, regions, num_regions, moment)) {
    case 0: return KVCONN_OK;
    case -1: return fail_handle();
  }
  return fail(KVCONN_ERR_INVALID, "a region is not in device memory: mark it at kvconn_written_address");
}

PUBLIC int32_t kvconn_written_on(kvconn_agent agent, const uint32_t *regions, size_t num_regions, void *stream) {
  if (in_fork()) return fail_forked();
  NEED(regions != NULL && num_regions > 0, "regions is NULL, or num_regions is 0");
  uint64_t moment;
  int32_t status = kvconn_moment(agent, regions[0], stream, &moment);
  return status != KVCONN_OK ? status : kvconn_written_after(agent, regions, num_regions, moment);
}

PUBLIC int32_t kvconn_get_finished(kvconn_agent agent, kvconn_completion *completions, size_t completion_size, size_t capacity, size_t *count) {
  if (in_fork()) return fail_forked();
  NEED(count != NULL, "count is NULL");
  *count = 0;
  NEED(completions != NULL || capacity == 0, "completions is NULL");
  NEED(completion_size >= sizeof(kvconn_completion), "completion_size is less than the size of a kvconn_completion");
  if (slots_poisoned()) return fail_poisoned();
  int n = slot_count(agent);
  if (n < 0) return fail_handle();
  if (n == 0) return KVCONN_OK;
  int32_t status = slot_take(agent, completions, completion_size, capacity, count);
  return status == KVCONN_ERR_HANDLE ? fail_handle() : status;
}

PUBLIC int32_t kvconn_event_fd(kvconn_agent agent) {
  if (in_fork()) return -fail_forked();
  int fd = slot_event_fd(agent);
  return fd >= 0 ? fd : -fail_handle();
}

PUBLIC int32_t kvconn_stats(kvconn_agent agent, char *buffer, size_t capacity, size_t *length) {
  ENTER();
  NEED(buffer != NULL || capacity == 0, "buffer is NULL");
  size_t len = 0;
  int32_t status = go_stats(agent, buffer, capacity, &len, &text);
  if (length != NULL) *length = len;
  return done(status, text);
}

PUBLIC int32_t kvconn_bootstrap_address(kvconn_agent agent, char *buffer, size_t capacity) {
  ENTER();
  NEED(buffer != NULL && capacity > 0, "buffer is NULL or has no room");
  int32_t status = go_bootstrap_address(agent, buffer, capacity, &text);
  return done(status, text);
}

PUBLIC int32_t kvconn_log_fd(void) {
  if (in_fork()) return -fail_forked();
  return go_log_fd();
}

PUBLIC int32_t kvconn_next_log(char *buffer, size_t capacity) {
  if (in_fork()) return -fail_forked();
  if (buffer == NULL || capacity == 0) return -fail(KVCONN_ERR_INVALID, "buffer is NULL or has no room");
  return go_next_log(buffer, capacity);
}

PUBLIC int32_t kvconn_close(kvconn_agent agent) {
  ENTER();
  int32_t status = go_close(agent, &text);
  return done(status, text);
}

PUBLIC int32_t kvconn_main(int32_t argc, const char *const *argv) {
  if (in_fork()) return fail_forked();
  NEED(argc > 0 && argc < 10000 && argv != NULL, "argc is not 1 to 9999, or argv is NULL");
  return go_main(argc, (char **)argv);
}
