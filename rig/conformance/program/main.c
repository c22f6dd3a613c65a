/* kvgpu-facts [--library FILE] [--only GROUP | --speed]: checks the facts against a CUDA driver and prints JSON. The library is the argument's,
 * KVCONN_LIBCUDA's or libcuda.so.1. The status is 1 if a fact differs or a group did not end, 2 if the library cannot be opened. */
#include "fact.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define DEFINE(name) __typeof__(&name) p_##name;
FUNCTIONS(DEFINE)

#define GROUP_SECONDS 60

bool is_double;
int driver_version, no_device;
static bool differs;
static char not_ended[2000]; /* groups, as strings of JSON */

const char *own_path(void) { return "/proc/self/exe"; }

static const char *option(int argc, char **argv, const char *name) {
  for (int i = 1; i + 1 < argc; i++) {
    if (!strcmp(argv[i], name)) return argv[i + 1];
  }
  return NULL;
}

static void *load(const char *name) {
  void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fprintf(stderr, "kvgpu-facts: %s\n", dlerror());
    exit(2);
  }
#define FIND(name) p_##name = (__typeof__(p_##name))dlsym(library, #name);
  FUNCTIONS(FIND)
  is_double = dlsym(library, "kvgpu_seed");
  if (!CU(cuInit) || !CU(cuDriverGetVersion) || CU(cuDriverGetVersion)(&driver_version)) {
    fprintf(stderr, "kvgpu-facts: %s is no CUDA driver\n", name);
    exit(2);
  }
  return library;
}

/* Passes on what a group prints, an object a line, and tells whether it came to its end. */
static bool run_group(const struct group *g, bool *first) {
  int ends[2];
  if (pipe(ends)) return false;
  fflush(stdout);
  pid_t child = fork();
  if (!child) {
    close(ends[0]);
    dup2(ends[1], STDOUT_FILENO);
    close(ends[1]);
    alarm(GROUP_SECONDS);
    g->run();
    fflush(stdout);
    _exit(0);
  }
  close(ends[1]);
  FILE *in = fdopen(ends[0], "r");
  char line[2000];
  while (in && fgets(line, sizeof line, in)) {
    line[strcspn(line, "\n")] = 0;
    differs |= strstr(line, "\"verdict\": \"differs\"") != NULL;
    printf("%s\n    %s", *first ? "" : ",", line);
    *first = false;
  }
  if (in) fclose(in);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (status) {
    size_t n = strlen(not_ended);
    const char *how = WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "it could not begin";
    fprintf(stderr, "kvgpu-facts: the group %s did not end: %s\n", g->name, how);
    snprintf(not_ended + n, sizeof not_ended - n, "%s\"%s: %s\"", n ? ", " : "", g->name, how);
  }
  return !status;
}

static void print_head(const char *library) {
  struct utsname host;
  uname(&host);
  char date[32];
  time_t t = time(NULL);
  strftime(date, sizeof date, "%Y-%m-%d", gmtime(&t));
  printf("{\n  \"library\": \"%s\",\n  \"double\": %s,\n  \"driver\": %d,\n  \"date\": \"%s\",\n  \"kernel\": \"%s\",\n", is_double ? "driver double" : library, is_double ? "true" : "false",
         driver_version, date, is_double ? "" : host.release);
}

static void print_symbols(void) {
  printf("  \"lacks\": [");
  const char *comma = "";
#define LACKS(name) \
  if (!p_##name) printf("%s\"" #name "\"", comma), comma = ", ";
  FUNCTIONS(LACKS)
  printf("],\n");
}

/* The device's name, or what cuInit answers, asked in a process of its own. */
static void print_device(void) {
  fflush(stdout);
  pid_t child = fork();
  if (!child) {
    alarm(GROUP_SECONDS);
    char name[100] = "";
    int error = (int)CU(cuInit)(0);
    if (!error) error = (int)CU(cuDeviceGetName)(name, sizeof name, 0);
    if (error) snprintf(name, sizeof name, "none: cuInit answers %d", error);
    printf("  \"device\": \"%s\",\n", name);
    fflush(stdout);
    _exit(error != 0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  no_device = status;
  if (WIFSIGNALED(status)) printf("  \"device\": \"none: cuInit ended with the signal %s\",\n", strsignal(WTERMSIG(status)));
}

int main(int argc, char **argv) {
  const char *named = option(argc, argv, "--library"), *given = getenv("KVCONN_LIBCUDA"), *only = option(argc, argv, "--only");
  const char *library = named ? named : given && *given ? given : "libcuda.so.1";
  setenv("KVCONN_LIBCUDA", library, 1); /* for this program's other processes */
  load(library);
  if (argc == 4 && !strcmp(argv[1], "--peer")) return run_peer(argv[2], argv[3]);
  if (argc > 1 && !strcmp(argv[argc - 1], "--speed")) return run_speed();
  print_head(library);
  print_symbols();
  print_device();
  printf("  \"facts\": [");
  bool first = true, ended = true;
  for (size_t i = 0; i < group_count; i++) {
    if (no_device && !groups[i].without_device) continue;
    if (!only || !strcmp(only, groups[i].name)) ended &= run_group(&groups[i], &first);
  }
  printf("\n  ],\n  \"not_ended\": [%s]\n}\n", not_ended);
  return differs || !ended;
}
