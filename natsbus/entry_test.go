package natsbus

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// entryFor is the message by which an agent writes its entry, which ends after some time.
func entryFor(t testing.TB, i *Identity, a *wire.Agent, ends time.Duration) *nats.Msg {
	t.Helper()
	value, err := a.MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	m := nats.NewMsg(clusterKey(a.EngineID, a.TPRank, a.PPRank))
	m.Data = value
	m.Header.Set(sinceHeader, strconv.FormatInt(time.Now().UnixNano(), 10))
	i.signEntry(m, time.Now().Add(ends))
	return m
}

// TestEntryOfAnotherEngine: a user that may write the whole registry, as with the file of earlier releases, writes its own agent
// under the engine id of another's nkey, in every way that it can. Nobody takes that for the engine's, and the engine writes over
// it. No renewal comes by itself here.
func TestEntryOfAnotherEngine(t *testing.T) {
	leaktest.Check(t)
	up, attacker, ud := newUser(t), newUser(t), newUser(t)
	c := nettest.NewNATS(t, "-c", nettest.EarlierClusterOf(t, []string{up.key, attacker.key}, []string{ud.key}))
	log, logs := observed()
	prefill := newBus(t, Options{Identity: up.named(t, "EP"), ClusterURL: c.URL(), Seed: up.seed, TTL: time.Hour, Logger: log})
	decode := newBus(t, Options{Identity: ud.named(t, "ED"), ClusterURL: c.URL(), Seed: ud.seed, JSPrefix: registryPrefix})
	engine := up.engine("e")
	register(t, prefill, engine)
	nc := connAs(t, c.URL(), attacker)
	me, his := attacker.named(t, "EE"), prefill.opt.Identity
	foreign := agent(string(me.ID()), engine)
	own := entryFor(t, his, agent(string(his.ID()), engine), time.Hour) // as the registry shows it to all
	find := func() (*wire.Agent, error) {
		a, _, err := decode.Lookup(ctxOf(t, within), core.Target{EngineID: engine})
		return a, err
	}
	forged := map[string]func(m *nats.Msg){
		"unsigned":            func(m *nats.Msg) { m.Header.Del(signatureHeader) },
		"signed by another":   func(*nats.Msg) {},
		"with his signature":  func(m *nats.Msg) { m.Header = own.Header },
		"a garbled signature": func(m *nats.Msg) { m.Header.Set(signatureHeader, "?") },
		"his, with another end": func(m *nats.Msg) {
			m.Data = own.Data
			m.Header = headerWith(own.Header, endsHeader, "9000000000000000000")
		},
		"his, later": func(m *nats.Msg) {
			m.Data = own.Data
			m.Header = headerWith(own.Header, sinceHeader, "9000000000000000000")
		},
		"his, of another rank": func(m *nats.Msg) {
			m.Data, m.Header = entryFor(t, his, &wire.Agent{Version: wire.Version, ID: string(his.ID()), EngineID: engine, TPRank: 1}, time.Hour).Data, own.Header
		},
		"his signed pointer to another's agent": func(m *nats.Msg) { *m = *entryFor(t, his, foreign, time.Hour) },
	}
	for what, forge := range forged {
		m := entryFor(t, me, foreign, time.Hour)
		forge(m)
		if ack, err := nc.RequestMsgWithContext(ctxOf(t, within), m); err != nil || strings.Contains(string(ack.Data), `"error"`) {
			t.Fatalf("%s: %+v, %v: the attack itself has failed", what, ack, err)
		}
		a, err := find()
		if err == nil || !strings.Contains(err.Error(), engine) {
			t.Errorf("%s: decode takes %+v, %v", what, a, err)
		}
		prefill.renewNow()
		eventually(t, "the engine's own entry", func() error {
			a, err := find()
			if err == nil && a.ID != string(his.ID()) {
				t.Fatalf("%s: decode takes %+v", what, a)
			}
			return err
		})
	}
	if n := logs.FilterMessageSnippet("could not be renewed").Len(); n != 0 {
		t.Errorf("%d renewals failed: %v", n, logs.All())
	}
	// Nor does it register there by the rules, or under the old key of that engine id.
	b := newBus(t, Options{Identity: me, ClusterURL: c.URL(), Seed: attacker.seed})
	if err := b.Register(ctxOf(t, within), foreign); err == nil || !strings.Contains(err.Error(), attacker.engine("e")) {
		t.Errorf("it registers as another's engine: %v", err)
	}
	m := entryFor(t, me, foreign, time.Hour)
	m.Subject = rankKey(engine, 0, 0)
	if _, err := nc.RequestMsgWithContext(ctxOf(t, within), m); err != nil {
		t.Fatal(err)
	}
	for _, named := range []string{engine, ""} {
		if a, _, err := decode.Lookup(ctxOf(t, within), core.Target{EngineID: named}); err != nil || a.ID != string(his.ID()) {
			t.Errorf("under the flat key: %+v, %v", a, err)
		}
	}
}

func headerWith(h nats.Header, name, value string) nats.Header {
	out := nats.Header{}
	for k, v := range h {
		out[k] = v
	}
	out.Set(name, value)
	return out
}

// TestEntriesEnd: an entry that its engine has signed long ago, and that somebody writes again, is as none: decode is told that
// the engine is not registered, nobody is accused, and the engine itself takes its place back without a word.
func TestEntriesEnd(t *testing.T) {
	leaktest.Check(t)
	up, attacker, ud := newUser(t), newUser(t), newUser(t)
	c := nettest.NewNATS(t, "-c", nettest.EarlierClusterOf(t, []string{up.key, attacker.key}, []string{ud.key}))
	log, logs := observed()
	prefill := newBus(t, Options{Identity: up.named(t, "OP"), ClusterURL: c.URL(), Seed: up.seed, TTL: time.Hour, Logger: log})
	decode := newBus(t, Options{Identity: ud.named(t, "OD"), ClusterURL: c.URL(), Seed: ud.seed, JSPrefix: registryPrefix, Logger: log})
	engine := up.engine("e")
	register(t, prefill, engine)
	before := up.named(t, "OB") // the agent before this one
	old := entryFor(t, before, agent(string(before.ID()), engine), -time.Second)
	if ack, err := connAs(t, c.URL(), attacker).RequestMsgWithContext(ctxOf(t, within), old); err != nil || strings.Contains(string(ack.Data), `"error"`) {
		t.Fatalf("%+v, %v", ack, err)
	}
	a, _, err := decode.Lookup(ctxOf(t, within), core.Target{EngineID: engine})
	if !errors.Is(err, core.ErrNotRegistered) || !strings.Contains(err.Error(), "ended") || !strings.Contains(err.Error(), "clock") {
		t.Errorf("an entry that has ended: %+v, %v", a, err)
	}
	prefill.renewNow()
	eventually(t, "the engine's own entry", func() error {
		a, _, err := decode.Lookup(ctxOf(t, within), core.Target{EngineID: engine})
		if err == nil && a.ID != string(prefill.opt.Identity.ID()) {
			err = fmt.Errorf("it is agent %s", shortName(a.ID))
		}
		return err
	})
	for _, e := range logs.All() {
		if e.Level.String() != "debug" {
			t.Errorf("the log says: %s", e.Message)
		}
	}
}

// TestEntryOfTheServer: where the NATS server writes an entry itself, from a schedule or another stream, nobody takes it, also not
// for an engine whose id begins with no nkey.
func TestEntryOfTheServer(t *testing.T) {
	value, err := agent("Z", "e").MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	for header, taken := range map[string]bool{"Nats-Scheduler": false, "Nats-Stream-Source": false, "Nats-TTL": true} {
		h := nats.Header{}
		h.Set(header, "x")
		if r, err := recordOf(1, h, value, rankKey("e", 0, 0)); (r.agent != nil) != taken || taken != (err == nil) || !taken && (!unreadable(err) || !strings.Contains(err.Error(), header)) {
			t.Errorf("%s: %+v, %v", header, r, err)
		}
	}
}

// TestEngineOwners: which engine ids are whose, and under which keys they stand.
func TestEngineOwners(t *testing.T) {
	u := newUser(t)
	for _, c := range []struct{ engine, key string }{
		{"e", subtree + "eZQ.1.2"},
		{"", subtree + "e.1.2"},
		{u.key, subtree + u.key + ".e.1.2"},
		{u.key + "-p", subtree + u.key + ".eLXA.1.2"},
		{u.key + "_dp0", subtree + u.key + ".eX2RwMA.1.2"},
		{"x" + u.key, ""},
		{u.key[:55] + "1", ""},
		{strings.ToLower(u.key), ""},
		{"UAAABHF5", ""}, // nkeys takes this for a key, and passes over line ends
		{"UAAABHF5" + strings.Repeat("\n", nkeyChars-len("UAAABHF5")), ""},
		{u.key[:20] + "\n" + u.key[20:], ""},
	} {
		got := clusterKey(c.engine, 1, 2)
		if c.key == "" {
			c.key = rankKey(c.engine, 1, 2)
		}
		if got != c.key {
			t.Errorf("%q stands under %s, want %s", c.engine, got, c.key)
		}
		if name := fmt.Sprintf("%q rank 1.2", c.engine); keyName(got) != name {
			t.Errorf("%s is called %s, want %s", got, keyName(got), name)
		}
		if p := portLink.rankKey(c.engine, 1, 2); p != rankKey(c.engine, 1, 2) {
			t.Errorf("at a port %q stands under %s", c.engine, p)
		}
	}
	for what, i := range map[string]*Identity{"no key": NewIdentity(), "another key": keyedIdentity(t)} {
		if err := i.mayName(clusterKey(u.engine("e"), 0, 0), u.engine("e")); err == nil || !strings.Contains(err.Error(), u.key) {
			t.Errorf("with %s an agent may be %q: %v", what, u.engine("e"), err)
		}
		if err := i.mayName(clusterKey("e", 0, 0), "e"); err != nil {
			t.Errorf("with %s an agent may not be engine e: %v", what, err)
		}
	}
}

// TestFreeIDsAreOne: to an agent with an nkey all ids of none are one owner, in the places of opens, of long requests and of
// sessions. Keys have their own. An agent without an nkey tells ids apart.
func TestFreeIDsAreOne(t *testing.T) {
	keyed, free, other := keyedIdentity(t), NewIdentity(), keyedIdentity(t)
	waits := newSessionless(keyed.ownerIn)
	message := func(from core.AgentID) *inboundRequest { return &inboundRequest{from: from, m: &nats.Msg{}} }
	for i := range maxSessionlessOf + 1 {
		if taken := waits.put(message(core.AgentID(fmt.Sprint("free", i)))) == nil; taken != (i < maxSessionlessOf) {
			t.Fatalf("message %d of free ids: %v", i, taken)
		}
	}
	if waits.put(message(other.ID())) != nil {
		t.Error("free ids keep a key out")
	}
	waits.close()
	if waits.len() != 0 || waits.put(message("free")) != nil {
		t.Errorf("after close %d messages wait, and free ids count as if theirs did", waits.len())
	}
	q := newLongQueue(time.Hour, keyed.ownerIn)
	for i := range maxLongRequests {
		q.put(askedFor(core.AgentID(fmt.Sprint("free", i)), 1))
	}
	if dropped, _ := q.put(askedFor(other.ID(), 2)); dropped != 1 || q.of[ownerOf(other.ID())].requests != 1 || len(q.of) != 2 {
		t.Errorf("beside free ids a key's request: %d dropped, %v", dropped, q.of)
	}
	q = newLongQueue(time.Hour, keyed.ownerIn)
	const mib = maxLongBytes / 16
	q.put(askedFor("free", 3*mib)) // free ids have the most bytes, but no two requests
	for range 6 {
		key := keyedIdentity(t).ID()
		q.put(askedFor(key, mib))
		q.put(askedFor(key, mib))
	}
	newcomer := keyedIdentity(t).ID()
	if dropped, _ := q.put(askedFor(newcomer, 4*mib)); dropped != 3 || q.of[ownerOf(newcomer)].requests != 1 {
		t.Errorf("a key of which nothing waits: %d dropped, %v", dropped, q.of)
	}
	for _, c := range []struct {
		self, one, two *Identity
		same           bool
	}{{keyed, free, NewIdentity(), true}, {keyed, other, keyedIdentity(t), false}, {keyed, free, other, false}, {NewIdentity(), free, NewIdentity(), false}} {
		_, a := established(t, c.one, c.self)
		_, b := established(t, c.two, c.self)
		if same := a.key == b.key; same != c.same {
			t.Errorf("sessions of %s and %s are of one key: %v", c.one.ID(), c.two.ID(), same)
		}
	}
}

// TestEngineThatMayNot: an engine whose engine_id the permissions file does not let it have is told so, by its name.
func TestEngineThatMayNot(t *testing.T) {
	leaktest.Check(t)
	up, ud := newUser(t), newUser(t)
	c := nettest.NewNATS(t, "-c", nettest.ClusterUsers(t, up.key, ud.key))
	b := newBus(t, Options{Identity: up.named(t, "MP"), ClusterURL: c.URL(), Seed: up.seed})
	err := b.Register(ctxOf(t, within), agent(string(b.opt.Identity.ID()), "plain"))
	if err == nil || !strings.Contains(err.Error(), "engine_id") || !strings.Contains(err.Error(), up.engine("plain")) {
		t.Errorf("it registers: %v", err)
	}
}
