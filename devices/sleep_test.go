package devices_test

import (
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// mapped are agents whose caches lie in memory that was mapped by handles.
func mapped(t *testing.T) (p, d *side, maps [2]*engine.Mapping) {
	t.Helper()
	return mappedBy(t, config)
}

func mappedBy(t *testing.T, config func(role string) node.Config) (p, d *side, maps [2]*engine.Mapping) {
	t.Helper()
	for i := range maps {
		maps[i] = engine.New(t, i).Map(blocks * blockBytes)
	}
	return open(t, config(node.RolePrefill), 0, maps[0].At), open(t, config(node.RoleDecode), 1, maps[1].At), maps
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it did not come to it: %s", what)
		}
	}
}

// halfway begins a transfer of blocks 0 and 1, of which the first has landed and nothing moves.
func halfway(p, d *side, id core.TransferID) {
	p.t.Helper()
	p.Fill(p.at(0), blocks*blockBytes, 1)
	d.Fill(d.at(0), blockBytes, 2)
	d.Fill(d.at(1), blockBytes, 2)
	d.load(id, p, 0, 2, 0)
	if _, err := p.OfferPartial([]core.PartialOffer{{ID: id, Blocks: sequence(0, 2).Blocks, Ready: []uint32{1}}}); err != nil {
		p.t.Fatal(err)
	}
	eventually(p.t, "the first block has landed", func() bool { return d.Wrong(d.at(0), blockBytes, 1) == 0 })
	p.settled()
	d.settled()
}

// offerAfter offers a transfer in memory that is another now. It is refused until what was begun
// before has ended.
func (s *side) offerAfter(id core.TransferID, first, n int) {
	s.t.Helper()
	eventually(s.t, "the offer is taken", func() bool {
		_, err := s.Offer([]core.OfferRequest{{ID: id, Selection: sequence(first, n)}})
		if err != nil && !strings.Contains(err.Error(), "have not ended yet") {
			s.t.Fatal(err)
		}
		return err == nil
	})
}

// lost wants a transfer to have failed, since its memory became another.
func (s *side) lost(id core.TransferID, says ...string) {
	s.t.Helper()
	s.failed(id, says...)
	if r := s.ended(id); r.Code != core.Failed {
		s.t.Errorf("%q ended with %v, want %v", id, r.Code, core.Failed)
	}
}

// goesOn wants a transfer of all blocks to go well, with bytes of now.
func goesOn(p, d *side, id core.TransferID) {
	p.t.Helper()
	p.Fill(p.at(0), blocks*blockBytes, 6)
	p.offer(id, 0, blocks, 0)
	d.load(id, p, 0, blocks, 0)
	d.well(id)
	p.well(id)
	if wrong := d.Wrong(d.at(0), blocks*blockBytes, 6); wrong > 0 {
		p.t.Errorf("%q: %d bytes are wrong", id, wrong)
	}
}

// TestFreed: an engine frees its cache, or sleeps and wakes, in the middle of a transfer, of which some
// layers have landed. The transfer ends with the reason. While the memory is not there, so does the next
// one; when it is there again, the next one goes well.
func TestFreed(t *testing.T) {
	for _, wakes := range []string{"sleeps", "wakes"} {
		t.Run(wakes, func(t *testing.T) {
			p, d, maps := mapped(t)
			halfway(p, d, "t")
			maps[0].Sleep()
			if wakes == "wakes" {
				maps[0].Wake()
				p.Fill(p.at(0), blocks*blockBytes, 5)
			}
			p.offerAfter("t", 0, 2)
			if r := d.ended("t"); r.Code == core.OK {
				t.Errorf("that the memory is another was not noticed")
			}
			p.lost("t", "region layer.0", "freed or mapped anew")
			d.lost("t", "region layer.0")
			if wrong := d.Wrong(d.at(1), blockBytes, 2); wrong > 0 {
				t.Errorf("%d bytes of the other memory have come", wrong)
			}
			if wakes == "wakes" {
				goesOn(p, d, "next")
				return
			}
			p.offer("next", 0, 1, 0)
			d.load("next", p, 0, 1, 0)
			p.lost("next", "region layer.0", "freed or mapped anew")
			d.lost("next", "region layer.0")
			hostTransfer(t)
		})
	}
}

// TestRemapped: an engine sleeps and wakes, at either side. What was offered before ends, by name, since its
// blocks do not hold it any more, and so does a load that was begun before: no byte of it comes into the
// new memory. What is begun later goes well, again and again.
func TestRemapped(t *testing.T) {
	for _, ours := range []string{"prefill", "decode"} {
		t.Run(ours, func(t *testing.T) {
			p, d, maps := mapped(t)
			goesOn(p, d, "first")
			if ours == "prefill" {
				p.offer("t", 0, 1, 0)
				maps[0].Sleep()
				maps[0].Wake()
				d.load("t", p, 0, 1, 0)
			} else {
				halfway(p, d, "t")
				maps[1].Sleep()
				maps[1].Wake()
				d.Fill(d.at(0), blocks*blockBytes, 5)
				p.offer("t", 0, 2, 0)
			}
			if r := d.ended("t"); r.Code == core.OK {
				t.Errorf("that the memory is another was not noticed")
			}
			p.lost("t", "region layer.0")
			d.lost("t", "region layer.0")
			if ours == "decode" {
				if wrong := d.Wrong(d.at(0), blocks*blockBytes, 5); wrong > 0 {
					t.Errorf("%d bytes have come into the new memory", wrong)
				}
			}
			goesOn(p, d, "second")
			for _, m := range maps { // both, when nothing is under way
				m.Sleep()
				m.Wake()
			}
			goesOn(p, d, "third")
		})
	}
}

// TestNewMemoryWaits: while a load that was begun before a sleep has not ended, no load begins in the new
// memory. The old one ends by name at once, though its peer has nothing to say. No copy of it is under way,
// by which it would have ended before.
func TestNewMemoryWaits(t *testing.T) {
	p, d, maps := mapped(t)
	if _, err := p.Announce([]core.TransferID{"t"}); err != nil {
		t.Fatal(err)
	}
	d.load("t", p, 0, 2, 0)
	eventually(t, "the load waits at prefill", func() bool { return d.Stats().LoadsWaiting == 1 })
	maps[1].Sleep()
	maps[1].Wake()
	from := core.Target{Bootstrap: p.BootstrapAddress()}
	n, err := d.StartLoad([]core.LoadRequest{{ID: "next", From: from, Selection: sequence(0, blocks)}})
	if n != 0 || err == nil || !strings.Contains(err.Error(), "region layer.0") || !strings.Contains(err.Error(), "have not ended yet") {
		t.Fatalf("a load was begun beside one of before: %d, %v", n, err)
	}
	d.lost("t", "region layer.0", "freed or mapped anew")
	goesOn(p, d, "next")
}
