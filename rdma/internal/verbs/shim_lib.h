/* What the parts of the shim share: the library's functions and the meaning of its statuses. */
#ifndef KVCONN_VERBS_SHIM_LIB_H
#define KVCONN_VERBS_SHIM_LIB_H

#include <errno.h>
#include <fcntl.h>

#include "abi.h"
#include "shim.h"

struct vb_table {
#define VB_MEMBER(name, symbol, version, result, arguments) result(*name) arguments;
  KV_IBV_NEEDED(VB_MEMBER)
  KV_IBV_OPTIONAL(VB_MEMBER)
#undef VB_MEMBER
};
extern struct vb_table vb_lib; /* filled by vb_load */

/* errno after a function of the library has failed; never 0. */
static inline int vb_failed(void) { return errno != 0 ? errno : EIO; }

/* The status of a function that is documented to return errno. Some drivers return -1 or a negative errno. */
static inline int vb_code(int rc) { return rc == -1 ? vb_failed() : rc < 0 ? -rc : rc; }

/*
 * The status of giving an object back. After EIO the device was taken out of
 * the machine, and the kernel has freed the object already. The few bytes that
 * the library holds for the object are lost.
 */
static inline int vb_gone(int rc) { return vb_code(rc) == EIO ? 0 : vb_code(rc); }

static inline int vb_nonblocking(int fd) {
  int flags = fcntl(fd, F_GETFL);
  return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? vb_failed() : 0;
}

#endif
