/* The table of open agents and their completion rings, in C memory. */
#ifndef KVCONN_SLOTS_H
#define KVCONN_SLOTS_H

#include <stdint.h>

#include "../include/kvconn.h"

enum { KVCONN_MAX_AGENTS = 64, KVCONN_MAX_REGIONS = 1 << 16 };

/* Takes a slot for a new agent; 0 if none is free or memory is out. */
kvconn_agent slot_open(uint32_t capacity);

/* Frees a slot and its ring; its handle is stale from now on. */
void slot_close(kvconn_agent agent);

/* Appends a completion; there is room for capacity of them. 0, or -1 when the
   handle is stale or the ring is full. */
int slot_push(kvconn_agent agent, const kvconn_completion *c);

/* Completions that wait; -1 when the handle is stale. */
int slot_count(kvconn_agent agent);

/* Where the count stands, or NULL when the handle is stale. */
const volatile uint32_t *slot_count_address(kvconn_agent agent);

/* The regions that an agent has registered. */
void slot_set_regions(kvconn_agent agent, uint32_t num_regions);
uint32_t slot_regions(kvconn_agent agent);

/* Where the host marks the regions that its step has written, a byte each, or NULL: the handle is stale, or nothing here
   orders a host's stores. */
volatile uint8_t *slot_written_address(kvconn_agent agent);

/* Clears the marks and gives their regions, in ascending order, and the moments from which on they count, at most
   capacity; returns how many they are. What the host stored before a mark is seen after it: where nothing here orders a
   host's stores, the marks of regions in host memory are lost, and those of regions in device memory are not. */
size_t slot_take_written(kvconn_agent agent, uint32_t *regions, uint64_t *moments, size_t capacity);

/* Marks regions that count from a moment on. 0, or -1 when the handle is stale, -2 when a region is not in device memory. */
int slot_mark_written(kvconn_agent agent, const uint32_t *regions, size_t num_regions, uint64_t moment);

/* How a device records a moment: the function's result begins with a code, 0 if *moment was set. */
struct slot_status { uint32_t code, call; };
struct slot_device {
  struct slot_status (*record)(void *argument, uintptr_t stream, uint64_t *moment);
  void *argument;
};

/* The devices on which the agent's regions lie: of_region has for each the device's place from 1 on, 0 for host memory.
   Both are copied. 0, -1 when the handle is stale or the agent closes, or -2 when memory is out. */
int slot_set_devices(kvconn_agent agent, const uint8_t *of_region, const struct slot_device *devices, uint32_t num_devices);

/* Forgets the devices for good: no thread goes into their functions any more. Returns how many are in them. *opened is for
   slot_wait_left, which waits until these have left. As long as a thread has not left, no other agent gets the slot. */
uint32_t slot_forget_devices(kvconn_agent agent, uint64_t *opened);
void slot_wait_left(kvconn_agent agent, uint64_t opened);

/* Records a moment on a stream of a region's device; not 0 if that was done. */
int slot_moment(kvconn_agent agent, uint32_t region, uintptr_t stream, uint64_t *moment);

/* After a panic: every open agent says so instead of waiting in silence. */
void slots_poison(void);
int slots_poisoned(void);

int slot_take(kvconn_agent agent, kvconn_completion *out, size_t size, size_t capacity, size_t *count);
int slot_event_fd(kvconn_agent agent);

#endif
