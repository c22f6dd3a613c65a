package machine_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

// accountsRig is a P agent's machine whose engine has named nothing.
type accountsRig struct {
	machine.Told
	t     *testing.T
	now   time.Time
	ended int // offers
}

func newAccountsRig(t *testing.T, places int) *accountsRig {
	t.Helper()
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: 1 << 24, BlockStride: 1024, BlockBytes: 1024, NumBlocks: 1 << 18}})
	if err != nil {
		t.Fatal(err)
	}
	k := &accountsRig{t: t, now: time.Unix(0, 0)}
	k.Machine = machine.New(l, core.Options{MaxTransfers: places, EarlyLoad: 2 * time.Second, OnTransition: func(c core.Transition) {
		if c.Half == "offer" && c.To == "-" {
			k.ended++
		}
	}})
	return k
}

func (k *accountsRig) claim(account, from string, ids ...core.TransferID) (out []core.Status) {
	answers := k.Tell(k.now, core.RenewMessage{From: core.AgentID(from), Account: core.Account(account), Claims: ids}).(core.AnswerRenew).Answers
	for _, a := range answers {
		out = append(out, a.Status)
	}
	return out
}

func (k *accountsRig) load(account, from string, id core.TransferID, blocks int) core.Code {
	return k.Tell(k.now, core.LoadMessage{ID: id, Peer: core.AgentID(from), Account: core.Account(account), Grant: []byte("g"),
		Selection: kv.Selection{First: []uint32{0}, Blocks: [][]kv.BlockID{make([]kv.BlockID, blocks)}}}).(core.AnswerLoad).Code
}

// early says whether a transfer, or a share of one, has a place.
func (k *accountsRig) early(id core.TransferID) bool { return k.StateOf(core.SideOffer, id) == "early" }

// rest tells Resume for as long as the machine wants it, and returns all actions.
func (k *accountsRig) rest() (all []core.Action) {
	k.t.Helper()
	for range 1000 {
		yields := false
		for _, a := range k.Actions() {
			if _, ok := a.(core.Yield); ok {
				yields = true
				continue
			}
			all = append(all, a)
		}
		if !yields {
			return all
		}
		k.Tell(k.now, core.Resume{})
	}
	k.t.Fatal("the machine yields without an end")
	return nil
}

func named(form string, n int) core.TransferID { return core.TransferID(fmt.Sprintf(form, n)) }

func share(id core.TransferID, k int) core.TransferID {
	return machine.PartID(id, kv.Share{K: k, Of: kv.MaxShares})
}

// TestPlacesByAccount: the agents that one makes share what one account gets, however many they are. Within an account the agent
// with the most gives way, and in equal accounts who comes has no right to more.
func TestPlacesByAccount(t *testing.T) {
	k := newAccountsRig(t, 64)
	for i := range 64 {
		if got := k.claim("evil", fmt.Sprint("e", i), named("evil%d", i)); got[0] != core.StatusEarly {
			t.Fatal(i, got)
		}
	}
	if got := k.claim("evil", "late", "late"); got[0] != core.StatusUnknown {
		t.Errorf("another agent of the account with the most: %v", got)
	}
	for i := range 32 {
		if code := k.load("good", "d", named("good%d", i), 1); code != core.OK {
			t.Fatalf("load %d of an account with fewer: %v", i, code)
		}
	}
	if code := k.load("good", "d", "more", 1); code != core.Refused {
		t.Errorf("a load of an account that has as much as any: %v", code)
	}
	if code := k.load("good", "d2", "little", 1); code != core.OK {
		t.Errorf("a load of another agent, while one of its account has 32: %v", code)
	}
	if k.early("good31") || !k.early("good30") {
		t.Error("not the newest load of the agent with the most has given way")
	}
	for _, a := range k.rest() {
		if f, ok := a.(core.SendFinish); !ok || f.ID != "good31" {
			t.Errorf("%+v: a claim that gives way is told, or more than one load was", a)
		}
	}
	if n := k.Sizes().Early; n != 64 {
		t.Errorf("%d places are taken", n)
	}
}

// TestWordsByAccount: what the agents that one makes say of the ends of unknown transfers pushes out what they themselves have said.
func TestWordsByAccount(t *testing.T) {
	k := newAccountsRig(t, 16)
	for i := range 4 {
		k.Tell(k.now, core.FinishMessage{From: "d", Account: "good", ID: named("good%d", i), Code: core.Cancelled})
	}
	for i := range 64 {
		k.Tell(k.now, core.FinishMessage{From: core.AgentID(fmt.Sprint("e", i)), Account: "evil", ID: named("evil%d", i), Code: core.Cancelled})
	}
	for i := range 4 {
		if code := k.load("good", "d", named("good%d", i), 1); code == core.OK {
			t.Errorf("the end of good%d is forgotten", i)
		}
	}
}

// TestClaimGivesWay: a claim that gives way is forgotten, and its D is told nothing. It asks again, and has its place when there is room.
func TestClaimGivesWay(t *testing.T) {
	k := newAccountsRig(t, 2)
	k.claim("a", "d", "one", "two")
	if got := k.claim("b", "e", "three"); got[0] != core.StatusEarly || k.early("two") || !k.early("one") {
		t.Fatal(got)
	}
	if acts := k.rest(); len(acts) > 0 {
		t.Errorf("%+v", acts)
	}
	if got := k.claim("a", "d", "one", "two"); got[0] != core.StatusEarly || got[1] != core.StatusUnknown {
		t.Errorf("asked again while there is no room: %v", got)
	}
	if n := k.Sizes(); n.Ended != 0 || n.Early != 2 || n.FanOuts != 0 {
		t.Errorf("%+v", n)
	}
	k.Tell(k.now, core.FinishMessage{From: "e", Account: "b", ID: "three", Code: core.Cancelled})
	if got := k.claim("a", "d", "two"); got[0] != core.StatusEarly {
		t.Errorf("asked again when there is room: %v", got)
	}
	if code := k.load("a", "d", "two", 4); code != core.OK {
		t.Errorf("its load: %v", code)
	}
}

// TestSharesGiveWayTogether: all shares of a claim give way in one step. A share whose load has come makes its transfer firm: claims
// that are newer, or older, give way before it.
func TestSharesGiveWayTogether(t *testing.T) {
	const shares = kv.MaxShares
	k := newAccountsRig(t, 3*shares)
	for _, id := range []core.TransferID{"old", "loaded", "new"} {
		k.claim("a", "d", share(id, 0))
	}
	if code := k.load("a", "d", share("loaded", 0), 4); code != core.OK {
		t.Fatal(code)
	}
	k.claim("a", "d1", share("loaded", 1))
	for i, want := range []string{"old loaded", "loaded", "loaded"} { // the third finds that nobody has more than it wants
		k.claim(fmt.Sprint("b", i), "e", share(named("b%d", i), 0))
		var left []string
		for _, id := range []core.TransferID{"old", "loaded", "new"} {
			n := 0
			for s := range shares {
				if k.early(share(id, s)) {
					n++
				}
			}
			if n > 0 {
				left = append(left, string(id))
			}
			if n != 0 && n != shares {
				t.Errorf("%d shares of %s are left", n, id)
			}
		}
		if got := strings.Join(left, " "); got != want {
			t.Errorf("after %d newcomers there are: %s, want %s", i+1, got, want)
		}
	}
	if acts := k.rest(); len(acts) > 0 {
		t.Errorf("%+v", acts)
	}
}

// TestLoadInSharesGivesWay: a load that must give way does so with all its shares.
func TestLoadInSharesGivesWay(t *testing.T) {
	const shares = kv.MaxShares
	k := newAccountsRig(t, shares)
	if code := k.load("a", "d", share("loaded", 0), 4); code != core.OK {
		t.Fatal(code)
	}
	k.claim("a", "d1", share("loaded", 1))
	if got := k.claim("b", "e", "other"); got[0] != core.StatusEarly {
		t.Fatal(got)
	}
	told := map[core.AgentID]int{}
	for _, a := range k.rest() {
		if f, ok := a.(core.SendFinish); ok && f.Code == core.Refused {
			told[f.Peer]++
		}
	}
	if told["d"] != 1 || told["d1"] != 1 || len(told) != 2 {
		t.Errorf("told are %v", told)
	}
	if n := k.Sizes(); n.Early != 1 || n.FanOuts != 0 {
		t.Errorf("%+v", n)
	}
	if code := k.load("a", "d2", share("loaded", 2), 4); code == core.OK {
		t.Error("a share of a load that has ended is kept")
	}
}

// TestWorkOfOneStep: whatever peers say, and when a thousand offers lapse, a step ends few of them and asks to be told Resume. At the end all
// have ended that had to.
func TestWorkOfOneStep(t *testing.T) {
	const most = 1024
	for what, c := range map[string]struct {
		fill func(k *accountsRig)
		then core.Event
		left int
	}{
		"a lapse": {func(k *accountsRig) {
			for i := range most {
				k.load("a", "d", named("t%d", i), 1)
			}
			for range 2 {
				k.now = k.now.Add(900 * time.Millisecond) // not as long as this process would take for a pause of its own
				k.Tell(k.now, core.Tick{})
			}
			k.now = k.now.Add(900 * time.Millisecond)
		}, core.Tick{}, 0},
		"a D that is gone": {func(k *accountsRig) {
			for i := range most {
				k.load("a", "d", named("t%d", i), 1)
			}
			k.Tell(k.now, core.PeerDown{Peer: "d"})
			for range 11 { // it is not believed before
				k.Tell(k.now, core.ProbeReplied{Peer: "d", Absent: true})
			}
		}, core.ProbeReplied{Peer: "d", Absent: true}, 0},
		"shares that take the places of others": {func(k *accountsRig) {
			for i := range most {
				k.claim("a", "d", named("t%d", i))
			}
		}, core.RenewMessage{From: "e", Account: "b", Claims: []core.TransferID{
			share("s0", 0), share("s1", 0), share("s2", 0), share("s3", 0), share("s4", 0), share("s5", 0), share("s6", 0), share("s7", 0)}}, most},
		"block ids that take the place of many small loads": {func(k *accountsRig) {
			const large = 1<<22/kv.MaxBlocks - 1
			for i := range large {
				k.load("a", "d", named("t%d", i), kv.MaxBlocks)
			}
			for i := range most - large - 1 {
				k.load("a", "d", named("s%d", i), kv.MaxBlocks/(most-large))
			}
		}, core.LoadMessage{ID: "large", Peer: "e", Account: "b", Grant: []byte("g"),
			Selection: kv.Selection{First: []uint32{0}, Blocks: [][]kv.BlockID{make([]kv.BlockID, kv.MaxBlocks)}}}, -1},
	} {
		t.Run(what, func(t *testing.T) {
			k := newAccountsRig(t, most)
			c.fill(k)
			k.rest()
			began := k.Sizes().Early
			yielded, steps := true, 0
			for e := c.then; yielded; e = (core.Resume{}) {
				k.ended = 0
				k.Tell(k.now, e)
				if k.ended >= core.Defaults.Ends+kv.MaxShares {
					t.Fatalf("step %d ends %d offers", steps, k.ended)
				}
				yielded = slices.ContainsFunc(k.Actions(), func(a core.Action) bool { _, is := a.(core.Yield); return is })
				if steps++; steps > most {
					t.Fatal("no end")
				}
			}
			if steps < 3 {
				t.Errorf("%d steps end what is due: %d places were taken, %d are", steps, began, k.Sizes().Early)
			}
			if c.left >= 0 && k.Sizes().Early != c.left {
				t.Errorf("%d places are taken at the end, want %d", k.Sizes().Early, c.left)
			}
			t.Logf("%d steps, %d places of %d", steps, k.Sizes().Early, began)
		})
	}
}
