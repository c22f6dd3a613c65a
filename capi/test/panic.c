/* Run on a library built with the tag panictest: each export panics inside when
   KVCONN_PANIC names it, and must give an error code instead of ending us. */
#include <kvconn.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

extern char **environ;

static int32_t call(const char *name) {
  kvconn_agent a = 1;
  char buf[4096];
  const char *id = "x";
  if (strcmp(name, "kvconn_open") == 0) return kvconn_open("{}", &a);
  if (strcmp(name, "kvconn_register_kv_caches") == 0) return kvconn_register_kv_caches(a, NULL, 0);
  if (strcmp(name, "kvconn_announce") == 0) return kvconn_announce(a, &id, 1, NULL);
  if (strcmp(name, "kvconn_offer") == 0) return kvconn_offer(a, NULL, 0, NULL);
  if (strcmp(name, "kvconn_start_load") == 0) return kvconn_start_load(a, NULL, 0, NULL);
  if (strcmp(name, "kvconn_cancel") == 0) return kvconn_cancel(a, &id, 1, "why", NULL);
  if (strcmp(name, "kvconn_stats") == 0) return kvconn_stats(a, buf, sizeof buf, NULL);
  if (strcmp(name, "kvconn_bootstrap_address") == 0) return kvconn_bootstrap_address(a, buf, sizeof buf);
  return kvconn_close(a);
}

/* The child: makes one call that panics inside. */
static int panicking(const char *name) {
  int32_t status = call(name);
  char text[1024];
  kvconn_last_error(text, sizeof text);
  if (status != KVCONN_ERR_INTERNAL || strstr(text, name) == NULL) {
    fprintf(stderr, "%s gave %d: %s\n", name, status, text);
    return 1;
  }
  /* a defect was found: later calls must not pretend that all is well */
  kvconn_agent a;
  return kvconn_open("{\"engine_id\":\"e\",\"role\":\"decode\"}", &a) == KVCONN_ERR_INTERNAL ? 0 : 1;
}

int main(int argc, char **argv) {
  if (argc > 1) return panicking(argv[1]);
  static const char *const names[] = {"kvconn_open",  "kvconn_register_kv_caches", "kvconn_announce", "kvconn_offer",
                                      "kvconn_start_load", "kvconn_cancel", "kvconn_stats", "kvconn_bootstrap_address", "kvconn_close"};
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
