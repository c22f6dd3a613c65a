package node

import (
	"bytes"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/freeport"
	"github.com/kvconn/kvconn/kv"
)

const (
	layers     = 3
	numBlocks  = 32
	blockBytes = 4096
	// bound is how long anything may take on a loaded machine.
	bound = 30 * time.Second
)

// side is an agent over a small cache.
type side struct {
	*Agent
	t     testing.TB
	cache []byte
	seen  map[core.TransferID]core.Report
}

func regions(cache []byte) []kv.Region {
	out := make([]kv.Region, layers)
	for l := range out {
		out[l] = kv.Region{Name: fmt.Sprint("layer.", l), Base: uint64(uintptr(unsafe.Pointer(&cache[l*numBlocks*blockBytes]))),
			BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks}
	}
	return out
}

// testConfig's peers are never silent for too long, since a test on a loaded machine may be: see soon.
func testConfig(role string) Config {
	c := DefaultConfig()
	c.EngineID, c.Role = "engine-"+role, role
	c.BootstrapHost, c.BootstrapPort, c.TCPListenHost = "127.0.0.1", 0, "127.0.0.1"
	c.PeerTimeout, c.ConnectTimeout = Seconds(20*time.Second), Seconds(20*time.Second)
	return c
}

// soon is for tests of peers that are silent.
func soon(c *Config) {
	c.PeerTimeout, c.ConnectTimeout = Seconds(1500*time.Millisecond), Seconds(core.DefaultConnectTimeout)
}

// busFor keeps an agent's connections, though the machine stands still, if its peers may be silent for long: see soon.
func busFor(c Config) busTimes {
	if c.PeerTimeout < testConfig("").PeerTimeout {
		return busTimes{} // the product's
	}
	return busTimes{auth: time.Hour, ping: time.Hour}
}

func open(t testing.TB, cfg Config) *side {
	t.Helper()
	a, err := Open(cfg, Options{bus: busFor(cfg)})
	if err != nil {
		t.Fatal(err)
	}
	s := &side{Agent: a, t: t, cache: make([]byte, layers*numBlocks*blockBytes), seen: map[core.TransferID]core.Report{}}
	t.Cleanup(func() { _ = a.Close() })
	if err := a.RegisterKVCaches(regions(s.cache)); err != nil {
		t.Fatal(err)
	}
	return s
}

// nameOf is the id by which this prefill agent knows a decode agent. To derive one takes
// milliseconds under the race detector, and the doubles ask for many at each message.
func (s *side) nameOf(d *side) core.AgentID {
	key := [2]core.AgentID{s.ID(), d.ID()}
	if id, known := derivedNames.Load(key); known {
		return id.(core.AgentID)
	}
	id := d.identity.At(s.ID()).ID()
	derivedNames.Store(key, id)
	return id
}

var derivedNames sync.Map // of pairs of agents' own ids

// block is one block's bytes in a layer.
func (s *side) block(layer int, id kv.BlockID) []byte {
	off := (layer*numBlocks + int(id)) * blockBytes
	return s.cache[off : off+blockBytes]
}

func (s *side) fill(salt byte, ids ...kv.BlockID) {
	for l := range layers {
		for pos, id := range ids {
			for i, b := 0, s.block(l, id); i < len(b); i++ {
				b[i] = salt + byte(l*31+pos*7+i*13)
			}
		}
	}
}

func (s *side) offer(id core.TransferID, ids ...kv.BlockID) {
	s.t.Helper()
	if _, err := s.Offer([]core.OfferRequest{{ID: id, Selection: kv.Selection{Blocks: [][]kv.BlockID{ids}}}}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *side) load(id core.TransferID, from string, ids ...kv.BlockID) {
	s.t.Helper()
	if _, err := s.StartLoad([]core.LoadRequest{{ID: id, From: core.Target{Bootstrap: from}, Selection: kv.Selection{Blocks: [][]kv.BlockID{ids}}}}); err != nil {
		s.t.Fatal(err)
	}
}

// report waits for one transfer's report and checks that none comes twice.
func (s *side) report(id core.TransferID) core.Report {
	s.t.Helper()
	timeout := time.NewTimer(bound)
	defer timeout.Stop()
	for {
		for _, r := range s.GetFinished() {
			if old, twice := s.seen[r.ID]; twice {
				s.t.Fatalf("second report of %q: %+v after %+v", r.ID, r, old)
			}
			s.seen[r.ID] = r
		}
		if r, ok := s.seen[id]; ok {
			return r
		}
		select {
		case <-s.Finished():
		case <-timeout.C:
			s.t.Fatalf("no report of %q within %v: %+v", id, bound, s.Stats())
		}
	}
}

func (s *side) want(id core.TransferID, code core.Code, says ...string) core.Report {
	s.t.Helper()
	r := s.report(id)
	if r.Code != code {
		s.t.Fatalf("%s %q ended with %v (%s), want %v", r.Side, id, r.Code, r.Reason, code)
	}
	for _, part := range says {
		if !strings.Contains(r.Reason, part) {
			s.t.Fatalf("%s %q: reason %q does not name %q", r.Side, id, r.Reason, part)
		}
	}
	return r
}

// until polls a condition of another process or goroutine.
func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	deadline := time.Now().Add(bound)
	for !f() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", bound, what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func (s *side) knows(offers int) {
	s.t.Helper()
	until(s.t, fmt.Sprintf("prefill knows %d transfers", offers), func() bool { return s.Stats().OffersUnderWay == offers })
}

func same(t testing.TB, p *side, src []kv.BlockID, d *side, dst []kv.BlockID) {
	t.Helper()
	for l := range layers {
		for i := range src {
			if !bytes.Equal(p.block(l, src[i]), d.block(l, dst[i])) {
				t.Fatalf("layer %d: block %d of decode differs from block %d of prefill", l, dst[i], src[i])
			}
		}
	}
}

func announce(t testing.TB, p *side, ids ...core.TransferID) {
	t.Helper()
	if _, err := p.Announce(ids); err != nil {
		t.Fatal(err)
	}
}

func portOf(t testing.TB, address string) int {
	t.Helper()
	_, port, err := net.SplitHostPort(strings.TrimPrefix(address, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	var n int
	fmt.Sscan(port, &n)
	return n
}

func freePort(t testing.TB) int {
	t.Helper()
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	return ports[0]
}

// setBus puts b in the place of an agent's bus.
func setBus(a *Agent, b core.Bus) {
	a.bus, a.client.bus, a.caches.Load().performer.finder.bus = b, b, b
}
