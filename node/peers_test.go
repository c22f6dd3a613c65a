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
	table, transport := newPeerTable(), &admissions{tickets: map[core.AgentID][]byte{}}
	all := newTransports("P", &Config{}, zap.NewNop(), nil, nil, nil)
	all.add(transport)
	hello := &wire.Agent{Endpoints: []wire.Endpoint{{Transport: viaTCP}}}
	for i := range maxPeers + 3 {
		id := core.AgentID(fmt.Sprint(i))
		admit := func() ([]wire.Ticket, error) { return all.admit(id, hello) }
		if i >= maxPeers { // nobody in use makes room
			for _, p := range table.byID {
				p.works.Store(true)
			}
			if _, err := table.admit(&peer{id: id}, all, admit); !errors.Is(err, errManyPeers) || transport.tickets[id] != nil {
				t.Fatalf("peer %d: %v, admitted %v", i, err, transport.tickets[id] != nil)
			}
			table.order.Front().Value.(*peer).used = time.Now().Add(-keptFor)
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
	table, transport := newPeerTable(), &admissions{tickets: map[core.AgentID][]byte{}}
	admit := func(id core.AgentID) {
		t.Helper()
		if _, err := table.admit(&peer{id: id}, transport, func() ([]wire.Ticket, error) { return nil, nil }); err != nil {
			t.Fatalf("%s: %v", id, err)
		}
	}
	admit("works")
	table.get("works").works.Store(true)
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

// TestPeersByAccount: an account whose agents all work here, as many as the table has peers, makes room for others, and no more than its
// share. It makes none for itself. A peer of an account that has few stays, though it is not in use, while that account's agents come and go.
func TestPeersByAccount(t *testing.T) {
	table, transport := newPeerTable(), &admissions{tickets: map[core.AgentID][]byte{}}
	admit := func(account core.Account, id int, works bool) error {
		p := &peer{id: core.AgentID(fmt.Sprint(account, id)), account: account}
		p.works.Store(works)
		_, err := table.admit(p, transport, func() ([]wire.Ticket, error) { return nil, nil })
		return err
	}
	known := func(want bool, ids ...core.AgentID) {
		t.Helper()
		for _, id := range ids {
			if (table.byID[id] != nil) != want {
				t.Errorf("%s is known: %v", id, !want)
			}
		}
	}
	if err := admit("quiet", 0, false); err != nil {
		t.Fatal(err)
	}
	for i := range maxPeers + 10 {
		err := admit("greedy", i, true)
		if i < maxPeers-1 && err != nil || i >= maxPeers-1 && !errors.Is(err, errManyPeers) {
			t.Fatalf("%d of one account: %v", i, err)
		}
	}
	known(true, "quiet0", "greedy0")
	for i := range 10 {
		if err := admit("new", i, i%2 == 0); err != nil {
			t.Errorf("another account's: %v", err)
		}
	}
	known(true, "quiet0", "new0", "new9", "greedy10")
	known(false, "greedy0", "greedy9")
	for i := range 10 {
		if err := admit("greedy", maxPeers+i, false); !errors.Is(err, errManyPeers) {
			t.Errorf("one more of the account that has the most: %v", err)
		}
	}
	for i := range maxPeers {
		if err := admit("new", 10+i, true); err != nil && !errors.Is(err, errManyPeers) {
			t.Fatal(err)
		}
	}
	if g, n := table.held["greedy"], table.held["new"]; g < n || g > n+2 || g+n+1 != maxPeers || table.order.Len() != maxPeers {
		t.Errorf("%v, %d peers", table.held, table.order.Len())
	}
}

// TestWhoWorks: a peer is in use once this agent's engine works on a transfer of its own. What it has claimed on the off chance, or what
// has ended, counts for nothing.
func TestWhoWorks(t *testing.T) {
	for status, works := range map[core.Status]bool{core.StatusUnknown: false, core.StatusEarly: false, core.StatusPrefill: true, core.StatusOffered: true,
		core.StatusSending: true, core.StatusSent: false, core.StatusEnded: false, core.StatusRestart: false} {
		p := &peer{}
		if p.notes([]core.Answer{{Status: core.StatusUnknown}, {Status: status}}); p.works.Load() != works {
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
