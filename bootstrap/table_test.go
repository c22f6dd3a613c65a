package bootstrap

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
)

func TestUnregisterTakesOnlyTheSameRegistration(t *testing.T) {
	leaktest.Check(t)
	var table Table
	old := Registration{"engine-old", 0, 0, 0, "tcp://a:1"}
	if err := table.Register(old); err != nil {
		t.Fatal(err)
	}
	if !table.Unregister(old) || len(table.Query()) != 0 {
		t.Fatalf("after Unregister the table is %v; want it empty", table.Query())
	}
	successor := Registration{"engine-new", 0, 0, 0, "tcp://a:1"}
	if err := table.Register(successor); err != nil {
		t.Fatalf("the dp rank is not free again: %v", err)
	}
	moved := successor
	moved.Addr = "tcp://b:1"
	for _, r := range []Registration{old, moved, {"engine-new", 1, 0, 0, "tcp://a:1"}} {
		if table.Unregister(r) {
			t.Errorf("Unregister(%+v) took out %+v", r, successor)
		}
	}
	if got := table.Query()[0].WorkerAddr[0][0]; got != "tcp://a:1" {
		t.Fatalf("addr %q after foreign goodbyes, want tcp://a:1", got)
	}
}

func TestQueryIsACopy(t *testing.T) {
	leaktest.Check(t)
	var table Table
	if err := table.Register(Registration{"e", 0, 1, 2, "a"}); err != nil {
		t.Fatal(err)
	}
	table.Query()[0].WorkerAddr[1][2] = "changed"
	want := map[int]Engine{0: {"e", map[int]map[int]string{1: {2: "a"}}}}
	if got := table.Query(); !reflect.DeepEqual(got, want) {
		t.Fatalf("table %v, want %v", got, want)
	}
}

func TestFullTable(t *testing.T) {
	leaktest.Check(t)
	table := Table{limit: 2}
	for tp := range 2 {
		if err := table.Register(Registration{"e", 0, tp, 0, "a"}); err != nil {
			t.Fatal(err)
		}
	}
	var full *FullError
	if err := table.Register(Registration{"e", 0, 2, 0, "a"}); !errors.As(err, &full) {
		t.Fatalf("third of two entries: %v, want a *FullError", err)
	}
	if err := table.Register(Registration{"e", 0, 1, 0, "a"}); err != nil {
		t.Fatalf("a full table must know its own entries: %v", err)
	}
	if !table.Unregister(Registration{"e", 0, 0, 0, "a"}) {
		t.Fatal("entry not found")
	}
	if err := table.Register(Registration{"e", 0, 2, 0, "a"}); err != nil {
		t.Fatalf("after an Unregister there is room: %v", err)
	}
}

// TestRanksOfAnother: a table full of ranks that one address has registered has room for another's, and for one that a lease ends. Those
// that came last make room. No rank of an address that has as few gives way, and none that a lease ends.
func TestRanksOfAnother(t *testing.T) {
	leaktest.Check(t)
	table, tp := Table{limit: 5}, 0
	add := func(from *netip.Prefix) error {
		tp++
		return table.register(Registration{"e", 0, tp, 0, "a"}, from)
	}
	var full *FullError
	if err := add(nil); err != nil { // 1
		t.Fatal(err)
	}
	for n := range 10 { // 2 to 5, of 11
		if err := add(&abroad); errors.As(err, &full) != (n >= 4) {
			t.Fatalf("%d of one address: %v", n, err)
		}
	}
	has := func(tps ...int) {
		t.Helper()
		for _, tp := range tps {
			if table.Query()[0].WorkerAddr[tp][0] == "" {
				t.Errorf("rank %d is not there: %v", tp, table.Query())
			}
		}
		if table.entries != len(tps) || len(table.told) > table.entries {
			t.Errorf("%d ranks are there: %v", table.entries, table.Query())
		}
	}
	has(1, 2, 3, 4, 5)
	if err := add(&home); err != nil { // 12
		t.Errorf("another address's: %v", err)
	}
	has(1, 2, 3, 4, 12)
	if err := add(&home); err != nil { // 13
		t.Errorf("3 and 1: %v", err)
	}
	has(1, 2, 3, 12, 13)
	if err := add(&home); !errors.As(err, &full) {
		t.Errorf("2 and 2: %v", err)
	}
	for range 4 {
		if err := add(nil); err != nil { // 15 to 18
			t.Errorf("an agent's: %v", err)
		}
	}
	has(1, 15, 16, 17, 18)
	if len(table.told) != 0 || len(table.from) != 0 {
		t.Errorf("%v, %v", table.told, table.from)
	}
	if err := add(nil); !errors.As(err, &full) {
		t.Errorf("an agent's beside agents' only: %v", err)
	}
}

// Many workers race for the same ranks with different addresses: one worker wins each
// rank, the others get conflicts, and readers see whole tables.
func TestConcurrentRegistration(t *testing.T) {
	leaktest.Check(t)
	const workers, ranks = 8, 64
	var (
		table Table
		wg    sync.WaitGroup
		mu    sync.Mutex
		won   = map[int]string{}
	)
	for w := range workers {
		wg.Go(func() {
			addr := fmt.Sprintf("addr-%d", w)
			for tp := range ranks {
				err := table.Register(Registration{"e", 0, tp, 0, addr})
				var conflict *ConflictError
				switch {
				case err == nil:
					mu.Lock()
					if other, ok := won[tp]; ok {
						t.Errorf("tp rank %d went to %s and to %s", tp, other, addr)
					}
					won[tp] = addr
					mu.Unlock()
				case !errors.As(err, &conflict):
					t.Errorf("tp rank %d: %v", tp, err)
				}
				table.Query()
			}
		})
	}
	wg.Wait()
	for tp, addr := range won {
		if got := table.Query()[0].WorkerAddr[tp][0]; got != addr {
			t.Errorf("tp rank %d is at %q, but %q was told that it won", tp, got, addr)
		}
	}
	if len(won) != ranks || table.entries != ranks {
		t.Fatalf("%d ranks won, %d entries; want %d", len(won), table.entries, ranks)
	}
}

// TestConcurrentUnregistration: of many who take out the same rank one does, and the others are told that it was not there.
func TestConcurrentUnregistration(t *testing.T) {
	leaktest.Check(t)
	const workers, ranks = 8, 64
	var (
		table Table
		wg    sync.WaitGroup
		took  atomic.Int64
	)
	for tp := range ranks {
		if err := table.Register(Registration{"e", 0, tp, 0, "a"}); err != nil {
			t.Fatal(err)
		}
	}
	for range workers {
		wg.Go(func() {
			for tp := range ranks {
				if table.Unregister(Registration{"e", 0, tp, 0, "a"}) {
					took.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if n := took.Load(); n != ranks || table.entries != 0 || len(table.Query()) != 0 {
		t.Fatalf("%d ranks were taken out, want %d; %d entries are left in %v", n, ranks, table.entries, table.Query())
	}
}
