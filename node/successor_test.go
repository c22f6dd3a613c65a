package node

import (
	"bytes"
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// skewedClock is the system's clock, put forward.
type skewedClock struct {
	systemClock
	by atomic.Int64
}

func (c *skewedClock) Now() time.Time { return c.systemClock.Now().Add(time.Duration(c.by.Load())) }

// TestLoadIsNotForTheSuccessor: P goes before it has answered a load, and another agent
// is up on its port at once. That agent cannot know the request. Its age tells D that it
// opened later.
func TestLoadIsNotForTheSuccessor(t *testing.T) {
	leaktest.Check(t)
	cfg := testConfig(RolePrefill)
	cfg.BootstrapPort = freePort(t)
	p := open(t, cfg)
	address := p.BootstrapAddress()
	clock := &skewedClock{}
	const skew = time.Minute // more than a hello takes on any machine
	patient := testConfig(RoleDecode)
	patient.PeerTimeout, patient.ConnectTimeout = Seconds(skew+2*bound), Seconds(skew+2*bound)
	a, err := Open(patient, Options{Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	d := &side{Agent: a, t: t, cache: make([]byte, layers*numBlocks*blockBytes), seen: map[core.TransferID]core.Report{}}
	t.Cleanup(func() { _ = a.Close() })
	if err := a.RegisterKVCaches(regions(d.cache)); err != nil {
		t.Fatal(err)
	}
	p.offer("first", 1)
	d.load("first", address, 2)
	d.want("first", core.OK)
	until(t, "P has answered the first load", func() bool { return !runs("(*server).load(") })

	p.machine.mu.Lock() // P answers nothing any more
	goOn := sync.OnceFunc(p.machine.mu.Unlock)
	t.Cleanup(goOn)
	d.load("second", address, 3)
	until(t, "P has the load", func() bool { return runs("(*server).load(") })
	clock.by.Store(int64(skew))
	gone, cancel := context.WithTimeout(t.Context(), bound)
	cancel()
	_ = p.plane.close(gone)
	next := open(t, cfg)
	r := d.want("second", core.PeerLost, string(p.ID()), "was replaced by agent "+string(next.ID()))
	goOn()
	if n := next.Stats().OffersUnderWay; n != 0 || r.Blocks != 1 {
		t.Errorf("%d transfers at the successor after %+v", n, r)
	}

	next.fill(3, 4)
	next.offer("third", 4)
	d.load("third", address, 5)
	d.want("third", core.OK)
	same(t, next, []kv.BlockID{4}, d, []kv.BlockID{5})
}

// runs says whether a goroutine of this process is in a function.
func runs(function string) bool {
	stacks := make([]byte, 4<<20)
	return bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte(function))
}

func TestOpenedAt(t *testing.T) {
	asked := time.Now()
	for age, want := range map[int64]time.Time{
		1: asked.Add(-time.Millisecond), 0: {}, -1: {}, 1 << 62: {}, -1 << 63: {}, 60_000: asked.Add(-time.Minute),
	} {
		if got := openedAt(asked, age); !got.Equal(want) {
			t.Errorf("an agent of %d ms that was asked at %v was open at %v, want %v", age, asked, got, want)
		}
	}
}
