package bootstrap

import (
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"
)

// home and abroad are two addresses that do not count as one.
var (
	home   = netip.MustParsePrefix("10.0.0.1/32")
	abroad = besides(home)
)

// besides is an address that does not count as one with others.
func besides(others ...netip.Prefix) netip.Prefix {
	for ip := netip.MustParseAddr("10.0.0.2"); ; ip = ip.Next() {
		p := netip.PrefixFrom(ip, 32)
		if !slices.ContainsFunc(others, func(o netip.Prefix) bool { return groupOf(o) == groupOf(p) }) {
			return p
		}
	}
}

// TestRoomsEnd: rooms end with age. When there are too many, the oldest end.
func TestRoomsEnd(t *testing.T) {
	now := time.Unix(1000, 0)
	r := rooms{limit: 3}
	want := func(id int64, dp int, known bool) {
		t.Helper()
		if got, ok := r.get(id, now); ok != known || got != dp {
			t.Fatalf("room %d: %d %v, want %d %v", id, got, ok, dp, known)
		}
		if len(r.dp) > 3 || r.order.Len() > 3 {
			t.Fatalf("%d rooms, %d entries, at most 3", len(r.dp), r.order.Len())
		}
	}
	r.set(1, 10, home, now)
	now = now.Add(roomAge / 2)
	r.set(2, 20, home, now)
	r.set(1, 11, home, now) // again: it lives from now
	want(1, 11, true)
	now = now.Add(roomAge/2 + 1)
	want(1, 11, true)
	want(2, 20, true)
	r.set(3, 30, home, now)
	r.set(4, 40, home, now) // there is no room for 2, the oldest
	want(2, 0, false)
	want(1, 11, true)
	want(3, 30, true)
	now = now.Add(roomAge / 2)
	want(1, 0, false)
	want(4, 40, true)
	now = now.Add(roomAge / 2)
	want(3, 0, false)
	want(4, 0, false)
	if r.dp != nil || r.order.Len() != 0 {
		t.Fatalf("nothing is left, but %d and %d", len(r.dp), r.order.Len())
	}
}

// TestRoomsOfManyRequests: many rooms, of which nobody asks for one, stay within the limit.
func TestRoomsOfManyRequests(t *testing.T) {
	now := time.Unix(1000, 0)
	var r rooms
	for i := range int64(3 * MaxRooms) {
		r.set(i, 1, home, now)
		now = now.Add(time.Microsecond)
	}
	if len(r.dp) != MaxRooms || r.order.Len() != MaxRooms {
		t.Fatalf("%d rooms, %d entries, want %d", len(r.dp), r.order.Len(), MaxRooms)
	}
	if _, ok := r.get(3*MaxRooms-1, now); !ok {
		t.Fatal("the newest is not known")
	}
}

// TestRoomsOfAnother: the rooms that one address enters push out its own, and none of an address that has fewer.
func TestRoomsOfAnother(t *testing.T) {
	now := time.Unix(1000, 0)
	r := rooms{limit: 4}
	r.set(1, 10, home, now)
	for i := range int64(100) {
		r.set(100+i, 99, abroad, now)
	}
	r.set(2, 20, home, now)
	for i := range int64(100) {
		r.set(200+i, 99, abroad, now)
		r.set(1, 10, home, now) // again and again: its own oldest go
		r.set(2, 20, home, now)
	}
	for id, dp := range map[int64]int{1: 10, 2: 20} {
		if got, ok := r.get(id, now); !ok || got != dp {
			t.Errorf("room %d: %d, %v", id, got, ok)
		}
	}
	if h, a := r.order.Of(groupOf(home)), r.order.Of(groupOf(abroad)); h != 2 || a != 2 || r.order.Len() != 4 {
		t.Errorf("%d, %d of %d entries", h, a, r.order.Len())
	}
	third := besides(home, abroad)
	r = rooms{limit: 2}
	r.set(1, 1, home, now)
	r.set(2, 2, abroad, now)
	r.set(3, 3, third, now) // each has one: the oldest
	r.set(4, 4, third, now) // its own
	if _, ok := r.get(2, now); !ok || len(r.dp) != 2 {
		t.Errorf("%v", r.dp)
	}
	r.get(0, now.Add(roomAge))
	if r.dp != nil || r.order.Len() != 0 {
		t.Errorf("%v is left", r.dp)
	}
}

// TestOldRoomsGoFirst: rooms that were needed long ago go before one of whoever has the most, whosever they are. Until then they stay.
func TestOldRoomsGoFirst(t *testing.T) {
	start := time.Unix(1000, 0)
	for _, x := range []struct {
		age        time.Duration
		home, busy int64 // rooms that are left
	}{{roomNeeded, 1, 3}, {roomNeeded - 1, 2, 2}} {
		r, now := rooms{limit: 4}, start
		r.set(1, 1, home, now)
		r.set(2, 1, home, now)
		now = now.Add(x.age)
		for id := range int64(3) {
			r.set(3+id, 1, abroad, now)
		}
		if h, b := r.order.Of(groupOf(home)), r.order.Of(groupOf(abroad)); h != x.home || b != x.busy {
			t.Errorf("after %v %d and %d rooms are left, want %d and %d", x.age, h, b, x.home, x.busy)
		}
	}
}

// TestRoomsOfManyAddresses: rooms of which each is another address's take no more than a few hundred bytes each.
func TestRoomsOfManyAddresses(t *testing.T) {
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	now := time.Unix(1000, 0)
	var r rooms
	ip := netip.MustParseAddr("10.0.0.0")
	for i := range int64(MaxRooms) {
		r.set(i, 1, netip.PrefixFrom(ip, 32), now)
		ip = ip.Next()
	}
	took := heap() - before
	if t.Logf("%d bytes", took); took > 40<<20 || len(r.dp) != MaxRooms {
		t.Errorf("%d rooms of as many addresses take %d bytes", len(r.dp), took)
	}
	runtime.KeepAlive(&r)
}
