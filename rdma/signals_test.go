package rdma

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// patience bounds every wait of these tests.
const patience = 30 * time.Second

// TestSignalFaults: whatever becomes of one signal, each transfer ends, no byte
// lands after its end, and the two agents find back to each other.
func TestSignalFaults(t *testing.T) {
	needsRDMA(t)
	names := map[signalKind]string{signalHello: "hello", signalPorts: "ports", signalConnect: "connect", signalConnected: "connected", signalLost: "lost",
		signalDrain: "drain", signalDrained: "drained", signalBye: "bye", signalDismissed: "dismissed"}
	for kind := signalHello; kind <= signalDismissed; kind++ {
		for f := lost; f <= behind; f++ {
			// Order matters most to what the two ends count.
			counts := kind == signalConnect || kind == signalLost || kind == signalDrain
			if testing.Short() && f != lost && (f != behind || !counts) {
				continue
			}
			// The second signal of a kind meets agents that have lanes and transfers
			// already. For three kinds that shows nothing new.
			for nth := 1; nth <= 2; nth++ {
				if nth == 2 && (testing.Short() || kind == signalHello || kind == signalBye || kind == signalDismissed) {
					continue
				}
				t.Run(fmt.Sprintf("%s %d %v", names[kind], nth, f), func(t *testing.T) { signalFault(t, kind, nth, f) })
			}
		}
	}
}

// signalFault does a fault to the nth signal of a kind of a workload.
func signalFault(t *testing.T, kind signalKind, nth int, f fault) {
	leaktest.Check(t)
	c := newControl()
	var mu sync.Mutex
	seen := 0
	c.decide = func(from core.AgentID, s *signal) fault {
		mu.Lock()
		defer mu.Unlock()
		if s.Kind == kind {
			if seen++; seen == nth {
				return f
			}
		}
		return passes
	}
	const each, many = 12, 6
	w := &workload{t: t, p: start(t, c, "p", each*many, nil), d: start(t, c, "d", each*many, nil), each: each}
	connect(t, w.d, w.p)
	w.round(many, func() { w.d.breakPort() })
	w.round(many, func() { w.p.breakPort() })
	w.d.tr.Dismiss(w.p.id)
	connect(t, w.d, w.p)
	w.round(many, nil)
	w.p.tr.Dismiss(w.d.id)
	connect(t, w.d, w.p)
	w.round(many, nil)
	// However the fault came out, its effect does not last.
	for try := 0; !w.one(try); try++ {
		if try == 20 {
			t.Errorf("no transfer has ended well after the fault")
			break
		}
	}
	usable(t, w.d, w.p)
	w.p.close(c)
	for i := range many {
		w.d.untouched(fmt.Sprint("blocks of place ", i, " at the end"), i*each, each)
	}
	mu.Lock()
	defer mu.Unlock()
	if seen < nth {
		t.Logf("only %d signals of this kind", seen)
	}
}

type workload struct {
	t    *testing.T
	p, d *agent
	each int // blocks of a transfer
	next int
}

// round has n transfers under way, every third of which is revoked. amid is called when
// bytes have begun to land.
func (w *workload) round(n int, amid func()) {
	t := w.t
	t.Helper()
	ids := make([]core.TransferID, n)
	first := w.next
	for i := range n {
		w.next++
		ids[i] = core.TransferID(fmt.Sprint("t", w.next))
		w.p.paint(w.next, i*w.each, w.each)
		grant := w.d.expect(ids[i], w.p, i*w.each, w.each)
		w.p.write(ids[i], w.d, grant, i*w.each, i*w.each, w.each)
	}
	if amid != nil {
		w.begun(ids)
		amid()
	}
	var wait sync.WaitGroup
	for i := 2; i < n; i += 3 {
		wait.Go(func() {
			w.d.tr.Revoke(ids[i])
			if len(w.d.rec.All("received", ids[i])) == 1 {
				return // checked below
			}
			w.d.fill(i*w.each, w.each)
		})
	}
	wait.Wait()
	for i, id := range ids {
		revoked := i%3 == 2
		if o := w.p.rec.Wait("written", id, 1); !revoked && o.Err != nil {
			w.d.tr.Revoke(id) // as the agents do
		}
		if (revoked || w.p.rec.All("written", id)[0].Err != nil) && len(w.d.rec.All("received", id)) == 0 {
			w.d.fill(i*w.each, w.each)
			continue
		}
		if o := w.d.rec.Wait("received", id, 1); o.Err == nil {
			w.d.has(first+i+1, i*w.each, w.each)
		}
		w.d.fill(i*w.each, w.each)
	}
	for i, id := range ids {
		w.d.untouched(fmt.Sprintf("transfer %q after its end", id), i*w.each, w.each)
		if n := len(w.d.rec.All("received", id)); n > 1 {
			t.Errorf("received of %q was told %d times", id, n)
		}
		if n := len(w.p.rec.All("written", id)); n != 1 {
			t.Errorf("written of %q was told %d times", id, n)
		}
	}
}

// begun waits until a byte of one of the transfers has landed, or one has failed.
func (w *workload) begun(ids []core.TransferID) {
	for end := time.Now().Add(patience); time.Now().Before(end); runtime.Gosched() {
		for i, id := range ids {
			if w.d.mem[i*w.each*blockBytes] != guard || w.d.mem[i*w.each*blockBytes+7] != guard || len(w.p.rec.All("written", id)) > 0 {
				return
			}
		}
	}
	w.t.Fatalf("no byte has landed within %v", patience)
}

// one moves a transfer, and says whether it ended well.
func (w *workload) one(try int) bool {
	w.t.Helper()
	usable(w.t, w.d, w.p)
	id := core.TransferID(fmt.Sprint("again", try))
	w.next++
	w.p.paint(w.next, 0, w.each)
	w.p.write(id, w.d, w.d.expect(id, w.p, 0, w.each), 0, 0, w.each)
	if o := w.p.rec.Wait("written", id, 1); o.Err != nil {
		w.t.Logf("%q: %v", id, o.Err)
		w.d.tr.Revoke(id)
		w.d.fill(0, w.each)
		return false
	}
	if o := w.d.rec.Wait("received", id, 1); o.Err != nil {
		w.t.Logf("%q: %v", id, o.Err)
		w.d.fill(0, w.each)
		return false
	}
	w.d.has(w.next, 0, w.each)
	w.d.fill(0, w.each)
	return true
}
