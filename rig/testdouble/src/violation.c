/* A violation is what a real driver leaves undefined: it is told on stderr, with the seed, and counted. KVGPU_ABORT=1 ends the process. */
#include "double.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t violations;

void violation(const char *format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "kvgpu: violation: %s (KVGPU_SEED=%llu)\n", text, (unsigned long long)kvgpu_seed());
  violations++;
  const char *end = getenv("KVGPU_ABORT");
  if (end && !strcmp(end, "1")) abort();
}
