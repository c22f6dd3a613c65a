// Package verbs is libibverbs for Go: opened at run time, never linked, with
// the work requests in C memory and nothing allocated to post or to poll.
//
// Objects may be used from any goroutine. Their owner closes them in this order: queue
// pairs, then completion queues and memory regions, then protection domains, then the
// device. An object that is used after its Close returns ErrClosed.
package verbs

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra -Wno-unused-parameter -fvisibility=hidden
// An empty archive since glibc 2.34, where dlopen is in libc.
#cgo LDFLAGS: -ldl
#cgo noescape vb_poll
#cgo nocallback vb_poll
#cgo noescape vb_post
#cgo nocallback vb_post
#cgo nocallback vb_post_receives
#cgo nocallback vb_arm
#cgo nocallback vb_take_events
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"github.com/kvconn/kvconn/internal/hostenv"
)

// ErrClosed is wrapped by the errors of a closed object, and ends waits.
var ErrClosed = os.ErrClosed

// UnavailableError says why this process has no verbs at all.
type UnavailableError struct {
	Reason string // names the missing part
	Remedy string // tells how to get it
}

func (e *UnavailableError) Error() string {
	return "rdma is not available: " + e.Reason + "; " + e.Remedy
}

// The library and the variable that names another one, for libraries that the
// loader does not find by itself.
const (
	libraryName     = "libibverbs.so.1"
	libraryVariable = "KVCONN_LIBIBVERBS"
)

// Library is libibverbs of this process.
type Library struct{}

var (
	loadOnce sync.Once
	library  *Library
	loadErr  error
)

// Load opens libibverbs.so.1, or what KVCONN_LIBIBVERBS names, once in the life
// of the process. The error is an *UnavailableError, the same at each call.
func Load() (*Library, error) {
	loadOnce.Do(func() {
		name := hostenv.Get(libraryVariable)
		if name == "" {
			name = libraryName
		}
		library, loadErr = load(name)
	})
	return library, loadErr
}

func load(name string) (*Library, error) {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	var reason [512]C.char
	switch C.vb_load(c, &reason[0], C.int(len(reason))) {
	case 0:
		return &Library{}, nil
	case C.int(syscall.ENOENT):
		return nil, &UnavailableError{
			Reason: C.GoString(&reason[0]),
			Remedy: "install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or libibverbs (RHEL, SUSE), or name the library in " + libraryVariable,
		}
	default:
		return nil, &UnavailableError{Reason: C.GoString(&reason[0]), Remedy: "install a newer rdma-core"}
	}
}

// errno is a status of the shim as an error.
func errno(rc C.int) error {
	if rc == 0 {
		return nil
	}
	return syscall.Errno(rc)
}

// cause is why a call that gave NULL has failed; cgo's second result.
func cause(err error) error {
	if err == nil {
		return syscall.EIO
	}
	return err
}

// number is the error number that err wraps, as the kernel's headers call it.
func number(err error) string {
	var e syscall.Errno
	if !errors.As(err, &e) {
		return ""
	}
	return fmt.Sprintf(" (errno %d)", int(e))
}

// The types of types.go are laid out like their twins in shim.h, field by field. If one
// differs, its line here does not compile.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(SGE{})-C.sizeof_struct_vb_sge]
	_ = [1]struct{}{}[unsafe.Offsetof(SGE{}.Length)-unsafe.Offsetof(C.struct_vb_sge{}.length)]
	_ = [1]struct{}{}[unsafe.Offsetof(SGE{}.Key)-unsafe.Offsetof(C.struct_vb_sge{}.lkey)]

	_ = [1]struct{}{}[unsafe.Sizeof(Write{})-C.sizeof_struct_vb_write]
	_ = [1]struct{}{}[unsafe.Offsetof(Write{}.RemoteAddr)-unsafe.Offsetof(C.struct_vb_write{}.remote_addr)]
	_ = [1]struct{}{}[unsafe.Offsetof(Write{}.RemoteKey)-unsafe.Offsetof(C.struct_vb_write{}.remote_key)]
	_ = [1]struct{}{}[unsafe.Offsetof(Write{}.Imm)-unsafe.Offsetof(C.struct_vb_write{}.imm)]
	_ = [1]struct{}{}[unsafe.Offsetof(Write{}.First)-unsafe.Offsetof(C.struct_vb_write{}.first)]
	_ = [1]struct{}{}[unsafe.Offsetof(Write{}.Pieces)-unsafe.Offsetof(C.struct_vb_write{}.pieces)]
	_ = [1]struct{}{}[unsafe.Offsetof(Write{}.Flags)-unsafe.Offsetof(C.struct_vb_write{}.flags)]

	_ = [1]struct{}{}[unsafe.Sizeof(Completion{})-C.sizeof_struct_vb_completion]
	_ = [1]struct{}{}[unsafe.Offsetof(Completion{}.Status)-unsafe.Offsetof(C.struct_vb_completion{}.status)]
	_ = [1]struct{}{}[unsafe.Offsetof(Completion{}.Opcode)-unsafe.Offsetof(C.struct_vb_completion{}.opcode)]
	_ = [1]struct{}{}[unsafe.Offsetof(Completion{}.QueuePair)-unsafe.Offsetof(C.struct_vb_completion{}.qp)]
	_ = [1]struct{}{}[unsafe.Offsetof(Completion{}.Imm)-unsafe.Offsetof(C.struct_vb_completion{}.imm)]
	_ = [1]struct{}{}[unsafe.Offsetof(Completion{}.Bytes)-unsafe.Offsetof(C.struct_vb_completion{}.bytes)]
	_ = [1]struct{}{}[unsafe.Offsetof(Completion{}.Vendor)-unsafe.Offsetof(C.struct_vb_completion{}.vendor)]

	_ = [1]struct{}{}[Signaled-C.VB_SIGNALED]
	_ = [1]struct{}{}[WithImm-C.VB_WITH_IMM]
)
