/* What kvconn.h promises and the example does not show: bad arguments, stale
   handles, forked children, completions of several threads. */
#include <errno.h>
#include <kvconn.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

#define EXPECT(condition)                                                                          \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      char text[1024];                                                                             \
      kvconn_last_error(text, sizeof text);                                                        \
      fprintf(stderr, "%s:%d: %s does not hold (last error: %s)\n", __FILE__, __LINE__, #condition, text); \
      failures++;                                                                                  \
    }                                                                                              \
  } while (0)

static unsigned char p_cache[8][4096] __attribute__((aligned(64)));
static unsigned char d_cache[8][4096] __attribute__((aligned(64)));

static int error_says(const char *part) {
  char text[1024];
  kvconn_last_error(text, sizeof text);
  return strstr(text, part) != NULL;
}

static kvconn_region region_of(unsigned char (*cache)[4096]) {
  kvconn_region r;
  memset(&r, 0, sizeof r);
  r.struct_size = sizeof r;
  r.name = "layer.0";
  r.address = (uint64_t)(uintptr_t)cache;
  r.block_stride = r.block_bytes = 4096;
  r.num_blocks = 8;
  return r;
}

static void bad_config(void) {
  kvconn_agent a = 7;
  EXPECT(kvconn_open(NULL, &a) == KVCONN_ERR_INVALID && a == 0);
  EXPECT(kvconn_open("{", &a) == KVCONN_ERR_INVALID);
  EXPECT(kvconn_open("{}", &a) == KVCONN_ERR_INVALID && error_says("engine_id"));
  EXPECT(kvconn_open("{\"engine_id\":\"e\",\"role\":\"decode\",\"leese_s\":1}", &a) == KVCONN_ERR_INVALID && error_says("leese_s"));
  EXPECT(kvconn_open("{\"engine_id\":7,\"role\":\"decode\"}", &a) == KVCONN_ERR_INVALID && error_says("engine_id"));
  EXPECT(kvconn_open("{\"engine_id\":\"e\",\"role\":\"cook\"}", &a) == KVCONN_ERR_INVALID && error_says("cook"));
}

static void stale_handles(void) {
  kvconn_completion c;
  size_t n = 9;
  const char *id = "x";
  const kvconn_agent bad[] = {0, 1, 12345, ~(kvconn_agent)0};
  const uint32_t region = 0;
  uint64_t moment = 7;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    EXPECT(kvconn_pending(bad[i]) == -KVCONN_ERR_HANDLE);
    EXPECT(kvconn_get_finished(bad[i], &c, sizeof c, 1, &n) == KVCONN_ERR_HANDLE && n == 0);
    EXPECT(kvconn_event_fd(bad[i]) == -KVCONN_ERR_HANDLE);
    EXPECT(kvconn_announce(bad[i], &id, 1, NULL) == KVCONN_ERR_HANDLE);
    EXPECT(kvconn_written_address(bad[i]) == NULL && error_says("handle"));
    EXPECT(kvconn_moment(bad[i], 0, NULL, &moment) == KVCONN_ERR_HANDLE && moment == 0);
    EXPECT(kvconn_written_after(bad[i], &region, 1, 1) == KVCONN_ERR_HANDLE);
    EXPECT(kvconn_written_on(bad[i], &region, 1, NULL) == KVCONN_ERR_HANDLE);
    EXPECT(kvconn_written_on(bad[i], &region, 0, NULL) == KVCONN_ERR_INVALID);
    EXPECT(kvconn_close(bad[i]) == KVCONN_ERR_HANDLE);
  }
}

static void bad_calls(kvconn_agent p, kvconn_agent d, const char *address) {
  kvconn_region r = region_of(p_cache);
  const char *id = "bad-1";
  const uint32_t ids[] = {1, 2, 8};
  kvconn_blocks g = {ids, 3, 0};
  kvconn_offer_request o;
  memset(&o, 0, sizeof o);
  o.struct_size = sizeof o;
  o.transfer_id = id;
  o.groups = &g;
  o.num_groups = 1;
  size_t taken = 9;
  EXPECT(kvconn_offer(p, &o, 1, &taken) == KVCONN_ERR_NOT_REGISTERED && taken == 0);
  r.struct_size = 3;
  EXPECT(kvconn_register_kv_caches(p, &r, 1) == KVCONN_ERR_INVALID && error_says("struct_size"));
  r = region_of(p_cache);
  r.address += 1;
  EXPECT(kvconn_register_kv_caches(p, &r, 1) == KVCONN_ERR_INVALID && error_says("unaligned"));
  kvconn_region two[2];
  two[0] = two[1] = region_of(p_cache);
  two[1].name = "layer.1";
  two[1].address += 4;
  EXPECT(kvconn_register_kv_caches(p, two, 2) == KVCONN_ERR_INVALID && error_says("overlaps"));
  r = region_of(p_cache);
  EXPECT(kvconn_register_kv_caches(p, &r, 1) == KVCONN_OK);
  EXPECT(kvconn_register_kv_caches(p, &r, 1) == KVCONN_ERR_DUPLICATE);
  r = region_of(d_cache);
  EXPECT(kvconn_register_kv_caches(d, &r, 1) == KVCONN_OK);

  EXPECT(kvconn_offer(p, &o, 1, &taken) == KVCONN_ERR_INVALID && error_says("block id 8") && taken == 0);
  const uint32_t four = 4, other = 1;
  kvconn_partial_offer part = {sizeof part, 1, "bad-0", &g, &four, 0, NULL, 0};
  EXPECT(kvconn_offer_partial(p, &part, 1, NULL, 0, &taken) == KVCONN_ERR_INVALID && error_says("block id 8") && taken == 0);
  g.count = 2;
  EXPECT(kvconn_offer_partial(p, &part, 1, NULL, 0, &taken) == KVCONN_ERR_INVALID && error_says("blocks up to 4"));
  EXPECT(kvconn_offer_partial(p, &part, 1, &other, 1, &taken) == KVCONN_ERR_INVALID && error_says("region"));
  EXPECT(kvconn_offer_partial(p, &part, 1, NULL, 1, &taken) == KVCONN_ERR_INVALID && error_says("regions is NULL"));
  EXPECT(kvconn_offer_partial(d, &part, 1, NULL, 0, &taken) == KVCONN_ERR_INVALID && error_says("role"));
  part.computing = &four;
  const uint32_t none = 0;
  part.ready = &none;
  EXPECT(kvconn_offer_partial(p, &part, 1, NULL, 0, &taken) == KVCONN_ERR_INVALID && error_says("being computed"));
  volatile uint8_t *written = kvconn_written_address(p);
  EXPECT(written != NULL && written[0] == 0);
  written[0] = 1; /* no step runs: the mark says nothing */
  uint64_t moment = 1;
  EXPECT(kvconn_moment(p, 0, NULL, &moment) == KVCONN_ERR_INVALID && moment == 0 && error_says("device memory"));
  EXPECT(kvconn_moment(p, 0, NULL, NULL) == KVCONN_ERR_INVALID && error_says("moment is NULL"));
  EXPECT(kvconn_written_after(p, &none, 1, 1) == KVCONN_ERR_INVALID && error_says("device memory"));
  part.computing = NULL;
  part.ready = NULL;
  EXPECT(kvconn_offer_partial(p, &part, 1, NULL, 0, &taken) == KVCONN_ERR_INVALID && error_says("ready"));
  part.struct_size = 3;
  EXPECT(kvconn_offer_partial(p, &part, 1, NULL, 0, &taken) == KVCONN_ERR_INVALID && error_says("struct_size"));
  EXPECT(kvconn_withdraw(p, &id, 1, 1000) == KVCONN_OK);
  EXPECT(kvconn_withdraw(p, NULL, 1, 1000) == KVCONN_ERR_INVALID && error_says("transfer_ids is NULL"));
  g.count = 3;
  g.count = 2;
  EXPECT(kvconn_offer(p, &o, 1, &taken) == KVCONN_OK && taken == 1);
  EXPECT(kvconn_offer(p, &o, 1, &taken) == KVCONN_ERR_DUPLICATE && error_says("bad-1"));
  kvconn_load_request l;
  memset(&l, 0, sizeof l);
  l.struct_size = sizeof l;
  l.transfer_id = id;
  l.bootstrap_addr = address;
  l.groups = &g;
  l.num_groups = 1;
  EXPECT(kvconn_start_load(p, &l, 1, &taken) == KVCONN_ERR_INVALID && error_says("role"));
  EXPECT(kvconn_claim(d, &l, 1, &taken) == KVCONN_ERR_INVALID && taken == 0 && error_says("num_groups"));
  l.num_groups = 0;
  EXPECT(kvconn_claim(p, &l, 1, &taken) == KVCONN_ERR_INVALID && error_says("role"));
  EXPECT(kvconn_claim(d, NULL, 1, &taken) == KVCONN_ERR_INVALID && error_says("claims is NULL"));
  EXPECT(kvconn_claim(d, &l, 1, &taken) == KVCONN_OK && taken == 1);
  EXPECT(kvconn_claim(d, &l, 1, &taken) == KVCONN_OK && taken == 1);
  EXPECT(kvconn_cancel(d, &l.transfer_id, 1, NULL, &taken) == KVCONN_OK && kvconn_pending(d) == 0);
  l.num_groups = 1;
  l.transfer_id = "";
  EXPECT(kvconn_start_load(d, &l, 1, &taken) == KVCONN_ERR_INVALID && error_says("transfer_id"));
  l.transfer_id = NULL;
  EXPECT(kvconn_start_load(d, &l, 1, &taken) == KVCONN_ERR_INVALID);
  kvconn_completion c;
  size_t n;
  EXPECT(kvconn_get_finished(d, &c, 4, 1, &n) == KVCONN_ERR_INVALID);
  EXPECT(kvconn_get_finished(d, NULL, sizeof c, 1, &n) == KVCONN_ERR_INVALID);
  char small[4];
  size_t length;
  EXPECT(kvconn_stats(d, small, sizeof small, &length) == KVCONN_ERR_BUFFER && length > sizeof small);
  /* an address that nobody serves: the load ends, with the reason */
  l.transfer_id = "bad-2";
  l.bootstrap_addr = "http://127.0.0.1:1";
  EXPECT(kvconn_start_load(d, &l, 1, &taken) == KVCONN_OK);
  struct pollfd ready = {kvconn_event_fd(d), POLLIN, 0};
  EXPECT(poll(&ready, 1, 30000) == 1);
  EXPECT(kvconn_pending(d) == 1);
  EXPECT(kvconn_get_finished(d, &c, sizeof c, 1, &n) == KVCONN_OK && n == 1);
  EXPECT(c.code == KVCONN_UNREACHABLE && strstr(c.reason, "127.0.0.1:1") != NULL);
  EXPECT(poll(&ready, 1, 0) == 0);
}

struct batch {
  kvconn_agent p, d;
  const char *address;
  int from;
};

enum { THREADS = 4, EACH = 50 };

/* One thread's transfers. D loads each, and P offers it. P offers some in parts first, and takes some of these parts back before
   the offer. */
static void *transfers(void *arg) {
  struct batch *b = arg;
  const uint32_t one = (uint32_t)b->from, two = (uint32_t)b->from;
  kvconn_blocks src = {&one, 1, 0}, dst = {&two, 1, 0};
  for (int i = 0; i < EACH; i++) {
    char id[64];
    snprintf(id, sizeof id, "thread-%d-%d", b->from, i);
    kvconn_offer_request o;
    memset(&o, 0, sizeof o);
    o.struct_size = sizeof o;
    o.transfer_id = id;
    o.groups = &src;
    o.num_groups = 1;
    o.token = (uint64_t)(b->from * EACH + i);
    o.prompt = UINT64_MAX - o.token;
    kvconn_load_request l;
    memset(&l, 0, sizeof l);
    l.struct_size = sizeof l;
    l.transfer_id = id;
    l.bootstrap_addr = b->address;
    l.groups = &dst;
    l.num_groups = 1;
    l.token = o.token;
    l.prompt = o.prompt;
    EXPECT(kvconn_start_load(b->d, &l, 1, NULL) == KVCONN_OK);
    const uint32_t ready = 1, region = 0;
    kvconn_partial_offer g = {sizeof g, 1, id, &src, &ready, o.prompt, NULL, 0};
    const char *ids[] = {id};
    if (i % 3 > 0) EXPECT(kvconn_offer_partial(b->p, &g, 1, &region, (size_t)(i % 2), NULL) == KVCONN_OK);
    if (i % 3 > 1) EXPECT(kvconn_withdraw(b->p, ids, 1, 30000) == KVCONN_OK);
    EXPECT(kvconn_offer(b->p, &o, 1, NULL) == KVCONN_OK);
  }
  return NULL;
}

/* Prefill and decode have different requests of one id. */
static void crossed(kvconn_agent p, kvconn_agent d, const char *address) {
  const uint32_t block = 1, ready = 1;
  kvconn_blocks g = {&block, 1, 0};
  const char *const ids[] = {"crossed-0", "crossed-1"};
  for (int i = 0; i < 2; i++) {
    kvconn_load_request l;
    memset(&l, 0, sizeof l);
    l.struct_size = sizeof l;
    l.transfer_id = ids[i];
    l.bootstrap_addr = address;
    l.groups = &g;
    l.num_groups = 1;
    l.prompt = 0xfeed;
    EXPECT(kvconn_start_load(d, &l, 1, NULL) == KVCONN_OK);
    kvconn_partial_offer part = {sizeof part, 1, ids[i], &g, &ready, 0xbeef00000000, NULL, 0};
    if (i) EXPECT(kvconn_offer_partial(p, &part, 1, NULL, 0, NULL) == KVCONN_OK);
    kvconn_offer_request o;
    memset(&o, 0, sizeof o);
    o.struct_size = sizeof o;
    o.transfer_id = ids[i];
    o.groups = &g;
    o.num_groups = 1;
    o.prompt = i ? 0 : part.prompt; /* said before */
    EXPECT(kvconn_offer(p, &o, 1, NULL) == KVCONN_OK);
    const kvconn_agent both[] = {p, d};
    for (int k = 0; k < 2; k++) {
      struct pollfd done = {kvconn_event_fd(both[k]), POLLIN, 0};
      kvconn_completion c;
      size_t n;
      EXPECT(poll(&done, 1, 30000) == 1);
      EXPECT(kvconn_get_finished(both[k], &c, sizeof c, 1, &n) == KVCONN_OK && n == 1);
      EXPECT(c.code == KVCONN_REFUSED && strstr(c.reason, "000000000000feed and 0000beef00000000") != NULL);
    }
  }
}

static void collect(kvconn_agent a, int side, int want) {
  static unsigned char seen[THREADS * EACH];
  memset(seen, 0, sizeof seen);
  struct pollfd ready = {kvconn_event_fd(a), POLLIN, 0};
  for (int have = 0; have < want;) {
    kvconn_completion c[16];
    size_t n = 0;
    if (poll(&ready, 1, 30000) != 1) {
      fprintf(stderr, "only %d of %d completions came\n", have, want);
      failures++;
      return;
    }
    EXPECT(kvconn_get_finished(a, c, sizeof *c, 16, &n) == KVCONN_OK);
    for (size_t i = 0; i < n; i++) {
      if (strncmp(c[i].transfer_id, "thread-", 7) != 0) continue;
      EXPECT(c[i].code == KVCONN_OK);
      EXPECT(c[i].side == side);
      EXPECT(c[i].bytes == 4096);
      EXPECT(c[i].token < sizeof seen && !seen[c[i].token]);
      if (c[i].token < sizeof seen) seen[c[i].token] = 1;
      have++;
    }
  }
}

static void forked_child(kvconn_agent d) {
  pid_t pid = fork();
  if (pid == 0) {
    kvconn_agent a;
    size_t n;
    kvconn_completion c;
    alarm(20); /* a hang is a failure */
    int ok = kvconn_pending(d) == -KVCONN_ERR_FORKED && kvconn_get_finished(d, &c, sizeof c, 1, &n) == KVCONN_ERR_FORKED &&
             kvconn_open("{}", &a) == KVCONN_ERR_FORKED && kvconn_written_address(d) == NULL && kvconn_close(d) == KVCONN_ERR_FORKED && error_says("fork");
    _exit(ok ? 0 : 1);
  }
  int status = -1;
  EXPECT(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
  kvconn_agent p, d;
  char address[256];
  EXPECT(kvconn_abi_version() == KVCONN_ABI_VERSION);
  EXPECT(strlen(kvconn_version()) > 0);
  EXPECT(strcmp(kvconn_status_name(9999), "unknown") == 0);
  bad_config();
  stale_handles();
  EXPECT(kvconn_open("{\"engine_id\":\"p\",\"role\":\"prefill\",\"bootstrap_host\":\"127.0.0.1\",\"bootstrap_port\":0,\"log_level\":\"error\"}", &p) == KVCONN_OK);
  EXPECT(kvconn_open("{\"engine_id\":\"d\",\"role\":\"decode\",\"log_level\":\"error\"}", &d) == KVCONN_OK);
  EXPECT(kvconn_bootstrap_address(p, address, sizeof address) == KVCONN_OK && strncmp(address, "http://127.0.0.1:", 17) == 0);
  /* the port is taken now */
  char config[512];
  kvconn_agent other;
  snprintf(config, sizeof config, "{\"engine_id\":\"q\",\"role\":\"prefill\",\"bootstrap_host\":\"127.0.0.1\",\"bootstrap_port\":%s}", address + 17);
  EXPECT(kvconn_open(config, &other) == KVCONN_ERR_ADDRESS && error_says("bootstrap_port"));
  bad_calls(p, d, address);

  pthread_t threads[THREADS];
  struct batch batches[THREADS];
  memset(p_cache, 1, sizeof p_cache);
  for (int i = 0; i < THREADS; i++) {
    batches[i].p = p;
    batches[i].d = d;
    batches[i].address = address;
    batches[i].from = i;
    EXPECT(pthread_create(&threads[i], NULL, transfers, &batches[i]) == 0);
  }
  collect(d, KVCONN_SIDE_LOAD, THREADS * EACH);
  collect(p, KVCONN_SIDE_OFFER, THREADS * EACH);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);

  crossed(p, d, address);
  forked_child(d);
  EXPECT(kvconn_close(d) == KVCONN_OK);
  EXPECT(kvconn_close(d) == KVCONN_ERR_HANDLE);
  EXPECT(kvconn_pending(d) == -KVCONN_ERR_HANDLE);
  EXPECT(kvconn_close(p) == KVCONN_OK); /* with an offer under way that nobody loads */
  char record[4096];
  EXPECT(kvconn_log_fd() >= 0);
  while (kvconn_next_log(record, sizeof record) > 0) EXPECT(record[0] == '{');
  return failures ? 1 : 0;
}
