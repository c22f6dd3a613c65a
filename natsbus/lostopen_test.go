package natsbus

import (
	"crypto/ed25519"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// TestLostOpen: an open that is lost, so that no server says that nobody listens, is not waited for: another follows.
func TestLostOpen(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATS(t, "--auth", "right")
	nc, err := nats.Connect(c.URL(), nats.Token("right"), nats.NoReconnect())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	heard, err := nc.SubscribeSync(agentRoot + ">") // it hears the open in P's place, and says nothing
	if err == nil {
		err = nc.FlushTimeout(within)
	}
	if err != nil {
		t.Fatal(err)
	}
	p := named("P")
	decode := newBus(t, Options{Identity: named("D"), ClusterURL: c.URL(), Token: "right", ConnectTimeout: time.Hour})
	answered := make(chan error, 1)
	go func() {
		_, err := decode.Request(ctxOf(t, within), "", p.ID(), hello("D"))
		answered <- err
	}()
	if m, err := heard.NextMsg(within); err != nil || kindOfSealed(m.Data) != sealOpen {
		t.Fatal(m, err)
	}
	prefill := newBus(t, Options{Identity: p, ClusterURL: c.URL(), Token: "right"})
	prefill.Serve(func(core.Via, *wire.Request) *wire.Reply { return new(wire.Reply) })
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

// TestQueueOfAnother: a user who may hear others takes no request away from them, in whatever queue group.
func TestQueueOfAnother(t *testing.T) {
	s := newSealedPair(t)
	for range 20 {
		if _, err := s.nc.QueueSubscribe(agentRoot+">", "agent", func(*nats.Msg) {}); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.nc.FlushTimeout(within); err != nil {
		t.Fatal(err)
	}
	for range 40 {
		if _, err := s.decode.Request(ctxOf(t, within), "", s.p, hello("D")); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.handled.Load(); n != 40 {
		t.Errorf("%d of 40 requests were handled", n)
	}
}

// TestOpenOfAnothersKey: who opens a session by a key that it has intercepted keeps nobody out.
func TestOpenOfAnothersKey(t *testing.T) {
	d, e, p := NewIdentity(), NewIdentity(), NewIdentity()
	mine, err := d.open(p.ID())
	if err != nil {
		t.Fatal(err)
	}
	_, dh, _ := keysOf(mine.message)
	theirs := append(append([]byte{sealMagic, sealVersion, byte(sealOpen)}, e.public()...), dh...)
	theirs = append(theirs, signOpen(e, p.ID(), dh)...)
	served := newResponderSessions()
	for _, open := range []struct {
		from *Identity
		m    []byte
	}{{e, theirs}, {d, mine.message}} {
		s, _, err := p.accept(open.from.ID(), open.m, served.number())
		if err != nil || served.repeated(open.m) || !served.add(newResponderSession(p, s, open.m)) {
			t.Fatal(errors.Join(err, errors.New("an open is not taken")))
		}
	}
}

func signOpen(by *Identity, to core.AgentID, dh []byte) []byte {
	return ed25519.Sign(by.signer, signText("open", by.id, to, by.public(), dh))
}
