#ifdef KVCONN_FAULTS
#include <stdlib.h>
#include <string.h>

#include "shim_lib.h"

int kvg_fault(const char *name) {
  const char *active = getenv("KVCONN_FAULT");
  return active != NULL && strcmp(active, name) == 0;
}
#endif
