// Package engine is an engine's side of a CUDA driver, for tests: it makes contexts, memory and streams, and runs what stands for
// kernels, by the driver double's own functions (rig/testdouble/src/kvgpu.h).
package engine

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef uint64_t (*function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
// All arguments of these functions are integers or pointers: each takes a register or a stack slot.
static uint64_t call(void *f, const uint64_t *a) { return ((function)f)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]); }

static void *push_symbol, *pop_symbol;
static uint64_t call_in(uint64_t context, void *f, const uint64_t *a) {
  uint64_t was, push[8] = {context}, pop[8] = {(uint64_t)(uintptr_t)&was};
  uint32_t r = (uint32_t)call(push_symbol, push);
  if (r != 0) return r;
  uint64_t result = call(f, a);
  call(pop_symbol, pop);
  return result;
}
static void symbols(void *push, void *pop) { push_symbol = push; pop_symbol = pop; }
*/
import "C"

import (
	"os"
	"slices"
	"sync"
	"unsafe"

	"github.com/kvconn/kvconn/rig/testdouble"
)

var (
	load    sync.Once
	library unsafe.Pointer
)

// Engine is an engine on one device.
type Engine struct {
	tb      testdouble.Test
	Device  int
	context uintptr

	scratch      uintptr // device memory in which patterns are made
	scratchBytes int
	card         uintptr
}

// Library has KVCONN_LIBCUDA name the driver double, unless it names a library already.
func Library(tb testdouble.Test) string {
	tb.Helper()
	if os.Getenv("KVCONN_LIBCUDA") == "" {
		os.Setenv("KVCONN_LIBCUDA", testdouble.Library(tb, testdouble.Newest))
	}
	return os.Getenv("KVCONN_LIBCUDA")
}

// New starts the driver and makes the device's primary context, until the test ends.
func New(tb testdouble.Test, device int) *Engine {
	tb.Helper()
	path := Library(tb)
	load.Do(func() {
		c := C.CString(path)
		defer C.free(unsafe.Pointer(c))
		library = C.dlopen(c, C.RTLD_NOW)
	})
	if library == nil {
		tb.Fatalf("cannot open %s", path)
	}
	C.symbols(symbol(tb, "cuCtxPushCurrent_v2"), symbol(tb, "cuCtxPopCurrent_v2"))
	e := &Engine{tb: tb, Device: device}
	e.must("cuInit", e.Bare("cuInit", 0))
	e.context = e.out("cuDevicePrimaryCtxRetain", func(p uintptr) int { return e.Bare("cuDevicePrimaryCtxRetain", p, uintptr(device)) })
	tb.Cleanup(func() { e.Bare("cuDevicePrimaryCtxRelease_v2", uintptr(device)) })
	return e
}

// rdmaOfMapped is the device attribute that says whether mapped memory can be for RDMA.
const rdmaOfMapped = 110

// Attribute is a number of the device's: CU_DEVICE_ATTRIBUTE_…
func (e *Engine) Attribute(number int) int {
	e.tb.Helper()
	return int(int32(e.Out("cuDeviceGetAttribute", uintptr(number), uintptr(e.Device))))
}

// Name is the device's.
func (e *Engine) Name() string {
	e.tb.Helper()
	text := (*[100]C.char)(C.calloc(1, 100))
	defer C.free(unsafe.Pointer(text))
	e.Must("cuDeviceGetName", uintptr(unsafe.Pointer(text)), 100, uintptr(e.Device))
	return C.GoString(&text[0])
}

// Double says whether the driver is the tests' own. Any other lacks all that is named kvgpu_ here.
func (e *Engine) Double() bool {
	c := C.CString("kvgpu_seed")
	defer C.free(unsafe.Pointer(c))
	return C.dlsym(library, c) != nil
}

// Context is the device's primary context.
func (e *Engine) Context() uintptr { return e.context }

func symbol(tb testdouble.Test, name string) unsafe.Pointer {
	tb.Helper()
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	p := C.dlsym(library, c)
	if p == nil {
		tb.Fatalf("%s has no %s", os.Getenv("KVCONN_LIBCUDA"), name)
	}
	return p
}

func arguments(given []uintptr) (a [8]C.uint64_t) {
	for i, v := range given {
		a[i] = C.uint64_t(v)
	}
	return a
}

// Bare calls a function, with whatever context the thread has.
func (e *Engine) Bare(name string, given ...uintptr) int {
	e.tb.Helper()
	a := arguments(given)
	return int(int32(C.call(symbol(e.tb, name), &a[0])))
}

// Call calls a function in the device's primary context, and gives its CUresult.
func (e *Engine) Call(name string, given ...uintptr) int {
	e.tb.Helper()
	a := arguments(given)
	return int(int32(C.call_in(C.uint64_t(e.context), symbol(e.tb, name), &a[0])))
}

// Must is Call, and if the call fails the test ends.
func (e *Engine) Must(name string, given ...uintptr) {
	e.tb.Helper()
	e.must(name, e.Call(name, given...))
}

func (e *Engine) must(name string, code int) {
	e.tb.Helper()
	if code != 0 {
		e.tb.Fatalf("%s: CUresult %d", name, code)
	}
}

// out calls f with the address of a word, and gives what f put there.
func (e *Engine) out(name string, f func(uintptr) int) uintptr {
	e.tb.Helper()
	word := C.calloc(1, 8)
	defer C.free(word)
	e.must(name, f(uintptr(word)))
	return *(*uintptr)(word)
}

// Out is Must for a function whose first argument is the address of its result.
func (e *Engine) Out(name string, given ...uintptr) uintptr {
	e.tb.Helper()
	return e.out(name, func(p uintptr) int { return e.Call(name, append([]uintptr{p}, given...)...) })
}

// Count is a number of kvgpu_count: "streams", "events", "pinned", a function's name …
func (e *Engine) Count(what string) uint64 {
	e.tb.Helper()
	c := C.CString(what)
	defer C.free(unsafe.Pointer(c))
	a := arguments([]uintptr{uintptr(unsafe.Pointer(c))})
	return uint64(C.call(symbol(e.tb, "kvgpu_count"), &a[0]))
}

// Alloc gives device memory until the test ends.
func (e *Engine) Alloc(bytes int) uintptr {
	e.tb.Helper()
	p := e.Out("cuMemAlloc_v2", uintptr(bytes))
	e.tb.Cleanup(func() { e.Call("cuMemFree_v2", p) }) // a test may have freed it
	return p
}

// Stream gives a non-blocking stream until the test ends.
func (e *Engine) Stream() uintptr {
	e.tb.Helper()
	s := e.Out("cuStreamCreate", 1)
	e.tb.Cleanup(func() { e.Call("cuStreamDestroy_v2", s) })
	return s
}

// Sync waits for a stream.
func (e *Engine) Sync(stream uintptr) {
	e.tb.Helper()
	e.Must("cuStreamSynchronize", stream)
}

// Kernel writes a pattern, when the stream comes to it.
func (e *Engine) Kernel(stream, addr uintptr, bytes int, pattern uint64) {
	e.tb.Helper()
	e.Must("kvgpu_kernel_fill", stream, addr, uintptr(bytes), uintptr(pattern), 0)
}

// Fill writes a pattern at once.
func (e *Engine) Fill(addr uintptr, bytes int, pattern uint64) {
	e.tb.Helper()
	e.Must("kvgpu_fill", addr, uintptr(bytes), uintptr(pattern), 0)
}

// Wrong counts, at once, the bytes that are not the pattern's.
func (e *Engine) Wrong(addr uintptr, bytes int, pattern uint64) uint64 {
	e.tb.Helper()
	a := arguments([]uintptr{addr, uintptr(bytes), uintptr(pattern), 0})
	return uint64(C.call_in(C.uint64_t(e.context), symbol(e.tb, "kvgpu_wrong"), &a[0]))
}

// Pattern returns so many of a pattern's bytes, from its first byte on.
func (e *Engine) Pattern(bytes int, pattern uint64) []byte {
	e.tb.Helper()
	if e.scratchBytes < bytes {
		e.scratch, e.scratchBytes = e.Alloc(bytes), bytes
	}
	e.Fill(e.scratch, bytes, pattern)
	return slices.Clone(e.Alias(e.scratch, bytes))
}

// Alias is device memory as a test may touch it.
func (e *Engine) Alias(addr uintptr, bytes int) []byte {
	e.tb.Helper()
	a := arguments([]uintptr{addr})
	p := uintptr(C.call(symbol(e.tb, "kvgpu_alias"), &a[0]))
	if p == 0 {
		e.tb.Fatalf("there is no device memory at %#x", addr)
	}
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), bytes)
}

// Card is what a card sees of the memory that was exported as a dma-buf, until the test ends.
func (e *Engine) Card(fd int) []byte {
	e.tb.Helper()
	size := e.out("kvgpu_map_dmabuf", func(p uintptr) int {
		a := arguments([]uintptr{uintptr(fd), p})
		e.card = uintptr(C.call(symbol(e.tb, "kvgpu_map_dmabuf"), &a[0]))
		return 0
	})
	if e.card == 0 {
		e.tb.Fatalf("the descriptor is no dma-buf")
	}
	card := unsafe.Slice(*(**byte)(unsafe.Pointer(&e.card)), size)
	e.tb.Cleanup(func() { C.munmap(unsafe.Pointer(unsafe.SliceData(card)), C.size_t(len(card))) })
	return card
}

// Expose gives a file's memory a second address, as device memory, until Hide or the process's end.
func (e *Engine) Expose(file *os.File, bytes int) uintptr {
	e.tb.Helper()
	a := arguments([]uintptr{uintptr(e.Device), file.Fd(), 0, uintptr(bytes)})
	p := uintptr(C.call_in(C.uint64_t(e.context), symbol(e.tb, "kvgpu_expose"), &a[0]))
	if p == 0 {
		e.tb.Fatalf("%d bytes of %s cannot be device memory", bytes, file.Name())
	}
	return p
}

// Hide takes an address of Expose back, when nothing uses it any more.
func (e *Engine) Hide(addr uintptr) {
	e.tb.Helper()
	e.must("kvgpu_hide", e.Bare("kvgpu_hide", addr))
}

// Hold lets a stream begin nothing, until Release.
func (e *Engine) Hold(stream uintptr) { e.Must("kvgpu_hold", stream) }

// Release ends Hold.
func (e *Engine) Release(stream uintptr) { e.Must("kvgpu_release", stream) }

// Delay is the longest delay before an operation; 0: none.
func (e *Engine) Delay(microseconds int) { e.Bare("kvgpu_delay", uintptr(microseconds)) }

// Fail lets the nth call of a function from now on fail.
func (e *Engine) Fail(function string, nth, code int) {
	e.tb.Helper()
	c := C.CString(function)
	defer C.free(unsafe.Pointer(c))
	e.must("kvgpu_fail", e.Bare("kvgpu_fail", uintptr(unsafe.Pointer(c)), uintptr(nth), uintptr(code)))
}

// Block has no call of a function return, of any engine, until Unblock.
func (e *Engine) Block(function string) {
	e.tb.Helper()
	c := C.CString(function)
	defer C.free(unsafe.Pointer(c))
	e.Bare("kvgpu_block", uintptr(unsafe.Pointer(c)))
}

// Unblock ends Block.
func (e *Engine) Unblock() { e.Bare("kvgpu_block", 0) }

// Halt lets the device do nothing, until it is false.
func (e *Engine) Halt(on bool) {
	var flag uintptr
	if on {
		flag = 1
	}
	e.Bare("kvgpu_halt", uintptr(e.Device), flag)
}

// Stick lets all calls on the device fail, until the code is 0.
func (e *Engine) Stick(code int) { e.Bare("kvgpu_stick", uintptr(e.Device), uintptr(code)) }
