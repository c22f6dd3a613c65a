package attack

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// sealedHello is what prefill answers to the hello of an agent that keeps to the protocol, with that key.
func sealedHello(t testing.TB, c *nettest.NATSServer, k natsKey, to string) (*wire.Reply, error) {
	t.Helper()
	seed, err := os.ReadFile(k.file)
	if err != nil {
		return nil, err
	}
	i, err := natsbus.NewKeyedIdentity(string(seed))
	if err != nil {
		return nil, err
	}
	b, err := natsbus.Open(natsbus.Options{Identity: i, ClusterURL: c.URL(), Seed: string(seed), JSPrefix: natsRegistry})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	defer func() {
		if err := b.Close(ctx); err != nil {
			t.Error(err)
		}
	}()
	return b.Request(ctx, "", core.AgentID(to), aHello())
}

// ear records what it hears at a NATS server, and answers what others ask each other.
type ear struct {
	nc *nats.Conn

	mu    sync.Mutex
	heard []*nats.Msg
	said  int
}

func listen(t *testing.T, nc *nats.Conn) *ear {
	t.Helper()
	e := &ear{nc: nc}
	refusal, err := (&wire.Reply{Code: int(core.Refused), Reason: "the attacker's"}).MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	last := []byte{0xc1, 1, 4}
	_, err = nc.Subscribe(">", func(m *nats.Msg) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.heard = append(e.heard, m)
		if strings.HasPrefix(m.Subject, "_INBOX.") && len(m.Data) > 2 && m.Data[0] == 0xc1 {
			last = m.Data // an answer, to be given again
		}
		if !strings.HasPrefix(m.Subject, "kvconn.v1.agent.") || m.Reply == "" {
			return
		}
		for _, data := range [][]byte{refusal, {}, m.Data, last} {
			if nc.Publish(m.Reply, data) == nil {
				e.said++
			}
		}
	})
	if err == nil {
		err = nc.FlushTimeout(bound)
	}
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// TestObserverAtANATSServer: a holder of the token hears all that agents say at a NATS server. It finds no
// transfer's id in it. It answers each request, says each again: honest loads go on.
func TestObserverAtANATSServer(t *testing.T) {
	c := nettest.NewNATS(t, "--auth", "right")
	cfg := func(role string) map[string]any {
		return map[string]any{"role": role, "nats_url": c.URL(), "nats_token": "right", "advertise_host": "127.0.0.1"}
	}
	p := start(t, cfg("prefill"))
	d := start(t, cfg("decode"))
	calm := before(t, p, d)
	e := listen(t, client(t, c, nats.Token("right")))
	h, newcomers := &honest{}, &honest{}
	var ids []string
	for i := range 8 {
		ids = append(ids, fmt.Sprintf("secret-transfer-%d", 2*i), fmt.Sprintf("secret-transfer-%d", 2*i+1))
		h.load(t, p, d, ids[2*i])
		newcomers.load(t, p, start(t, cfg("decode")), ids[2*i+1])
		e.mu.Lock()
		again := append([]*nats.Msg(nil), e.heard...)
		e.mu.Unlock()
		once := map[string]bool{} // it hears itself too
		for _, m := range again {
			if name := m.Subject + string(m.Data); strings.HasPrefix(m.Subject, "kvconn.v1.agent.") && !once[name] {
				once[name] = true
				if err := e.nc.PublishRequest(m.Subject, m.Reply, m.Data); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := e.nc.FlushTimeout(bound); err != nil {
			t.Fatal(err)
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	sealed, plain := 0, 0
	for _, m := range e.heard {
		for _, id := range ids {
			if bytes.Contains(m.Data, []byte(id)) || strings.Contains(m.Subject, id) {
				t.Errorf("transfer %s is named at %s", id, m.Subject)
			}
		}
		if strings.HasPrefix(m.Subject, "kvconn.v1.agent.") {
			if sealed++; len(m.Data) == 0 || m.Data[0] != 0xc1 {
				plain++
			}
		}
	}
	if plain != 0 || sealed < 2*len(ids) {
		t.Errorf("%d of %d messages between agents are plain", plain, sealed)
	}
	if newcomers.well != newcomers.all {
		t.Errorf("%d of %d new decode engines got their load", newcomers.well, newcomers.all)
	}
	got(t, "tickets, their secrets, grants and transfer ids, in the clear", "0 of %d transfer ids in %d messages, %d false answers, %s", len(ids), sealed, e.said, h.comparedWith(t, calm))
}
