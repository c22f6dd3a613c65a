/* An engine in C over device memory that was mapped by handles: it sleeps and wakes, and registers nothing anew. The driver is that of
   KVCONN_LIBCUDA, the tests' double. */
#include <kvconn.h>
#include <dlfcn.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

enum { BLOCKS = 16, BLOCK = 128 << 10, BYTES = BLOCKS * BLOCK, MOVED = 5 };

static void *driver;

/* The double's functions take arguments as registers hold them. */
static int cu(const char *name, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e) {
  int (*call)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
  *(void **)&call = dlsym(driver, name);
  if (call == NULL) {
    fprintf(stderr, "the driver has no %s\n", name);
    exit(1);
  }
  return call(a, b, c, d, e);
}

#define AT(x) ((uint64_t)(uintptr_t)(x))

/* CUmemAllocationProp and CUmemAccessDesc: pinned memory of device 0, exportable, for RDMA. */
struct properties {
  int kind, handles, where, device;
  void *win32;
  unsigned char flags[8];
};
struct access {
  int where, device, flags;
};

struct memory {
  uint64_t at, handle;
};

static void wake(struct memory *m) {
  struct properties p = {1, 1, 1, 0, NULL, {0, 1}};
  struct access both = {1, 0, 3};
  EXPECT(cu("cuMemCreate", AT(&m->handle), BYTES, AT(&p), 0, 0) == 0);
  EXPECT(cu("cuMemMap", m->at, BYTES, 0, m->handle, 0) == 0);
  EXPECT(cu("cuMemSetAccess", m->at, BYTES, AT(&both), 1, 0) == 0);
}

static void sleeps(struct memory *m) {
  EXPECT(cu("cuMemUnmap", m->at, BYTES, 0, 0, 0) == 0);
  EXPECT(cu("cuMemRelease", m->handle, 0, 0, 0, 0) == 0);
}

static struct memory reserve(void) {
  struct memory m = {0, 0};
  EXPECT(cu("cuMemAddressReserve", AT(&m.at), BYTES, 0, 0, 0) == 0);
  wake(&m);
  return m;
}

static void fill(uint64_t at, uint64_t bytes, uint64_t pattern) { EXPECT(cu("kvgpu_fill", at, bytes, pattern, 0, 0) == 0); }

static size_t wrong(uint64_t at, uint64_t bytes, uint64_t pattern) {
  size_t (*call)(uint64_t, size_t, uint64_t, uint64_t);
  *(void **)&call = dlsym(driver, "kvgpu_wrong");
  return call == NULL ? bytes : call(at, bytes, pattern, 0);
}

static kvconn_agent opens(const char *config, const struct memory *m) {
  kvconn_agent agent = 0;
  kvconn_region r;
  memset(&r, 0, sizeof r);
  r.struct_size = sizeof r;
  r.name = "layer.0";
  r.address = m->at;
  r.block_stride = r.block_bytes = BLOCK;
  r.num_blocks = BLOCKS;
  r.memory = KVCONN_MEMORY_DEVICE;
  EXPECT(kvconn_open(config, &agent) == KVCONN_OK);
  EXPECT(kvconn_register_kv_caches(agent, &r, 1) == KVCONN_OK);
  return agent;
}

static void ends(kvconn_agent agent, const char *id, int32_t code) {
  struct pollfd ready = {kvconn_event_fd(agent), POLLIN, 0};
  kvconn_completion c;
  size_t n = 0;
  EXPECT(poll(&ready, 1, 30000) == 1);
  EXPECT(kvconn_get_finished(agent, &c, sizeof c, 1, &n) == KVCONN_OK && n == 1);
  if (n == 1 && (c.code != code || strcmp(c.transfer_id, id) != 0)) {
    fprintf(stderr, "%s ended with %d: %s; want %s, %d\n", c.transfer_id, c.code, c.reason, id, code);
    failures++;
  }
}

static uint32_t source(int i) { return (uint32_t)(3 * i % BLOCKS); }
static uint32_t target(int i) { return (uint32_t)(7 * i % BLOCKS); }

static void offers(kvconn_agent p, const char *id) {
  uint32_t ids[MOVED];
  for (int i = 0; i < MOVED; i++) ids[i] = source(i);
  kvconn_blocks group = {ids, MOVED, 0};
  kvconn_offer_request offer;
  memset(&offer, 0, sizeof offer);
  offer.struct_size = sizeof offer;
  offer.transfer_id = id;
  offer.groups = &group;
  offer.num_groups = 1;
  EXPECT(kvconn_offer(p, &offer, 1, NULL) == KVCONN_OK);
}

static void loads(kvconn_agent d, const char *id, const char *address) {
  uint32_t ids[MOVED];
  for (int i = 0; i < MOVED; i++) ids[i] = target(i);
  kvconn_blocks group = {ids, MOVED, 0};
  kvconn_load_request load;
  memset(&load, 0, sizeof load);
  load.struct_size = sizeof load;
  load.transfer_id = id;
  load.bootstrap_addr = address;
  load.groups = &group;
  load.num_groups = 1;
  EXPECT(kvconn_start_load(d, &load, 1, NULL) == KVCONN_OK);
}

int main(void) {
  driver = dlopen(getenv("KVCONN_LIBCUDA"), RTLD_NOW);
  uint64_t context = 0;
  if (driver == NULL || cu("cuInit", 0, 0, 0, 0, 0) != 0 || cu("cuDevicePrimaryCtxRetain", AT(&context), 0, 0, 0, 0) != 0 || cu("cuCtxSetCurrent", context, 0, 0, 0, 0) != 0) {
    fprintf(stderr, "KVCONN_LIBCUDA has no driver: %s\n", dlerror());
    return 1;
  }
  struct memory of_p = reserve(), of_d = reserve();
  kvconn_agent p = opens("{\"engine_id\":\"p\",\"role\":\"prefill\",\"bootstrap_host\":\"127.0.0.1\",\"bootstrap_port\":0,\"tcp_listen_host\":\"127.0.0.1\"}", &of_p);
  kvconn_agent d = opens("{\"engine_id\":\"d\",\"role\":\"decode\"}", &of_d);
  char address[256] = "", id[16];
  EXPECT(kvconn_bootstrap_address(p, address, sizeof address) == KVCONN_OK);
  for (int turn = 0; turn < 3; turn++) {
    snprintf(id, sizeof id, "turn %d", turn);
    fill(of_d.at, BYTES, 1);
    for (int i = 0; i < MOVED; i++) fill(of_p.at + source(i) * (uint64_t)BLOCK, BLOCK, (uint64_t)(100 + 10 * turn + i));
    offers(p, id);
    loads(d, id, address);
    ends(d, id, KVCONN_OK);
    ends(p, id, KVCONN_OK);
    for (int i = 0; i < MOVED; i++) EXPECT(wrong(of_d.at + target(i) * (uint64_t)BLOCK, BLOCK, (uint64_t)(100 + 10 * turn + i)) == 0);
    if (turn == 0) offers(p, "of before");
    sleeps(&of_p);
    sleeps(&of_d);
    wake(&of_p);
    wake(&of_d);
    if (turn == 0) { /* what was offered before the sleep is gone */
      loads(d, "of before", address);
      ends(d, "of before", KVCONN_FAILED);
      ends(p, "of before", KVCONN_FAILED);
    }
  }
  EXPECT(kvconn_close(d) == KVCONN_OK);
  EXPECT(kvconn_close(p) == KVCONN_OK);
  return failures ? 1 : 0;
}
