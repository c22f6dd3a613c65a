package natsbus

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

// registryPrefix is where examples/nats/kvconn.conf puts the registry for decode engines.
const registryPrefix = "kvconn.v1.registry"

// user is an nkey of a cluster.
type user struct{ seed, key string }

func newUser(t testing.TB) user {
	t.Helper()
	seed, key := newNKey(t)
	return user{seed, key}
}

// engine is an engine id of that user's.
func (u user) engine(name string) string { return u.key + "-" + name }

// agent is an identity of that user's, under a name of the test.
func (u user) named(t testing.TB, name string) *Identity {
	t.Helper()
	i, err := NewKeyedIdentity(u.seed)
	if err != nil {
		t.Fatal(err)
	}
	names.Lock()
	defer names.Unlock()
	if names.byName == nil {
		names.byName, names.byID = map[string]*Identity{}, map[core.AgentID]string{}
	}
	names.byName[name], names.byID[i.ID()] = i, name
	return i
}

// connAs is a client with a user's key that says what it likes.
func connAs(t testing.TB, url string, u user, opts ...nats.Option) *nats.Conn {
	t.Helper()
	key, err := nkeys.FromSeed([]byte(u.seed))
	if err != nil {
		t.Fatal(err)
	}
	nc, err := nats.Connect(url, append(opts, nats.Nkey(u.key, key.Sign), nats.CustomInboxPrefix(inboxRoot+u.key+".box"), nats.NoReconnect(),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// refused says whether the server took offence at what was just sent.
func refused(t testing.TB, nc *nats.Conn) bool {
	t.Helper()
	if err := nc.FlushTimeout(within); err != nil {
		t.Fatal(err)
	}
	return errors.Is(nc.LastError(), nats.ErrPermissionViolation)
}

// TestAttacksOnACluster: a decode engine with a key of its own attacks the others in a
// cluster of three servers, by TLS, whose users are those of examples/nats/kvconn.conf.
func TestAttacksOnACluster(t *testing.T) {
	leaktest.Check(t)
	ca := nettest.NewAuthority(t)
	cert, key := ca.Issue(time.Now().Add(time.Hour), "127.0.0.1")
	up, ud, ue := newUser(t), newUser(t), newUser(t)
	c := nettest.NewNATSTrio(t, "-c", nettest.ClusterUsers(t, up.key, ud.key, ue.key), "--tls", "--tlscert", cert, "--tlskey", key)
	urls := strings.ReplaceAll(c.URLs(), "nats://", "tls://")
	log, logs := observed()
	bus := func(u user, name string) *Bus {
		opt := Options{Identity: u.named(t, name), ClusterURL: urls, Seed: u.seed, TLS: ca.Client(), Logger: log, TTL: 30 * time.Second}
		if u != up {
			opt.JSPrefix = registryPrefix
		}
		b := newBus(t, opt)
		serve(b)
		return b
	}
	prefill := bus(up, "CP")
	if err := prefill.Register(ctxOf(t, nettest.ElectionBound), agent(string(prefill.opt.Identity.ID()), up.engine("e"))); err != nil {
		t.Fatal(err)
	}
	works := func(name string) *Bus {
		t.Helper()
		d := bus(ud, name)
		for _, engine := range []string{up.engine("e"), ""} {
			if a, _, err := d.Lookup(ctxOf(t, nettest.ElectionBound), core.Target{EngineID: engine}); err != nil || shortName(a.ID) != "CP" {
				t.Fatalf("%+v, %v", a, err)
			}
		}
		ask(t, d, "", "CP", "CP via : hello "+name)
		ask(t, prefill, "", core.AgentID(name), name+" via : hello CP")
		return d
	}
	d := works("CD1")
	if n := logs.FilterMessageSnippet("ermissions").Len(); n != 0 {
		t.Fatalf("permissions are missing: %v", logs.All())
	}
	// An agent that is gone is known to be gone at once.
	gone := up.named(t, "CX")
	_, err := d.Request(ctxOf(t, within), "", gone.ID(), hello("CX"))
	mustBe(t, err, core.ErrAbsent)

	p, victim := prefill.opt.Identity.ID(), d.opt.Identity.ID()
	me := ue.named(t, "CE").ID()
	secure := nats.Secure(ca.Client())
	box := inboxOf(me) + ".1"
	entry := clusterKey(up.engine("e"), 0, 0)
	for _, subj := range []string{
		subject(p, ">"), subject(victim, ">"), agentRoot + ">", agentRoot + "*.*.*.*", agentRoot + "*.*." + tokens(me), joinRoot + ">",
		inboxRoot + ">", inboxOf(victim) + ".>", inboxOf(p) + ".>", importedReply + ">", "$KV.>", subtree + ">", "$JS.>", "$SYS.>", ">",
	} {
		for _, queue := range []string{"", "agent"} {
			nc := connAs(t, urls, ue, secure)
			if _, err := nc.QueueSubscribe(subj, queue, func(*nats.Msg) {}); err != nil {
				t.Fatal(err)
			}
			if !refused(t, nc) {
				t.Errorf("a decode engine listens at %s", subj)
			}
			nc.Close()
		}
	}
	publish := []string{
		subject(p, victim), subject(victim, p), subject(p, "x"), subject(p, core.AgentID(string(me)+".x")), agentRoot + tokens(p) + ".a." + tokens(me),
		entry, subtree + "eZZ.0.0", subtree + up.key + ".eZZ.0.0", inboxOf(victim) + ".1", inboxOf(p) + ".1", "$JS.API.INFO", "$SYS.REQ.SERVER.PING",
	}
	var forwarded []string // it may say so, and nobody hears it
	for _, api := range []string{"STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE", "STREAM.MSG.GET", "STREAM.SNAPSHOT", "STREAM.LEADER.STEPDOWN", "STREAM.PEER.REMOVE", "CONSUMER.CREATE", "CONSUMER.LIST"} {
		publish = append(publish, "$JS.API."+api+"."+stream)
		forwarded = append(forwarded, registryPrefix+"."+api+"."+stream)
	}
	for _, subj := range publish {
		nc := connAs(t, urls, ue, secure)
		if err := nc.PublishRequest(subj, box, []byte("x")); err != nil {
			t.Fatal(err)
		}
		if !refused(t, nc) {
			t.Errorf("a decode engine publishes to %s", subj)
		}
		nc.Close()
	}
	for _, at := range publish { // nor does it get there by a message that wants its answer there
		probesReplySubject(t, urls, ue, ue, at, secure)
	}
	nc := connAs(t, urls, ue, secure)
	for _, subj := range forwarded {
		if _, err := nc.RequestWithContext(ctxOf(t, within), subj, []byte("{}")); !errors.Is(err, nats.ErrNoResponders) {
			t.Errorf("a decode engine asks for %s: %v", subj, err)
		}
	}
	// It names a subject of the registry for the answer.
	before := entryOf(t, prefill, entry)
	data, err := hello("CE").MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{entry, subtree + "eZZ.0.0"} {
		for _, subj := range []string{subject(p, me), registryPrefix + ".STREAM.INFO." + stream, registryPrefix + ".DIRECT.GET." + stream + "." + entry} {
			for range 3 {
				if err := nc.PublishRequest(subj, at, data); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if _, err := nc.RequestWithContext(ctxOf(t, within), subject(p, me), data); err != nil {
		t.Errorf("its own query: %v", err)
	}
	if refused(t, nc) {
		t.Error(nc.LastError())
	}
	if after := entryOf(t, prefill, entry); after != before {
		t.Errorf("the registry's entry was %s, and is %s", before, after)
	}
	keys, err := prefill.homeLink().list(ctxOf(t, within), subtree+">", 2)
	if err != nil || !slices.Equal(keys, []string{entry}) {
		t.Errorf("the registry has %v, %v", keys, err)
	}
	works("CD2")
}

// entryOf is what the registry has under a key.
func entryOf(t testing.TB, b *Bus, key string) string {
	t.Helper()
	r, err := b.homeLink().read(ctxOf(t, within), key)
	if err != nil || r.agent == nil {
		return fmt.Sprint("nothing: ", err)
	}
	return fmt.Sprint(shortName(r.agent.ID), " as ", r.seq)
}

// TestUnknownAgentInACluster: without a key, with another's public key, or with an unknown one
// nobody enters.
func TestUnknownAgentInACluster(t *testing.T) {
	leaktest.Check(t)
	up, ud, unknown := newUser(t), newUser(t), newUser(t)
	c := nettest.NewNATS(t, "-c", nettest.ClusterUsers(t, up.key, ud.key))
	for what, opt := range map[string]Options{
		"no key":      {},
		"a token":     {Token: ud.key},
		"unknown key": {Seed: unknown.seed},
	} {
		opt.Identity, opt.ClusterURL, opt.ConnectTimeout, opt.Logger = NewIdentity(), c.URL(), within, zap.NewNop()
		b, err := Open(opt)
		if err == nil {
			closeBus(t, b)
			t.Errorf("%s: it is let in", what)
			continue
		}
		mustBe(t, err, core.ErrUnreachable)
	}
	_, err := nats.Connect(c.URL(), nats.Nkey(up.key, func([]byte) ([]byte, error) { return make([]byte, 64), nil }), nats.NoReconnect())
	if !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("another's public key: %v", err)
	}
}

// TestAnswersElsewhere: without permissions, as in a cluster that only asks for a token, an
// agent still answers to its requester only.
func TestAnswersElsewhere(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATS(t, "--auth", "right")
	prefill := newBus(t, Options{Identity: named("P"), ClusterURL: c.URL(), Token: "right"})
	serve(prefill)
	register(t, prefill, "e")
	nc, err := nats.Connect(c.URL(), nats.Token("right"), nats.NoReconnect())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	p, me, entry := named("P").ID(), named("E").ID(), rankKey("e", 0, 0)
	data, err := hello("E").MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	subscriptions, err := nc.SubscribeSync("elsewhere.>")
	if err != nil {
		t.Fatal(err)
	}
	for _, reply := range []string{entry, "elsewhere.1", inboxOf(p) + ".1", inboxOf(me)} {
		if err := nc.PublishRequest(subject(p, me), reply, data); err != nil {
			t.Fatal(err)
		}
	}
	for _, subj := range []string{agentRoot + string(p) + ".a.b.c", agentRoot + string(p) + ".a-b", agentRoot + string(p) + ".a$"} { // no sender
		if err := nc.PublishRequest(subj, "elsewhere.2", data); err != nil {
			t.Fatal(err)
		}
	}
	mine := inboxOf(me) + ".1"
	answer, err := nc.SubscribeSync(mine)
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.PublishRequest(subject(p, me), mine, data); err != nil { // behind the others
		t.Fatal(err)
	}
	if _, err := answer.NextMsg(within); err != nil {
		t.Errorf("its own query: %v", err)
	}
	if n, _, err := subscriptions.Pending(); n != 0 || err != nil {
		t.Errorf("%d answers elsewhere, %v", n, err)
	}
	if got := entryOf(t, prefill, entry); !strings.HasPrefix(got, "P as 1") {
		t.Errorf("the registry has %s", got)
	}
}
