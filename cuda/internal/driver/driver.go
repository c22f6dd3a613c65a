// Package driver is libcuda for Go: opened at run time, never linked, with every call made
// in the device's primary context and with the thread's capture mode relaxed.
//
// Objects may be used from any goroutine. Their owner closes them in this order: queues and
// the ring, then the device; nothing is used after its Close.
package driver

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra -fvisibility=hidden
// An empty archive since glibc 2.34, where dlopen is in libc.
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"sync"
	"syscall"
	"unsafe"

	"github.com/kvconn/kvconn/internal/hostenv"
)

// The library and the variable that names another one.
const (
	libraryName     = "libcuda.so.1"
	libraryVariable = "KVCONN_LIBCUDA"
)

// leastVersion is the oldest driver that was tried. The newest call that is needed, cuStreamGetId, is of 12.0.
const leastVersion = 12020

var (
	loadOnce sync.Once
	loadErr  error
	version  int
)

// Load opens libcuda.so.1, or what KVCONN_LIBCUDA names, and starts it, once in the life of
// the process. The error is the same at each call: an *UnavailableError.
func Load() error {
	loadOnce.Do(func() { loadErr = load(library()) })
	return loadErr
}

func library() string {
	if name := hostenv.Get(libraryVariable); name != "" {
		return name
	}
	return libraryName
}

func load(name string) error {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	var reason [512]C.char
	switch C.kvg_load(c, &reason[0], C.int(len(reason))) {
	case 0:
	case C.int(syscall.ENOENT):
		return &UnavailableError{
			Reason: C.GoString(&reason[0]),
			Remedy: "install NVIDIA's driver, start the container with GPUs (docker run --gpus all), or name the library in " + libraryVariable,
		}
	default:
		return &UnavailableError{Reason: C.GoString(&reason[0]), Remedy: fmt.Sprintf("install a driver of CUDA %s or newer", versionText(leastVersion))}
	}
	var v C.int
	if rc := C.kvg_version(&v); rc != 0 {
		return &UnavailableError{Reason: fmt.Sprintf("%s does not tell its version: error %d", name, int(rc)), Remedy: "reinstall NVIDIA's driver"}
	}
	if version = int(v); version < leastVersion {
		return &UnavailableError{
			Reason: fmt.Sprintf("the driver %s is of CUDA %s, and CUDA %s or newer is needed", name, versionText(version), versionText(leastVersion)),
			Remedy: "install a newer driver",
		}
	}
	C.kvg_kernel_text(C.CString(copyKernel)) // for as long as the process lives
	if err := failed(C.kvg_start(), "starting the driver %s", name); err != nil {
		return &UnavailableError{Reason: err.Error(), Err: err}
	}
	return nil
}

// InProcess says whether somebody in this process has opened the library. It opens nothing.
func InProcess() bool {
	c := C.CString(library())
	defer C.free(unsafe.Pointer(c))
	return C.kvg_in_process(c) != 0
}

// Version is the newest CUDA that the driver knows, as cuDriverGetVersion tells it: 12080 is 12.8.
func Version() int { return version }

func versionText(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }

// HasBatch says whether several copies go to the driver in one call.
func HasBatch() bool { return C.kvg_has_batch() != 0 }

// UseBatch lets a test do without the call that HasBatch asks for.
func UseBatch(on bool) { C.kvg_use_batch(flag(on)) }
