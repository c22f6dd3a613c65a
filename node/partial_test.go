package node

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// fillLayer fills a layer's blocks as fill does; pos counts from the first of ids.
func (s *side) fillLayer(salt byte, layer, pos int, ids ...kv.BlockID) {
	for k, id := range ids {
		for i, b := 0, s.block(layer, id); i < len(b); i++ {
			b[i] = salt + byte(layer*31+(pos+k)*7+i*13)
		}
	}
}

func (s *side) partial(id core.TransferID, ready uint32, regions []uint32, more ...kv.BlockID) {
	s.t.Helper()
	if _, err := s.OfferPartial([]core.PartialOffer{{ID: id, Blocks: [][]kv.BlockID{more}, Ready: []uint32{ready}, Regions: regions}}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *side) withdraw(ids ...core.TransferID) {
	s.t.Helper()
	if err := s.Withdraw(ids, bound); err != nil {
		s.t.Fatal(err)
	}
}

func (s *side) cancel(id core.TransferID) {
	s.t.Helper()
	if _, err := s.Cancel([]core.TransferID{id}, "the client went"); err != nil {
		s.t.Fatal(err)
	}
}

// arrives waits until a layer's block at D holds what P's does.
func (s *side) arrives(layer int, at kv.BlockID, from *side, block kv.BlockID) {
	s.t.Helper()
	want := from.block(layer, block)
	for end := time.Now().Add(bound); !sameBytes(s.block(layer, at), want); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("layer %d of block %d has not come within %v", layer, at, bound)
		}
	}
}

// Transports write by system calls that the race detector does not see.
//
//go:norace
func sameBytes(a, b []byte) bool { return string(a) == string(b) }

// TestPartialOffers: chunks and layers are at D before P has the next.
func TestPartialOffers(t *testing.T) { byEach(t, partialOffers) }

func partialOffers(t *testing.T, transport, by string) {
	p, d := open(t, forced(RolePrefill, transport)), open(t, forced(RoleDecode, transport))
	src, dst := []kv.BlockID{9, 3, 17, 4, 30}, []kv.BlockID{5, 6, 2, 28, 1}
	d.load("t", p.BootstrapAddress(), dst...)
	for n := range src {
		p.partial("t", uint32(n), nil, src[n]) // of a block that is about to be computed
		for l := range layers {
			p.fillLayer(7, l, n, src[n])
			p.partial("t", uint32(n+1), []uint32{uint32(l)})
			if n+1 < len(src) || l+1 < layers {
				d.arrives(l, dst[n], p, src[n])
				if len(d.GetFinished()) > 0 {
					t.Fatalf("the load has ended with %d blocks of %d", n+1, len(src))
				}
			}
		}
	}
	d.want("t", core.OK)
	p.offer("t", src...)
	r := p.want("t", core.OK)
	if want := uint64(layers * len(src) * blockBytes); r.Stats.Bytes != want || r.Transport != by {
		t.Errorf("P has sent %d bytes by %q, want %d by %s", r.Stats.Bytes, r.Transport, want, by)
	}
	checkBlocks(t, p, d, src, dst)
	if s := p.Stats(); s.Partial != 1 || s.BytesPartial != r.Stats.Bytes {
		t.Errorf("%d partial offers were sent, %d bytes of them, want 1 and all of its %d", s.Partial, s.BytesPartial, r.Stats.Bytes)
	}
}

func checkBlocks(t *testing.T, p, d *side, src, dst []kv.BlockID) {
	t.Helper()
	for l := range layers {
		for i := range src {
			if !sameBytes(d.block(l, dst[i]), p.block(l, src[i])) {
				t.Errorf("block %d of layer %d differs", i, l)
			}
		}
	}
}

// TestWithdraw: a preempted request's blocks are another request's as soon as Withdraw
// has returned. D gets the request's own bytes all the same.
func TestWithdraw(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	rnd := rand.New(rand.NewPCG(1, 2))
	const n = 6
	for k := range 40 {
		id := core.TransferID(fmt.Sprint("t", k))
		all := rnd.Perm(numBlocks)
		take := func() (out []kv.BlockID) {
			for _, b := range all[:n] {
				out = append(out, kv.BlockID(b))
			}
			all = all[n:]
			return out
		}
		dst := take()
		if k%2 == 0 {
			d.load(id, p.BootstrapAddress(), dst...)
		}
		var src []kv.BlockID
		for try := range 3 {
			src = take()
			for i, done := 0, 0; i < n; i++ {
				p.partial(id, uint32(done), nil, src[i])
				for l := range layers {
					p.fillLayer(byte(k), l, i, src[i])
				}
				done = i + 1
				p.partial(id, uint32(done), nil)
				if k%2 == 1 && i == 0 && try == 0 {
					d.load(id, p.BootstrapAddress(), dst...)
				}
				if k == 0 && try == 0 { // this one is under way for certain
					d.arrives(layers-1, dst[0], p, src[0])
					break
				}
				if try < 2 && rnd.IntN(3) == 0 {
					break
				}
			}
			if try < 2 {
				p.withdraw(id)
				for _, b := range src { // another request's
					for l := range layers {
						p.fillLayer(byte(200+k), l, 50, b)
					}
				}
			}
		}
		// Those that were offered in full before a withdraw were perhaps D's already.
		p.offer(id, src...)
		d.want(id, core.OK)
		p.want(id, core.OK)
		for l := range layers {
			for i := range n {
				b := make([]byte, blockBytes)
				for j := range b {
					b[j] = byte(k) + byte(l*31+i*7+j*13)
				}
				if !sameBytes(d.block(l, dst[i]), b) {
					t.Fatalf("%s: block %d of layer %d holds something else", id, i, l)
				}
			}
		}
	}
	if s := p.Stats(); s.Withdrawn == 0 {
		t.Errorf("no transfer under way was taken back: %+v", s)
	}
}

// TestWithdrawUnknown: the transfer was never given, or is offered.
func TestWithdrawUnknown(t *testing.T) {
	leaktest.Check(t)
	p := open(t, testConfig(RolePrefill))
	p.withdraw("nobody's")
	p.partial("t", 1, nil, 1)
	p.withdraw("t", "nobody's")
	p.offer("t", 2)
	if err := p.Withdraw([]core.TransferID{"t"}, bound); err == nil {
		t.Error("what is offered was taken back")
	}
	if _, err := p.Cancel([]core.TransferID{"t"}, ""); err != nil {
		t.Fatal(err)
	}
	p.want("t", core.Cancelled)
	p.partial("late", 1, nil, 1)
	if _, err := p.Cancel([]core.TransferID{"late"}, "aborted"); err != nil {
		t.Fatal(err)
	}
	p.withdraw("late")
}

// TestWithdrawAmongWrongOnes: an id that cannot be taken back does not leave another's
// blocks to a D that asks for them later.
func TestWithdrawAmongWrongOnes(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	p.fill(1, 1, 2)
	p.partial("t", 1, nil, 1)
	if err := p.Withdraw([]core.TransferID{"", "t"}, bound); !errors.Is(err, core.ErrInvalid) {
		t.Errorf("an empty id: %v", err)
	}
	p.offer("t", 2)
	d.load("t", p.BootstrapAddress(), 3)
	d.want("t", core.OK)
	p.want("t", core.OK)
	same(t, p, []kv.BlockID{2}, d, []kv.BlockID{3})
}

// TestPartialOfferDecoderGone: P hears of it with its offer, and has its blocks back.
func TestPartialOfferDecoderGone(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	src, dst := []kv.BlockID{1, 2, 3}, []kv.BlockID{4, 5, 6}
	d.load("t", p.BootstrapAddress(), dst...)
	p.fill(1, src...)
	p.partial("t", 1, nil, src...)
	d.arrives(0, 4, p, 1)
	_ = d.Close()
	p.offer("t", src...)
	r := p.report("t")
	if r.Code == core.OK || !slices.Contains([]core.Code{core.PeerLost, core.PeerCancelled, core.Failed}, r.Code) {
		t.Errorf("the offer ended with %v (%s)", r.Code, r.Reason)
	}
}

// TestWithdrawInFull: all of a transfer was given when the engine takes it back. D has
// the bytes of before, or loads anew, and never gets the bytes of afterwards.
func TestWithdrawInFull(t *testing.T) {
	leaktest.Check(t)
	const size, n = 256 << 10, 24
	sides := map[string]*side{}
	for _, role := range []string{RolePrefill, RoleDecode} {
		a, err := Open(testConfig(role), Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = a.Close() })
		s := &side{Agent: a, t: t, cache: make([]byte, 2*n*size), seen: map[core.TransferID]core.Report{}}
		if err := a.RegisterKVCaches([]kv.Region{{Name: "kv", Base: uint64(uintptr(unsafe.Pointer(&s.cache[0]))), BlockStride: size, BlockBytes: size, NumBlocks: 2 * n}}); err != nil {
			t.Fatal(err)
		}
		sides[role] = s
	}
	p, d := sides[RolePrefill], sides[RoleDecode]
	ids := func(first int) (out []kv.BlockID) {
		for i := range n {
			out = append(out, kv.BlockID(first+i))
		}
		return out
	}
	paint := func(s *side, first int, with byte) {
		for i := range s.cache[first*size : (first+n)*size] {
			s.cache[first*size+i] = with
		}
	}
	for k := range 4 {
		id := core.TransferID(fmt.Sprint("t", k))
		paint(d, 0, 0)
		d.load(id, p.BootstrapAddress(), ids(0)...)
		paint(p, 0, 1)
		p.partial(id, n, nil, ids(0)...)
		until(t, "the first byte is there", func() bool { return sameBytes(d.cache[:1], []byte{1}) })
		p.withdraw(id)
		paint(p, 0, 2) // another request's
		paint(p, n, 1)
		p.partial(id, n/2, nil, ids(n)...)
		p.offer(id, ids(n)...)
		d.want(id, core.OK)
		p.want(id, core.OK)
		if !sameBytes(d.cache[:n*size], bytes.Repeat([]byte{1}, n*size)) {
			t.Fatalf("%s: D has what P's blocks held after they were taken back", id)
		}
	}
	t.Logf("%d of 4 were taken back while they moved", p.Stats().Withdrawn)
}
