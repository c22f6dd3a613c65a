package local

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// frames reads frames off a socket until one of a kind comes, whose bytes it returns.
func frames(t *testing.T, c *net.UnixConn, want kind) []byte {
	t.Helper()
	for {
		b, err := read(c, headerSize)
		if err != nil {
			t.Errorf("no frame of kind %d: %v", want, err)
			runtime.Goexit()
		}
		h := parseHeader(b)
		if b, err = read(c, int(h.length)); err != nil {
			t.Error(err)
			runtime.Goexit()
		}
		if h.kind == want {
			return b
		}
	}
}

// poser is a prefill agent whose frames the test says.
type poser struct {
	t     *testing.T
	c     *net.UnixConn
	grant random
	proof uint64 // 0: D is to ask
	mem   *[2 * blocks * blockBytes]byte
}

// runs says that n bytes from a position on lie there.
func (p *poser) runs(position, n, total uint64) {
	s := spoken{total: total, validity: uint64(uintptr(unsafe.Pointer(p.mem))), proof: p.proof, piece: piece{position: position, runs: []run{{uint64(uintptr(unsafe.Pointer(p.mem))) + position, n}}}}
	p.says(s.append(nil, p.grant))
}

func (p *poser) says(b []byte) {
	if _, err := p.c.Write(b); err != nil {
		p.t.Error(err)
	}
}

// whole is all bytes of agent.all.
const whole = 2 * blocks * blockBytes

// withPoser has a decode agent expect a transfer "t" of a prefill agent whose frames does says.
func withPoser(t *testing.T, does func(p *poser), after func(d *agent)) {
	t.Helper()
	posing(t, func(c *net.UnixConn) { _, _ = c.Write(make([]byte, 4)) }, does, after)
}

// posing is withPoser for one that says its memories first.
func posing(t *testing.T, lists func(c *net.UnixConn), does func(p *poser), after func(d *agent)) {
	t.Helper()
	leaktest.Check(t)
	d := start(t, "d", Config{}, nil)
	ticket, grants, done := newRandom(), make(chan random, 1), make(chan struct{})
	t.Cleanup(func() { <-done })
	mem := new([whole]byte)
	where := impostor(t, func(c *net.UnixConn) {
		defer close(done)
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := answers(c, ticket, func(*challenge) {}); err != nil {
			t.Error(err)
			return
		}
		_, _ = c.Write(verdictReady.bytes(0))
		lists(c)
		_, _ = c.Write(verdictReady.bytes(0))
		does(&poser{t: t, c: c, grant: <-grants, mem: mem})
		runtime.KeepAlive(mem)
	})
	if err := d.tr.Connect("p", where, ticket[:]); err != nil {
		t.Fatal(err)
	}
	grants <- random(d.expect("t", "p"))
	after(d)
	_ = d.tr.Close()
}

// TestBadPrefill: what no prefill agent says ends its link, and D reports nothing as good.
func TestBadPrefill(t *testing.T) {
	for name, c := range map[string]struct {
		does func(p *poser)
		says string
	}{
		"an unknown frame":  {func(p *poser) { p.says((&header{kind: 99}).append(nil)) }, "kind 99"},
		"a decode's frame":  {func(p *poser) { p.says(word(frameDone, p.grant)) }, "only decode agents say"},
		"a long frame":      {func(p *poser) { p.says((&header{kind: frameRuns, length: 1 << 30}).append(nil)) }, "at most"},
		"kept before done":  {func(p *poser) { p.says(word(frameKept, p.grant)) }, "was not called done"},
		"runs of the space": {func(p *poser) { p.runs(0, 1<<63, 1<<62) }, "transfer of"},
		"too many runs": {func(p *poser) {
			s := spoken{total: whole, piece: piece{runs: make([]run, maxRuns)}}
			for i := range s.runs {
				s.runs[i] = run{1 << 12, 1}
			}
			p.grant = newRandom() // of no transfer; credit comes, but not for more than were done with
			for range 2 * window / maxRuns {
				if _, err := p.c.Write(s.append(nil, p.grant)); err != nil {
					break // D has ended it already
				}
			}
			p.says((&header{kind: 98}).append(nil))
		}, ""},
		"runs of another space": {func(p *poser) {
			s := spoken{total: whole, piece: piece{space: 2, runs: []run{{4096, 10}}}}
			p.says(s.append(nil, p.grant))
		}, "leaves the memory of space 2"},
		"it leaves": {func(p *poser) { p.runs(0, 100, whole) }, "closed the socket"},
	} {
		t.Run(name, func(t *testing.T) {
			withPoser(t, func(p *poser) {
				c.does(p)
				if name == "it leaves" {
					return
				}
				ends(t, p.c)
			}, func(d *agent) {
				o := d.sink.Wait("received", "t", 1)
				wants(t, o.Err, c.says)
				d.down(c.says)
			})
		})
	}
}

// TestAlwaysAnew: a prefill agent that is to be met anew whenever it was met is met some times, and then as rarely as one that is gone.
func TestAlwaysAnew(t *testing.T) {
	leaktest.Check(t)
	d := start(t, "d", Config{}, nil)
	d.tr.receiver.redial = time.Hour
	ticket, met := newRandom(), make(chan struct{}, 100)
	where := impostor(t, func(c *net.UnixConn) {
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := answers(c, ticket, func(*challenge) {}); err != nil {
			t.Error(err)
			return
		}
		if met <- struct{}{}; len(met) == cap(met) {
			return
		}
		_, _ = c.Write(append(append(verdictReady.bytes(0), 0, 0, 0, 0), verdictReady.bytes(0)...))
		_, _ = c.Write(word(frameAnew, random{}))
		_ = c.CloseWrite()
		ends(t, c)
	})
	if err := d.tr.Connect("p", where, ticket[:]); err != nil {
		t.Fatal(err)
	}
	d.down("closed the socket")
	if n := len(met); n != 1+mostAgain {
		t.Errorf("it was met %d times", n)
	}
}

// TestBadTransfers: a transfer of which P says what cannot be fails, and its link goes on.
func TestBadTransfers(t *testing.T) {
	for name, c := range map[string]struct {
		does func(p *poser)
		says string
	}{
		"another length": {func(p *poser) { p.runs(0, 100, whole+1) }, "has 2097153 bytes at prefill agent p, 2097152 here"},
		"twice":          {func(p *poser) { p.runs(0, 100, whole); p.runs(50, 100, whole) }, "came twice"},
		"holes": {func(p *poser) {
			for at := uint64(0); at <= 4096; at += 2 {
				p.runs(at, 1, whole)
			}
		}, "holes"},
	} {
		t.Run(name, func(t *testing.T) {
			lives := make(chan struct{})
			withPoser(t, func(p *poser) {
				defer close(lives)
				c.does(p)
				e, err := parseEnding(frames(t, p.c, frameOver))
				if err != nil || e.cause != overFailed {
					t.Errorf("%+v, %v", e, err)
				}
				p.grant = newRandom() // the link lives
				p.runs(0, 1, 1)
				for {
					if e, err := parseEnding(frames(t, p.c, frameOver)); err != nil || e.cause == overUnexpected && err == nil {
						return
					}
				}
			}, func(d *agent) {
				wants(t, d.sink.Wait("received", "t", 1).Err, c.says)
				<-lives
			})
		})
	}
}

// TestNotKept: D reports no transfer as good before P's word, and P's stop ends its copy.
func TestNotKept(t *testing.T) {
	stopped := make(chan struct{})
	over := sync.OnceFunc(func() { close(stopped) })
	withPoser(t, func(p *poser) {
		defer over() // also where D never asks
		p.runs(0, whole, whole)
		frames(p.t, p.c, frameDone)
		p.says(word(frameStop, p.grant))
		e, err := parseEnding(frames(p.t, p.c, frameOver))
		if err != nil || e.cause != overStopped {
			p.t.Errorf("%+v, %v", e, err)
		}
		over()
		ends(p.t, p.c)
	}, func(d *agent) {
		<-stopped
		d.tr.Revoke("t") // waits for a word to the sink that is under way
		if all := d.sink.All("received", ""); len(all) != 0 {
			t.Errorf("received was told without the prefill agent's word: %+v", all)
		}
	})
}

// TestInvalidatedPage: when the page is invalidated D copies nothing more, before it has heard why.
func TestInvalidatedPage(t *testing.T) {
	p, d := two(t, nil)
	moves(t, "before", p, d)
	grant := d.expect("t", "p")
	into, pairs := d.all()
	p.tr.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant, Pairs: pairs[:1], At: []kv.Extent{{Pairs: 1}}, Bytes: whole})
	d.copied("t", blockBytes)
	p.tr.sender.mu.Lock()
	out := p.tr.sender.byID["t"]
	p.tr.validity.invalidate(out.validity)
	p.tr.sender.mu.Unlock()
	before := append([]byte(nil), d.mem...)
	for i := range p.mem {
		p.mem[i] = ^p.mem[i]
	}
	p.tr.Extend(core.WriteOp{ID: "t", Peer: "d", Grant: grant, Pairs: pairs[1:], At: []kv.Extent{{Position: blockBytes, Pairs: len(pairs) - 1}}, Bytes: whole})
	d.over("t")
	if string(before) != string(d.mem) {
		t.Error("bytes came through an invalidated page")
	}
	p.tr.Stop("t")
	wants(t, p.sink.Wait("written", "t", 1).Err, "stopped")
	d.tr.Revoke("t")
	_ = into
	moves(t, "after", p, d)
}

// copied waits until so many bytes of a transfer are.
func (a *agent) copied(id core.TransferID, n uint64) {
	a.until(func() bool { in := a.tr.receiver.byID[id]; return in != nil && in.copied >= n && in.flying == 0 })
}

// over waits until no copy of a transfer begins any more, or it has ended.
func (a *agent) over(id core.TransferID) {
	a.until(func() bool {
		in := a.tr.receiver.byID[id]
		return in == nil || (in.over || in.copied == whole) && in.flying == 0
	})
}

func (a *agent) until(is func() bool) {
	a.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Microsecond) {
		a.tr.receiver.mu.Lock()
		yes := is()
		a.tr.receiver.mu.Unlock()
		if yes {
			return
		}
		if time.Now().After(end) {
			a.t.Fatal("it does not come to that")
		}
	}
}

// TestBadDecode: what no decode agent says ends its link, and P reports nothing as good.
func TestBadDecode(t *testing.T) {
	for name, c := range map[string]struct {
		does func(c *net.UnixConn, grant random)
		says string
	}{
		"an unknown frame":  {func(c *net.UnixConn, _ random) { _, _ = c.Write((&header{kind: 99}).append(nil)) }, "kind 99"},
		"a prefill's frame": {func(c *net.UnixConn, g random) { _, _ = c.Write(word(frameStop, g)) }, "only prefill agents say"},
		"done at once":      {func(c *net.UnixConn, g random) { frames(t, c, frameRuns); _, _ = c.Write(word(frameDone, g)) }, "is called done"},
		"credit for nothing": {func(c *net.UnixConn, g random) {
			frames(t, c, frameRuns)
			_, _ = c.Write(credit(3))
		}, "more than were said"},
		"it leaves": {func(c *net.UnixConn, g random) { frames(t, c, frameRuns); c.Close() }, "closed the socket"},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			p := start(t, "p", Config{}, nil)
			conn := p.poses("d")
			grant := newRandom()
			_, pairs := p.all()
			p.tr.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: pairs[:1], Bytes: whole, At: []kv.Extent{{Pairs: 1}}})
			c.does(conn, grant)
			wants(t, p.sink.Wait("written", "t", 1).Err, c.says, core.ErrConnectionLost.Error())
			p.down(c.says)
		})
	}
}

// TestSilentDecode: a stopped write ends also if D never says a word, and D's late report of it is
// none.
func TestSilentDecode(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{StopGrace: time.Millisecond}, nil)
	c := p.poses("d")
	grant := newRandom()
	p.write("t", "d", grant[:])
	frames(t, c, frameRuns)
	page := p.tr.sender.byID["t"].validity
	p.tr.Stop("t")
	wants(t, p.sink.Wait("written", "t", 1).Err, "stopped")
	_, _ = c.Write(word(frameDone, grant))
	_, _ = c.Write(word(frameTaken, grant))
	if _, errno := readRandom(linux{}, os.Getpid(), page.address); errno == 0 {
		t.Error("the page of a write that D may still copy is valid")
	}
	other := newRandom()
	p.write("u", "d", other[:])
	frames(t, c, frameRuns) // the link lives
	c.Close()
	p.sink.Wait("written", "u", 1)
	p.down("closed")
	if all := p.sink.All("written", "t"); len(all) != 1 {
		t.Errorf("written was told %d times", len(all))
	}
}

// TestMuteDecode: a D that answers no stop loses its link before its validity pages are many.
func TestMuteDecode(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{StopGrace: time.Millisecond}, nil)
	c := p.poses("d")
	defer c.Close()
	for n := range mostLate + 1 {
		id, grant := core.TransferID(fmt.Sprint("t", n)), newRandom()
		p.write(id, "d", grant[:])
		frames(t, c, frameRuns)
		p.tr.Stop(id)
		p.sink.Wait("written", id, 1)
	}
	p.down("has not answered 64 stops")
}
