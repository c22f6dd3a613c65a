/*
 * Blocks of unequal numbers of tokens, in another order, of which the prompt
 * fills the last one in part; an offer that begins late; callers with the first
 * header, whose structs end earlier.
 */
#define _GNU_SOURCE
#include <kvconn.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static int failures;
#define EXPECT(cond)                                                            \
  do {                                                                          \
    if (!(cond)) {                                                              \
      char text_[1024] = "";                                                    \
      kvconn_last_error(text_, sizeof text_);                                   \
      fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #cond, text_);    \
      failures++;                                                               \
    }                                                                           \
  } while (0)

enum { HEADS = 2, ITEM = 2, P_TOKENS = 16, D_TOKENS = 32, BLOCKS = 8 };

/* An item is ITEM words that name its token and head. */
static uint32_t p_cache[BLOCKS][HEADS][P_TOKENS][ITEM] __attribute__((aligned(64))); /* HND */
static uint32_t d_cache[BLOCKS][D_TOKENS][HEADS][ITEM] __attribute__((aligned(64))); /* NHD */
static uint32_t flat_cache[2][BLOCKS][64] __attribute__((aligned(64)));

static uint32_t item(uint32_t token, uint32_t head) { return 1 + token * HEADS + head; }

static int error_says(const char *part) {
  char text[1024];
  kvconn_last_error(text, sizeof text);
  return strstr(text, part) != NULL;
}

static kvconn_region region_of(void *cache, uint32_t tokens, uint64_t token_stride, uint64_t head_stride) {
  kvconn_region r;
  memset(&r, 0, sizeof r);
  r.struct_size = sizeof r;
  r.name = "layer.0";
  r.address = (uint64_t)(uintptr_t)cache;
  r.block_stride = r.block_bytes = (uint64_t)tokens * HEADS * ITEM * 4;
  r.num_blocks = BLOCKS;
  r.tokens = tokens;
  r.heads = tokens ? HEADS : 0;
  r.token_stride = token_stride;
  r.head_stride = head_stride;
  return r;
}

static kvconn_completion finished(kvconn_agent a) {
  kvconn_completion c;
  size_t n = 0;
  struct pollfd ready = {kvconn_event_fd(a), POLLIN, 0};
  memset(&c, 0xff, sizeof c);
  EXPECT(poll(&ready, 1, 30000) == 1);
  EXPECT(kvconn_get_finished(a, &c, sizeof c, 1, &n) == KVCONN_OK && n == 1);
  return c;
}

/* A pair whose callers have another header each, or the same. */
static void open_pair(kvconn_agent *p, kvconn_agent *d, char *address, size_t size) {
  EXPECT(kvconn_open("{\"engine_id\":\"p\",\"role\":\"prefill\",\"bootstrap_host\":\"127.0.0.1\",\"bootstrap_port\":0,\"log_level\":\"error\"}", p) == KVCONN_OK);
  EXPECT(kvconn_open("{\"engine_id\":\"d\",\"role\":\"decode\",\"log_level\":\"error\"}", d) == KVCONN_OK);
  EXPECT(kvconn_bootstrap_address(*p, address, size) == KVCONN_OK);
}

static void unequal_blocks(void) {
  kvconn_agent p, d;
  char address[256];
  open_pair(&p, &d, address, sizeof address);
  kvconn_region r = region_of(p_cache, P_TOKENS, ITEM * 4, P_TOKENS * ITEM * 4);
  r.head_stride = 12;
  EXPECT(kvconn_register_kv_caches(p, &r, 1) == KVCONN_ERR_INVALID && error_says("a head's 12") && error_says("8 and 128 (HND)"));
  r.head_stride = P_TOKENS * ITEM * 4;
  r.first_head = 1;
  r.total_heads = 2;
  EXPECT(kvconn_register_kv_caches(p, &r, 1) == KVCONN_ERR_INVALID && error_says("2 heads from head 1 on"));
  r.first_head = 0;
  EXPECT(kvconn_register_kv_caches(p, &r, 1) == KVCONN_OK);
  r = region_of(d_cache, D_TOKENS, HEADS * ITEM * 4, ITEM * 4);
  EXPECT(kvconn_register_kv_caches(d, &r, 1) == KVCONN_OK);

  /* P's window begins with its block 1, which is token 16; its blocks 5, 3 and 6 hold
     tokens 16 to 63. D wants its block 1, tokens 32 to 63, of a prompt of 40. */
  const uint32_t src[] = {5, 3, 6}, dst[] = {4};
  for (uint32_t i = 0; i < 3; i++)
    for (uint32_t h = 0; h < HEADS; h++)
      for (uint32_t t = 0; t < P_TOKENS; t++)
        for (uint32_t w = 0; w < ITEM; w++) p_cache[src[i]][h][t][w] = item((1 + i) * P_TOKENS + t, h);
  kvconn_blocks from = {src, 2, 1}, to = {dst, 1, 1};
  kvconn_offer_request o;
  memset(&o, 0, sizeof o);
  o.struct_size = sizeof o;
  o.transfer_id = "half a block";
  o.groups = &from;
  o.num_groups = 1;
  const uint32_t tokens = 40;
  kvconn_load_request l;
  memset(&l, 0, sizeof l);
  l.struct_size = sizeof l;
  l.transfer_id = o.transfer_id;
  l.bootstrap_addr = address;
  l.groups = &to;
  l.num_groups = 1;
  l.tokens = &tokens;
  EXPECT(kvconn_offer(p, &o, 1, NULL) == KVCONN_OK);
  EXPECT(kvconn_start_load(d, &l, 1, NULL) == KVCONN_OK);
  kvconn_completion c = finished(d);
  EXPECT(c.code == KVCONN_OK && c.bytes == P_TOKENS * HEADS * ITEM * 4);
  EXPECT(finished(p).code == KVCONN_OK);
  for (uint32_t b = 0; b < BLOCKS; b++)
    for (uint32_t t = 0; t < D_TOKENS; t++)
      for (uint32_t h = 0; h < HEADS; h++)
        for (uint32_t w = 0; w < ITEM; w++) EXPECT(d_cache[b][t][h][w] == (b == 4 && t < P_TOKENS ? item(D_TOKENS + t, h) : 0));

  /* a part that the offer does not have is refused by name */
  o.transfer_id = l.transfer_id = "too early";
  to.first = 0;
  EXPECT(kvconn_offer(p, &o, 1, NULL) == KVCONN_OK);
  EXPECT(kvconn_start_load(d, &l, 1, NULL) == KVCONN_OK);
  c = finished(d);
  EXPECT(c.code == KVCONN_REFUSED && strstr(c.reason, "blocks 0 to 2") && strstr(c.reason, "begins with block 1"));
  EXPECT(finished(p).code == KVCONN_REFUSED);
  to.first = 2;
  EXPECT(kvconn_start_load(d, &l, 1, NULL) == KVCONN_ERR_INVALID && error_says("40 tokens") && error_says("token 64"));
  EXPECT(kvconn_close(d) == KVCONN_OK);
  EXPECT(kvconn_close(p) == KVCONN_OK);
}

/* A later header's structs are longer. What this library does not know must be 0; a
   struct that is shorter than this header's is refused. */
static void other_headers(void) {
  kvconn_agent p, d;
  char address[256];
  open_pair(&p, &d, address, sizeof address);
  struct {
    kvconn_region known;
    uint64_t later;
  } regions[2];
  for (int i = 0; i < 2; i++) {
    const char *const names[] = {"layer.0", "layer.1"};
    for (int k = 0; k < 2; k++) {
      kvconn_region r = region_of(flat_cache[i][k * BLOCKS / 2], 0, 0, 0);
      r.struct_size = sizeof *regions;
      r.name = names[k];
      r.block_stride = r.block_bytes = sizeof flat_cache[0][0];
      r.num_blocks = BLOCKS / 2;
      regions[k].known = r;
      regions[k].later = 0;
    }
    regions[1].later = 1;
    EXPECT(kvconn_register_kv_caches(i ? d : p, &regions->known, 2) == KVCONN_ERR_INVALID && error_says("regions[1]") && error_says("older"));
    regions[1].later = 0;
    EXPECT(kvconn_register_kv_caches(i ? d : p, &regions->known, 2) == KVCONN_OK);
  }
  memset(flat_cache[0], 7, sizeof flat_cache[0]);
  const uint32_t one = 3, two[] = {1, 2};
  kvconn_blocks src = {&one, 1, 0}, dst[] = {{&two[0], 1, 0}, {&two[1], 1, 0}};
  kvconn_offer_request o;
  memset(&o, 0, sizeof o);
  o.num_groups = 1;
  o.groups = &src;
  struct {
    kvconn_load_request known;
    uint64_t later[2];
  } loads[2];
  memset(loads, 0, sizeof loads);
  const char *const ids[] = {"one", "two"};
  for (int i = 0; i < 2; i++) {
    o.transfer_id = ids[i];
    o.struct_size = offsetof(kvconn_offer_request, prompt);
    EXPECT(kvconn_offer(p, &o, 1, NULL) == KVCONN_ERR_INVALID && error_says("struct_size"));
    o.struct_size = sizeof o;
    EXPECT(kvconn_offer(p, &o, 1, NULL) == KVCONN_OK);
    loads[i].known.struct_size = sizeof *loads;
    loads[i].known.transfer_id = ids[i];
    loads[i].known.bootstrap_addr = address;
    loads[i].known.groups = &dst[i];
    loads[i].known.num_groups = 1;
  }
  EXPECT(kvconn_start_load(d, &loads->known, 2, NULL) == KVCONN_OK);
  for (int i = 0; i < 2; i++) EXPECT(finished(d).code == KVCONN_OK);
  for (int i = 0; i < 2; i++) EXPECT(memcmp(flat_cache[1][two[i]], flat_cache[0][one], sizeof flat_cache[0][0]) == 0);
  EXPECT(flat_cache[1][0][0] == 0);
  struct {
    kvconn_completion known;
    uint64_t later;
  } c;
  size_t n = 0;
  EXPECT(kvconn_get_finished(p, &c.known, sizeof c.known - 8, 1, &n) == KVCONN_ERR_INVALID && error_says("completion_size"));
  c.later = 1;
  struct pollfd ready = {kvconn_event_fd(p), POLLIN, 0};
  EXPECT(poll(&ready, 1, 30000) == 1);
  EXPECT(kvconn_get_finished(p, &c.known, sizeof c, 1, &n) == KVCONN_OK && n == 1 && c.known.code == KVCONN_OK && c.later == 0);
  EXPECT(kvconn_close(d) == KVCONN_OK);
  EXPECT(kvconn_close(p) == KVCONN_OK);
}

int main(void) {
  unequal_blocks();
  other_headers();
  return failures ? 1 : 0;
}
