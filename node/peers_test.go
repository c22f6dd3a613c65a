package node

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// admissions is the half of a transport that the peer table uses.
type admissions struct {
	core.Transport
	tickets map[core.AgentID][]byte
}

func (a *admissions) Admit(peer core.AgentID) ([]byte, error) {
	if a.tickets[peer] == nil {
		a.tickets[peer] = []byte(fmt.Sprint("ticket of ", peer))
	}
	return a.tickets[peer], nil
}

func (a *admissions) Name() string     { return viaTCP }
func (a *admissions) Endpoint() string { return "" }

func (a *admissions) Dismiss(peer core.AgentID) { delete(a.tickets, peer) }

// TestForgottenPeersAreDismissed: a peer that is not in the table is not admitted, so
// that the transport's peers are bounded too.
func TestForgottenPeersAreDismissed(t *testing.T) {
	table, transport, now := newPeerTable(), &admissions{tickets: map[core.AgentID][]byte{}}, time.Now()
	table.now = func() time.Time { return now }
	all := newTransports("P", &Config{}, zap.NewNop(), nil, nil, nil)
	all.add(transport)
	hello := &wire.Agent{Endpoints: []wire.Endpoint{{Transport: viaTCP}}}
	for i := range maxPeers + 3 {
		id := core.AgentID(fmt.Sprint(i))
		admit := func() ([]wire.Ticket, error) { return all.admit(id, hello) }
		if i >= maxPeers { // nobody in use makes room
			for _, p := range table.byID {
				table.noteWorks(p)
			}
			if _, err := table.admit(&peer{id: id}, all, admit); !errors.Is(err, errManyPeers) || transport.tickets[id] != nil {
				t.Fatalf("peer %d: %v, admitted %v", i, err, transport.tickets[id] != nil)
			}
			table.order.Front().Value.(*peer).used = now.Add(-keptFor)
		}
		ticket, err := table.admit(&peer{id: id}, all, admit)
		if err != nil {
			t.Fatal(err)
		}
		again, err := table.admit(&peer{id: id}, all, admit)
		if err != nil || len(ticket) != 1 || !bytes.Equal(ticket[0].Ticket, again[0].Ticket) {
			t.Fatalf("second hello of %s: ticket %q, %v; the first was %q", id, again, err, ticket)
		}
	}
	for i := range maxPeers + 3 {
		id := core.AgentID(fmt.Sprint(i))
		known, admitted := table.get(id) != nil, transport.tickets[id] != nil
		if want := i >= 3; known != want || admitted != want {
			t.Fatalf("peer %d: known %v, admitted %v; want %v", i, known, admitted, want)
		}
	}
	if len(all.pairs) != maxPeers {
		t.Fatalf("%d pairs are remembered, of %d peers", len(all.pairs), maxPeers)
	}
}

// TestHellosMakeRoom: peers that have only said hello, however lately, make room for one another, the oldest first. A peer
// that has a transfer here stays, and so does one that says hello again.
func TestHellosMakeRoom(t *testing.T) {
	table, transport, now := newPeerTable(), &admissions{tickets: map[core.AgentID][]byte{}}, time.Now()
	table.now = func() time.Time { return now } // however slow the machine is
	admit := func(id core.AgentID) {
		t.Helper()
		if _, err := table.admit(&peer{id: id}, transport, func() ([]wire.Ticket, error) { return nil, nil }); err != nil {
			t.Fatalf("%s: %v", id, err)
		}
	}
	admit("works")
	table.noteWorks(table.get("works"))
	admit("works") // it has lost its connection, say
	admit("newcomer")
	for i := range maxPeers - 3 {
		admit(core.AgentID(fmt.Sprint(i)))
	}
	admit("newcomer")
	for i := range maxPeers - 2 { // each takes the place of one of those before it
		admit(core.AgentID(fmt.Sprint("more", i)))
	}
	for id, stays := range map[core.AgentID]bool{"works": true, "newcomer": true, "0": false} {
		known := false
		table.with(id, func(*peer) { known = true })
		if known != stays {
			t.Errorf("%s is known: %v", id, known)
		}
	}
	if len(table.byID) != maxPeers || table.order.Len() != maxPeers {
		t.Errorf("%d peers, %d in order", len(table.byID), table.order.Len())
	}
}

// crowd is a peer table of accounts, with a clock that a test sets.
type crowd struct {
	*peerTable
	*admissions
	t    *testing.T
	time time.Time
}

func newCrowd(t *testing.T) *crowd {
	c := &crowd{newPeerTable(), &admissions{tickets: map[core.AgentID][]byte{}}, t, time.Now()}
	c.now = func() time.Time { return c.time }
	return c
}

// hello has a peer of an account say hello, and work if it is so.
func (c *crowd) hello(account core.Account, i int, works bool) error {
	id := core.AgentID(fmt.Sprint(account, i))
	_, err := c.admit(&peer{id: id, account: account}, c.admissions, func() ([]wire.Ticket, error) { return nil, nil })
	if err == nil && works {
		c.noteWorks(c.byID[id])
	}
	return err
}

func (c *crowd) known(want bool, account core.Account, from, to int) {
	c.t.Helper()
	for i := from; i < to; i++ {
		if (c.byID[core.AgentID(fmt.Sprint(account, i))] != nil) != want {
			c.t.Errorf("%s%d is known: %v", account, i, !want)
		}
	}
	if n := c.idle.Len() + c.working.Len(); n != c.order.Len() || n > maxPeers {
		c.t.Errorf("%d of %d peers are counted", n, c.order.Len())
	}
}

// full has peers say hello and work until the table has so many.
func (c *crowd) full(account core.Account, until int) {
	for c.order.Len() < until {
		if err := c.hello(account, c.order.Len(), true); err != nil {
			c.t.Fatal(err)
		}
	}
}

// TestHellosEndNoWork: while there are peers that have only said hello, newcomers end none that works, of whatever account. They push out
// those of the account with the most.
func TestHellosEndNoWork(t *testing.T) {
	c := newCrowd(t)
	const many = maxPeers - 30
	c.full("gateway", many)
	for i := range 30 {
		account := core.Account("flood")
		if i == 0 {
			account = "quiet"
		}
		if err := c.hello(account, i, false); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 1000 {
		for _, account := range []core.Account{"flood", "other", "third", "gateway"} {
			if err := c.hello(account, maxPeers+i, false); err != nil {
				t.Fatalf("%s: %v", account, err)
			}
		}
	}
	c.known(true, "gateway", 0, many)
	c.known(true, "quiet", 0, 1)
}

// TestPeersByAccount: if all peers work, one account's newcomers push out those of another that are more than half of all, until they are no
// more than that. So an account whose agents work, as many as the table has peers, keeps no other out.
func TestPeersByAccount(t *testing.T) {
	c := newCrowd(t)
	const half = maxPeers / 2
	c.full("greedy", half+3)
	c.full("other", maxPeers)
	if err := c.hello("greedy", maxPeers, false); !errors.Is(err, errManyPeers) {
		t.Errorf("one more of the account that has the most: %v", err)
	}
	for i := range 5 {
		if err := c.hello("new", i, true); errors.Is(err, errManyPeers) != (i >= 3) {
			t.Errorf("another account's %d: %v", i, err)
		}
	}
	c.known(false, "greedy", 0, 3)
	c.known(true, "greedy", 3, half+3)
	c.known(true, "other", half+3, maxPeers)
	c.known(true, "new", 0, 3)
}

// TestStalePeers: a peer that was not used lately makes room for any other, also for one of an account that has the most, and for one that
// this agent looks up.
func TestStalePeers(t *testing.T) {
	c := newCrowd(t)
	c.full("gone", 2)
	c.full("gateway", maxPeers)
	c.time = c.time.Add(keptFor)
	for i := 2; i < maxPeers; i++ {
		c.get(core.AgentID(fmt.Sprint("gateway", i)))
	}
	if err := c.hello("gateway", maxPeers, true); err != nil {
		t.Error(err)
	}
	c.known(false, "gone", 0, 1)
	c.known(true, "gone", 1, 2)
	connect := func(id core.AgentID) error {
		return c.connect(&peer{id: id}, c.admissions, func() error { return nil })
	}
	if err := connect("P"); err != nil {
		t.Error(err)
	}
	c.known(false, "gone", 1, 2)
	c.known(true, "gateway", 2, maxPeers+1)
	if err := connect("gateway2"); err != nil || c.byID["gateway2"].account != "gateway" {
		t.Errorf("one that has said hello is looked up: %v, it is %q's", err, c.byID["gateway2"].account)
	}
}

// TestWhoWorks: a peer is in use once this agent's engine works on a transfer of its own. What it has claimed on the off chance, or what
// has ended, counts for nothing.
func TestWhoWorks(t *testing.T) {
	for status, works := range map[core.Status]bool{core.StatusUnknown: false, core.StatusEarly: false, core.StatusPrefill: true, core.StatusOffered: true,
		core.StatusSending: true, core.StatusSent: false, core.StatusEnded: false, core.StatusRestart: false} {
		p := &peer{}
		if newPeerTable().notes(p, []core.Answer{{Status: core.StatusUnknown}, {Status: status}}); p.works.Load() != works {
			t.Errorf("with a transfer of status %d it works: %v", status, p.works.Load())
		}
	}
}

// TestSilentPeer: loads that wait behind one without an answer fail at once, unless the peer has answered another load
// since, and lately.
func TestSilentPeer(t *testing.T) {
	const pause = time.Hour
	now := time.Now()
	for what, c := range map[string]struct {
		heard, began time.Time
		unresponsive bool
	}{
		"never heard":           {time.Time{}, now.Add(-2 * pause), true},
		"heard before it began": {now.Add(-pause / 2), now.Add(-pause / 4), true},
		"heard lately":          {now.Add(-pause / 2), now.Add(-3 * pause), false},
		"heard, but long ago":   {now.Add(-2 * pause), now.Add(-3 * pause), true},
	} {
		table := newPeerTable()
		table.byID["p"] = &peer{id: "p", answeredAt: c.heard}
		table.noteUnanswered("p", c.began, pause)
		if unresponsive := table.unresponsive("p", time.Now()); unresponsive != c.unresponsive {
			t.Errorf("%s: unresponsive %v, want %v", what, unresponsive, c.unresponsive)
		}
	}
}
