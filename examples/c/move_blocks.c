/*
 * Moves the KV blocks of one request from a prefill process to a decode process
 * and checks every byte. Build and run, with libkvconn.so installed or in DIR:
 *
 *   cc move_blocks.c -I DIR/include -L DIR -lkvconn -Wl,-rpath,DIR -o move_blocks
 *   ./move_blocks
 *
 * The decode side is this process; it starts the prefill side as a process of
 * its own ("move_blocks prefill"), which prints its bootstrap address.
 */
#include <kvconn.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, BLOCKS = 64, BLOCK_BYTES = 16384, REQUEST = 5 };

static const char TRANSFER[] = "xfer-c-example";
static unsigned char cache[LAYERS][BLOCKS][BLOCK_BYTES] __attribute__((aligned(64)));

static void check(int32_t status, const char *what) {
  if (status == KVCONN_OK) return;
  char text[1024];
  kvconn_last_error(text, sizeof text);
  fprintf(stderr, "%s: %s: %s\n", what, kvconn_status_name(status), text);
  exit(1);
}

/* What the request's block at a position has in a layer. */
static unsigned char pattern(int layer, int position, int i) { return (unsigned char)(layer * 31 + position * 7 + i * 13 + 1); }

static kvconn_agent open_agent(const char *config) {
  kvconn_agent agent;
  check(kvconn_open(config, &agent), "kvconn_open");
  static const char *const names[LAYERS] = {"layer.0", "layer.1", "layer.2", "layer.3"};
  kvconn_region regions[LAYERS];
  memset(regions, 0, sizeof regions);
  for (int l = 0; l < LAYERS; l++) {
    regions[l].struct_size = sizeof regions[l];
    regions[l].name = names[l];
    regions[l].address = (uint64_t)(uintptr_t)cache[l];
    regions[l].block_stride = BLOCK_BYTES;
    regions[l].block_bytes = BLOCK_BYTES;
    regions[l].num_blocks = BLOCKS;
  }
  check(kvconn_register_kv_caches(agent, regions, LAYERS), "kvconn_register_kv_caches");
  return agent;
}

/* Waits until the agent's one transfer has ended. An engine would look at
   kvconn_get_finished once in each of its steps instead. */
static void await(kvconn_agent agent, kvconn_completion *done) {
  struct pollfd ready;
  ready.fd = kvconn_event_fd(agent);
  ready.events = POLLIN;
  size_t count = 0;
  while (count == 0) {
    if (poll(&ready, 1, 30000) == 0) {
      fprintf(stderr, "no completion after 30 s\n");
      exit(1);
    }
    check(kvconn_get_finished(agent, done, sizeof *done, 1, &count), "kvconn_get_finished");
  }
  if (done->code != KVCONN_OK) {
    fprintf(stderr, "transfer %s: %s: %s\n", done->transfer_id, kvconn_status_name(done->code), done->reason);
    exit(1);
  }
}

static int prefill(void) {
  kvconn_agent agent = open_agent(
      "{\"engine_id\":\"c-prefill\",\"role\":\"prefill\",\"bootstrap_host\":\"127.0.0.1\",\"bootstrap_port\":0,\"tcp_listen_host\":\"127.0.0.1\"}");
  const uint32_t ids[REQUEST] = {3, 17, 4, 60, 21};
  for (int l = 0; l < LAYERS; l++)
    for (int p = 0; p < REQUEST; p++)
      for (int i = 0; i < BLOCK_BYTES; i++) cache[l][ids[p]][i] = pattern(l, p, i);

  kvconn_blocks group = {ids, REQUEST, 0};
  kvconn_offer_request offer;
  memset(&offer, 0, sizeof offer);
  offer.struct_size = sizeof offer;
  offer.transfer_id = TRANSFER;
  offer.groups = &group;
  offer.num_groups = 1;
  check(kvconn_offer(agent, &offer, 1, NULL), "kvconn_offer");

  char address[256];
  check(kvconn_bootstrap_address(agent, address, sizeof address), "kvconn_bootstrap_address");
  printf("%s\n", address);
  fflush(stdout);
  kvconn_completion done;
  await(agent, &done);
  check(kvconn_close(agent), "kvconn_close");
  return 0;
}

static int decode(const char *self) {
  char command[4096], address[256];
  snprintf(command, sizeof command, "exec '%s' prefill", self);
  FILE *peer = popen(command, "r");
  if (peer == NULL || fgets(address, sizeof address, peer) == NULL) {
    fprintf(stderr, "the prefill process did not start\n");
    return 1;
  }
  address[strcspn(address, "\n")] = 0;

  kvconn_agent agent = open_agent("{\"engine_id\":\"c-decode\",\"role\":\"decode\"}");
  const uint32_t ids[REQUEST] = {50, 2, 33, 34, 9};
  kvconn_blocks group = {ids, REQUEST, 0};
  kvconn_load_request load;
  memset(&load, 0, sizeof load);
  load.struct_size = sizeof load;
  load.transfer_id = TRANSFER;
  load.bootstrap_addr = address;
  load.engine_id = "c-prefill";
  load.groups = &group;
  load.num_groups = 1;
  check(kvconn_start_load(agent, &load, 1, NULL), "kvconn_start_load");

  kvconn_completion done;
  await(agent, &done);
  for (int l = 0; l < LAYERS; l++)
    for (int b = 0; b < BLOCKS; b++) {
      int position = -1;
      for (int p = 0; p < REQUEST; p++)
        if (ids[p] == (uint32_t)b) position = p;
      for (int i = 0; i < BLOCK_BYTES; i++) {
        unsigned char want = position < 0 ? 0 : pattern(l, position, i);
        if (cache[l][b][i] != want) {
          fprintf(stderr, "layer %d, block %d, byte %d is %d, want %d\n", l, b, i, cache[l][b][i], want);
          return 1;
        }
      }
    }
  printf("%s: %u blocks, %llu bytes by %s in %.3f ms, every byte verified\n", done.transfer_id, done.blocks,
         (unsigned long long)done.bytes, done.transport, (double)done.transfer_ns / 1e6);
  check(kvconn_close(agent), "kvconn_close");
  return pclose(peer) == 0 ? 0 : 1;
}

int main(int argc, char **argv) { return argc > 1 && strcmp(argv[1], "prefill") == 0 ? prefill() : decode(argv[0]); }
