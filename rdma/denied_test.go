package rdma

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// deniedRig has two writes on a lane, of one region each, with requests 1 to 3 and 4 to 6.
func deniedRig(t *testing.T) (cn *conn, l *lane, other, bad *write) {
	t.Helper()
	cn = newTestConn(t, 2)
	cn.reconnecting, cn.tells = true, true
	cn.t.layout = &kv.Layout{Regions: []kv.Region{{Name: "a"}, {Name: "b"}, {Name: "c"}}}
	l = cn.lanes[0]
	other, bad = cn.testWrite("other", 7, l, 3), cn.testWrite("bad", 8, l, 3)
	pairs := []kv.Pair{{SrcRegion: 0, Length: 64}, {SrcRegion: 1, Length: 64}, {SrcRegion: 2, Length: 64}}
	bad.jobs[0].cursor.ranges = []stripeRange{{pairs: pairs, first: 1, skip: 4, length: 60}}
	return cn, l, other, bad
}

func wantDenied(t *testing.T, w *write, says string) {
	t.Helper()
	if w.cause == nil || !strings.Contains(w.cause.Error(), says) || errors.Is(w.cause, core.ErrConnectionLost) {
		t.Errorf("%s ended with %v, want %q", w.op.ID, w.cause, says)
	}
}

// TestMemoryThatTheDeviceRefuses: one write's memory is refused at this end. That write
// ends at once, by the region's name. The other write on the lane waits for another
// lane.
func TestMemoryThatTheDeviceRefuses(t *testing.T) {
	cn, l, other, bad := deniedRig(t)
	cn.mu.Lock()
	defer cn.mu.Unlock()
	cn.took(l, []verbs.Completion{{ID: 5, Status: verbs.LocalProtection}}, time.Now())
	wantDenied(t, bad, `transfer "bad": the device may not read region "b"`)
	if !bad.over || other.over || other.cause != nil || !other.jobs[0].lost {
		t.Errorf("over: %v, the other: %v, %v", bad.over, other.over, other.cause)
	}
	if len(cn.lanes) != 1 {
		t.Errorf("%d lanes are left, want the one that works", len(cn.lanes))
	}
}

// TestMemoryThatThePeerRefuses: the first refusal may be of a key that is out of date. The
// second one in a row is the transfer's end.
func TestMemoryThatThePeerRefuses(t *testing.T) {
	cn, l, other, bad := deniedRig(t)
	cn.mu.Lock()
	defer cn.mu.Unlock()
	j := bad.jobs[0]
	cn.took(l, []verbs.Completion{{ID: 4, Status: verbs.RemoteAccess}}, time.Now())
	if bad.cause != nil || other.cause != nil {
		t.Fatalf("after the first refusal: %v, %v", bad.cause, other.cause)
	}
	l = cn.lanes[0]
	j.lane, j.lost, j.flight, bad.flight = l, false, 2, 2
	l.queue.posting(j, make([]verbs.Write, 2), nil, false)
	cn.took(l, []verbs.Completion{{ID: 1, Status: verbs.RemoteAccess}}, time.Now())
	wantDenied(t, bad, `decode agent d does not let bytes into region "b"`)
	if other.cause != nil {
		t.Errorf("the other one: %v", other.cause)
	}
}

// TestPathFailuresEndNoWrite: failures of the way say nothing of memory.
func TestPathFailuresEndNoWrite(t *testing.T) {
	for _, status := range []verbs.Status{verbs.RetryExceeded, verbs.Flushed, verbs.RNRExceeded, verbs.Fatal} {
		cn, l, other, bad := deniedRig(t)
		cn.mu.Lock()
		cn.took(l, []verbs.Completion{{ID: 5, Status: status}}, time.Now())
		if other.cause != nil || bad.cause != nil {
			t.Errorf("%v: %v, %v", status, other.cause, bad.cause)
		}
		cn.mu.Unlock()
	}
}

// TestPretouchNamesTheRegion: what cannot be registered is named as the engine knows it.
func TestPretouchNamesTheRegion(t *testing.T) {
	const page = 4096
	f, err := os.Create(filepath.Join(t.TempDir(), "kv"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(8 * page); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, 8*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	base := uint64(uintptr(unsafe.Pointer(&mem[0])))
	layout, err := kv.NewLayout([]kv.Region{
		{Name: "a", Base: base, BlockStride: page, BlockBytes: page, NumBlocks: 4},
		{Name: "b", Base: base + 4*page, BlockStride: page, BlockBytes: page, NumBlocks: 4},
	})
	if err != nil {
		t.Fatal(err)
	}
	touch := func(says string) {
		t.Helper()
		var r agentMemory
		if err := r.init(layout, nil); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.close() }()
		if err := r.touch(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
	}
	if err := f.Truncate(6 * page); err != nil {
		t.Fatal(err)
	}
	touch(`rdma: region "b" cannot be written`)
	if err := unix.Mprotect(mem[2*page:3*page], unix.PROT_READ); err != nil {
		t.Fatal(err)
	}
	touch(`rdma: region "a" cannot be written`)
}
