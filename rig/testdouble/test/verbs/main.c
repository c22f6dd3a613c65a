/* Tries the tests' libibverbs on the fake one: main VERBS DOUBLE. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct ibv_mr { /* the fake one's */
  char *at;
  size_t length;
  uint64_t iova;
};

#define EXPECT(condition)                                                     \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                \
    }                                                                         \
  } while (0)

static void *find(void *library, const char *name, const char *version) {
  void *f = version ? dlvsym(library, name, version) : dlsym(library, name);
  if (!f) fprintf(stderr, "%s is missing: %s\n", name, dlerror()), exit(1);
  return f;
}

int main(int argc, char **argv) {
  EXPECT(argc == 3);
  setenv("KVCONN_LIBCUDA", argv[2], 1);
  void *verbs = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL), *driver = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
  EXPECT(verbs && driver);
  struct ibv_mr *(*reg_dmabuf)(void *, uint64_t, size_t, uint64_t, int, int) = find(verbs, "ibv_reg_dmabuf_mr", "IBVERBS_1.12");
  struct ibv_mr *(*reg)(void *, void *, size_t, int) = find(verbs, "ibv_reg_mr", "IBVERBS_1.1");
  int (*dereg)(struct ibv_mr *) = find(verbs, "ibv_dereg_mr", "IBVERBS_1.1");
  find(verbs, "ibv_wc_status_str", "IBVERBS_1.1"); /* comes from the library below */
  int (*init)(unsigned) = find(driver, "cuInit", NULL), (*retain)(void **, int) = find(driver, "cuDevicePrimaryCtxRetain", NULL), (*push)(void *) = find(driver, "cuCtxPushCurrent_v2", NULL);
  int (*alloc)(uint64_t *, size_t) = find(driver, "cuMemAlloc_v2", NULL), (*range)(void *, uint64_t, size_t, int, uint64_t) = find(driver, "cuMemGetHandleForAddressRange", NULL);
  char *(*alias)(uint64_t) = find(driver, "kvgpu_alias", NULL);
  void *ctx;
  uint64_t p;
  int fd = -1;
  EXPECT(!init(0) && !retain(&ctx, 0) && !push(ctx) && !alloc(&p, 1 << 20) && !range(&fd, p + 4096, 8192, 1, 0));

  errno = 0;
  EXPECT(!reg_dmabuf(NULL, 0, 4096, 0, -1, 0) && errno == EBADF); /* as the probe for support asks */
  EXPECT(!reg_dmabuf(NULL, 0, 4096, p + 1, fd, 0) && errno == EINVAL);
  EXPECT(!reg_dmabuf(NULL, 4096, 8192, p, fd, 0) && errno == EINVAL);
  struct ibv_mr *mr = reg_dmabuf(NULL, 100, 8000, p + 4196, fd, 0);
  EXPECT(mr && mr->iova == p + 4196 && mr->length == 8000);
  close(fd); /* the registration lives on */
  mr->at[0] = 77, mr->at[7999] = 78;
  EXPECT(alias(p + 4196)[0] == 77 && alias(p + 4196)[7999] == 78);
  EXPECT(!dereg(mr));

  mr = reg(NULL, (void *)p, 4096, 0);
  EXPECT(mr && mr->at == (char *)p); /* the kernel would refuse it */
  EXPECT(!dereg(mr));
  setenv("KVGPU_VERBS", "nodmabuf,peermem", 1);
  EXPECT(!reg_dmabuf(NULL, 0, 4096, 0, -1, 0) && errno == EOPNOTSUPP);
  mr = reg(NULL, (void *)p, 4096, 0);
  EXPECT(mr && mr->at == alias(p) && mr->iova == p);
  EXPECT(!dereg(mr));
  printf("ok verbs\n");
  return 0;
}
