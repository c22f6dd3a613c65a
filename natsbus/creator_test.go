package natsbus

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

// TestRegistryOfAnAttacker: a user of a cluster that may create the registry's stream creates it
// before others do, so that it keeps what agents say to each other, or says it again. No engine
// registers there. Other settings are the operator's to choose.
func TestRegistryOfAnAttacker(t *testing.T) {
	leaktest.Check(t)
	up := newUser(t)
	c := nettest.NewNATS(t, "-c", nettest.ClusterUsers(t, up.key))
	prefill := newBus(t, Options{Identity: up.named(t, "CP"), ClusterURL: c.URL(), Seed: up.seed, TTL: within})
	for _, r := range []struct{ settings, says string }{
		{`"subjects":["$KV.kvconn_ranks.>","kvconn.v1.agent.>","_INBOX.>","_R_.>"],"no_ack":true`, "kvconn.v1.agent.>"},
		{`"subjects":["$KV.kvconn_ranks.>"],"republish":{"src":">","dest":"kvconn.v1.agent.x.>"}`, "kvconn.v1.agent.x.>"},
		{`"subjects":["$KV.kvconn_ranks.>"],"subject_transform":{"src":"$KV.kvconn_ranks.>","dest":"$KV.other.>"}`, "$KV.other.>"},
		{`"mirror":{"name":"OTHER"},"subject_delete_marker_ttl":0,"allow_rollup_hdrs":false`, "mirror"},
		{`"subjects":["$KV.kvconn_ranks.>"],"sources":[{"name":"OTHER"}]`, "sources"},
		{`"subjects":["$KV.kvconn_ranks.>"],"allow_msg_schedules":true`, "allow_msg_schedules"},
		{`"subjects":["$KV.kvconn_ranks.>"],"max_bytes":1000000`, ""},
	} {
		m, err := connAs(t, c.URL(), up).RequestWithContext(ctxOf(t, within), "$JS.API.STREAM.CREATE."+stream, fmt.Appendf(nil,
			`{"name":%q,"storage":"memory","max_msgs_per_subject":1,"allow_direct":true,"allow_msg_ttl":true,"allow_rollup_hdrs":true,"subject_delete_marker_ttl":10000000000,"num_replicas":1,%s}`, stream, r.settings))
		if err != nil || strings.Contains(string(m.Data), `"error"`) {
			t.Fatalf("%s: %q, %v", r.settings, m.Data, err)
		}
		err = prefill.Register(ctxOf(t, within), agent(string(prefill.opt.Identity.ID()), up.engine("e")))
		if r.says == "" && err != nil || r.says != "" && (err == nil || !strings.Contains(err.Error(), r.says)) {
			t.Errorf("%s: %v, want %q in it", r.settings, err, r.says)
		}
		c.Kill() // its memory is gone, with the stream
		c.Start()
	}
}

// TestRegistryCapturesNoRequests: a prefill engine's user creates the registry's stream so that it would keep whatever is said.
// Agents that talk beside it are not heard: the stream's account is not theirs.
func TestRegistryCapturesNoRequests(t *testing.T) {
	leaktest.Check(t)
	up, attacker, ud := newUser(t), newUser(t), newUser(t)
	c := nettest.NewNATS(t, "-c", nettest.ClusterOf(t, []string{up.key, attacker.key}, []string{ud.key}))
	nc := connAs(t, c.URL(), attacker)
	m, err := nc.RequestWithContext(ctxOf(t, within), "$JS.API.STREAM.CREATE."+stream, fmt.Appendf(nil,
		`{"name":%q,"storage":"memory","allow_direct":true,"num_replicas":1,"no_ack":true,"subjects":["$KV.kvconn_ranks.>","kvconn.v1.>","_INBOX.>","_R_.>"]}`, stream))
	if err != nil || strings.Contains(string(m.Data), `"error"`) {
		t.Fatalf("%+v, %v", m, err)
	}
	prefill := newBus(t, Options{Identity: up.named(t, "HP"), ClusterURL: c.URL(), Seed: up.seed})
	pair := []*Bus{prefill, newBus(t, Options{Identity: ud.named(t, "HD"), ClusterURL: c.URL(), Seed: ud.seed})}
	for _, b := range pair {
		serve(b)
	}
	for i, b := range pair {
		self, other := shortName(b.opt.Identity.ID()), shortName(pair[1-i].opt.Identity.ID())
		ask(t, b, "", core.AgentID(other), other+" via : hello "+self)
	}
	if err := nc.Publish(clusterKey(attacker.engine("marker"), 0, 0), nil); err != nil || refused(t, nc) {
		t.Fatal(err, nc.LastError())
	}
	marker := func(key string) bool { return strings.HasPrefix(key, subtree) }
	// What the stream keeps of JetStream's own answers begins with _R_, in its own account, and is said to its requester.
	eventually(t, "the stream keeps what is written behind them", func() error {
		keys, err := prefill.homeLink().list(ctxOf(t, within), ">", 1000)
		if err != nil || !slices.ContainsFunc(keys, marker) {
			return fmt.Errorf("%v, %w", keys, err)
		}
		for _, key := range keys {
			if strings.HasPrefix(key, "kvconn.") || strings.HasPrefix(key, inboxRoot) {
				t.Errorf("the registry's stream keeps %s", key)
			}
		}
		return nil
	})
}

// TestNarrowRights: a prefill engine whose key may write its own entries only, and create nothing,
// registers in a stream that the operator has made. It cannot take another engine's place.
func TestNarrowRights(t *testing.T) {
	leaktest.Check(t)
	up, other, third, operator := newUser(t), newUser(t), newUser(t), newUser(t)
	file := nettest.ClusterOf(t, []string{up.key, other.key, third.key}, nil)
	operated(t, file, operator)
	for _, u := range []user{up, other, third} {
		narrowed(t, file, u)
	}
	c := nettest.NewNATS(t, "-c", file)
	nc := connAs(t, c.URL(), up)
	if err := nc.Publish("$JS.API.STREAM.CREATE."+stream, nil); err != nil || !refused(t, nc) {
		t.Fatalf("a prefill engine creates the stream: %v", err)
	}
	rankStream(t, connAs(t, c.URL(), operator))
	for name, u := range map[string]user{"NE": up, "NF": other} {
		b := newBus(t, Options{Identity: u.named(t, name), ClusterURL: c.URL(), Seed: u.seed, TTL: time.Hour})
		register(t, b, u.engine("e"))
		defer func() {
			if got := entryOf(t, b, clusterKey(other.engine("e"), 0, 0)); !strings.HasPrefix(got, "NF as ") {
				t.Errorf("the other engine's entry is %s", got)
			}
		}()
	}
	own, others := clusterKey(up.engine("e"), 0, 0), clusterKey(other.engine("e"), 0, 0)
	for _, to := range []user{up, third} {
		probesReplySubject(t, c.URL(), up, to, others)
	}
	nc = connAs(t, c.URL(), up)
	// A roll-up of all would end others' entries. The operator's stream takes none.
	m := nats.NewMsg(own)
	m.Header.Set("Nats-Rollup", "all")
	if ack, err := nc.RequestMsgWithContext(ctxOf(t, within), m); err != nil || !strings.Contains(string(ack.Data), `"error"`) {
		t.Errorf("it ends the entries of all: %+v, %v", ack, err)
	}
	if err := nc.Publish(others, nil); err != nil || !refused(t, nc) {
		t.Errorf("it writes the entry of another engine: %v", err)
	}
}

// TestRegistryChangedLater: somebody changes the registry's stream below engines that are registered there, so that it
// keeps what agents say. They say so, and renew their entries when it is right again.
func TestRegistryChangedLater(t *testing.T) {
	leaktest.Check(t)
	operator, up := newUser(t), newUser(t)
	file := nettest.ClusterUsers(t, up.key)
	operated(t, file, operator)
	c := nettest.NewNATS(t, "-c", file)
	log, logs := observed()
	prefill := newBus(t, Options{Identity: up.named(t, "LP"), ClusterURL: c.URL(), Seed: up.seed, TTL: 2 * time.Second, Logger: log})
	register(t, prefill, up.engine("e"))
	js, err := jetstream.New(connAs(t, c.URL(), operator))
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(ctxOf(t, within), stream)
	if err != nil {
		t.Fatal(err)
	}
	right := s.CachedInfo().Config
	wrong := right
	wrong.Subjects = []string{subtree + ">", "kvconn.v1.agent.>"}
	said := func(what string) {
		t.Helper()
		eventually(t, what, func() error {
			if logs.FilterMessageSnippet(what).Len() == 0 {
				return errors.New("it is not said")
			}
			return nil
		})
	}
	for _, st := range []struct {
		config jetstream.StreamConfig
		says   string
	}{{wrong, "kvconn.v1.agent.>"}, {right, "is renewed again"}} {
		if _, err := js.UpdateStream(ctxOf(t, within), st.config); err != nil {
			t.Fatal(err)
		}
		said(st.says)
	}
}

// TestEntryOfATransform: a prefill engine's user that may write its own entries only creates the registry first, so that the stream keeps
// them as those of another engine, whose engine_id begins with no nkey. Decode engines do not take them. They take that engine's own
// entry once the stream is right.
func TestEntryOfATransform(t *testing.T) {
	leaktest.Check(t)
	operator, attacker, ud := newUser(t), newUser(t), newUser(t)
	file := nettest.ClusterOf(t, []string{attacker.key}, []string{ud.key})
	operated(t, file, operator)
	c := nettest.NewNATS(t, "-c", file)
	nc := connAs(t, c.URL(), attacker)
	ok := func(m *nats.Msg, err error) {
		t.Helper()
		if err != nil || strings.Contains(string(m.Data), `"error"`) {
			t.Fatalf("the attack itself has failed: %+v, %v", m, err)
		}
	}
	ok(nc.RequestWithContext(ctxOf(t, within), "$JS.API.STREAM.CREATE."+stream, fmt.Appendf(nil,
		`{"name":%q,"storage":"memory","max_msgs_per_subject":1,"allow_direct":true,"allow_msg_ttl":true,"num_replicas":1,"subjects":["$KV.kvconn_ranks.>"],"subject_transform":{"src":"$KV.kvconn_ranks.%s.>","dest":"$KV.kvconn_ranks.>"}}`, stream, attacker.key)))
	value, err := agent(string(attacker.named(t, "TE").ID()), "sglang-dp0").MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	key := rankKey("sglang-dp0", 0, 0)
	ok(nc.RequestWithContext(ctxOf(t, within), subtree+attacker.key+"."+strings.TrimPrefix(key, subtree), value))
	decode := newBus(t, Options{Identity: ud.named(t, "TD"), ClusterURL: c.URL(), Seed: ud.seed, JSPrefix: registryPrefix})
	if got := entryOf(t, decode, key); !strings.HasPrefix(got, "TE as ") {
		t.Fatalf("the attack itself has failed: the stream keeps %s", got)
	}
	for _, engine := range []string{"sglang-dp0", ""} {
		if a, _, err := decode.Lookup(ctxOf(t, within), core.Target{EngineID: engine}); err == nil || !strings.Contains(err.Error(), "subject_transform") {
			t.Errorf("engine %q is %+v, %v", engine, a, err)
		}
	}
	js, err := jetstream.New(connAs(t, c.URL(), operator))
	if err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteStream(ctxOf(t, within), stream); err != nil {
		t.Fatal(err)
	}
	rankStream(t, connAs(t, c.URL(), operator))
	if _, err := js.Publish(ctxOf(t, within), key, value); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if a, _, err := decode.Lookup(ctxOf(t, within), core.Target{EngineID: "sglang-dp0"}); err != nil || shortName(a.ID) != "TE" {
			t.Errorf("in the right stream it is %+v, %v", a, err)
		}
	}
	l := decode.homeLink()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.right != l.session {
		t.Error("the stream's settings are looked at for each look-up")
	}
}
