package natsbus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
	"github.com/kvconn/kvconn/internal/nettest"
	"github.com/kvconn/kvconn/wire"
)

// electionBound is how long a cluster may be without a leader on a slow machine:
// nats-server waits 4 to 9 s before it elects one.
const electionBound = 40 * time.Second

// trio is a cluster of three nats-servers, s0 to s2, each a process.
type trio struct {
	t       testing.TB
	servers [3]*cluster
	monitor [3]string
}

func newTrio(t testing.TB) *trio {
	t.Helper()
	c := &trio{t: t}
	var routes [3]string
	for i := range routes {
		routes[i] = "nats://" + freeAddr(t)
	}
	for i := range c.servers {
		c.monitor[i] = freeAddr(t)
		_, port, _ := net.SplitHostPort(c.monitor[i])
		c.servers[i] = newCluster(t, "-n", fmt.Sprint("s", i), "-m", port, "--cluster_name", "trio", "--cluster", routes[i], "--routes", strings.Join(routes[:], ","))
	}
	c.whole()
	return c
}

// whole waits until the cluster has a leader that sees all three.
func (c *trio) whole() {
	c.t.Helper()
	begin := time.Now()
	for {
		_, err := c.metaLeader(3)
		if err == nil {
			return
		}
		if time.Since(begin) > electionBound {
			c.t.Fatalf("no cluster within %v: %v", electionBound, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (c *trio) metaLeader(size int) (string, error) {
	err := errors.New("no server answers")
	for i, s := range c.servers {
		if s.cmd == nil {
			continue
		}
		var info struct {
			Meta struct {
				Leader   string `json:"leader"`
				Replicas []struct {
					Current bool `json:"current"`
					Offline bool `json:"offline"`
				} `json:"replicas"`
			} `json:"meta_cluster"`
		}
		if err = fetchJSON("http://"+c.monitor[i]+"/jsz", &info); err != nil {
			continue
		}
		err = fmt.Errorf("s%d sees %+v", i, info.Meta)
		if info.Meta.Leader != fmt.Sprint("s", i) {
			continue // the leader itself knows the others
		}
		current := 1
		for _, r := range info.Meta.Replicas {
			if r.Current && !r.Offline {
				current++
			}
		}
		if current >= size {
			return info.Meta.Leader, nil
		}
	}
	return "", err
}

func fetchJSON(url string, v any) error {
	client := &http.Client{Timeout: within, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(v)
}

// named returns the server of a name, and the two others.
func (c *trio) named(name string) (it *cluster, others [2]*cluster) {
	c.t.Helper()
	n := 0
	for i, s := range c.servers {
		if fmt.Sprint("s", i) == name {
			it = s
		} else if n < 2 {
			others[n] = s
			n++
		}
	}
	if it == nil {
		c.t.Fatalf("no server %q", name)
	}
	return it, others
}

func (c *trio) urls() string {
	var all []string
	for _, s := range c.servers {
		all = append(all, s.url())
	}
	return strings.Join(all, ",")
}

func ranksInfo(t testing.TB, b *Bus) *jetstream.StreamInfo {
	t.Helper()
	var info *jetstream.StreamInfo
	begin := time.Now()
	for {
		st, err := b.homeLink().js.Stream(ctxOf(t, time.Second), stream)
		if err == nil {
			if info = st.CachedInfo(); info.Cluster != nil && info.Cluster.Leader != "" {
				return info
			}
			err = errors.New("it has no leader")
		}
		if time.Since(begin) > electionBound {
			t.Fatalf("the registry: %v", err)
		}
	}
}

// healed waits until all replicas of the registry hold what its leader holds.
func healed(t testing.TB, b *Bus) {
	t.Helper()
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		info, current := ranksInfo(t, b), 0
		for _, r := range info.Cluster.Replicas {
			if r.Current && !r.Offline {
				current++
			}
		}
		if current == 2 {
			return
		}
		if time.Since(begin) > electionBound {
			t.Fatalf("the registry is not whole within %v: %+v", electionBound, info.Cluster)
		}
	}
}

// pump asks an agent again and again, and keeps the errors.
type pump struct {
	stop   context.CancelFunc
	wg     sync.WaitGroup
	mu     sync.Mutex
	good   int
	errors []error
}

func newPump(t testing.TB, b *Bus, to core.AgentID) *pump {
	ctx, stop := context.WithCancel(context.Background())
	p := &pump{stop: stop}
	p.wg.Go(func() {
		for ctx.Err() == nil {
			// Short, so that one that is lost does not hide what comes after it.
			asked, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
			_, err := b.Request(asked, "", to, hello(string(b.opt.AgentID)))
			cancel()
			p.mu.Lock()
			switch {
			case err == nil:
				p.good++
			case ctx.Err() == nil:
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
	c := newTrio(t)
	const ttl = 20 * time.Second
	boot := newBus(t, Options{AgentID: "boot", ClusterURL: c.urls(), TTL: ttl})
	if err := boot.Register(ctxOf(t, electionBound), agent("boot", "boot")); err != nil {
		t.Fatal(err)
	}
	info := ranksInfo(t, boot)
	if info.Config.Replicas != 3 || len(info.Cluster.Replicas) != 2 {
		t.Fatalf("the registry has %d replicas: %+v", info.Config.Replicas, info.Cluster)
	}
	leader, others := c.named(info.Cluster.Leader)

	// P and D are at the servers that stay, K is at the one that goes. Each knows
	// one URL; they find the others by themselves.
	prefill := newBus(t, Options{AgentID: "P", ClusterURL: others[0].url(), TTL: ttl})
	serve(prefill)
	register(t, prefill, "e")
	decode := newBus(t, Options{AgentID: "D", ClusterURL: others[1].url()})
	serve(decode)
	kept := newBus(t, Options{AgentID: "K", ClusterURL: leader.url()})
	serve(kept)
	target := core.Target{Bootstrap: "http://not-used:1", EngineID: "e"}
	for _, b := range []*Bus{decode, kept} {
		if a, _, err := b.Lookup(ctxOf(t, within), target); err != nil || a.ID != "P" {
			t.Fatalf("%+v, %v", a, err)
		}
	}
	onSurvivors, onKilled, toKilled := newPump(t, decode, "P"), newPump(t, kept, "P"), newPump(t, decode, "K")

	killed := time.Now()
	leader.kill()

	// At once: P is found by who knows it and by who comes new, though nobody
	// leads the registry.
	if a, _, err := decode.Lookup(ctxOf(t, within), target); err != nil || a.ID != "P" {
		t.Fatalf("%+v, %v", a, err)
	}
	fresh := newBus(t, Options{AgentID: "N", ClusterURL: c.urls()})
	serve(fresh)
	if a, _, err := fresh.Lookup(ctxOf(t, within), target); err != nil || a.ID != "P" {
		t.Fatalf("%+v, %v", a, err)
	}
	ask(t, fresh, "", "P", "P via : hello N")
	// An engine that nobody knows: the leader is waited for, with a bound.
	_, _, err := fresh.Lookup(ctxOf(t, 500*time.Millisecond), core.Target{Bootstrap: "http://not-used:1", EngineID: "unknown"})
	if !errors.Is(err, core.ErrNotRegistered) && !(errors.Is(err, core.ErrUnreachable) && strings.Contains(err.Error(), "leader")) {
		t.Errorf("during the election: %v", err)
	}

	// A new prefill agent waits for the election.
	second := newBus(t, Options{AgentID: "P2", ClusterURL: c.urls(), TTL: ttl})
	serve(second)
	if err := second.Register(ctxOf(t, electionBound), agent("P2", "e2")); err != nil {
		t.Fatal(err)
	}
	t.Logf("a new agent is registered %v after the kill", time.Since(killed).Round(100*time.Millisecond))
	// The entry does not expire, before or after the election.
	for time.Since(killed) < ttl+5*time.Second {
		if a, _, err := decode.Lookup(ctxOf(t, within), target); err != nil || a.ID != "P" {
			t.Fatalf("%v after the kill: %+v, %v", time.Since(killed), a, err)
		}
		time.Sleep(100 * time.Millisecond) // a poll of another process's state
	}
	onSurvivors.end()
	if good, errs := onSurvivors.counts(); good == 0 || len(errs) != 0 {
		t.Errorf("between the servers that stayed: %d requests, errors %v", good, errs)
	}
	// Who was at the killed server is unreachable for a moment, never gone.
	ask(t, kept, "", "P", "P via : hello K")
	ask(t, decode, "", "K", "K via : hello D")
	for what, p := range map[string]*pump{"from": onKilled, "to": toKilled} {
		p.end()
		good, errs := p.counts()
		t.Logf("%s the killed server: %d requests, %d errors", what, good, len(errs))
		for _, err := range errs {
			if errors.Is(err, core.ErrAbsent) || !errors.Is(err, core.ErrUnreachable) && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s the killed server: %v", what, err)
			}
		}
		if good == 0 || len(errs) > 50 {
			t.Errorf("%s the killed server: %d requests, errors %v", what, good, errs)
		}
	}

	// The server comes back empty; then the cluster's own leader goes.
	leader.start()
	c.whole()
	healed(t, decode)
	meta, err := c.metaLeader(3)
	if err != nil {
		t.Fatal(err)
	}
	again := newPump(t, decode, "P")
	gone, _ := c.named(meta)
	gone.kill()
	for _, who := range []*Bus{decode, fresh, kept} {
		begin := time.Now()
		for {
			a, _, err := who.Lookup(ctxOf(t, within), target)
			if err == nil && a.ID == "P" {
				break
			}
			if !errors.Is(err, core.ErrUnreachable) || time.Since(begin) > electionBound {
				t.Fatalf("%s: %+v, %v", who.opt.AgentID, a, err)
			}
		}
	}
	third := newBus(t, Options{AgentID: "P3", ClusterURL: c.urls(), TTL: ttl})
	serve(third)
	if err := third.Register(ctxOf(t, electionBound), agent("P3", "e3")); err != nil {
		t.Fatal(err)
	}
	again.end()
	_, errs := again.counts()
	for _, err := range errs {
		if errors.Is(err, core.ErrAbsent) {
			t.Errorf("after the second kill: %v", err)
		}
	}
}

// With one server there is one replica; a number that cannot be is an error.
func TestReplicas(t *testing.T) {
	leaktest.Check(t)
	c := newCluster(t)
	b := newBus(t, Options{AgentID: "P", ClusterURL: c.url()})
	serve(b)
	register(t, b, "e")
	if info, err := b.homeLink().js.Stream(ctxOf(t, within), stream); err != nil || info.CachedInfo().Config.Replicas != 1 {
		t.Errorf("%+v, %v", info, err)
	}
	if err := b.homeLink().js.DeleteStream(ctxOf(t, within), stream); err != nil {
		t.Fatal(err)
	}
	three := newBus(t, Options{AgentID: "Q", ClusterURL: c.url(), Replicas: 3})
	if err := three.Register(ctxOf(t, within), agent("Q", "q")); err == nil || !strings.Contains(err.Error(), "nats_replicas") {
		t.Errorf("3 replicas on one server: %v", err)
	}
	// What is there is used as it is.
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
	ca, stranger := nettest.NewAuthority(t), nettest.NewAuthority(t)
	cert, key := ca.Issue(time.Now().Add(time.Hour), "127.0.0.1")
	c := newCluster(t, "--tlsverify", "--tlscert", cert, "--tlskey", key, "--tlscacert", ca.File, "--auth", "right")
	secure := ca.Client()
	secure.Certificates = ca.Server(time.Now().Add(time.Hour), "client").Certificates
	for what, u := range map[string]string{"tls": "tls://" + c.addr, "nats": c.url()} {
		b := newBus(t, Options{AgentID: core.AgentID(what), ClusterURL: u, Token: "right", TLS: secure})
		b.Serve(func(core.Via, *wire.Request) *wire.Reply { return &wire.Reply{} })
		register(t, b, what)
	}
	for what, w := range map[string]struct {
		opt  Options
		says string
	}{
		"unknown authority": {Options{Token: "right", TLS: stranger.Client()}, "tls_ca_file"},
		"no certificate":    {Options{Token: "right", TLS: ca.Client()}, ""},
		"wrong token":       {Options{Token: "wrong", TLS: secure}, "nats_token"},
	} {
		w.opt.AgentID, w.opt.ClusterURL, w.opt.ConnectTimeout = "D", "tls://"+c.addr, within
		b, err := Open(w.opt)
		if err == nil {
			closeBus(t, b)
		}
		if !errors.Is(err, core.ErrUnreachable) || !strings.Contains(err.Error(), w.says) || !strings.Contains(err.Error(), c.addr) {
			t.Errorf("%s: %v, want %q", what, err, w.says)
		}
	}
	plain := newCluster(t)
	if _, err := Open(Options{AgentID: "D", ClusterURL: "tls://" + plain.addr, TLS: secure}); err == nil || !strings.Contains(err.Error(), "no TLS") {
		t.Errorf("tls:// to a plain server: %v", err)
	}
}

// The permissions that the README names for a cluster's users are enough.
func TestClusterUsersWithLeastPermissions(t *testing.T) {
	leaktest.Check(t)
	pSeed, pKey := newNKey(t)
	dSeed, dKey := newNKey(t)
	const all = `"kvconn.v1.agent.*", "$JS.API.STREAM.INFO.KV_kvconn_ranks", "$JS.API.STREAM.MSG.GET.KV_kvconn_ranks", "$JS.API.DIRECT.GET.KV_kvconn_ranks.>"`
	const prefills = all + `, "$KV.kvconn_ranks.>", "$JS.API.INFO", "$JS.API.STREAM.CREATE.KV_kvconn_ranks"`
	user := func(key, publish string) string {
		return fmt.Sprintf("{ nkey: %s, permissions: { publish: [%s], subscribe: [\"kvconn.v1.agent.*\", \"_INBOX.>\"], allow_responses: true } }\n", key, publish)
	}
	conf := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(conf, []byte("authorization { users: [\n"+user(pKey, prefills)+user(dKey, all)+"] }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := newCluster(t, "-c", conf)
	log, logs := observed()
	prefill := newBus(t, Options{AgentID: "P", ClusterURL: c.url(), Seed: pSeed, Logger: log})
	serve(prefill)
	register(t, prefill, "e")
	decode := newBus(t, Options{AgentID: "D", ClusterURL: c.url(), Seed: dSeed, Logger: log})
	serve(decode)
	for _, engine := range []string{"e", ""} {
		if _, _, err := decode.Lookup(ctxOf(t, within), core.Target{EngineID: engine}); err != nil {
			t.Error(err)
		}
	}
	ask(t, decode, "", "P", "P via : hello D")
	ask(t, prefill, "", "D", "D via : hello P")
	_, err := Open(Options{AgentID: "X", ClusterURL: c.url()})
	mustBe(t, err, core.ErrUnreachable)
	closeBus(t, prefill)
	_, _, err = decode.Lookup(ctxOf(t, within), core.Target{EngineID: "e"})
	mustBe(t, err, core.ErrNotRegistered)
	if n := logs.FilterMessageSnippet("ermissions").Len(); n != 0 {
		t.Errorf("permissions are missing: %v", logs.All())
	}
}
