/* What kvconn.h promises of kvconn_alloc and kvconn_free, and that a decode process maps such memory of a prefill
   process: this program starts itself as one. */
#include <kvconn.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
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

enum { BLOCKS = 64, BLOCK = 65536, MOVED = 20, HUGE_PAGE = 2 << 20 };

static unsigned char ordinary[BLOCKS][BLOCK] __attribute__((aligned(4096)));

static int error_says(const char *part) {
  char text[1024];
  kvconn_last_error(text, sizeof text);
  return strstr(text, part) != NULL;
}

static int32_t registers(kvconn_agent agent, void *cache) {
  kvconn_region r;
  memset(&r, 0, sizeof r);
  r.struct_size = sizeof r;
  r.name = "layer.0";
  r.address = (uint64_t)(uintptr_t)cache;
  r.block_stride = r.block_bytes = BLOCK;
  r.num_blocks = BLOCKS;
  return kvconn_register_kv_caches(agent, &r, 1);
}

static void lengths(void) {
  void *at = &at, *second = NULL;
  EXPECT(kvconn_alloc(4096, NULL) == KVCONN_ERR_INVALID && error_says("address is NULL"));
  EXPECT(kvconn_alloc(0, &at) == KVCONN_ERR_INVALID && at == NULL && error_says("0 bytes"));
  EXPECT(kvconn_alloc(UINT64_MAX, &at) == KVCONN_ERR_INVALID && at == NULL);
  EXPECT(kvconn_alloc(UINT64_C(1) << 45, &at) == KVCONN_ERR_SYSTEM && at == NULL && error_says("available"));
  struct rlimit limit, was;
  EXPECT(getrlimit(RLIMIT_FSIZE, &was) == 0);
  limit = was;
  limit.rlim_cur = 1 << 20; /* over which the kernel would end this process by SIGXFSZ */
  EXPECT(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  EXPECT(kvconn_alloc((1 << 20) + 1, &at) == KVCONN_ERR_SYSTEM && at == NULL && error_says("ulimit -f"));
  EXPECT(setrlimit(RLIMIT_FSIZE, &was) == 0);
  EXPECT(kvconn_alloc(1, &at) == KVCONN_OK && (uintptr_t)at % 4096 == 0);
  EXPECT(kvconn_alloc(2 * HUGE_PAGE + 1, &second) == KVCONN_OK && (uintptr_t)second % HUGE_PAGE == 0);
  unsigned char *bytes = second;
  for (size_t i = 0; i <= 2 * HUGE_PAGE; i++)
    if (bytes[i] != 0) {
      EXPECT(!"it is zeroed");
      break;
    }
  memset(bytes, 7, 2 * HUGE_PAGE + 1);
  EXPECT(*(unsigned char *)at == 0);
  EXPECT(kvconn_free(at) == KVCONN_OK);
  EXPECT(kvconn_free(second) == KVCONN_OK);
}

static void bad_frees(void) {
  void *at = NULL, *more[1025];
  EXPECT(kvconn_free(NULL) == KVCONN_OK);
  EXPECT(kvconn_free(ordinary) == KVCONN_ERR_INVALID && error_says("no shared memory begins"));
  EXPECT(kvconn_alloc(8192, &at) == KVCONN_OK);
  EXPECT(kvconn_free((unsigned char *)at + 4096) == KVCONN_ERR_INVALID);
  EXPECT(kvconn_free(at) == KVCONN_OK);
  EXPECT(kvconn_free(at) == KVCONN_ERR_INVALID && error_says("freed already"));
  for (int i = 0; i < 1024; i++) EXPECT(kvconn_alloc(1, &more[i]) == KVCONN_OK);
  EXPECT(kvconn_alloc(1, &more[1024]) == KVCONN_ERR_OVERLOAD && more[1024] == NULL && error_says("1024"));
  for (int i = 0; i < 1024; i++) EXPECT(kvconn_free(more[i]) == KVCONN_OK);
}

/* A child neither calls the library nor has the memory, and its end frees nothing of the parent's. */
static void forked(void) {
  void *at = NULL, *none = NULL;
  EXPECT(kvconn_alloc(8192, &at) == KVCONN_OK);
  volatile unsigned char *bytes = at;
  bytes[4096] = 3;
  pid_t child = fork();
  if (child == 0) {
    alarm(20); /* a hang is a failure */
    if (kvconn_alloc(1, &none) != KVCONN_ERR_FORKED || kvconn_free(at) != KVCONN_ERR_FORKED) _exit(1);
    _exit(bytes[4096]);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
  EXPECT(bytes[4096] == 3);
  EXPECT(kvconn_free(at) == KVCONN_OK);
}

/* Whether memory of kvconn_alloc lies there. Other memory may, as a new thread's stack, as soon as it has gone. */
static int is_allocated(void *at) {
  char line[4096];
  unsigned long from, to;
  int found = 0;
  FILE *maps = fopen("/proc/self/maps", "re");
  EXPECT(maps != NULL);
  while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
    if (sscanf(line, "%lx-%lx", &from, &to) == 2 && from <= (uintptr_t)at && (uintptr_t)at < to) found = strstr(line, "memfd:kvconn") != NULL;
  if (maps != NULL) fclose(maps);
  return found;
}

/* Freed while it is registered, it stays until kvconn_close; freed memory is not registered. */
static void freed_early(void) {
  kvconn_agent a = 0, b = 0;
  void *at = NULL;
  EXPECT(kvconn_alloc(sizeof ordinary, &at) == KVCONN_OK);
  EXPECT(kvconn_open("{\"engine_id\":\"s\",\"role\":\"decode\"}", &a) == KVCONN_OK);
  EXPECT(kvconn_open("{\"engine_id\":\"t\",\"role\":\"decode\"}", &b) == KVCONN_OK);
  EXPECT(registers(a, at) == KVCONN_OK);
  EXPECT(kvconn_free(at) == KVCONN_OK);
  memset(at, 1, sizeof ordinary);
  EXPECT(registers(b, at) == KVCONN_ERR_INVALID && error_says("was freed"));
  EXPECT(is_allocated(at));
  EXPECT(kvconn_close(a) == KVCONN_OK);
  EXPECT(!is_allocated(at));
  EXPECT(kvconn_close(b) == KVCONN_OK);
}

static const char ID[] = "shared";

static unsigned char pattern(int position, int i) { return (unsigned char)(position * 7 + i * 13 + (i >> 8) + 1); }

/* The agent's one transfer has gone by local, in this way. */
static void awaits(kvconn_agent agent, const char *how) {
  struct pollfd ready = {kvconn_event_fd(agent), POLLIN, 0};
  kvconn_completion c;
  size_t n = 0;
  EXPECT(poll(&ready, 1, 30000) == 1);
  EXPECT(kvconn_get_finished(agent, &c, sizeof c, 1, &n) == KVCONN_OK && n == 1);
  EXPECT(n == 1 && c.code == KVCONN_OK && strcmp(c.transport, "local") == 0 && c.bytes == (uint64_t)MOVED * BLOCK);
  if (n == 1 && c.code != KVCONN_OK) fprintf(stderr, "%s\n", c.reason);
  static char stats[1 << 16];
  char says[64];
  snprintf(says, sizeof says, "\"how\":\"%s\"", how);
  EXPECT(kvconn_stats(agent, stats, sizeof stats, NULL) == KVCONN_OK && strstr(stats, says) != NULL);
}

static int prefill(const char *how) {
  kvconn_agent agent = 0;
  void *at = ordinary;
  if (strcmp(how, "mapping") == 0) EXPECT(kvconn_alloc(sizeof ordinary, &at) == KVCONN_OK);
  unsigned char(*cache)[BLOCK] = at;
  EXPECT(kvconn_open("{\"engine_id\":\"p\",\"role\":\"prefill\",\"bootstrap_host\":\"127.0.0.1\",\"bootstrap_port\":0,\"transport\":\"local\"}", &agent) == KVCONN_OK);
  EXPECT(registers(agent, cache) == KVCONN_OK);
  uint32_t ids[MOVED];
  for (int p = 0; p < MOVED; p++) {
    ids[p] = (uint32_t)(p * 5 % BLOCKS);
    for (int i = 0; i < BLOCK; i++) cache[ids[p]][i] = pattern(p, i);
  }
  kvconn_blocks group = {ids, MOVED, 0};
  kvconn_offer_request offer;
  memset(&offer, 0, sizeof offer);
  offer.struct_size = sizeof offer;
  offer.transfer_id = ID;
  offer.groups = &group;
  offer.num_groups = 1;
  EXPECT(kvconn_offer(agent, &offer, 1, NULL) == KVCONN_OK);
  char address[256];
  EXPECT(kvconn_bootstrap_address(agent, address, sizeof address) == KVCONN_OK);
  printf("%s\n", address);
  fflush(stdout);
  awaits(agent, how);
  EXPECT(kvconn_close(agent) == KVCONN_OK);
  EXPECT(kvconn_free(at == ordinary ? NULL : at) == KVCONN_OK);
  return failures ? 1 : 0;
}

static void decode(const char *self, const char *how) {
  char command[4096], address[256];
  snprintf(command, sizeof command, "exec '%s' %s", self, how);
  FILE *peer = popen(command, "r");
  if (peer == NULL || fgets(address, sizeof address, peer) == NULL) {
    EXPECT(!"the prefill process has begun");
    return;
  }
  address[strcspn(address, "\n")] = 0;
  kvconn_agent agent = 0;
  void *at = NULL;
  EXPECT(kvconn_alloc(sizeof ordinary, &at) == KVCONN_OK);
  unsigned char(*cache)[BLOCK] = at;
  EXPECT(kvconn_open("{\"engine_id\":\"d\",\"role\":\"decode\",\"transport\":\"local\"}", &agent) == KVCONN_OK);
  EXPECT(registers(agent, cache) == KVCONN_OK);
  uint32_t ids[MOVED];
  int position[BLOCKS];
  for (int b = 0; b < BLOCKS; b++) position[b] = -1;
  for (int p = 0; p < MOVED; p++) position[ids[p] = (uint32_t)(p * 11 % BLOCKS)] = p;
  kvconn_blocks group = {ids, MOVED, 0};
  kvconn_load_request load;
  memset(&load, 0, sizeof load);
  load.struct_size = sizeof load;
  load.transfer_id = ID;
  load.bootstrap_addr = address;
  load.groups = &group;
  load.num_groups = 1;
  EXPECT(kvconn_start_load(agent, &load, 1, NULL) == KVCONN_OK);
  awaits(agent, how);
  for (int b = 0; b < BLOCKS; b++)
    for (int i = 0; i < BLOCK; i++) {
      unsigned char want = position[b] < 0 ? 0 : pattern(position[b], i);
      if (cache[b][i] == want) continue;
      fprintf(stderr, "%s: block %d, byte %d is %d, want %d\n", how, b, i, cache[b][i], want);
      failures++;
      b = BLOCKS;
      break;
    }
  EXPECT(pclose(peer) == 0);
  EXPECT(kvconn_close(agent) == KVCONN_OK);
  EXPECT(kvconn_free(at) == KVCONN_OK);
}

int main(int argc, char **argv) {
  if (argc > 1) return prefill(argv[1]);
  lengths();
  bad_frees();
  forked();
  freed_early();
  decode(argv[0], "mapping");
  decode(argv[0], "process_vm_readv");
  return failures ? 1 : 0;
}
