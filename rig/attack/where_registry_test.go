package attack

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/wire"
)

// registryTTL is how long an entry outlives its last renewal at a prefill engine's own port.
const registryTTL = 6 * time.Second

// longRank is an unknown client that joins a prefill engine's port as the first rank of an engine, and describes itself at great length.
type longRank struct {
	*session
	request []byte
}

func newLongRank(t *testing.T, p *victim, i, ranks int) *longRank {
	t.Helper()
	s, err := insistent(func() (*session, error) { return newAttacker(t).enter(p.boot, "join", "") })
	if err != nil {
		t.Fatal(err)
	}
	a := aHello().Hello
	a.ID, a.EngineID, a.DPRank, a.DPSize, a.TPSize, a.PPSize, a.Joined = s.id, fmt.Sprint("evil", i), i+1, ranks+1, 1, 1, true
	for i := range 6500 {
		shape := wire.Shape{Name: fmt.Sprintf("%0256d", i), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks}
		a.Shapes = append(a.Shapes, shape)
	}
	data, err := (&wire.Request{Kind: wire.KindJoin, Join: &wire.Join{Agent: a, New: true, Since: time.Now().UnixNano()}}).MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	return &longRank{s, data}
}

// join registers it, or again.
func (r *longRank) join() *wire.Reply {
	rep := new(wire.Reply)
	if b, err := r.session.request("kvconn.v1.join."+r.id, r.request); err != nil || wire.Decode(b, rep) != nil {
		return &wire.Reply{Code: -1, Reason: fmt.Sprint(err)}
	}
	return rep
}

// TestRanksThatFillTheRegistry: where all may join, unknown clients join as ranks that describe themselves at great length. The registry
// was full, and prefill could not renew its own entry: nobody found it. Now ranks that join have a part of it.
func TestRanksThatFillTheRegistry(t *testing.T) {
	const ranks = 40
	s := newScenario(t, deployment{name: "port"})
	p, d := s.start("prefill", map[string]any{"dp_size": ranks + 1}), s.start("decode", nil)
	before(s, p, d)
	rogues := make([]*longRank, ranks)
	joined, why := 0, ""
	for i := range rogues {
		rogues[i] = newLongRank(t, p, i, ranks)
		if rep := rogues[i].join(); rep.Code == 0 {
			joined++
		} else {
			why = rep.Reason
		}
	}
	if joined < 10 || joined == ranks || !strings.Contains(why, "no room") {
		t.Errorf("%d of %d ranks have joined, the last answer is %q: the attack itself has failed, or there is no bound", joined, ranks, why)
	}
	ctx, over := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { // they stay
		for i := 0; ctx.Err() == nil; i++ {
			rogues[i%ranks].join()
			time.Sleep(registryTTL / 3 / ranks) // as ranks that join do
		}
	})
	defer wg.Wait()
	defer over()
	reader, err := insistent(func() (*session, error) { return newAttacker(t).enter(p.boot, "ask", "") })
	if err != nil {
		t.Fatal(err)
	}
	full, renewed := reader.sequence(), false
	h := &honest{}
	for deadline := time.Now().Add(bound); h.all < loadsBefore || !renewed && time.Now().Before(deadline); {
		h.load(s, p, d, fmt.Sprint("beside", h.all))
		renewed = reader.sequence() > full
	}
	if !renewed {
		t.Errorf("prefill has not renewed its entry for %v", bound)
	}
	n := s.newcomers(p, "new", 3)
	p.peak = p.mib("VmHWM")
	got(s, "prefill's own renewals fail (read at 1a5364a)", "%d of %d ranks have joined, %s, of newcomers %s, %s",
		joined, ranks, h.went(s), n.went(s), p.growth(s))
}

// sequence is the number of the newest entry of the victims' prefill engine.
func (s *session) sequence() (n uint64) {
	s.a.t.Helper()
	head, _, err := s.answer("$JS.API.DIRECT.GET."+natsStream+"."+entryAt("p0"), nil)
	if err == nil {
		_, rest, _ := strings.Cut(head, jetstream.SequenceHeader+":")
		_, err = fmt.Sscan(rest, &n)
	}
	if err != nil {
		s.a.t.Fatal(err)
	}
	return n
}

// TestEntriesThatFillARegistry: who may write a cluster's registry, a holder of the token or a prefill engine, writes as many long
// entries as it likes. Others are found as before, for as long as the server has room.
func TestEntriesThatFillARegistry(t *testing.T) {
	const entries = 40
	for _, m := range deployments {
		if !m.cluster {
			continue
		}
		t.Run(m.name, func(t *testing.T) {
			s := newScenario(t, m)
			p, d := s.start("prefill", nil), s.start("decode", nil)
			before(s, p, d)
			nc := s.user(s.hostileP)
			junk := make([]byte, 1_000_000)
			under := natsEntry
			if m.nkeys {
				under = natsRoot + s.hostileP.public + ".e"
			}
			for i := range entries {
				m, err := nc.Request(fmt.Sprintf("%sJUNK%d.0.0", under, i), junk, bound)
				if err != nil || strings.Contains(string(m.Data), `"error"`) {
					t.Fatalf("entry %d: %+v, %v", i, m, err)
				}
			}
			h := &honest{}
			for i := range loadsBefore {
				h.load(s, p, d, fmt.Sprint("beside", i))
			}
			n := s.newcomers(p, "new", 3)
			if m.nkeys { // a decode engine writes none
				nc := s.user(s.hostile)
				if err := nc.PublishRequest(natsEntry+"JUNK.0.0", nc.NewInbox(), junk); err != nil {
					t.Fatal(err)
				}
				if !barred(t, nc) {
					t.Error("a decode engine writes the registry")
				}
			}
			d.peak, p.peak = d.mib("VmHWM"), p.mib("VmHWM")
			got(s, "not tried", "%d entries of 1 MB, %s, of newcomers %s, %s, %s", entries, h.went(s), n.went(s), p.growth(s), d.growth(s))
		})
	}
}

// user is a connection of the attacker's to the NATS server: with one of its keys where there are nkeys, else with the token.
func (s *scenario) user(k natsKey) *nats.Conn {
	s.Helper()
	opts := []nats.Option{nats.NoReconnect(), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})}
	if s.tls {
		opts = append(opts, nats.Secure(s.authority.Client()))
	}
	if s.nkeys {
		opts = append(opts, nats.Nkey(k.public, k.Sign), nats.CustomInboxPrefix("_INBOX."+k.public+".x"))
	} else {
		opts = append(opts, nats.Token(s.token))
	}
	nc, err := nats.Connect(s.url(), opts...)
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(nc.Close)
	return nc
}
