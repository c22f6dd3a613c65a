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

// fullTable is a table in which ranks register one after the other, each in a place of its own.
type fullTable struct {
	Table
	t  *testing.T
	tp int
}

func (c *fullTable) next() Registration {
	c.tp++
	return Registration{"e", 0, c.tp, 0, "a"}
}

// add has an address register a rank; nil: the agent itself.
func (c *fullTable) add(from *netip.Prefix) error {
	if from == nil {
		return c.Register(c.next())
	}
	return c.tell(c.next(), *from)
}

// join has a rank of an account join. It is refused if that is so, and else these ranks have given way that had joined.
func (c *fullTable) join(account string, refused bool, gone ...int) {
	c.t.Helper()
	got, err := c.Join(c.next(), account, nil)
	full := (*FullError)(nil)
	if refused != errors.As(err, &full) || !refused && err != nil || len(got) != len(gone) {
		c.t.Errorf("rank %d of %s: %v, and %v have given way; want %v", c.tp, account, err, got, gone)
		return
	}
	for i, r := range got {
		if r.TPRank != gone[i] {
			c.t.Errorf("for rank %d of %s %v have given way, want %v", c.tp, account, got, gone)
		}
	}
}

// fill has an address register so many ranks.
func (c *fullTable) fill(from netip.Prefix, n int) {
	c.t.Helper()
	for range n {
		if err := c.add(&from); err != nil {
			c.t.Fatal(err)
		}
	}
}

// has says that these ranks are there, and no others.
func (c *fullTable) has(tps ...int) {
	c.t.Helper()
	for _, tp := range tps {
		if c.Query()[0].WorkerAddr[tp][0] == "" {
			c.t.Errorf("rank %d is not there: %v", tp, c.Query())
		}
	}
	if c.entries != len(tps) || c.told.Len() > c.others.Len() || c.others.Len() > c.entries {
		c.t.Errorf("%d ranks are there: %v", c.entries, c.Query())
	}
}

// TestRanksOfAnother: a table full of ranks that one address has registered has room for another's, until it has no more than a quarter. Those
// that came last make room. For the agent's own any of them does, and none that did not come in this way.
func TestRanksOfAnother(t *testing.T) {
	leaktest.Check(t)
	c, full := fullTable{Table: Table{limit: 8}, t: t}, (*FullError)(nil)
	if err := c.add(nil); err != nil { // 1
		t.Fatal(err)
	}
	c.fill(abroad, 4)                                  // 2 to 5
	c.fill(home, 3)                                    // 6 to 8
	if err := c.add(&abroad); !errors.As(err, &full) { // 9
		t.Errorf("one more of the address that has the most: %v", err)
	}
	third := netip.MustParsePrefix("10.0.0.3/32")
	c.fill(third, 1) // 10
	c.has(1, 2, 3, 4, 6, 7, 8, 10)
	c.fill(third, 1)                                  // 11
	if err := c.add(&third); !errors.As(err, &full) { // 12
		t.Errorf("3, 2 and 2: %v", err)
	}
	for range 6 { // 13 to 18
		if err := c.add(nil); err != nil {
			t.Errorf("an agent's: %v", err)
		}
	}
	if c.told.Len() != 1 {
		t.Errorf("%d ranks have no lease", c.told.Len())
	}
	if err := c.add(nil); err != nil { // 19
		t.Errorf("an agent's: %v", err)
	}
	c.has(1, 13, 14, 15, 16, 17, 18, 19)
	if err := c.add(nil); !errors.As(err, &full) {
		t.Errorf("an agent's beside agents' only: %v", err)
	}
}

// TestFewRanksStay: however many addresses come, none pushes out ranks of an address that has a quarter of the table or less.
func TestFewRanksStay(t *testing.T) {
	c, full := fullTable{Table: Table{limit: 9}, t: t}, (*FullError)(nil)
	var all []int
	for i := range byte(4) {
		c.fill(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, i}), 32), 2)
		all = append(all, c.tp-1, c.tp)
	}
	for i := range byte(100) {
		from := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 1, i}), 32)
		if err := c.add(&from); !errors.As(err, &full) {
			t.Errorf("address %d: %v", i, err)
		}
	}
	c.has(all...)
}

// TestToldAndJoined: a rank that came by POST /register and then joins gives way to no other of POST /register: a lease ends it.
func TestToldAndJoined(t *testing.T) {
	c := fullTable{Table: Table{limit: 9}, t: t}
	c.fill(home, 8)
	if _, err := c.Join(Registration{"e", 0, 8, 0, "a"}, "b", nil); err != nil {
		t.Fatal(err)
	}
	c.fill(abroad, 1) // 9
	c.has(1, 2, 3, 4, 5, 6, 8, 9)
}

// TestPlacesForRanksThatJoin: an eighth of the table is kept for ranks that did not come by POST /register. So four addresses that have nearly a quarter
// of it each keep out neither ranks that join nor the agent's own.
func TestPlacesForRanksThatJoin(t *testing.T) {
	c, full := fullTable{Table: Table{limit: 32}, t: t}, (*FullError)(nil)
	for i := range byte(4) {
		c.fill(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, i}), 32), 7)
	}
	if err := c.add(&abroad); !errors.As(err, &full) { // 29
		t.Errorf("one more by POST /register: %v", err)
	}
	for range 3 { // 30 to 32
		c.join("a", false)
	}
	c.join("b", true)
	if err := c.add(nil); err != nil { // 34
		t.Errorf("the agent's own: %v", err)
	}
	if c.told.Len() != 28 || c.others.Len() != 31 || c.entries != 32 {
		t.Errorf("%d ranks are there, %d of others, %d by POST /register", c.entries, c.others.Len(), c.told.Len())
	}
}

// TestPlaceOfItsOwn: ranks that join leave the agent's own its place, however many they are.
func TestPlaceOfItsOwn(t *testing.T) {
	c := fullTable{Table: Table{limit: 9}, t: t}
	for i := range 8 {
		c.join(fmt.Sprint("account ", i), false)
	}
	c.join("one more", true) // 9
	if err := c.add(nil); err != nil {
		t.Errorf("the agent's own: %v", err)
	}
	c.has(1, 2, 3, 4, 5, 6, 7, 8, 10)
}

// TestRanksThatProveASecret: where ranks that join have proved a secret they are of the agent's engine. So they push out any that came by
// POST /register, the newest first of the address with most. Of each other they push out none but those of an account that has more than a quarter.
func TestRanksThatProveASecret(t *testing.T) {
	c := fullTable{Table: Table{JoinsProved: true, limit: 9}, t: t}
	for i := range byte(4) {
		c.fill(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, i}), 32), 2)
	}
	c.join("a", false) // 9
	c.has(1, 3, 4, 5, 6, 7, 8, 9)
	for i := range 7 { // 10 to 16
		c.join(fmt.Sprint("account ", i/2), false)
	}
	c.join("b", true)
	c.has(9, 10, 11, 12, 13, 14, 15, 16)
}

// TestJoinsPushOutNoFew: ranks that join push out none of an address or account that has a quarter of the table or less, and share the table with one
// that has more. What an address has told counts with what has joined from there.
func TestJoinsPushOutNoFew(t *testing.T) {
	few := fullTable{Table: Table{limit: 9}, t: t}
	for i := range byte(4) {
		few.fill(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, i}), 32), 2)
	}
	for i := range 100 {
		few.join(fmt.Sprint("account ", i), true)
	}
	few.has(1, 2, 3, 4, 5, 6, 7, 8)

	many := fullTable{Table: Table{limit: 9}, t: t}
	many.fill(home, 8)
	many.join(home.String(), true) // 9
	for range 4 {                  // 10 to 13
		many.join("a", false)
	}
	many.join("a", true)
	many.has(1, 2, 3, 4, 10, 11, 12, 13)
	if err := many.add(&abroad); err != nil { // 15
		t.Error(err)
	}
	many.join("b", false, 13) // 16: of 4 and 3
	many.join("b", false)     // 17: of as many those that came first
	many.has(1, 2, 10, 11, 12, 15, 16, 17)
}

// TestBothWays: what an address has told and what has joined from there is what it has: it cannot have a quarter of the table by either way.
func TestBothWays(t *testing.T) {
	c := fullTable{Table: Table{limit: 33}, t: t}
	for _, from := range []netip.Prefix{home, abroad} {
		c.fill(from, 8)
		for range 8 {
			c.join(from.String(), false)
		}
	}
	c.join("a", false, 16) // the newest of home's
	c.join("b", false, 32) // of abroad's
}

// TestJoinedRanksOfOneAccount: a table full of ranks of one account that have joined has room for another account's, until it has no more than a
// quarter. A rank that has joined gives way to none that came by POST /register, nor to one of its own account.
func TestJoinedRanksOfOneAccount(t *testing.T) {
	c, full := fullTable{Table: Table{limit: 9}, t: t}, (*FullError)(nil)
	for range 8 {
		c.join("a", false)
	}
	c.join("a", true)                                // 9
	if err := c.add(&home); !errors.As(err, &full) { // 10
		t.Errorf("one that does not join: %v", err)
	}
	c.join("b", false, 8) // 11
	c.join("b", false, 7)
	c.join("b", false, 6)
	c.join("b", false, 5)  // 14
	c.join("b", true)      // 4 and 4
	c.join("c", false, 4)  // 16: as many as b, and older
	c.join("c", false, 14) // 17
	c.join("d", false, 3)  // 18: a has 3
	c.join("e", false, 13) // 19: b has 3
	c.join("f", true)      // none has more than a quarter
	c.has(1, 2, 11, 12, 16, 17, 18, 19)
}

// TestJoinInstead: a rank that joins takes the place of those that give way to it. If it does not come in, they stay.
func TestJoinInstead(t *testing.T) {
	c := fullTable{Table: Table{limit: 9}, t: t}
	for i := range 8 {
		c.join(fmt.Sprint("account ", i), false)
	}
	at := func(tp int, addr string) Registration { return Registration{"e", 0, tp, 0, addr} }
	var conflict *ConflictError
	if _, err := c.Join(at(3, "b"), "b", []Registration{at(1, "a")}); !errors.As(err, &conflict) {
		t.Errorf("at a place that is taken: %v", err)
	}
	var full *FullError
	if _, err := c.Join(at(9, "a"), "b", []Registration{at(10, "a")}); !errors.As(err, &full) {
		t.Errorf("instead of one that is not there: %v", err)
	}
	c.has(1, 2, 3, 4, 5, 6, 7, 8)
	if gone, err := c.Join(at(9, "a"), "b", []Registration{at(1, "a"), at(2, "a")}); err != nil || len(gone) > 0 {
		t.Errorf("instead of two: %v, and %v give way", err, gone)
	}
	c.has(3, 4, 5, 6, 7, 8, 9)
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
