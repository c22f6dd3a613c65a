package rdma_test

import (
	"context"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestRest: lanes that carry nothing are closed on both sides. P still counts as
// usable, and the next transfer opens other lanes.
func TestRest(t *testing.T) {
	needsMachine(t)
	leaktest.Check(t)
	cfg := rdma.DefaultConfig()
	cfg.Idle = time.Second
	p, d := pair(t, cfg)
	for n := 1; n <= 2; n++ {
		begin(p, d, n, 64).well()
		for deadline := time.Now().Add(patience); p.tr.Counters()["lanes"]+d.tr.Counters()["lanes"] > 0; pause(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%d lanes at P and %d at D have nothing to do for %v and are open", p.tr.Counters()["lanes"], d.tr.Counters()["lanes"], patience)
			}
		}
		now, cancel := context.WithCancel(context.Background())
		cancel()
		if err := d.tr.Usable(now, p.id); err != nil {
			t.Errorf("lanes at rest make the way unusable: %v", err)
		}
	}
	if down := append(p.sink.All("down", ""), d.sink.All("down", "")...); len(down) > 0 {
		t.Errorf("somebody was told of a loss: %+v", down)
	}
}
