// What the driver's errors mean: the remedy, and whether the device is lost to this process.

package driver

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
)

// Errors that are no CUresult.
var (
	// ErrClosed is of a closed handle, and ends waits.
	ErrClosed = os.ErrClosed
	// ErrInactive: the device's primary context is not active. None is made here.
	ErrInactive = errors.New("no primary context is active: kvconn makes none, so the engine must have used the device first (a tensor on it is enough)")
	// ErrCapturing: a stream that is being captured into a graph has no moments.
	ErrCapturing = errors.New("the stream is being captured into a CUDA graph: a moment is of work that runs, so it is taken before or after the capture")
	// ErrMoments: the pool of moments is used up.
	ErrMoments = errors.New("too many moments have not passed: the engine's stream stands still, or runs far ahead of the device")
	// ErrStreams: moments on too many streams.
	ErrStreams = errors.New("moments on more than 64 streams have not passed")
	// ErrMoment: the number is none of this device's moments.
	ErrMoment = errors.New("no such moment: it was taken on another device, or by an agent that is closed")
	// ErrAbsent: the driver lacks the call.
	ErrAbsent = errors.New("the installed driver does not have this call: install a newer driver")
	errBusy   = errors.New("a wait in the driver has not ended")
	errMemory = errors.New("no memory")
)

// UnavailableError says why this process cannot use CUDA at all.
type UnavailableError struct {
	Reason string // what is missing
	Remedy string // what to do about it; "" if Reason has it
	Err    error  // an *Error of the driver, or nil
}

func (e *UnavailableError) Error() string {
	text := "CUDA is not available: " + e.Reason
	if e.Remedy != "" {
		text += "; " + e.Remedy
	}
	return text
}

func (e *UnavailableError) Unwrap() error { return e.Err }

// Error is a failed call of the driver.
type Error struct {
	About string // what was being done, with its values
	Call  string // cuEventRecord
	Code  int    // of CUresult
	Name  string // CUDA_ERROR_INVALID_HANDLE
	Text  string // the driver's words
}

func (e *Error) Error() string {
	text := fmt.Sprintf("%s: %s (%d)", e.Call, e.Name, e.Code)
	if e.About != "" {
		text = e.About + ": " + text
	}
	if e.Text != "" && !e.Sticky() { // its name says the same, and a completion has little room
		text += ": " + e.Text
	}
	if r := remedies[e.Code]; r != "" {
		text += "; " + r
	} else if e.Sticky() {
		text += "; " + restart
	}
	return text
}

const restart = "see the kernel's log for NVRM Xid, and restart the engine"

// Brief is the error without what was being done and the driver's words: a completion, which has
// little room, then still has the remedy.
func (e *Error) Brief() error { return &brief{e} }

type brief struct{ of *Error }

func (b *brief) Error() string {
	return (&Error{Call: b.of.Call, Code: b.of.Code, Name: b.of.Name}).Error()
}

func (b *brief) Unwrap() error { return b.of }

// By CUresult.
var remedies = map[int]string{
	1:   "is the address of this process, and was its memory freed or mapped anew?",                                         // invalid value
	2:   "give the device or the host more free memory, or make the ring of pinned memory smaller",                          // out of memory
	3:   "the driver was not started in this process: was it forked from one that uses CUDA? Use spawn",                     // not initialized
	4:   "the process is ending",                                                                                            // deinitialized
	100: "see nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the container has GPUs (docker run --gpus all)",                 // no device
	101: "see CUDA_VISIBLE_DEVICES",                                                                                         // invalid device
	201: "the context was destroyed: restart the engine",                                                                    // invalid context
	400: "is the stream or the memory one of another device, or was it destroyed?",                                          // invalid handle
	801: "the device or its kernel modules cannot do this",                                                                  // not supported
	802: "the driver is starting: see nvidia-fabricmanager",                                                                 // system not ready
	803: "the driver's library and its kernel modules are of different versions: load the new modules, or restart the host", // driver mismatch
}

// Sticky says whether the error is of the whole device in this process, and for good.
func (e *Error) Sticky() bool { return sticky[e.Code] != "" }

// By CUresult, with its name in cuda.h without CUDA_ERROR_.
var sticky = map[int]string{
	4:   "DEINITIALIZED",
	46:  "DEVICE_UNAVAILABLE",
	201: "INVALID_CONTEXT",
	214: "ECC_UNCORRECTABLE",
	220: "NVLINK_UNCORRECTABLE",
	226: "CONTAINED",
	700: "ILLEGAL_ADDRESS",
	702: "LAUNCH_TIMEOUT",
	709: "CONTEXT_IS_DESTROYED",
	710: "ASSERT",
	714: "HARDWARE_STACK_ERROR",
	715: "ILLEGAL_INSTRUCTION",
	716: "MISALIGNED_ADDRESS",
	717: "INVALID_ADDRESS_SPACE",
	718: "INVALID_PC",
	719: "LAUNCH_FAILED",
	721: "TENSOR_MEMORY_LEAK",
	810: "MPS_CLIENT_TERMINATED",
	911: "EXTERNAL_DEVICE",
	999: "UNKNOWN",
}

// What a driver answers about memory of another process, as CUresult.
const (
	InvalidValue   = 1
	InvalidDevice  = 101
	InvalidContext = 201
	NoPeerAccess   = 217
	TooManyPeers   = 711
)

// failed is a status as an error; the format says what was being done.
func failed(s C.kvg_status, format string, args ...any) error {
	switch s.code {
	case 0:
		return nil
	case C.KVG_CLOSED:
		return ErrClosed
	case C.KVG_BUSY:
		return errBusy
	}
	about := fmt.Sprintf(format, args...)
	own := map[C.uint32_t]error{
		C.KVG_INACTIVE: ErrInactive, C.KVG_CAPTURING: ErrCapturing, C.KVG_FULL: ErrMoments, C.KVG_STREAMS: ErrStreams,
		C.KVG_UNKNOWN: ErrMoment, C.KVG_NO_MEMORY: errMemory, C.KVG_ABSENT: ErrAbsent,
	}
	call := C.GoString(C.kvg_call(s.call))
	if err := own[s.code]; err != nil {
		if call != "" {
			return fmt.Errorf("%s: %s: %w", about, call, err)
		}
		return fmt.Errorf("%s: %w", about, err)
	}
	var name, text *C.char
	C.kvg_describe(s.code, &name, &text)
	return &Error{About: about, Call: call, Code: int(s.code), Name: C.GoString(name), Text: C.GoString(text)}
}
