package natsbus

import (
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// TestAccounts: what an agent's places count under costs something to have. At a port that is a proven nkey, or the address that the
// agent comes from, however many agents there are. In a cluster it is the nkey that an id is of.
func TestAccounts(t *testing.T) {
	seed, public := newNKey(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right", NKeys: []string{public}})
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server, Token: "right"})
	prefill.Serve(func(_ core.Via, req *wire.Request) *wire.Reply { return &wire.Reply{Reason: req.Account} })
	register(t, prefill, "e")
	for _, c := range []struct {
		opt  Options
		want string
	}{
		{Options{Identity: named("D1"), Token: "right"}, "127.0.0.1/32"},
		{Options{Identity: named("D2"), Token: "right"}, "127.0.0.1/32"},
		{Options{Identity: named("D3"), Seed: seed}, public},
		{Options{Identity: named("D4"), Seed: seed}, public},
	} {
		d := newBus(t, c.opt)
		_, via, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url(), EngineID: "e"})
		if err != nil {
			t.Fatal(err)
		}
		ask(t, d, via, "P", c.want)
	}
	if got := prefill.accountOf(prefill.homeLink(), "gone"); got != "" {
		t.Errorf("an agent that is not there any more has account %q", got)
	}
	keyed, err := NewKeyedIdentity(seed)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		at   endpoint
		id   core.AgentID
		want core.Account
	}{
		{endpoint{kind: clusterLink}, keyed.ID(), core.Account(public)},
		{endpoint{kind: clusterLink}, NewIdentity().ID(), ""}, // anybody with the cluster's token makes as many as he likes
		{endpoint{kind: portLink, via: "http://host:1"}, NewIdentity().ID(), "http://host:1"},
		{endpoint{kind: joinLink}, NewIdentity().ID(), ""},
	} {
		if got := prefill.accountOf(&link{endpoint: c.at}, c.id); got != c.want {
			t.Errorf("%s at a link of kind %d has account %q, want %q", c.id, c.at.kind, got, c.want)
		}
	}
}
