package local

import (
	"net"
	"os"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestProvedAmongPending: an agent that has proved itself keeps its place while it opens what P lists, whoever comes
// meanwhile. A second socket of the same agent takes the first one's place.
func TestProvedAmongPending(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{ConnectTimeout: time.Minute, MaxPending: 4}, nil)
	p.shares(0, whole, seals, 1)
	first, second := p.proves("d"), p.proves("d")
	ends(t, first)
	var pending []*net.UnixConn
	for range 20 {
		pending = append(pending, p.socket())
	}
	for _, c := range pending[:16] {
		ends(t, c)
	}
	_, _ = second.Write([]byte{0, 0}) // it has opened the memory
	if b, err := read(second, verdictSize); err != nil || string(b) != string(verdictReady.bytes(0)) {
		t.Errorf("%x, %v; want to be taken", b, err)
	}
	_ = second.Close()
	third := p.proves("d")
	p.tr.Dismiss("d")
	ends(t, third)
	last := p.proves("e")
	_ = p.tr.Close()
	ends(t, last)
}

// proves meets an agent as the decode agent of a name, up to the one memory that is listed.
func (a *agent) proves(peer core.AgentID) *net.UnixConn {
	a.t.Helper()
	ticket, c := random(a.ticket(peer)), a.socket()
	h := hello{ticket.name(), newRandom()}
	w := a.hail(c, h)
	cl := response{kind: responseRead}
	cl.read, _ = readRandom(linux{}, os.Getpid(), w.address)
	cl.prove(ticket, h, &w)
	if v := a.responds(c, &cl); v != verdictReady {
		a.t.Fatalf("verdict %d", v)
	}
	if _, err := read(c, 4+memorySize+8); err != nil {
		a.t.Fatal(err)
	}
	return c
}
