package local

import (
	"errors"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// hangs is a kernel that ends no copy out of some memory until it is let go: what brings that memory does not answer.
type hangs struct {
	linux
	from, to uintptr
	looks    bool // the look at the validity page behind a mapped copy, and not the copies
	begun    atomic.Int32
	goes     chan struct{}
}

func (k *hangs) readv(pid int, into, from []iovec) (uint64, syscall.Errno) {
	blocks := from[min(1, len(from)-1)].base // the page comes before them
	if k.looks && len(from) == 1 && from[0].len == proofSize || !k.looks && blocks >= k.from && blocks < k.to {
		k.begun.Add(1)
		<-k.goes
	}
	return k.linux.readv(pid, into, from)
}

// hanging are agents of which D's copies out of P's memory hang, and those out of Q's do not. If D maps P's memory, its look at
// P's validity page hangs.
func hanging(t *testing.T, cfg Config, mapped bool) (p, q, d *agent, k *hangs) {
	t.Helper()
	leaktest.Check(t)
	p, q = start(t, "p", Config{}, nil), start(t, "q", Config{}, nil)
	if mapped {
		p.shares(0, whole, seals, 1)
	}
	k = &hangs{goes: make(chan struct{}), looks: mapped}
	d = start(t, "d", cfg, k)
	d.tr.receiver.redial = 0
	for _, a := range []*agent{p, q} {
		d.connect(a)
		if err := d.tr.Usable(t.Context(), a.id); err != nil {
			t.Fatal(err)
		}
	}
	k.from = uintptr(unsafe.Pointer(&p.mem[0]))
	k.to = k.from + whole
	return p, q, d, k
}

// small writes one block, which the reader of the link copies itself.
func (d *agent) small(id core.TransferID, p *agent) {
	d.t.Helper()
	grant, err := d.tr.Expect(id, p.id, []kv.Segment{{Length: blockBytes}})
	if err != nil {
		d.t.Fatal(err)
	}
	p.tr.Write(core.WriteOp{ID: id, Peer: d.id, Grant: grant, Pairs: []kv.Pair{{Length: blockBytes}}})
}

// TestHungCopy: the kernel ends no copy out of P's memory. The pair parts, and everything of others goes on. Revoke waits, since the copy may land,
// and D does not meet P again before it has ended. Then the transfer has an end, too.
func TestHungCopy(t *testing.T) {
	for name, begins := range map[string]func(p, d *agent){
		"by workers":            func(p, d *agent) { p.write("t", d.id, d.expect("t", p.id)) },
		"by the reader":         func(p, d *agent) { d.small("t", p) },
		"by workers, a look":    func(p, d *agent) { p.write("t", d.id, d.expect("t", p.id)) },
		"by the reader, a look": func(p, d *agent) { d.small("t", p) },
	} {
		for _, revoked := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				p, q, d, k := hanging(t, Config{StallTimeout: step}, strings.HasSuffix(name, "a look"))
				other := d.expect("other", p.id)
				begins(p, d)
				d.down("the kernel has not ended a copy", "connection lost")
				if o := d.sink.Wait("received", "other", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
					t.Error(o.Err)
				}
				p.write("other", d.id, other)
				if o := p.sink.Wait("written", "t", 1); o.Err == nil {
					t.Error("P has heard that it went well")
				}
				moves(t, "of q", q, d)
				if err := d.tr.Connect(p.id, p.tr.Endpoint(), p.ticket(d.id)); !errors.Is(err, errHung) {
					t.Errorf("the two are to meet again: %v", err)
				}
				if err := d.tr.Usable(t.Context(), p.id); !errors.Is(err, errHung) {
					t.Errorf("it is usable: %v", err)
				}
				returned := make(chan struct{})
				if revoked {
					go func() {
						defer close(returned)
						d.tr.Revoke("t")
					}()
					d.until(func() bool { return d.tr.receiver.byID["t"] == nil })
				}
				if isClosed(returned) || len(d.sink.All("received", "t")) > 0 {
					t.Error("the transfer has ended, and a copy may land")
				}
				close(k.goes)
				if revoked {
					<-returned
				} else if o := d.sink.Wait("received", "t", 1); !errors.Is(o.Err, errHung) {
					t.Error(o.Err)
				}
				if all := d.sink.All("received", "t"); revoked && len(all) > 0 {
					t.Errorf("%+v was told after Revoke", all)
				}
				d.until(func() bool { return len(d.tr.receiver.hung) == 0 })
				d.connect(p)
				moves(t, "again", p, d)
			})
		}
	}
}

// TestHungClose: Close has a bound, also if the kernel does not end a copy. What the copy comes to then is told to nobody.
func TestHungClose(t *testing.T) {
	for name, begins := range map[string]func(p, d *agent){
		"by workers":            func(p, d *agent) { p.write("t", d.id, d.expect("t", p.id)) },
		"by the reader":         func(p, d *agent) { d.small("t", p) },
		"by workers, a look":    func(p, d *agent) { p.write("t", d.id, d.expect("t", p.id)) },
		"by the reader, a look": func(p, d *agent) { d.small("t", p) },
	} {
		t.Run(name, func(t *testing.T) {
			p, _, d, k := hanging(t, Config{StallTimeout: time.Hour, CloseGrace: step}, strings.HasSuffix(name, "a look"))
			begins(p, d)
			comes(t, "a copy is under way", func() bool { return k.begun.Load() > 0 })
			closed := make(chan error, 1)
			go func() { closed <- d.tr.Close() }()
			select {
			case err := <-closed:
				if !errors.Is(err, errHung) {
					t.Error(err)
				}
			case <-time.After(20 * time.Second):
				t.Error("Close has not returned")
			}
			close(k.goes)
			d.until(func() bool { return len(d.tr.receiver.hung) == 0 })
			if all := d.sink.All("received", ""); len(all) > 0 {
				t.Errorf("%+v was told after Close", all)
			}
		})
	}
}

// TestHungMeeting: in a meeting D reads a random value out of the prefill agent's process. If the kernel does not end this read, the
// meeting ends in time all the same, and so does Close.
func TestHungMeeting(t *testing.T) {
	leaktest.Check(t)
	for within := time.Second; !hungMeeting(t, within); within *= 4 {
		if within > 10*time.Second {
			t.Fatalf("within %v no meeting got as far as the value", within)
		}
	}
}

// hungMeeting says whether the meeting got as far as the value before its time was over.
func hungMeeting(t *testing.T, within time.Duration) bool {
	place := new(random)
	k := &hangs{goes: make(chan struct{})}
	d := start(t, "d", Config{ConnectTimeout: within}, k)
	k.from = uintptr(unsafe.Pointer(place))
	k.to = k.from + 1
	ticket := newRandom()
	where := impostor(t, func(c *net.UnixConn) {
		_, _ = answers(c, ticket, func(w *challenge) { w.address = uint64(k.from) })
	})
	if err := d.tr.Connect("p", where, ticket[:]); err != nil {
		t.Fatal(err)
	}
	d.down("in time")
	hung := k.begun.Load() > 0
	if err := d.tr.Connect("p", where, ticket[:]); hung && !errors.Is(err, errHung) {
		t.Errorf("the two are to meet again: %v", err)
	}
	if err := d.tr.Close(); err != nil {
		t.Errorf("nothing is written into the caches: %v", err)
	}
	close(k.goes)
	d.until(func() bool { return len(d.tr.receiver.unread) == 0 })
	runtime.KeepAlive(place)
	return hung
}
