/* The groups of facts, each a process. */
#pragma once
#include "fact.h"

void before_start(void);
void none_visible(void);
void none_valid(void);
void devices(void);
void contexts(void);
void threads(void);
void allocations(void);
void host_touch(void);
void pointers(void);
void streams(void);
void waits(void);
void two_contexts(void);
void copies(void);
void batches(void);
void batches_astray(void);
void captures(void);
void kernels(void);
void kernels_astray(void);
void mapped(void);
void exports(void);
void pools(void);
void same_host(void);
void opened_elsewhere(void);
void mapped_elsewhere(void);
