// The Go half of each function of the C API: it finds the agent, contains panics, and turns errors into a status and a
// text.

package main

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra -Wno-unused-parameter -fvisibility=hidden
#include <stdlib.h>
#include "slots.h"
*/
import "C"

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/node"
)

// procs is small, since the host needs the cores: a few threads drive any number of
// transfers. Even on a machine of two cores it is not smaller: a call of the host would
// then wait for a goroutine that copies a transfer's bytes.
const procs = 4

func init() {
	runtime.GOMAXPROCS(procs)
	runtime.MemProfileRate = 0 // nobody reads the profile, which takes 1.4 MiB
	safe.SetHandler(poison)
}

// main is not called in a shared library.
func main() {}

var agents struct {
	sync.Mutex
	byHandle map[C.kvconn_agent]*node.Agent
	poisoned error // a panic was contained: the agents' state cannot be trusted
}

func poison(where string, cause any, stack []byte) {
	agents.Lock()
	defer agents.Unlock()
	if agents.poisoned == nil {
		agents.poisoned = fmt.Errorf("a defect of kvconn in %s: %v; the library is unusable in this process, please report it", where, cause)
	}
	logs.panicked(where, cause, stack)
	C.slots_poison()
}

// guard contains a panic of an export and turns errors into status and text.
func guard(name string, text **C.char, f func() error) (status C.int32_t) {
	defer func() {
		if p := recover(); p != nil {
			safe.Report(name, p)
			_, err := find(0)
			status = setText(text, err)
		}
	}()
	panicHook(name)
	return setText(text, f())
}

func setText(text **C.char, err error) C.int32_t {
	if err == nil {
		return C.KVCONN_OK
	}
	*text = C.CString(err.Error())
	return statusOf(err)
}

func statusOf(err error) C.int32_t {
	var op *net.OpError
	var errno syscall.Errno
	switch {
	case errors.Is(err, core.ErrMayLand): // whatever else has failed beside
		return C.KVCONN_ERR_SYSTEM
	case errors.Is(err, errHandle):
		return C.KVCONN_ERR_HANDLE
	case errors.Is(err, errBuffer):
		return C.KVCONN_ERR_BUFFER
	case errors.Is(err, core.ErrInvalid):
		return C.KVCONN_ERR_INVALID
	case errors.Is(err, core.ErrClosed):
		return C.KVCONN_ERR_CLOSED
	case errors.Is(err, node.ErrNotRegistered):
		return C.KVCONN_ERR_NOT_REGISTERED
	case errors.Is(err, core.ErrDuplicate):
		return C.KVCONN_ERR_DUPLICATE
	case errors.Is(err, core.ErrOverload):
		return C.KVCONN_ERR_OVERLOAD
	case errors.Is(err, core.ErrUnreachable), errors.Is(err, core.ErrNotRegistered), errors.As(err, &op):
		return C.KVCONN_ERR_ADDRESS
	case errors.As(err, &errno), errors.Is(err, errSystem), errors.Is(err, node.ErrTransport), errors.Is(err, node.ErrStillRead), errors.Is(err, devices.ErrDevice):
		return C.KVCONN_ERR_SYSTEM
	}
	return C.KVCONN_ERR_INTERNAL
}

var (
	errHandle = errors.New("the handle is not open: it was closed, or kvconn_open did not return it")
	errBuffer = errors.New("buffer is too small")
	errSystem = errors.New("the system refused")
)

func find(h C.kvconn_agent) (*node.Agent, error) {
	agents.Lock()
	defer agents.Unlock()
	if agents.poisoned != nil {
		return nil, agents.poisoned
	}
	a := agents.byHandle[h]
	if a == nil {
		return nil, errHandle
	}
	return a, nil
}

//export go_open
func go_open(config *C.char, out *C.kvconn_agent, text **C.char) C.int32_t {
	return guard("kvconn_open", text, func() error {
		agents.Lock()
		err := agents.poisoned
		agents.Unlock()
		if err != nil {
			return err
		}
		cfg, err := node.ParseConfig([]byte(C.GoString(config)))
		if err != nil {
			return err
		}
		r := &ring{capacity: 4 * cfg.MaxTransfers}
		r.handle = C.slot_open(C.uint32_t(r.capacity))
		if r.handle == 0 {
			return fmt.Errorf("%w: no more than %d agents may be open in a process, and each needs memory and a descriptor", errSystem, int(C.KVCONN_MAX_AGENTS))
		}
		a, err := node.Open(cfg, node.Options{Logger: logs.logger(cfg.LogLevel), Reports: r})
		if err != nil {
			C.slot_close(r.handle)
			return err
		}
		agents.Lock()
		if agents.byHandle == nil {
			agents.byHandle = map[C.kvconn_agent]*node.Agent{}
		}
		agents.byHandle[r.handle] = a
		agents.Unlock()
		*out = r.handle
		return nil
	})
}

//export go_close
func go_close(h C.kvconn_agent, text **C.char) C.int32_t {
	return guard("kvconn_close", text, func() error {
		// The agent is closed after a panic too: the memory must not be written any more.
		agents.Lock()
		a, poisoned := agents.byHandle[h], agents.poisoned
		delete(agents.byHandle, h)
		agents.Unlock()
		if a == nil {
			return cmp.Or(poisoned, errHandle)
		}
		forgetDevices(h, a) // before Close frees what their functions use
		err := a.Close()
		C.slot_close(h)
		if errors.Is(err, core.ErrMayLand) { // it says where
			return err
		}
		return cmp.Or(poisoned, err)
	})
}

//export go_register
func go_register(h C.kvconn_agent, regions *C.kvconn_region, n C.size_t, text **C.char) C.int32_t {
	return guard("kvconn_register_kv_caches", text, func() error {
		a, err := find(h)
		if err != nil {
			return err
		}
		if n > kv.MaxRegions {
			return fmt.Errorf("%w: %d regions, at most %d", core.ErrInvalid, n, kv.MaxRegions)
		}
		list, err := structs("regions", regions, n, regionOf)
		if err != nil {
			return err
		}
		if err := a.RegisterKVCaches(list); err != nil {
			return err
		}
		C.slot_set_regions(h, C.uint32_t(n))
		return setDevices(h, a)
	})
}

//export go_announce
func go_announce(h C.kvconn_agent, ids **C.char, n C.size_t, taken *C.size_t, text **C.char) C.int32_t {
	return batch("kvconn_announce", h, taken, text, idsOf(ids, n), (*node.Agent).Announce)
}

//export go_cancel
func go_cancel(h C.kvconn_agent, ids **C.char, n C.size_t, reason *C.char, taken *C.size_t, text **C.char) C.int32_t {
	return batch("kvconn_cancel", h, taken, text, idsOf(ids, n), func(a *node.Agent, list []core.TransferID) (int, error) {
		return a.Cancel(list, goText(reason))
	})
}

//export go_offer
func go_offer(h C.kvconn_agent, offers *C.kvconn_offer_request, n C.size_t, taken *C.size_t, text **C.char) C.int32_t {
	return batch("kvconn_offer", h, taken, text, structsOf("offers", offers, n, offerOf), (*node.Agent).Offer)
}

//export go_offer_partial
func go_offer_partial(h C.kvconn_agent, parts *C.kvconn_partial_offer, n C.size_t, regions *C.uint32_t, of C.size_t, taken *C.size_t, text **C.char) C.int32_t {
	return batch("kvconn_offer_partial", h, taken, text, structsOf("parts", parts, n, partialOfferOf), func(a *node.Agent, list []core.PartialOffer) (int, error) {
		var in []uint32 // nil: in all of them
		if of > 0 {
			in = numbers(regions, of)
		}
		follows := false
		for i := range list {
			list[i].Regions = in
			follows = follows || list[i].Computing != nil
		}
		if !follows {
			return a.OfferPartial(list)
		}
		return a.OfferPartialStep(list, newWritten(h).take)
	})
}

//export go_withdraw
func go_withdraw(h C.kvconn_agent, ids **C.char, n C.size_t, timeout C.uint32_t, text **C.char) C.int32_t {
	return batch("kvconn_withdraw", h, new(C.size_t), text, idsOf(ids, n), func(a *node.Agent, list []core.TransferID) (int, error) {
		return 0, a.Withdraw(list, time.Duration(timeout)*time.Millisecond)
	})
}

//export go_claim
func go_claim(h C.kvconn_agent, claims *C.kvconn_load_request, n C.size_t, taken *C.size_t, text **C.char) C.int32_t {
	return batch("kvconn_claim", h, taken, text, structsOf("claims", claims, n, claimOf), (*node.Agent).Claim)
}

//export go_start_load
func go_start_load(h C.kvconn_agent, loads *C.kvconn_load_request, n C.size_t, taken *C.size_t, text **C.char) C.int32_t {
	return batch("kvconn_start_load", h, taken, text, structsOf("loads", loads, n, loadOf), (*node.Agent).StartLoad)
}

//export go_moment
func go_moment(h C.kvconn_agent, region C.uint32_t, stream C.uintptr_t, moment *C.uint64_t, text **C.char) C.int32_t {
	return guard("kvconn_moment", text, func() error {
		a, err := find(h)
		if err != nil {
			return err
		}
		m, err := a.Moment(uint32(region), uintptr(stream))
		*moment = C.uint64_t(m)
		return err
	})
}

//export go_stats
func go_stats(h C.kvconn_agent, buf *C.char, capacity C.size_t, length *C.size_t, text **C.char) C.int32_t {
	return guard("kvconn_stats", text, func() error {
		a, err := find(h)
		if err != nil {
			return err
		}
		b, err := json.Marshal(a.Stats())
		if err != nil {
			return err
		}
		*length = C.size_t(len(b))
		return copyOut(buf, capacity, b)
	})
}

//export go_bootstrap_address
func go_bootstrap_address(h C.kvconn_agent, buf *C.char, capacity C.size_t, text **C.char) C.int32_t {
	return guard("kvconn_bootstrap_address", text, func() error {
		a, err := find(h)
		if err != nil {
			return err
		}
		return copyOut(buf, capacity, []byte(a.BootstrapAddress()))
	})
}

// copyOut writes b and a NUL.
func copyOut(buf *C.char, capacity C.size_t, b []byte) error {
	if uint64(capacity) < uint64(len(b))+1 {
		return fmt.Errorf("%w: %d bytes, %d are needed", errBuffer, capacity, len(b)+1)
	}
	dst := unsafe.Slice((*byte)(unsafe.Pointer(buf)), len(b)+1)
	copy(dst, b)
	dst[len(b)] = 0
	return nil
}
