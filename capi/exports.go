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
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/node"
)

// A host has cores of its own to use: a few threads drive any number of
// transfers, and each thread that Go makes counts against the host. With fewer,
// as on a machine of two cores, a call of the host would have to wait until a
// goroutine that copies a transfer's bytes gives its place up.
const procs = 4

func init() {
	runtime.GOMAXPROCS(procs)
	safe.SetHandler(poison)
}

// main is not called in a shared library.
func main() {}

var agents struct {
	sync.Mutex
	byHandle map[C.kvconn_agent]*node.Agent
	poisoned error // a panic was contained: what the agents hold cannot be trusted
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
	case errors.As(err, &errno), errors.Is(err, errSystem), errors.Is(err, node.ErrTransport), errors.Is(err, node.ErrStillRead):
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
		// Also after a panic: the memory must not be written any more.
		agents.Lock()
		a, poisoned := agents.byHandle[h], agents.poisoned
		delete(agents.byHandle, h)
		agents.Unlock()
		if a == nil {
			return cmp.Or(poisoned, errHandle)
		}
		err := a.Close()
		C.slot_close(h)
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
		if n > core.MaxRegions {
			return fmt.Errorf("%w: %d regions, at most %d", core.ErrInvalid, n, core.MaxRegions)
		}
		list := make([]core.Region, 0, n)
		err = structs(regions, n, unsafe.Offsetof(regions.tokens), func(r *C.kvconn_region) C.uint32_t { return r.struct_size }, func(i int, r *C.kvconn_region) error {
			if r.name == nil {
				return fmt.Errorf("%w: region %d: name is NULL", core.ErrInvalid, i)
			}
			if r.reserved != 0 {
				return fmt.Errorf("%w: region %d: reserved is %d, want 0", core.ErrInvalid, i, r.reserved)
			}
			list = append(list, core.Region{Name: C.GoString(r.name), Base: uint64(r.address), BlockStride: uint64(r.block_stride),
				BlockBytes: uint64(r.block_bytes), NumBlocks: uint32(r.num_blocks), Group: uint32(r.group),
				Tokens: uint32(r.tokens), Heads: uint32(r.heads), FirstHead: uint32(r.first_head), TotalHeads: uint32(r.total_heads),
				TokenStride: uint64(r.token_stride), HeadStride: uint64(r.head_stride)})
			return nil
		})
		if err != nil {
			return err
		}
		if err := a.RegisterKVCaches(list); err != nil {
			return err
		}
		C.slot_set_regions(h, C.uint32_t(n))
		return nil
	})
}

//export go_announce
func go_announce(h C.kvconn_agent, ids **C.char, n C.size_t, taken *C.size_t, text **C.char) C.int32_t {
	return guard("kvconn_announce", text, func() error {
		return withIDs(h, ids, n, taken, (*node.Agent).Announce)
	})
}

//export go_cancel
func go_cancel(h C.kvconn_agent, ids **C.char, n C.size_t, reason *C.char, taken *C.size_t, text **C.char) C.int32_t {
	return guard("kvconn_cancel", text, func() error {
		why := ""
		if reason != nil {
			why = C.GoString(reason)
		}
		return withIDs(h, ids, n, taken, func(a *node.Agent, list []core.TransferID) (int, error) { return a.Cancel(list, why) })
	})
}

func withIDs(h C.kvconn_agent, ids **C.char, n C.size_t, taken *C.size_t, f func(*node.Agent, []core.TransferID) (int, error)) error {
	a, err := find(h)
	if err != nil {
		return err
	}
	list := make([]core.TransferID, 0, n)
	for i, id := range unsafe.Slice(ids, n) {
		if id == nil {
			return fmt.Errorf("%w: transfer_ids[%d] is NULL", core.ErrInvalid, i)
		}
		list = append(list, core.TransferID(C.GoString(id)))
	}
	k, err := f(a, list)
	*taken = C.size_t(k)
	return err
}

//export go_offer
func go_offer(h C.kvconn_agent, offers *C.kvconn_offer_request, n C.size_t, taken *C.size_t, text **C.char) C.int32_t {
	return guard("kvconn_offer", text, func() error {
		a, err := find(h)
		if err != nil {
			return err
		}
		list := make([]core.OfferRequest, 0, n)
		err = structs(offers, n, unsafe.Offsetof(offers.prompt), func(o *C.kvconn_offer_request) C.uint32_t { return o.struct_size }, func(i int, o *C.kvconn_offer_request) error {
			blocks, first, err := groups(o.groups, o.num_groups)
			if err != nil || o.transfer_id == nil {
				return fmt.Errorf("%w: offers[%d]: transfer_id is NULL or %v", core.ErrInvalid, i, err)
			}
			list = append(list, core.OfferRequest{ID: core.TransferID(C.GoString(o.transfer_id)), Selection: core.Selection{First: first, Blocks: blocks}, Token: uint64(o.token), Prompt: uint64(o.prompt)})
			return nil
		})
		if err != nil {
			return err
		}
		k, err := a.Offer(list)
		*taken = C.size_t(k)
		return err
	})
}

//export go_grow
func go_grow(h C.kvconn_agent, parts *C.kvconn_growth, n C.size_t, regions *C.uint32_t, of C.size_t, taken *C.size_t, text **C.char) C.int32_t {
	return guard("kvconn_grow", text, func() error {
		a, err := find(h)
		if err != nil {
			return err
		}
		var in []uint32
		if of > 0 {
			in = slices.Clone(unsafe.Slice((*uint32)(unsafe.Pointer(regions)), of))
		}
		list, follows := make([]core.PartialOffer, 0, n), false
		err = structs(parts, n, unsafe.Offsetof(parts.prompt), func(g *C.kvconn_growth) C.uint32_t { return g.struct_size }, func(i int, g *C.kvconn_growth) error {
			blocks, first, err := groups(g.groups, g.num_groups)
			if err != nil || g.transfer_id == nil || g.ready == nil && g.num_groups > 0 {
				return fmt.Errorf("%w: parts[%d]: transfer_id or ready is NULL or %v", core.ErrInvalid, i, err)
			}
			ready := slices.Clone(unsafe.Slice((*uint32)(unsafe.Pointer(g.ready)), g.num_groups))
			r := core.PartialOffer{ID: core.TransferID(C.GoString(g.transfer_id)), First: first, Blocks: blocks, Ready: ready, Regions: in, Prompt: uint64(g.prompt)}
			if g.computing != nil {
				r.Computing = slices.Clone(unsafe.Slice((*uint32)(unsafe.Pointer(g.computing)), g.num_groups))
				follows = true
			}
			list = append(list, r)
			return nil
		})
		if err != nil {
			return err
		}
		if !follows {
			k, err := a.Grow(list)
			*taken = C.size_t(k)
			return err
		}
		k, err := a.GrowStep(list, newWritten(h).take)
		*taken = C.size_t(k)
		return err
	})
}

//export go_retract
func go_retract(h C.kvconn_agent, ids **C.char, n C.size_t, timeout C.uint32_t, text **C.char) C.int32_t {
	return guard("kvconn_retract", text, func() error {
		var taken C.size_t
		return withIDs(h, ids, n, &taken, func(a *node.Agent, list []core.TransferID) (int, error) {
			return 0, a.Retract(list, time.Duration(timeout)*time.Millisecond)
		})
	})
}

//export go_claim
func go_claim(h C.kvconn_agent, claims *C.kvconn_load_request, n C.size_t, taken *C.size_t, text **C.char) C.int32_t {
	return guard("kvconn_claim", text, func() error {
		a, err := find(h)
		if err != nil {
			return err
		}
		list := make([]core.ClaimRequest, 0, n)
		err = structs(claims, n, unsafe.Offsetof(claims.tokens), func(l *C.kvconn_load_request) C.uint32_t { return l.struct_size }, func(i int, l *C.kvconn_load_request) error {
			if l.transfer_id == nil || l.num_groups != 0 {
				return fmt.Errorf("%w: claims[%d]: transfer_id is NULL, or num_groups is %d, want 0", core.ErrInvalid, i, l.num_groups)
			}
			list = append(list, core.ClaimRequest{ID: core.TransferID(C.GoString(l.transfer_id)), From: target(l), Token: uint64(l.token)})
			return nil
		})
		if err != nil {
			return err
		}
		k, err := a.Claim(list)
		*taken = C.size_t(k)
		return err
	})
}

// target is where a claim or load is from.
func target(l *C.kvconn_load_request) (t core.Target) {
	t.DPRank = -1 // an engine_id names one dp rank
	if l.bootstrap_addr != nil {
		t.Bootstrap = C.GoString(l.bootstrap_addr)
	}
	if l.engine_id != nil {
		t.EngineID = C.GoString(l.engine_id)
	}
	return t
}

//export go_start_load
func go_start_load(h C.kvconn_agent, loads *C.kvconn_load_request, n C.size_t, taken *C.size_t, text **C.char) C.int32_t {
	return guard("kvconn_start_load", text, func() error {
		a, err := find(h)
		if err != nil {
			return err
		}
		list := make([]core.LoadRequest, 0, n)
		err = structs(loads, n, unsafe.Offsetof(loads.tokens), func(l *C.kvconn_load_request) C.uint32_t { return l.struct_size }, func(i int, l *C.kvconn_load_request) error {
			blocks, first, err := groups(l.groups, l.num_groups)
			if err != nil || l.transfer_id == nil {
				return fmt.Errorf("%w: loads[%d]: transfer_id is NULL or %v", core.ErrInvalid, i, err)
			}
			var tokens []uint32
			if l.tokens != nil {
				tokens = slices.Clone(unsafe.Slice((*uint32)(unsafe.Pointer(l.tokens)), l.num_groups))
			}
			list = append(list, core.LoadRequest{ID: core.TransferID(C.GoString(l.transfer_id)), From: target(l), Selection: core.Selection{First: first, Blocks: blocks, Tokens: tokens}, Token: uint64(l.token), Prompt: uint64(l.prompt)})
			return nil
		})
		if err != nil {
			return err
		}
		k, err := a.StartLoad(list)
		*taken = C.size_t(k)
		return err
	})
}

// structs walks over a caller's array whose elements say their own size: at least
// that of the first header's. What the caller's header does not have is 0.
func structs[T any](first *T, n C.size_t, least uintptr, sizeOf func(*T) C.uint32_t, f func(int, *T) error) error {
	if n == 0 {
		return nil
	}
	// A newer caller's struct may be longer: the fields that are known here come first.
	size := uintptr(sizeOf(first))
	if size < least || size > 4096 || size%8 != 0 {
		return fmt.Errorf("%w: struct_size of element 0 is %d, want %d: set it to sizeof of the struct", core.ErrInvalid, size, unsafe.Sizeof(*first))
	}
	var known T
	for i := range int(n) {
		e := (*T)(unsafe.Add(unsafe.Pointer(first), uintptr(i)*size))
		if uintptr(sizeOf(e)) != size {
			return fmt.Errorf("%w: struct_size of element %d is %d, of the first one %d", core.ErrInvalid, i, sizeOf(e), size)
		}
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&known)), unsafe.Sizeof(known)), unsafe.Slice((*byte)(unsafe.Pointer(e)), size))
		if err := f(i, &known); err != nil {
			return err
		}
	}
	return nil
}

func groups(g *C.kvconn_blocks, n C.uint32_t) (blocks [][]core.BlockID, first []uint32, err error) {
	if n > core.MaxGroups {
		return nil, nil, fmt.Errorf("num_groups is %d, at most %d", n, core.MaxGroups)
	}
	if n > 0 && g == nil {
		return nil, nil, errors.New("groups is NULL")
	}
	blocks, first = make([][]core.BlockID, n), make([]uint32, n)
	for i, b := range unsafe.Slice(g, n) {
		if b.count > core.MaxBlocks || b.count > 0 && b.ids == nil {
			return nil, nil, fmt.Errorf("group %d has %d block ids (at most %d), or ids is NULL", i, b.count, core.MaxBlocks)
		}
		blocks[i] = append([]core.BlockID(nil), unsafe.Slice((*uint32)(unsafe.Pointer(b.ids)), b.count)...)
		first[i] = uint32(b.first)
	}
	return blocks, first, nil
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
