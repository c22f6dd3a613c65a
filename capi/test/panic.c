/* Run on a library built with the tag panictest: each export panics inside when
   KVCONN_PANIC names it, and must give an error code instead of ending us. */
#include <fcntl.h>
#include <kvconn.h>
#include <poll.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

extern char **environ;

static int32_t call(const char *name, kvconn_agent a) {
  char buf[4096];
  const char *id = "x";
  void *memory = NULL;
  if (strcmp(name, "kvconn_open") == 0) return kvconn_open("{}", &a);
  if (strcmp(name, "kvconn_register_kv_caches") == 0) return kvconn_register_kv_caches(a, NULL, 0);
  if (strcmp(name, "kvconn_alloc") == 0) return kvconn_alloc(4096, &memory);
  if (strcmp(name, "kvconn_free") == 0) return kvconn_free(buf);
  if (strcmp(name, "kvconn_announce") == 0) return kvconn_announce(a, &id, 1, NULL);
  if (strcmp(name, "kvconn_offer") == 0) return kvconn_offer(a, NULL, 0, NULL);
  if (strcmp(name, "kvconn_offer_partial") == 0) return kvconn_offer_partial(a, NULL, 0, NULL, 0, NULL);
  if (strcmp(name, "kvconn_withdraw") == 0) return kvconn_withdraw(a, NULL, 0, 0);
  if (strcmp(name, "kvconn_claim") == 0) return kvconn_claim(a, NULL, 0, NULL);
  if (strcmp(name, "kvconn_start_load") == 0) return kvconn_start_load(a, NULL, 0, NULL);
  if (strcmp(name, "kvconn_cancel") == 0) return kvconn_cancel(a, &id, 1, "why", NULL);
  if (strcmp(name, "kvconn_stats") == 0) return kvconn_stats(a, buf, sizeof buf, NULL);
  if (strcmp(name, "kvconn_bootstrap_address") == 0) return kvconn_bootstrap_address(a, buf, sizeof buf);
  return kvconn_close(a);
}

static int expect(int holds, const char *what, const char *name) {
  if (!holds) fprintf(stderr, "%s: not so: %s\n", name, what);
  return holds ? 0 : 1;
}

/* The child: makes one call that panics inside. Nothing may pretend afterwards
   that all is well, and nobody may be left waiting. */
static int panicking(const char *name) {
  static const char config[] = "{\"engine_id\":\"e\",\"role\":\"decode\"}";
  int failures = 0, is_open = strcmp(name, "kvconn_open") == 0, is_close = strcmp(name, "kvconn_close") == 0;
  kvconn_agent a = 1, other;
  void *before = NULL, *after = &before;
  if (strcmp(name, "kvconn_alloc") != 0 && kvconn_alloc(4096, &before) != KVCONN_OK) return 3;
  if (!is_open && kvconn_open(config, &a) != KVCONN_OK) return 3;
  int fd = is_open ? -1 : kvconn_event_fd(a);
  const volatile uint32_t *shown = is_open ? NULL : kvconn_pending_address(a);

  int32_t status = call(name, a);
  char text[1024];
  kvconn_last_error(text, sizeof text);
  failures += expect(status == KVCONN_ERR_INTERNAL && strstr(text, name) != NULL, text, name);
  failures += expect(kvconn_open(config, &other) == KVCONN_ERR_INTERNAL, "open fails afterwards", name);
  failures += expect(kvconn_alloc(4096, &after) == KVCONN_ERR_INTERNAL && after == NULL, "alloc fails afterwards", name);
  failures += expect(strcmp(name, "kvconn_free") == 0 || kvconn_free(before) == KVCONN_OK, "memory of before is freed", name);
  if (!is_open) {
    kvconn_completion c;
    size_t n;
    struct pollfd ready = {fd, POLLIN, 0};
    failures += expect(poll(&ready, 1, 0) == 1, "who polls is woken", name);
    failures += expect(*shown != 0, "who looks at the count is made to ask", name);
    failures += expect(kvconn_pending(a) == -KVCONN_ERR_INTERNAL, "pending tells", name);
    failures += expect(kvconn_get_finished(a, &c, sizeof c, 1, &n) == KVCONN_ERR_INTERNAL, "get_finished tells", name);
    if (!is_close) {
      failures += expect(kvconn_close(a) == KVCONN_ERR_INTERNAL, "close tells", name);
      failures += expect(fcntl(fd, F_GETFD) < 0, "close has closed all the same", name);
    }
  }
  return failures ? 1 : 0;
}

int main(int argc, char **argv) {
  if (argc > 1) return panicking(argv[1]);
  static const char *const names[] = {"kvconn_open",  "kvconn_register_kv_caches", "kvconn_alloc", "kvconn_free", "kvconn_announce", "kvconn_offer", "kvconn_offer_partial", "kvconn_withdraw",
                                      "kvconn_claim", "kvconn_start_load", "kvconn_cancel", "kvconn_stats", "kvconn_bootstrap_address", "kvconn_close"};
  int failures = 0;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    fflush(NULL);
    setenv("KVCONN_PANIC", names[i], 1);
    pid_t pid;
    char *args[] = {argv[0], (char *)names[i], NULL};
    if (posix_spawn(&pid, argv[0], NULL, NULL, args, environ) != 0) return 2;
    int status = -1;
    waitpid(pid, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      fprintf(stderr, "%s: the process ended with status %#x\n", names[i], (unsigned)status);
      failures++;
    }
  }
  return failures ? 1 : 0;
}
