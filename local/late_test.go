package local

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestLinkAtTheLastMoment: D connects while P's wait for a connection ends. D has been told where the blocks are,
// and so P keeps them.
func TestLinkAtTheLastMoment(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{}, nil)
	p.ticket("d")
	grant := newRandom()
	p.write("t", "d", grant[:])
	s := &p.tr.sender
	s.mu.Lock()
	out := s.byID["t"]
	s.mu.Unlock()
	c := p.poses("d")
	frames(t, c, frameRuns)
	s.abandon(out, errors.New("the wait has ended")) // which has waited for the lock
	if *out.validity.word() != out.proof {
		t.Error("the page does not say that P keeps the blocks")
	}
	_, _ = c.Write(word(frameTaken, grant))
	if err := p.sink.Wait("written", "t", 1).Err; err != nil {
		t.Error(err)
	}
}

// TestLateAnswers: a D that answers each stop, but after P's grace, keeps its link: its words give P the pages back.
func TestLateAnswers(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{StopGrace: time.Millisecond}, nil)
	c := p.poses("d")
	s := &p.tr.sender
	for n := range 2 * mostLate {
		id, grant := core.TransferID(fmt.Sprint("t", n)), newRandom()
		p.write(id, "d", grant[:])
		_, _ = c.Write(credit(uint32((len(frames(t, c, frameRuns)) - runsSize) / runSize)))
		p.tr.Stop(id)
		p.sink.Wait("written", id, 1)
		_, _ = c.Write((&ending{cause: overStopped}).bytes(grant))
	}
	comes(t, "all pages are given back", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.peers["d"].link.late) == 0
	})
	if n := len(p.tr.validity.areas); n > 2 {
		t.Errorf("%d pages are kept", n*pagesAtOnce)
	}
	if all := p.sink.All("down", ""); len(all) > 0 {
		t.Errorf("the link has ended: %+v", all)
	}
}

// TestLostValidityPagesOfOne: a D that never answers a stop costs P only so many pages, however many links it opens.
func TestLostValidityPagesOfOne(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{StopGrace: time.Millisecond}, nil)
	for link := range 3 {
		c := p.poses("d")
		for n := range mostLate + 1 {
			id, grant := core.TransferID(fmt.Sprint("t", link, " ", n)), newRandom()
			p.write(id, "d", grant[:])
			frames(t, c, frameRuns)
			p.tr.Stop(id)
			p.sink.Wait("written", id, 1)
		}
		comes(t, "the link ends, and D's end is open yet", func() bool {
			p.tr.sender.mu.Lock()
			defer p.tr.sender.mu.Unlock()
			return p.tr.sender.links == 0
		})
		defer c.Close()
	}
	g := &p.tr.validity
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.lost > mostLate {
		t.Errorf("%d pages are lost", g.lost)
	}
	for _, a := range g.areas { // nobody reads them here, so that none is left to the process
		a.lost = false
	}
}

// interrupted is a sink in which something happens before it hears of what has arrived.
type interrupted struct {
	*coretest.Recorder
	before func()
}

func (s *interrupted) Received(id core.TransferID, stats core.TransferStats, err error) {
	s.before()
	s.Recorder.Received(id, stats, err)
}

// TestStoppedInReport: P's stop comes while D reports a transfer as good. P hears that before D's answer to the stop, so
// that both report the same.
func TestStoppedInReport(t *testing.T) {
	leaktest.Check(t)
	p, d := start(t, "p", Config{StopGrace: time.Minute}, nil), start(t, "d", Config{}, nil)
	d.tr.sink = &interrupted{d.sink, func() {
		p.tr.Stop("t")
		if err := p.sink.Wait("written", "t", 1).Err; err != nil {
			t.Errorf("D reports that all is well, P: %v", err)
		}
	}}
	d.connect(p)
	p.write("t", "d", d.expect("t", "p"))
	if err := d.sink.Wait("received", "t", 1).Err; err != nil {
		t.Error(err)
	}
}

// moved is an access that copies memory of this process.
type moved struct{}

func (moved) open(*memory, *os.File) error { return nil }
func (moved) close()                       {}

func (moved) copy(c *copier, b *batch) (uint64, error) {
	into, _ := b.into.cut(make([]iovec, 0, 1), b.position, b.bytes, c.pairs)
	from := (&cursor{b.runs, b.off}).cut(nil, b.bytes)
	return uint64(copy(unsafe.Slice(*(**byte)(unsafe.Pointer(&into[0].base)), into[0].len), unsafe.Slice(*(**byte)(unsafe.Pointer(&from[0].base)), from[0].len))), nil
}

// TestStagedProof: of blocks of P's host memory, some of which go to D's devices, each part has the proof, and so has the batch.
func TestStagedProof(t *testing.T) {
	from, into := make([]byte, 2*blockBytes), make([]byte, 2*blockBytes)
	for i := range from {
		from[i] = byte(i)
	}
	p := start(t, "p", Config{}, nil)
	one, proof, err := p.tr.validity.take()
	if err != nil {
		t.Fatal(err)
	}
	defer p.tr.validity.give(one)
	at := func(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(&b[0]))) }
	for name, number := range map[string]uint64{"kept": proof, "another's": proof + 1} {
		c := p.tr.receiver.copier()
		b := &batch{in: &inbound{}, into: &destination{runs: []run{{at(into), uint64(len(into))}}, ends: []uint64{uint64(len(into))}, total: uint64(len(into))}, on: new(stint),
			bytes: uint64(len(into)), runs: []run{{at(from), uint64(len(from))}}, validity: one.address, proof: number, pid: os.Getpid(), looks: true, access: moved{}}
		if _, err := c.stage(b); (err == nil) != (number == proof) || b.proven != (number == proof) {
			t.Errorf("%s: %v, proven %v", name, err, b.proven)
		}
	}
}
