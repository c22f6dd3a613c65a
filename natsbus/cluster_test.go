package natsbus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// pump asks an agent again and again, and keeps the errors. It ends with the answer to its last request: one that is lost counts.
type pump struct {
	stop   context.CancelFunc
	wg     sync.WaitGroup
	mu     sync.Mutex
	good   int
	errors []error
}

func newPump(t testing.TB, b *Bus, to core.AgentID, bound time.Duration) *pump {
	ctx, stop := context.WithCancel(context.Background())
	p := &pump{stop: stop}
	to = reach(b, string(to))
	p.wg.Go(func() {
		for ctx.Err() == nil {
			asked, cancel := context.WithTimeout(context.Background(), bound)
			_, err := b.Request(asked, "", to, hello(string(b.opt.Identity.ID())))
			cancel()
			p.mu.Lock()
			if err == nil {
				p.good++
			} else {
				p.errors = append(p.errors, err)
			}
			p.mu.Unlock()
			_ = pause(ctx, 20*time.Millisecond)
		}
	})
	t.Cleanup(p.end)
	return p
}

func (p *pump) end() { p.stop(); p.wg.Wait() }

func (p *pump) counts() (good int, errs []error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.good, p.errors
}

// The registry's leader is killed, and later the cluster's: requests between
// agents go on, entries stay, agents of the killed server come back to another,
// and new agents get in.
func TestClusterLosesItsLeaders(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATSTrio(t)
	const ttl = nettest.ElectionBound + 20*time.Second // an entry ends only if no leader lets it be renewed for longer than any election is waited for
	boot := newBus(t, Options{Identity: named("boot"), ClusterURL: c.URLs(), TTL: ttl})
	if err := boot.Register(ctxOf(t, nettest.ElectionBound), agent("boot", "boot")); err != nil {
		t.Fatal(err)
	}
	leader, others := c.StreamLeader(stream)

	// P and D are at the servers that stay, K is at the server that goes. Each knows
	// one URL; they find the others by themselves.
	prefill := newBus(t, Options{Identity: named("P"), ClusterURL: others[0].URL(), TTL: ttl})
	serve(prefill)
	register(t, prefill, "e")
	decode := newBus(t, Options{Identity: named("D"), ClusterURL: others[1].URL()})
	serve(decode)
	kept := newBus(t, Options{Identity: named("K"), ClusterURL: leader.URL()})
	serve(kept)
	target := core.Target{Bootstrap: "http://not-used:1", EngineID: "e"}
	for _, b := range []*Bus{decode, kept} {
		eventually(t, "P is found", func() error { // a replica may not have its entry yet
			a, _, err := b.Lookup(ctxOf(t, nettest.ElectionBound), target)
			if err == nil && shortName(a.ID) != "P" {
				err = fmt.Errorf("it is %+v", a)
			}
			return err
		})
	}
	ask(t, decode, "", "P", "P via : hello D") // D's server may not know yet where P is
	renewed := sequenceOf(t, decode, "e")
	// Between the servers that stay nothing is lost. Towards the other server the bound
	// is short, so that a lost request does not hide the requests after it.
	onSurvivors, before := newPump(t, decode, "P", nettest.ElectionBound), sessions(prefill, decode)
	onKilled, toKilled := newPump(t, kept, "P", 500*time.Millisecond), newPump(t, decode, "K", 500*time.Millisecond)

	killed := time.Now()
	leader.Kill()
	prefill.renewNow() // a renewal meets the election

	// At once P is found, by an agent that knows it and by a new one, though nobody
	// leads the registry.
	if a, _, err := decode.Lookup(ctxOf(t, nettest.ElectionBound), target); err != nil || shortName(a.ID) != "P" {
		t.Fatalf("%+v, %v", a, err)
	}
	fresh := newBus(t, Options{Identity: named("N"), ClusterURL: c.URLs()})
	serve(fresh)
	if a, _, err := fresh.Lookup(ctxOf(t, nettest.ElectionBound), target); err != nil || shortName(a.ID) != "P" {
		t.Fatalf("%+v, %v", a, err)
	}
	ask(t, fresh, "", "P", "P via : hello N")
	// For an engine that nobody knows, D waits for the leader, with a bound.
	_, _, err := fresh.Lookup(ctxOf(t, 500*time.Millisecond), core.Target{Bootstrap: "http://not-used:1", EngineID: "unknown"})
	if !errors.Is(err, core.ErrNotRegistered) && !(errors.Is(err, core.ErrUnreachable) && strings.Contains(err.Error(), "leader")) {
		t.Errorf("during the election: %v", err)
	}

	// A new prefill agent waits for the election.
	second := newBus(t, Options{Identity: named("P2"), ClusterURL: c.URLs(), TTL: ttl})
	serve(second)
	if err := second.Register(ctxOf(t, nettest.ElectionBound), agent("P2", "e2")); err != nil {
		t.Fatal(err)
	}
	t.Logf("a new agent is registered %v after the kill", time.Since(killed).Round(100*time.Millisecond))
	// The entry does not expire, before or after the election: it is there all the time until the new leader has taken the renewal that
	// met the election, and the next one, which is due ttl/3 later.
	for renewals := 0; renewals < 2; {
		if a, _, err := decode.Lookup(ctxOf(t, nettest.ElectionBound), target); err != nil || shortName(a.ID) != "P" {
			t.Fatalf("%v after the kill: %+v, %v", time.Since(killed), a, err)
		}
		if seq := sequenceOf(t, decode, "e"); seq > renewed {
			renewed, renewals = seq, renewals+1
			t.Logf("renewal %d is there %v after the kill", renewals, time.Since(killed).Round(100*time.Millisecond))
		}
		if time.Since(killed) > 2*(nettest.ElectionBound+ttl) {
			t.Fatalf("%d renewals since the kill", renewals)
		}
		time.Sleep(100 * time.Millisecond) // a poll of another process's state
	}
	onSurvivors.end()
	if good, errs := onSurvivors.counts(); good == 0 || len(errs) != 0 {
		t.Errorf("between the servers that stayed: %d requests, errors %v; P's and D's sessions began at %v before the kill, and now at %v",
			good, errs, before, sessions(prefill, decode))
	}
	// An agent of the killed server is unreachable for a moment, never gone.
	if _, err := kept.homeLink().wait(ctxOf(t, within)); err != nil {
		t.Fatal(err)
	}
	ask(t, kept, "", "P", "P via : hello K")
	ask(t, decode, "", "K", "K via : hello D")
	for what, p := range map[string]*pump{"from": onKilled, "to": toKilled} {
		p.end()
		good, errs := p.counts()
		t.Logf("%s the killed server: %d requests, %d errors", what, good, len(errs))
		for _, err := range errs {
			if proven(err) || !errors.Is(err, core.ErrAway) && !errors.Is(err, core.ErrUnreachable) && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s the killed server: %v", what, err)
			}
		}
		if good == 0 {
			t.Errorf("%s the killed server: no request, errors %v", what, errs)
		}
	}

	// The server comes back empty; then the cluster's own leader goes.
	leader.Start()
	c.StreamLeader(stream)
	meta, _ := c.MetaLeader()
	again := newPump(t, decode, "P", 500*time.Millisecond) // P's server may be the one that goes
	meta.Kill()
	for _, who := range []*Bus{decode, fresh, kept} {
		begin := time.Now()
		for {
			a, _, err := who.Lookup(ctxOf(t, nettest.ElectionBound), target)
			if err == nil && shortName(a.ID) == "P" {
				break
			}
			if !errors.Is(err, core.ErrUnreachable) || time.Since(begin) > nettest.ElectionBound {
				t.Fatalf("%s: %+v, %v", shortName(who.opt.Identity.ID()), a, err)
			}
		}
	}
	third := newBus(t, Options{Identity: named("P3"), ClusterURL: c.URLs(), TTL: ttl})
	serve(third)
	if err := third.Register(ctxOf(t, nettest.ElectionBound), agent("P3", "e3")); err != nil {
		t.Fatal(err)
	}
	again.end()
	_, errs := again.counts()
	for _, err := range errs {
		if proven(err) {
			t.Errorf("after the second kill: %v", err)
		}
	}
}

// sequenceOf is the number in the registry of an engine's entry, which each renewal raises.
func sequenceOf(t *testing.T, b *Bus, engine string) (seq uint64) {
	t.Helper()
	l := b.homeLink()
	err := l.patiently(ctxOf(t, nettest.ElectionBound), func(ctx context.Context) error {
		r, err := l.readChecked(ctx, clusterKey(engine, 0, 0))
		seq = r.seq
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return seq
}

// With one server there is one replica; a number that cannot be is an error.
func TestReplicas(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATS(t)
	b := newBus(t, Options{Identity: named("P"), ClusterURL: c.URL()})
	serve(b)
	register(t, b, "e")
	if info, err := b.homeLink().js.Stream(ctxOf(t, within), stream); err != nil || info.CachedInfo().Config.Replicas != 1 {
		t.Errorf("%+v, %v", info, err)
	}
	if err := b.homeLink().js.DeleteStream(ctxOf(t, within), stream); err != nil {
		t.Fatal(err)
	}
	three := newBus(t, Options{Identity: named("Q"), ClusterURL: c.URL(), Replicas: 3})
	if err := three.Register(ctxOf(t, within), agent("Q", "q")); err == nil || !strings.Contains(err.Error(), "nats_replicas") {
		t.Errorf("3 replicas on one server: %v", err)
	}
	// A bucket that exists is used as it is.
	b.renewNow()
	eventually(t, "the bucket is there again", func() error {
		_, _, err := b.Lookup(ctxOf(t, within), core.Target{EngineID: "e"})
		return err
	})
	if err := three.Register(ctxOf(t, within), agent("Q", "q")); err != nil {
		t.Error(err)
	}
}

func TestClusterByTLSAndNKey(t *testing.T) {
	leaktest.Check(t)
	ca, unknown := nettest.NewAuthority(t), nettest.NewAuthority(t)
	cert, key := ca.Issue(time.Now().Add(time.Hour), "127.0.0.1")
	c := nettest.NewNATS(t, "--tlsverify", "--tlscert", cert, "--tlskey", key, "--tlscacert", ca.File, "--auth", "right")
	secure := ca.Client()
	secure.Certificates = ca.Server(time.Now().Add(time.Hour), "client").Certificates
	for what, u := range map[string]string{"tls": "tls://" + c.Addr(), "nats": c.URL()} {
		b := newBus(t, Options{Identity: named(what), ClusterURL: u, Token: "right", TLS: secure})
		b.Serve(func(core.Via, *wire.Request) *wire.Reply { return &wire.Reply{} })
		register(t, b, what)
	}
	for what, w := range map[string]struct {
		opt  Options
		says string
	}{
		"unknown authority": {Options{Token: "right", TLS: unknown.Client()}, "tls_ca_file"},
		"no certificate":    {Options{Token: "right", TLS: ca.Client()}, ""},
		"wrong token":       {Options{Token: "wrong", TLS: secure}, "nats_token"},
	} {
		w.opt.Identity, w.opt.ClusterURL, w.opt.ConnectTimeout = named("D"), "tls://"+c.Addr(), within
		b, err := Open(w.opt)
		if err == nil {
			closeBus(t, b)
		}
		if !errors.Is(err, core.ErrUnreachable) || !strings.Contains(err.Error(), w.says) || !strings.Contains(err.Error(), c.Addr()) {
			t.Errorf("%s: %v, want %q", what, err, w.says)
		}
	}
	plain := nettest.NewNATS(t)
	if _, err := Open(Options{Identity: named("D"), ClusterURL: "tls://" + plain.Addr(), TLS: secure}); err == nil || !strings.Contains(err.Error(), "no TLS") {
		t.Errorf("tls:// to a plain server: %v", err)
	}
}

// A newcomer finds the engine of an nkey by any replica of the registry: it asks nothing that
// only a leader answers, which it may not here. Of other engines it asks for the stream's settings.
func TestNewcomerAsksNoLeader(t *testing.T) {
	leaktest.Check(t)
	pSeed, pKey := newNKey(t)
	dSeed, dKey := newNKey(t)
	conf := filepath.Join(t.TempDir(), "nats.conf")
	users := fmt.Sprintf("authorization { users: [ { nkey: %s }, { nkey: %s, permissions: { publish: [\"kvconn.v1.agent.*.*.*\", \"$JS.API.DIRECT.GET.KV_kvconn_ranks.>\"] } } ] }\n", pKey, dKey)
	if err := os.WriteFile(conf, []byte(users), 0o600); err != nil {
		t.Fatal(err)
	}
	c := nettest.NewNATS(t, "-c", conf)
	decode := newBus(t, Options{Identity: named("D"), ClusterURL: c.URL(), Seed: dSeed})
	serve(decode)
	up := user{pSeed, pKey}
	target := core.Target{EngineID: up.engine("e")}
	_, _, err := decode.Lookup(ctxOf(t, 500*time.Millisecond), target) // no registry yet
	mustBe(t, err, core.ErrUnreachable)
	prefill := newBus(t, Options{Identity: up.named(t, "NP"), ClusterURL: c.URL(), Seed: pSeed})
	serve(prefill)
	register(t, prefill, up.engine("e"))
	if a, _, err := decode.Lookup(ctxOf(t, within), target); err != nil || shortName(a.ID) != "NP" {
		t.Fatalf("%+v, %v", a, err)
	}
	ask(t, decode, "", "NP", "NP via : hello D")
	closeBus(t, prefill)
	_, _, err = decode.Lookup(ctxOf(t, 500*time.Millisecond), target) // whether an entry has ended, only the leader can tell
	mustBe(t, err, core.ErrUnreachable)
}

// sessions says when the agents' connections to their servers began.
func sessions(agents ...*Bus) (began []time.Time) {
	for _, b := range agents {
		l := b.homeLink()
		l.mu.Lock()
		began = append(began, l.since)
		l.mu.Unlock()
	}
	return began
}

// proven: the error says that an agent is gone for good.
func proven(err error) bool { return errors.Is(err, core.ErrAbsent) && !errors.Is(err, core.ErrAway) }

func TestCluster(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATS(t, "--auth", "right")
	prefill := newBus(t, Options{Identity: named("P"), ClusterURL: c.URL(), Token: "right", TTL: time.Minute}) // no renewal but that of the return
	serve(prefill)
	register(t, prefill, "e")
	decode := newBus(t, Options{Identity: named("D"), ClusterURL: c.URL(), Token: "right"})
	serve(decode)
	target := core.Target{Bootstrap: "http://not-used:1", EngineID: "e"}
	a, via, err := decode.Lookup(ctxOf(t, within), target)
	if err != nil || shortName(a.ID) != "P" || via != "" {
		t.Fatalf("%+v via %q: %v", a, via, err)
	}
	ask(t, decode, "", "P", "P via : hello D")
	ask(t, prefill, "", "D", "D via : hello P")
	_, err = Open(Options{Identity: named("X"), ClusterURL: c.URL(), Token: "wrong"})
	mustBe(t, err, core.ErrUnreachable)

	c.Kill()
	_, _, err = decode.Lookup(ctxOf(t, 200*time.Millisecond), target)
	mustBe(t, err, core.ErrUnreachable)
	_, err = decode.Request(ctxOf(t, within), "", reach(decode, "P"), hello("D"))
	mustBe(t, err, core.ErrUnreachable)

	c.Start() // it has forgotten all that it knew
	eventually(t, "the registration comes back", func() error {
		_, _, err := decode.Lookup(ctxOf(t, within), target)
		return err
	})
	ask(t, decode, "", "P", "P via : hello D")
	closeBus(t, prefill)
	_, _, err = decode.Lookup(ctxOf(t, within), target)
	mustBe(t, err, core.ErrNotRegistered)
	_, err = decode.Request(ctxOf(t, within), "", reach(decode, "P"), hello("D"))
	mustBe(t, err, core.ErrAbsent)
}
