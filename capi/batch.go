// A caller's arrays of C structs become Go values. The agent accepts them up to the first that it refuses.

package main

// #include "slots.h"
import "C"

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/node"
)

// batch reads a caller's array and gives it to a call of the agent; *taken says how
// many elements the call has accepted.
func batch[T any](name string, h C.kvconn_agent, taken *C.size_t, text **C.char, read func() ([]T, error), call func(*node.Agent, []T) (int, error)) C.int32_t {
	return guard(name, text, func() error {
		a, err := find(h)
		if err != nil {
			return err
		}
		list, err := read()
		if err != nil {
			return err
		}
		k, err := call(a, list)
		*taken = C.size_t(k)
		return err
	})
}

func structsOf[S, T any](array string, first *S, n C.size_t, convert func(*S) (T, error)) func() ([]T, error) {
	return func() ([]T, error) { return structs(array, first, n, convert) }
}

// maxStruct is the longest struct of a newer caller.
const maxStruct = 4096

// structs converts a caller's array, each of whose elements begins with its own size,
// struct_size. A newer caller's struct may be longer than S. The bytes behind S
// must be 0 then: they ask for something that this library does not know.
func structs[S, T any](array string, first *S, n C.size_t, convert func(*S) (T, error)) ([]T, error) {
	list := make([]T, 0, n)
	if n == 0 {
		return list, nil
	}
	sizeOf := func(e unsafe.Pointer) uintptr { return uintptr(*(*uint32)(e)) }
	known, size := unsafe.Sizeof(*first), sizeOf(unsafe.Pointer(first))
	if size < known || size > maxStruct || size%8 != 0 {
		return nil, fmt.Errorf("%w: %s[0]: struct_size is %d, want %d: set it to sizeof of the struct", core.ErrInvalid, array, size, known)
	}
	for i := range int(n) {
		e := unsafe.Add(unsafe.Pointer(first), uintptr(i)*size)
		if sizeOf(e) != size {
			return nil, fmt.Errorf("%w: %s[%d]: struct_size is %d, that of %s[0] is %d", core.ErrInvalid, array, i, sizeOf(e), array, size)
		}
		if slices.ContainsFunc(unsafe.Slice((*byte)(e), size)[known:], func(b byte) bool { return b != 0 }) {
			return nil, fmt.Errorf("%w: %s[%d]: a field after the first %d bytes is not 0, and this library does not know that field: it is older than the caller's header", core.ErrInvalid, array, i, known)
		}
		v, err := convert((*S)(e))
		if err != nil {
			return nil, fmt.Errorf("%w: %s[%d]: %w", core.ErrInvalid, array, i, err)
		}
		list = append(list, v)
	}
	return list, nil
}

func idsOf(ids **C.char, n C.size_t) func() ([]core.TransferID, error) {
	return func() ([]core.TransferID, error) {
		list := make([]core.TransferID, 0, n)
		for i, id := range unsafe.Slice(ids, n) {
			if id == nil {
				return nil, fmt.Errorf("%w: transfer_ids[%d] is NULL", core.ErrInvalid, i)
			}
			list = append(list, core.TransferID(C.GoString(id)))
		}
		return list, nil
	}
}

var errNoID = errors.New("transfer_id is NULL")

func regionOf(r *C.kvconn_region) (kv.Region, error) {
	switch {
	case r.name == nil:
		return kv.Region{}, errors.New("name is NULL")
	case r.memory > C.KVCONN_MEMORY_DEVICE:
		return kv.Region{}, fmt.Errorf("memory is %d, want %d (host) or %d (device)", r.memory, C.KVCONN_MEMORY_HOST, C.KVCONN_MEMORY_DEVICE)
	case r.reserved != 0:
		return kv.Region{}, fmt.Errorf("reserved is %d, want 0", r.reserved)
	}
	var memory kv.Memory
	if r.memory == C.KVCONN_MEMORY_DEVICE {
		memory = kv.DeviceMemory(0) // the agent finds out which device
	}
	return kv.Region{Memory: memory, Name: C.GoString(r.name), Base: uint64(r.address), BlockStride: uint64(r.block_stride),
		BlockBytes: uint64(r.block_bytes), NumBlocks: uint32(r.num_blocks), Group: uint32(r.group), IndexKind: kv.IndexKind(r.index_kind),
		Tokens: uint32(r.tokens), Heads: uint32(r.heads), FirstHead: uint32(r.first_head), TotalHeads: uint32(r.total_heads),
		TokenStride: uint64(r.token_stride), HeadStride: uint64(r.head_stride)}, nil
}

func offerOf(o *C.kvconn_offer_request) (core.OfferRequest, error) {
	if o.transfer_id == nil {
		return core.OfferRequest{}, errNoID
	}
	blocks, first, err := groups(o.groups, o.num_groups)
	return core.OfferRequest{ID: core.TransferID(C.GoString(o.transfer_id)), Selection: kv.Selection{First: first, Blocks: blocks},
		Token: uint64(o.token), Prompt: uint64(o.prompt), After: core.Moment(o.after)}, err
}

func partialOfferOf(g *C.kvconn_partial_offer) (core.PartialOffer, error) {
	switch {
	case g.transfer_id == nil:
		return core.PartialOffer{}, errNoID
	case g.ready == nil && g.num_groups > 0:
		return core.PartialOffer{}, errors.New("ready is NULL")
	}
	blocks, first, err := groups(g.groups, g.num_groups)
	if err != nil {
		return core.PartialOffer{}, err
	}
	n := C.size_t(g.num_groups)
	return core.PartialOffer{ID: core.TransferID(C.GoString(g.transfer_id)), First: first, Blocks: blocks,
		Ready: numbers(g.ready, n), Computing: numbers(g.computing, n), Prompt: uint64(g.prompt), After: core.Moment(g.after)}, nil
}

func claimOf(l *C.kvconn_load_request) (core.ClaimRequest, error) {
	switch {
	case l.transfer_id == nil:
		return core.ClaimRequest{}, errNoID
	case l.num_groups != 0:
		return core.ClaimRequest{}, fmt.Errorf("num_groups is %d, want 0", l.num_groups)
	}
	return core.ClaimRequest{ID: core.TransferID(C.GoString(l.transfer_id)), From: target(l), Token: uint64(l.token)}, nil
}

func loadOf(l *C.kvconn_load_request) (core.LoadRequest, error) {
	if l.transfer_id == nil {
		return core.LoadRequest{}, errNoID
	}
	blocks, first, err := groups(l.groups, l.num_groups)
	if err != nil {
		return core.LoadRequest{}, err
	}
	return core.LoadRequest{ID: core.TransferID(C.GoString(l.transfer_id)), From: target(l), Token: uint64(l.token), Prompt: uint64(l.prompt), After: core.Moment(l.after),
		Selection: kv.Selection{First: first, Blocks: blocks, Tokens: numbers(l.tokens, C.size_t(l.num_groups))}}, nil
}

// target is the prefill engine that a claim or load names.
func target(l *C.kvconn_load_request) core.Target {
	return core.Target{Bootstrap: goText(l.bootstrap_addr), EngineID: goText(l.engine_id), DPRank: -1} // an engine_id names one dp rank
}

// goText copies a text; "" if it was left out.
func goText(s *C.char) string {
	if s == nil {
		return ""
	}
	return C.GoString(s)
}

// numbers copies an array; nil if it was left out.
func numbers(first *C.uint32_t, n C.size_t) []uint32 {
	if first == nil {
		return nil
	}
	return append(make([]uint32, 0, n), unsafe.Slice((*uint32)(unsafe.Pointer(first)), n)...)
}

func groups(g *C.kvconn_blocks, n C.uint32_t) (blocks [][]kv.BlockID, first []uint32, err error) {
	if n > kv.MaxGroups {
		return nil, nil, fmt.Errorf("num_groups is %d, at most %d", n, kv.MaxGroups)
	}
	if n > 0 && g == nil {
		return nil, nil, errors.New("groups is NULL")
	}
	blocks, first = make([][]kv.BlockID, n), make([]uint32, n)
	for i, b := range unsafe.Slice(g, n) {
		if b.count > kv.MaxBlocks || b.count > 0 && b.ids == nil {
			return nil, nil, fmt.Errorf("group %d has %d block ids (at most %d), or ids is NULL", i, b.count, kv.MaxBlocks)
		}
		blocks[i] = append([]kv.BlockID(nil), unsafe.Slice((*uint32)(unsafe.Pointer(b.ids)), b.count)...)
		first[i] = uint32(b.first)
	}
	return blocks, first, nil
}
