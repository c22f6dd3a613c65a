package tcp

import (
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestGraceOfADThatIsBack: when all of D's streams have broken, P waits a short time for D. When D has come back by one stream, P waits
// for the others as when one of several has broken; but only once, since D's streams may break again and again.
func TestGraceOfADThatIsBack(t *testing.T) {
	leaktest.Check(t)
	const grace, dials = 10 * bound, time.Hour
	p := newAgent(t, Config{FrameBytes: testBlocks * testBlock / 2, StallTimeout: time.Hour, DialTimeout: dials})
	p.sender.grace = grace
	attempt := uint64(0)
	opens := func(number int) *rawConn {
		c := dial(t, p)
		attempt++
		c.say(p.hello(t, "d", number, attempt, headerSize))
		return c
	}
	streams := func(want int) {
		t.Helper()
		until(t, "as many streams are open", func() bool { return p.streams() == want })
	}
	waits := func(when string, want time.Duration) {
		t.Helper()
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		w := p.sender.byID["t"].wait
		if w == nil || w.bound != want || w.left > want || w.left < want-grace/2 {
			t.Errorf("%s: it waits by %+v, want %v", when, w, want)
		}
	}
	one, two := opens(0), opens(1)
	streams(2)
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	for _, c := range []*rawConn{one, two} {
		if h := c.next(); h.kind != frameData {
			t.Fatalf("told %+v", h)
		}
		c.Close()
	}
	streams(0)
	waits("all streams have broken", grace)
	two = opens(1)
	streams(1)
	waits("one is back", dials)
	two.Close()
	streams(0)
	waits("it has broken too", grace)
	opens(1)
	streams(1)
	waits("it is back again", grace)
	opens(0)
	streams(2)
	p.sender.mu.Lock()
	defer p.sender.mu.Unlock()
	if w := p.sender.byID["t"].wait; w != nil {
		t.Errorf("both are back, and it waits by %+v", w)
	}
}
