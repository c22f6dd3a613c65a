/* What tests may ask of the driver double, beside the driver's own functions. No header of CUDA's is needed: a device address is a
 * uint64_t, a stream or an event is a void *, and the int that a function returns is a CUresult.
 *
 * For a process that a test only starts, the environment says what is to happen:
 *
 *   KVGPU_SEED=N                    all chance; without it one is drawn, and told with each violation and leak
 *   KVGPU_DELAY_US=N                as kvgpu_delay; 300 if unset
 *   KVGPU_DEVICES=N                 2 if unset; 0: cuInit answers NO_DEVICE. CUDA_VISIBLE_DEVICES hides some, by number or as MIG-0
 *   KVGPU_ATTRIBUTES=NUM=VALUE,...  device attributes
 *   KVGPU_DRIVER=12020              the version that the driver tells
 *   KVGPU_HIDE=NAME,...             what cuGetProcAddress does not know
 *   KVGPU_FAIL=NAME:NTH:CODE,...    as kvgpu_fail
 *   KVGPU_FAIL_OPERATION=DEVICE:NTH:CODE   as kvgpu_fail_operation
 *   KVGPU_LATE_PCIE=1               as kvgpu_late_pcie
 *   CUDA_DEVICE_MAX_CONNECTIONS=1   as kvgpu_one_connection
 *   KVGPU_IPC=foreign, hidden, apart   the peer is in another PID namespace; its device is not visible here; devices have no way to
 *                                   each other
 *   KVGPU_LEAKS=report, exit        what is left at unload is told on stderr; the process ends with status 86
 *   KVGPU_ABORT=1                   a violation ends the process */
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- chance: all of the double's delays and orders come from this number, which KVGPU_SEED sets */
uint64_t kvgpu_seed(void);

/* ---- device memory, seen from the test's side */
/* The address at which a test may touch what lies at a device address; NULL if nothing is there. */
void *kvgpu_alias(uint64_t device_address);
/* The byte that stands at offset i of a pattern. */
unsigned char kvgpu_byte(uint64_t pattern, uint64_t i);
/* Writes a pattern at once, of which the first byte is the pattern's byte `from`. */
int kvgpu_fill(uint64_t device_address, size_t size, uint64_t pattern, uint64_t from);
/* Counts, at once, the bytes that differ from the pattern. SIZE_MAX if the range is not one allocation's. */
size_t kvgpu_wrong(uint64_t device_address, size_t size, uint64_t pattern, uint64_t from);
/* Memory of a file that somebody else also maps becomes device memory: an untouchable second address of it. 0 if it cannot be. */
uint64_t kvgpu_expose(int device, int fd, int64_t offset, size_t size);
/* Ends that, when nothing uses the memory any more. */
int kvgpu_hide(uint64_t device_address);
/* From now on cuMemAlloc and cuIpcOpenMemHandle give addresses of memory that is gone out again, as real drivers do. */
void kvgpu_reuse_addresses(int on);

/* ---- an engine's kernels: they run on the stream, slowly, as all that is on it */
int kvgpu_kernel_fill(void *stream, uint64_t device_address, size_t size, uint64_t pattern, uint64_t from);
/* Adds the number of bytes that differ to *wrong, when the stream comes to it. */
int kvgpu_kernel_check(void *stream, uint64_t device_address, size_t size, uint64_t pattern, uint64_t from, uint64_t *wrong);

/* ---- time */
/* The longest delay before an operation, in microseconds; 0 also ends the tearing of copies. */
void kvgpu_delay(unsigned microseconds);
/* The longest delay of one stream; UINT32_MAX: as all. */
int kvgpu_slow(void *stream, unsigned microseconds);
/* A device does all that its streams were given in that order, one after the other: so a stream that stands still holds up all others. Real
 * devices may do more beside each other. */
void kvgpu_one_connection(int on);
/* A held stream begins no operation until it is released, or the device fails. */
int kvgpu_hold(void *stream);
int kvgpu_release(void *stream);

/* ---- what goes wrong */
/* The nth call of a function from now on (1: the next) fails with this CUresult, and is not performed. The name is the symbol's. */
int kvgpu_fail(const char *function, unsigned nth, int code);
/* From now on each call and each operation of the device fails with this code, as after an illegal address or a lost device; 0 ends it. */
void kvgpu_stick(int device, int code);
/* All streams of a halted device are as if held: it answers calls, and does nothing until it fails. */
void kvgpu_halt(int device, int on);
/* The nth operation of a device's streams from now on fails with this code, which then sticks: as a kernel's illegal address does. */
int kvgpu_fail_operation(int device, uint64_t nth, int code);
/* Calls of a function do not return, and hold up no other call, until this is asked of another function or of NULL. So a driver does
 * in which an engine's call holds a lock. */
void kvgpu_block(const char *function);
/* Overrides a device attribute (CU_DEVICE_ATTRIBUTE_...). */
int kvgpu_attribute(int device, int attribute, int value);
/* Writes into exported memory arrive for kernels and copies only after a flush. Set it before the export. */
void kvgpu_late_pcie(int on);

/* A mapping of what an exported dma-buf's descriptor stands for, for a double of libibverbs; the caller unmaps it. NULL if it is none. */
void *kvgpu_map_dmabuf(int fd, size_t *size);

/* ---- what there is: "streams", "events", "allocations", "pinned", "contexts", "handles", "mapped" and "reserved" (of cuMemMap and
 * cuMemAddressReserve), "ipc" (opened allocations of other processes), "captures", "violations",
 * "queued" (operations that have not ended), "stuck" (those of them on a device that is halted),
 * "dmabufs" (descriptors that are open), "blocked" (calls that wait, by kvgpu_block),
 * "calls" or the name of a function, for how often it was called. UINT64_MAX for any other word. */
uint64_t kvgpu_count(const char *what);
/* Looks at the bytes behind each allocation now; damaged ones are violations. Returns the number of violations so far. */
uint64_t kvgpu_check(void);

#ifdef __cplusplus
}
#endif
