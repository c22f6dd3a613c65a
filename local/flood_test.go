package local

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// sockets are how many descriptors of this process an agent's name has: its listener, and its ends of what others have opened.
func (a *agent) sockets() (n int) {
	a.t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		a.t.Fatal(err)
	}
	for _, e := range all {
		fd, _ := strconv.Atoi(e.Name())
		at, err := unix.Getsockname(fd)
		if name, is := at.(*unix.SockaddrUnix); err == nil && is && name.Name == "@"+a.tr.here.name {
			n++
		}
	}
	return n
}

// footprint is what P has for its peers and unauthenticated sockets at a time.
type footprint struct{ sockets, goroutines, heap int }

func (a *agent) footprint() footprint {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return footprint{a.sockets(), runtime.NumGoroutine(), int(m.HeapAlloc + m.StackInuse)}
}

// TestManySockets: unauthenticated peers open 10,000 sockets and leave them open. They keep no decode agent out, one that has met goes on, and P
// has no more sockets, goroutines and memory than for those that may be proving themselves.
func TestManySockets(t *testing.T) {
	leaktest.Check(t)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	const pending = 64
	const all = 10_000
	n := int(min(all, limit.Cur/2))
	if n < all {
		t.Logf("NOT RUN: %d sockets: this process may have %d descriptors, so that %d come", all, limit.Cur, n)
	}
	p, d, e := start(t, "p", Config{ConnectTimeout: time.Minute, MaxPending: pending}, nil), start(t, "d", Config{}, nil), start(t, "e", Config{ConnectTimeout: time.Minute}, nil)
	d.connect(p)
	moves(t, "t", p, d)
	before := p.footprint()
	var fds []int
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	says := [][]byte{nil, hello{newRandom(), newRandom()}.bytes(), hello{}.bytes()[:9]} // nothing, of a ticket that P has not given, and a part
	for i := range n {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0) // no object of Go's, since memory is measured
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 30}); err != nil { // for as long the kernel may have others wait first
			t.Fatal(err)
		}
		for err = unix.EINTR; errors.Is(err, unix.EINTR); { // by a signal of Go's own
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: "@" + p.tr.here.name})
		}
		if err != nil {
			t.Fatal(err)
		}
		if b := says[i%len(says)]; b != nil {
			_, _ = unix.SendmsgN(fd, b, nil, nil, unix.MSG_NOSIGNAL) // to some that have lost their place
		}
	}
	moves(t, "another", p, d)
	e.connect(p)
	moves(t, "meanwhile", p, e)
	var now footprint
	most := footprint{before.sockets + pending + 1, before.goroutines + pending + 20, before.heap + 4<<20} // 1, 20: of e's
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if now = p.footprint(); now.sockets <= most.sockets && now.goroutines <= most.goroutines && now.heap <= most.heap {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("with %d sockets %+v, want at most %+v; before it was %+v", n, now, most, before)
		}
	}
	t.Logf("%d sockets: from %+v to %+v", n, before, now)
}

// TestManyPeers: more decode agents than MaxLinks have tickets. Those beyond are told why, and cost nothing. One that has a link
// may come anew, and when one has left another gets its place.
func TestManyPeers(t *testing.T) {
	leaktest.Check(t)
	p, d := start(t, "p", Config{MaxLinks: 3, MaxPending: 4}, nil), start(t, "d", Config{}, nil)
	var links []*net.UnixConn
	for i := range 3 {
		links = append(links, p.poses(core.AgentID(fmt.Sprint("linked", i))))
	}
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) { // a peer hears that it is taken before it is counted
		p.tr.sender.mu.Lock()
		n := p.tr.sender.links
		p.tr.sender.mu.Unlock()
		if n == len(links) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("it counts %d peers, want %d", n, len(links))
		}
	}
	for i := range 100 {
		ticket, c := random(p.ticket(core.AgentID(fmt.Sprint("beyond", i)))), p.socket()
		if w := p.hail(c, hello{ticket.name(), newRandom()}); w.refused != refusedFull || w.address != 0 {
			t.Fatalf("%+v", w)
		}
		ends(t, c)
	}
	d.tr.receiver.redial = 0
	d.connect(p)
	d.down("as many connections as its limit of descriptors allows")
	links[0] = p.poses("linked0")
	if n := p.sockets(); n < 1+len(links) || n > 1+len(links)+4 {
		t.Errorf("it has %d sockets, for %d peers", n, len(links))
	}
	_ = links[1].Close()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		err := d.tr.Usable(t.Context(), "p")
		if err == nil {
			break
		}
		if !errors.Is(err, refusedFull) || time.Now().After(end) {
			t.Fatalf("when there is room again: %v", err)
		}
	}
	moves(t, "t", p, d)
}
