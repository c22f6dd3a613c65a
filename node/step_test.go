package node

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// pass is the forward pass of an engine, as OfferPartialStep asks after it.
type pass struct {
	mu    sync.Mutex
	new   []uint32
	asked int
	over  string // the call that has ended it
	late  string // the call after which it was asked nevertheless
}

func (p *pass) write(regions ...uint32) {
	p.mu.Lock()
	p.new = append(p.new, regions...)
	p.mu.Unlock()
}

func (p *pass) written() (regions []uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked++
	p.late = p.over
	regions, p.new = p.new, nil
	return regions
}

func (p *pass) end(by string) {
	p.mu.Lock()
	p.over = by
	p.mu.Unlock()
}

func (p *pass) get() (asked int, late string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked, p.late
}

// awaitAsked waits until it was asked so many times more.
func (p *pass) awaitAsked(t *testing.T, more int) {
	t.Helper()
	before, _ := p.get()
	for end := time.Now().Add(bound); ; time.Sleep(time.Millisecond) {
		if now, _ := p.get(); now >= before+more {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the step was not asked %d times within %v", more, bound)
		}
	}
}

// atOnce is of a step in host memory, in which regions are written when it says so.
func atOnce(written func() []uint32) func() []Written {
	return func() []Written {
		if regions := written(); len(regions) > 0 {
			return []Written{{Regions: regions}}
		}
		return nil
	}
}

func (s *side) offerStep(id core.TransferID, ready, computing uint32, p *pass, more ...kv.BlockID) {
	s.t.Helper()
	if _, err := s.OfferPartialStep([]core.PartialOffer{{ID: id, Blocks: [][]kv.BlockID{more}, Ready: []uint32{ready}, Computing: []uint32{computing}}}, atOnce(p.written)); err != nil {
		s.t.Fatal(err)
	}
}

// TestLayersOfAStep: each moves when the pass has written it, without a call.
func TestLayersOfAStep(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	src, dst := []kv.BlockID{9, 3, 17}, []kv.BlockID{5, 6, 2}
	d.load("t", p.BootstrapAddress(), dst...)
	for n := range src {
		var forward pass
		p.offerStep("t", uint32(n), uint32(n+1), &forward, src[n])
		for l := range layers {
			p.fillLayer(7, l, n, src[n])
			forward.write(uint32(l))
			if n+1 < len(src) || l+1 < layers {
				d.arrives(l, dst[n], p, src[n])
			}
		}
	}
	d.want("t", core.OK)
	p.offer("t", src...)
	p.want("t", core.OK)
}

// TestStepEnds: after the call that ends a step nothing of it is sent any more, or a
// block that the engine has given to another request would be sent.
func TestStepEnds(t *testing.T) {
	leaktest.Check(t)
	p, q := open(t, testConfig(RolePrefill)), open(t, testConfig(RolePrefill))
	calls := []struct {
		name string
		do   func(id core.TransferID)
	}{
		{"offer partial", func(id core.TransferID) { p.partial(id, 1, nil) }},
		{"offer", func(id core.TransferID) { p.offer(id, 4) }},
		{"withdraw", func(id core.TransferID) { p.withdraw(id) }},
		{"cancel", func(id core.TransferID) { p.cancel(id) }},
		{"the next step", func(id core.TransferID) { p.offerStep(id, 1, 1, new(pass)) }},
	}
	for _, c := range calls {
		id := core.TransferID("of " + c.name)
		var forward, after pass
		p.offerStep(id, 0, 1, &forward, 4)
		forward.awaitAsked(t, 2)
		c.do(id)
		forward.end(c.name)
		// A later step was asked so often meanwhile that this step's turn would have come.
		q.offerStep(id, 0, 1, &after, 5)
		after.awaitAsked(t, 20)
		if _, late := forward.get(); late != "" {
			t.Errorf("after %s the step was asked for more", late)
		}
	}
}

func TestStepThatIsRefused(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	var forward pass
	part := core.PartialOffer{ID: "t", Blocks: [][]kv.BlockID{{1}}, Ready: []uint32{0}, Computing: []uint32{2}}
	for _, c := range []struct {
		at   *side
		part core.PartialOffer
	}{{p, part}, {d, core.PartialOffer{ID: "t"}}, {p, core.PartialOffer{ID: "t", Computing: []uint32{0, 0}}}} {
		if n, err := c.at.OfferPartialStep([]core.PartialOffer{c.part}, atOnce(forward.written)); n != 0 || !errors.Is(err, core.ErrInvalid) {
			t.Errorf("%d accepted of %+v, error %v", n, c.part, err)
		}
	}
	if asked, _ := forward.get(); asked > 0 {
		t.Errorf("a step that was refused was asked after %d times", asked)
	}
}

// unseenStep is one that has written its last layer, which only the call that ends it sees.
func (s *side) unseenStep(said *[]uint32, parts ...core.PartialOffer) {
	s.t.Helper()
	_, err := s.OfferPartialStep(parts, atOnce(func() (regions []uint32) {
		if s.steps.step == nil { // under its lock: a question while the step runs is told nothing
			regions, *said = *said, nil
		}
		return regions
	}))
	if err != nil {
		s.t.Fatal(err)
	}
	s.steps.mu.Lock()
	*said = append(*said, layers-1)
	s.steps.mu.Unlock()
}

// TestEndOfAStepPollsALastTime: a region that a step has marked as written moves when a
// call for another transfer ends the step. A mark of before the step does not count.
func TestEndOfAStepPollsALastTime(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	calls := []func(){
		func() { p.partial("other", 0, nil, 8) },
		func() { p.offerStep("another", 0, 1, new(pass), 7) },
		func() { p.offer("a third", 6) },
		func() { p.withdraw("nobody's") },
		func() { p.cancel("nobody's") },
	}
	for n, call := range calls {
		id, src, dst := core.TransferID(fmt.Sprintf("t%d", n)), kv.BlockID(9+n), kv.BlockID(2+n)
		d.load(id, p.BootstrapAddress(), dst)
		for l := range layers {
			p.fillLayer(7, l, n, src)
		}
		said := []uint32{0}
		p.unseenStep(&said, core.PartialOffer{ID: id, Blocks: [][]kv.BlockID{{src}}, Ready: []uint32{0}, Computing: []uint32{1}})
		call()
		d.arrives(layers-1, dst, p, src)
		if got := d.block(0, dst); !bytes.Equal(got, make([]byte, len(got))) {
			t.Errorf("of %s moved what was said before its step began", id)
		}
		p.offer(id, src)
		d.want(id, core.OK)
		p.want(id, core.OK)
	}
}

// TestFinalPollLeavesWhatIsTakenBack: a call that takes a transfer back lets none of its
// regions begin to move. The other transfers of the step move.
func TestFinalPollLeavesWhatIsTakenBack(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	for n, takeBack := range []func(id core.TransferID){func(id core.TransferID) { p.withdraw(id) }, p.cancel} {
		back, kept := core.TransferID(fmt.Sprintf("back%d", n)), core.TransferID(fmt.Sprintf("kept%d", n))
		var parts []core.PartialOffer
		for k, id := range []core.TransferID{back, kept} {
			src, dst := kv.BlockID(9+2*n+k), kv.BlockID(2+2*n+k)
			p.fill(7, src)
			d.load(id, p.BootstrapAddress(), dst)
			p.partial(id, 1, []uint32{0}, src)
			d.arrives(0, dst, p, src)
			parts = append(parts, core.PartialOffer{ID: id, Ready: []uint32{0}, Computing: []uint32{1}})
		}
		before := p.Stats().BytesPartial
		var said []uint32
		p.unseenStep(&said, parts...)
		takeBack(back)
		d.arrives(layers-1, kv.BlockID(2+2*n+1), p, kv.BlockID(9+2*n+1))
		if sent := p.Stats().BytesPartial - before; sent != blockBytes {
			t.Errorf("%d bytes were sent when %s was taken back, want the %d of %s", sent, back, blockBytes, kept)
		}
		p.offer(kept, kv.BlockID(9+2*n+1))
		p.want(kept, core.OK)
		d.want(kept, core.OK)
	}
}

// TestFollowerEndsAStepThatIsRefused: its error is told once.
func TestFollowerEndsAStepThatIsRefused(t *testing.T) {
	leaktest.Check(t)
	p := open(t, testConfig(RolePrefill))
	var forward pass
	p.offerStep("t", 0, 1, &forward, 4)
	p.steps.mu.Lock()
	p.steps.step.parts[0].Ready = []uint32{2} // more than there is
	p.steps.mu.Unlock()
	forward.write(0)
	until(t, "the step has ended", func() bool {
		p.steps.mu.Lock()
		defer p.steps.mu.Unlock()
		return p.steps.step == nil
	})
	forward.end("its refusal")
	p.offer("t", 4)
	if _, late := forward.get(); late != "" {
		t.Errorf("after %s the step was asked for more", late)
	}
}

// TestLayersInTheOrderOfMoments: a layer does not wait for a moment that was taken after its own,
// wherever its regions lie among the registered ones.
func TestLayersInTheOrderOfMoments(t *testing.T) {
	var order []core.Moment
	c := &steps{offer: func(parts []core.PartialOffer) (int, error) {
		order = append(order, parts[0].After)
		return 1, nil
	}}
	const stream = 1 << 48 // of another stream, which was not taken later for that
	s := &step{parts: make([]core.PartialOffer, 1), written: func() []Written {
		return []Written{{Regions: []uint32{0}, After: 9}, {Regions: []uint32{1}, After: 7 | stream}, {Regions: []uint32{2}}, {Regions: []uint32{3}, After: 8}}
	}}
	if more, err := c.offerWritten(s); !more || err != nil {
		t.Fatal(more, err)
	}
	if want := []core.Moment{0, 7 | stream, 8, 9}; !slices.Equal(order, want) {
		t.Errorf("offered in the order %x, want %x", order, want)
	}
}
