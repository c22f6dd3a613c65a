package local

import (
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestStoppedBeforeDone: P does not say that it has kept what it has given up meanwhile.
func TestStoppedBeforeDone(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{StopGrace: time.Minute}, nil)
	c := p.poses("d")
	grant := newRandom()
	p.write("t", "d", grant[:])
	frames(t, c, frameRuns)
	p.asks("t")
	p.tr.Stop("t")
	_, _ = c.Write(word(frameDone, grant)) // D's copy may have ended before it heard of the stop
	_, _ = c.Write(word(frameTaken, grant))
	_, _ = c.Write((&ending{cause: overStopped}).bytes(grant))
	wants(t, p.sink.Wait("written", "t", 1).Err, "stopped")
}

// slow is a kernel whose copies last until they are let go.
type slow struct {
	linux
	begun, goes chan struct{}
}

func (k *slow) readv(pid int, into, from []iovec) (uint64, syscall.Errno) {
	if len(into) > 1 { // a copy
		k.begun <- struct{}{}
		<-k.goes
	}
	return k.linux.readv(pid, into, from)
}

// TestFence: when Revoke has returned, no copy is under way.
func TestFence(t *testing.T) {
	leaktest.Check(t)
	k := &slow{begun: make(chan struct{}, 100), goes: make(chan struct{})}
	p, d := start(t, "p", Config{}, nil), start(t, "d", Config{}, k)
	d.connect(p)
	p.write("t", "d", d.expect("t", "p"))
	<-k.begun
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		d.tr.Revoke("t")
	}()
	d.until(func() bool { return d.tr.receiver.byID["t"] == nil })
	select {
	case <-returned:
		t.Error("Revoke has returned in the middle of a copy")
	case <-time.After(time.Second): // a Revoke that does not wait returns sooner
	}
	close(k.goes)
	<-returned
	wants(t, p.sink.Wait("written", "t", 1).Err, core.ErrNotExpected.Error())
	if all := d.sink.All("received", ""); len(all) != 0 {
		t.Errorf("received was told: %+v", all)
	}
}

// TestStoppedInRevoke: while D's own revoke waits for a copy, D does not tell P that there is none.
func TestStoppedInRevoke(t *testing.T) {
	leaktest.Check(t)
	k := &slow{begun: make(chan struct{}, 100), goes: make(chan struct{})}
	p, d := start(t, "p", Config{StopGrace: time.Minute}, nil), start(t, "d", Config{Workers: 1}, k)
	d.connect(p)
	p.write("t", "d", d.expect("t", "p"))
	<-k.begun
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		d.tr.Revoke("t")
	}()
	d.until(func() bool { return d.tr.receiver.byID["t"] == nil })
	p.tr.Stop("t")
	grant := d.expect("after", "p")
	p.tr.Write(core.WriteOp{ID: "other", Peer: "d", Grant: make([]byte, 16)}) // D refuses it behind its answer to the stop
	p.sink.Wait("written", "other", 1)
	if all := p.sink.All("written", "t"); len(all) != 0 {
		t.Errorf("the write has ended in the middle of a copy: %+v", all)
	}
	close(k.goes)
	<-returned
	p.sink.Wait("written", "t", 1)
	p.write("after", "d", grant)
	if o := d.sink.Wait("received", "after", 1); o.Err != nil {
		t.Error(o.Err)
	}
}

// TestBack: when a link has ended for a reason that is over, the next look makes it anew.
func TestBack(t *testing.T) {
	k := &stern{errno: syscall.EPERM}
	p, d := two(t, k)
	moves(t, "before", p, d)
	k.shuts()
	p.write("t", "d", d.expect("t", "p"))
	d.sink.Wait("received", "t", 1)
	d.down("process")
	p.down("closed")
	if err := d.tr.Usable(t.Context(), "p"); err == nil {
		t.Error("it is usable")
	}
	k.mu.Lock()
	k.shut = false
	k.mu.Unlock()
	d.tr.receiver.mu.Lock()
	d.tr.receiver.redial = 0
	d.tr.receiver.mu.Unlock()
	if err := d.tr.Usable(t.Context(), "p"); err == nil {
		t.Error("it is usable before it was tried")
	}
	if err := d.tr.Usable(t.Context(), "p"); err != nil {
		t.Error(err)
	}
	p.sink.Wait("written", "t", 1)
	moves(t, "after", p, d)
}
