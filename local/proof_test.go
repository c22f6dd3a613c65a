package local

import (
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// asks has D ask whether P has kept a transfer, as where D does not read P's process.
func (a *agent) asks(id core.TransferID) {
	a.tr.sender.mu.Lock()
	defer a.tr.sender.mu.Unlock()
	a.tr.sender.byID[id].proved = false
}

// TestTakenUnasked: D's report of a transfer that it was not told to have is no report, and nor is one of a
// transfer of which it was not told all.
func TestTakenUnasked(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{}, nil)
	c := p.poses("d")
	grant, part := newRandom(), newRandom()
	p.write("t", "d", grant[:])
	_, pairs := p.all()
	p.tr.Write(core.WriteOp{ID: "part", Peer: "d", Grant: part[:], Pairs: pairs[:1], Bytes: whole, At: []kv.Extent{{Pairs: 1}}})
	frames(t, c, frameRuns)
	frames(t, c, frameRuns)
	p.asks("t")
	for id, grant := range map[core.TransferID]random{"t": grant, "part": part} {
		_, _ = c.Write(word(frameTaken, grant))
		_, _ = c.Write((&ending{cause: overFailed, text: "no"}).bytes(grant))
		wants(t, p.sink.Wait("written", id, 1).Err, "decode agent d: no")
	}
}

// TestTakenAfterStop: D has read all with the page valid, and its report and P's stop cross. P's outcome is D's.
func TestTakenAfterStop(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{StopGrace: time.Minute}, nil)
	c := p.poses("d")
	grant := newRandom()
	p.write("t", "d", grant[:])
	frames(t, c, frameRuns)
	p.tr.Stop("t")
	_, _ = c.Write(word(frameTaken, grant))
	if err := p.sink.Wait("written", "t", 1).Err; err != nil {
		t.Error(err)
	}
}

// looksLate is a kernel in which something happens between a copy of blocks and the look at the validity page after it.
type looksLate struct {
	linux
	between atomic.Pointer[func()]
}

func (k *looksLate) readv(pid int, into, from []iovec) (uint64, syscall.Errno) {
	between := k.between.Load()
	if between == nil {
		return k.linux.readv(pid, into, from)
	}
	if len(into) == 1 { // the copy was out of a mapping
		(*between)()
		return k.linux.readv(pid, into, from)
	}
	last := len(into) - 1
	n, errno := k.linux.readv(pid, into[:last], from[:len(from)-1])
	if errno != 0 {
		return n, errno
	}
	(*between)()
	more, _ := k.linux.readv(pid, into[last:], from[len(from)-1:])
	return n + more, 0
}

// TestReadTooLate: P gives blocks up while D copies them. D finds that at the page, and reports nothing: also where the
// kernel cannot protect the page, and where another write has the page meanwhile.
func TestReadTooLate(t *testing.T) {
	for name, c := range map[string]func(g *validityPages, one *validityPage){
		"invalidated": func(g *validityPages, one *validityPage) { g.invalidate(one) },
		"its page is not protected": func(g *validityPages, one *validityPage) {
			g.invalidate(one)
			_ = one.protect(unix.PROT_READ)
		},
		"another write has it": func(g *validityPages, one *validityPage) {
			g.invalidate(one)
			g.give(one)
			_, _, _ = g.take()
		},
	} {
		for _, mapped := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " mapped ", mapped), func(t *testing.T) {
				leaktest.Check(t)
				k := new(looksLate)
				p, d := start(t, "p", Config{}, k), start(t, "d", Config{}, k)
				if mapped {
					p.shares(0, whole, seals, 1)
				}
				d.connect(p)
				moves(t, "before", p, d)
				once := sync.OnceFunc(func() {
					p.tr.sender.mu.Lock()
					out := p.tr.sender.byID["t"]
					p.tr.sender.mu.Unlock()
					c(&p.tr.validity, out.validity)
				})
				k.between.Store(&once)
				p.write("t", "d", d.expect("t", "p"))
				d.over("t")
				k.between.Store(nil)
				p.tr.Stop("t")
				wants(t, p.sink.Wait("written", "t", 1).Err, "stopped")
				d.tr.Revoke("t") // waits for a word to the sink that is under way
				if all := d.sink.All("received", "t"); len(all) != 0 {
					t.Errorf("blocks that P had given up were reported: %+v", all)
				}
				moves(t, "after", p, d)
			})
		}
	}
}

// TestProved: D reports a transfer that the page proves, and asks nobody.
func TestProved(t *testing.T) {
	proof := uint64(99)
	taken := make(chan struct{})
	withPoser(t, func(p *poser) {
		p.proof = proof
		*(*uint64)(unsafe.Pointer(p.mem)) = proof // its page is there
		p.runs(0, whole, whole)
		frames(p.t, p.c, frameTaken)
		close(taken)
		ends(p.t, p.c)
	}, func(d *agent) {
		if err := d.sink.Wait("received", "t", 1).Err; err != nil {
			t.Error(err)
		}
		<-taken
	})
}

// TestProvedOfMapping: so does a D that has mapped the memory.
func TestProvedOfMapping(t *testing.T) {
	sealed := file(t, whole, seals)
	taken := make(chan struct{})
	withLister(t, func(c *net.UnixConn) int {
		_, _ = c.Write([]byte{0, 0, 0, 1})
		saysMemory(t, c, memory{space: 3, kind: memoryFile, base: 4096, size: whole, handle: make([]byte, 8)}, sealed)
		return 1
	}, []string{""}, func(p *poser) {
		const proof = 99
		*(*uint64)(unsafe.Pointer(p.mem)) = proof // its page is there
		s := spoken{total: whole, validity: uint64(uintptr(unsafe.Pointer(p.mem))), proof: proof, piece: piece{space: 3, runs: []run{{4096, whole}}}}
		p.says(s.append(nil, p.grant))
		frames(t, p.c, frameTaken)
		close(taken)
		ends(t, p.c)
	}, func(d *agent) {
		if err := d.sink.Wait("received", "t", 1).Err; err != nil {
			t.Error(err)
		}
		<-taken
	})
}
