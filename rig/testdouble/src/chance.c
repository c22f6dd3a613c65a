/* Chance that can be repeated: one seed, from which each stream takes its own numbers. */
#include "double.h"

#include <stdlib.h>
#include <sys/random.h>

static uint64_t seed;
unsigned delay_max = 300;

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t draw(uint64_t *state) { return mix((*state)++); }

__attribute__((constructor)) static void read_chance(void) {
  const char *given = getenv("KVGPU_SEED");
  if (given) {
    seed = strtoull(given, NULL, 0);
  } else if (getrandom(&seed, sizeof seed, GRND_NONBLOCK) != sizeof seed) {
    seed = now();
  }
  const char *delay = getenv("KVGPU_DELAY_US");
  if (delay) delay_max = (unsigned)strtoul(delay, NULL, 10);
}

EXPORT uint64_t kvgpu_seed(void) { return seed; }

EXPORT void kvgpu_delay(unsigned microseconds) {
  pthread_mutex_lock(&world);
  delay_max = microseconds;
  pthread_mutex_unlock(&world);
}

uint64_t kvgpu_word(uint64_t pattern, uint64_t i) { return mix(pattern * 0x2545f4914f6cdd1du + i / 8) >> (8 * (i % 8)); }

EXPORT unsigned char kvgpu_byte(uint64_t pattern, uint64_t i) { return (unsigned char)kvgpu_word(pattern, i); }
