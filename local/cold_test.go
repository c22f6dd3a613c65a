package local

import (
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestLostValidityPages: pages that D never frees are bounded, and the later ones serve again.
func TestLostValidityPages(t *testing.T) {
	var g validityPages
	defer g.freeAll()
	for range 3 * mostLost {
		one, _, err := g.take()
		if err != nil {
			t.Fatal(err)
		}
		g.invalidate(one)
		g.lose(one)
	}
	if n := len(g.areas) * pagesAtOnce; n > mostLost+pagesAtOnce {
		t.Errorf("there are %d pages", n)
	}
	one, _, err := g.take()
	if err != nil {
		t.Fatal(err)
	}
	if _, errno := readRandom(linux{}, os.Getpid(), one.address); errno != 0 {
		t.Errorf("a page that serves again is protected: %v", errno)
	}
	g.give(one)
	for _, a := range g.areas { // nobody reads them here, so that none is left to the process
		a.lost = false
	}
}

// TestDeadlineOfWrites: after a write that waited, one that need not wait goes at once, however late.
func TestDeadlineOfWrites(t *testing.T) {
	p, d := two(t, nil)
	if err := d.tr.Usable(t.Context(), "p"); err != nil {
		t.Fatal(err)
	}
	d.tr.receiver.mu.Lock()
	l := d.tr.receiver.sources["p"].link
	d.tr.receiver.mu.Unlock()
	if err := l.write(word(frameTaken, newRandom())); err != nil { // which P knows nothing of
		t.Fatal(err)
	}
	<-time.After(step + step/4) // the deadline is over: that is what the test is about
	if n, err := l.try(word(frameTaken, newRandom())); err != nil || n == 0 {
		t.Errorf("%d bytes, %v", n, err)
	}
	moves(t, "t", p, d)
}

// TestRarerTries: a pair that cannot meet tries again more and more rarely. One that has lost its link
// tries as often as before.
func TestRarerTries(t *testing.T) {
	k := &stern{errno: syscall.EPERM}
	p, d := unmetAgents(t, k)
	r := &d.tr.receiver
	d.connect(p)
	for tries := 1; tries <= mostDoubled+2; tries++ {
		src, more := d.refused(), min(tries, mostDoubled)
		r.mu.Lock()
		r.redial = time.Hour
		src.ended = time.Now().Add(-r.redial<<more + time.Minute)
		r.again(src)
		if r.sources["p"] != src {
			t.Errorf("try %d came too early", tries+1)
		}
		src.ended = time.Now().Add(-r.redial << more)
		r.again(src)
		if r.sources["p"] == src {
			t.Errorf("try %d does not come", tries+1)
		}
		r.mu.Unlock()
	}
	d.refused()
	k.mu.Lock()
	k.shut = false
	k.mu.Unlock()
	r.mu.Lock()
	r.sources["p"].ended = time.Time{}
	r.again(r.sources["p"])
	r.mu.Unlock()
	moves(t, "t", p, d)
	r.mu.Lock()
	src := r.sources["p"]
	r.mu.Unlock()
	src.leave(errReplaced)
	d.until(func() bool { return src.state == sourceDown })
	r.mu.Lock()
	defer r.mu.Unlock()
	r.redial, src.ended = time.Hour, time.Now().Add(-time.Hour)
	if r.again(src); r.sources["p"] == src {
		t.Error("a pair whose link was lost waits as long as one that has never met")
	}
}

// refused waits until the meeting with "p" has failed.
func (a *agent) refused() *source {
	a.t.Helper()
	r := &a.tr.receiver
	r.mu.Lock()
	src := r.sources["p"]
	r.mu.Unlock()
	<-src.settled
	r.mu.Lock()
	defer r.mu.Unlock()
	if src.state != sourceDown {
		a.t.Fatal("it has met")
	}
	return src
}

// TestRefusalIsSaidOnce: P warns of a peer that cannot read its memory once, and not at each try.
func TestRefusalIsSaidOnce(t *testing.T) {
	leaktest.Check(t)
	core, logs := observer.New(zap.DebugLevel)
	k := &stern{errno: syscall.EPERM}
	p, d := start(t, "p", Config{Logger: zap.New(core)}, k), start(t, "d", Config{}, k)
	k.shuts()
	d.connect(p)
	d.tr.receiver.mu.Lock()
	d.tr.receiver.redial = 0
	d.tr.receiver.mu.Unlock()
	for n := range 3 {
		d.refused()
		d.until(func() bool { return logs.FilterMessage("socket refused").Len() > n })
		_ = d.tr.Usable(t.Context(), "p") // which tries again
	}
	warned := 0
	for _, e := range logs.FilterMessage("socket refused").All() {
		if e.Level == zap.WarnLevel {
			warned++
		}
	}
	if warned != 1 {
		t.Errorf("it was warned of %d times: %s", warned, fmt.Sprint(logs.All()))
	}
}
