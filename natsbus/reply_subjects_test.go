package natsbus

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// Who hears a message may answer it (allow_responses), at whatever subject its sender has named, and nats-server
// publishes JetStream's answers and those of honest agents there too.

// opened is a registry's stream that would keep what agents say, as STREAM.UPDATE takes it.
var opened = fmt.Appendf(nil, `{"name":%q,"description":"kvconn: prefill ranks","subjects":["$KV.kvconn_ranks.>","kvconn.v1.agent.>","_R_.>"],"retention":"limits",
	"storage":"memory","discard":"new","duplicate_window":120000000000,"max_consumers":-1,"max_msgs":-1,"max_bytes":-1,"max_msgs_per_subject":1,"max_msg_size":-1,
	"num_replicas":1,"allow_direct":true,"deny_delete":true,"allow_msg_ttl":true,"allow_rollup_hdrs":true,"subject_delete_marker_ttl":10000000000}`, stream)

// refusedAt says whether what was sent last was refused, and for that subject.
func refusedAt(t testing.TB, nc *nats.Conn, subj string) bool {
	t.Helper()
	return refused(t, nc) && strings.Contains(nc.LastError().Error(), strconv.Quote(subj))
}

// primes has one user say to another of the same role, or to itself, that the answer is wanted at some subject. The
// one that heard it publishes there. Neither may.
func probesReplySubject(t testing.TB, url string, from, to user, at string, opts ...nats.Option) {
	t.Helper()
	says, hears := connAs(t, url, from, opts...), connAs(t, url, to, opts...)
	defer says.Close()
	defer hears.Close()
	ear, err := hears.SubscribeSync(agentRoot + to.key + ".*.>")
	if err != nil || refused(t, hears) {
		t.Fatalf("a user cannot hear itself: %v, %v", err, hears.LastError())
	}
	where := agentRoot + to.key + ".a." + from.key + ".b"
	if err := says.PublishRequest(where, at, nil); err != nil {
		t.Fatal(err)
	}
	if !refusedAt(t, says, where) {
		t.Errorf("a user says at %s that it wants the answer at %s", where, at)
		if _, err := ear.NextMsg(within); err != nil {
			t.Errorf("and is not heard: %v", err)
		}
	}
	if err := hears.Publish(at, nil); err != nil {
		t.Fatal(err)
	}
	if !refusedAt(t, hears, at) {
		t.Errorf("a user publishes to %s", at)
	}
}

// edited is a configuration with some texts of one of its accounts replaced.
func edited(t testing.TB, file, account string, oldnew ...string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, _ := strings.Cut(string(text), "\n  "+account+" {")
	own, after, ok := strings.Cut(rest, "\n  }\n")
	for i := 0; i < len(oldnew); i += 2 {
		ok = ok && strings.Contains(own, oldnew[i])
	}
	if !ok {
		t.Fatalf("the configuration is another one: %s", text)
	}
	conf := before + "\n  " + account + " {" + strings.NewReplacer(oldnew...).Replace(own) + "\n  }\n" + after
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
}

// narrowed has a prefill engine create nothing.
func narrowed(t testing.TB, file string, u user) {
	t.Helper()
	edited(t, file, "KVCONN_"+u.key, "            \"$JS.API.STREAM.CREATE."+stream+"\"\n", "",
		"      { service: { account: KVCONN_REGISTRY, subject: \"$JS.API.STREAM.CREATE."+stream+"\" } }\n", "")
}

// operated lets the operator into the registry's account.
func operated(t testing.TB, file string, operator user) {
	t.Helper()
	edited(t, file, "KVCONN_REGISTRY", "jetstream: enabled\n", "jetstream: enabled\n    users: [ { nkey: "+operator.key+" } ]\n")
}

// rankStream is the registry as the operator makes it.
func rankStream(t testing.TB, nc *nats.Conn) jetstream.Stream {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.CreateStream(ctxOf(t, within), jetstream.StreamConfig{Name: stream, Subjects: []string{subtree + ">"}, MaxMsgsPerSubject: 1, AllowDirect: true, AllowMsgTTL: true})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestAnswersOfUsers: with examples/nats/kvconn.conf nobody speaks in another's name, writes another's entry or changes
// the registry by the subjects that messages name for their answers. The attackers are a decode engine's user, a
// prefill engine's that is held to its own entries, and both together.
func TestAnswersOfUsers(t *testing.T) {
	leaktest.Check(t)
	operator, up, up2, up3, ud, ue, ue2 := newUser(t), newUser(t), newUser(t), newUser(t), newUser(t), newUser(t), newUser(t)
	file := nettest.ClusterOf(t, []string{up.key, up2.key, up3.key}, []string{ud.key, ue.key, ue2.key})
	operated(t, file, operator)
	narrowed(t, file, up2)
	narrowed(t, file, up3)
	c := nettest.NewNATS(t, "-c", file)
	registry := rankStream(t, connAs(t, c.URL(), operator))
	var mu sync.Mutex
	heard := map[string][]string{} // by agent: who spoke to it
	bus := func(u user, name, prefix string) *Bus {
		b := newBus(t, Options{Identity: u.named(t, name), ClusterURL: c.URL(), Seed: u.seed, JSPrefix: prefix, TTL: time.Hour})
		b.Serve(func(_ core.Via, req *wire.Request) *wire.Reply {
			mu.Lock()
			defer mu.Unlock()
			heard[name] = append(heard[name], shortName(req.From))
			return &wire.Reply{Reason: name + " via : hello " + shortName(req.From)}
		})
		return b
	}
	prefill, d := bus(up, "AP", ""), bus(ud, "AD", registryPrefix)
	register(t, prefill, up.engine("e"))
	p, victim, entry := prefill.opt.Identity.ID(), d.opt.Identity.ID(), clusterKey(up.engine("e"), 0, 0)
	others := []string{
		subject(p, victim), subject(victim, p), inboxOf(victim) + ".1", inboxOf(p) + ".1", entry, subtree + "eZZ.0.0",
		"$JS.API.STREAM.UPDATE." + stream, "$JS.API.STREAM.DELETE." + stream, "$JS.API.STREAM.CREATE.OTHER", "$JS.API.CONSUMER.CREATE." + stream, "$SYS.REQ.SERVER.PING",
	}
	for _, pair := range [][2]user{{ue, ue}, {ue, ue2}, {ue2, ue}, {up2, up2}, {up2, up3}} {
		for _, at := range others {
			probesReplySubject(t, c.URL(), pair[0], pair[1], at)
		}
	}

	ofP, ofE := connAs(t, c.URL(), up2), connAs(t, c.URL(), ue)
	asked, asks := agentRoot+ue.key+".a."+up2.key+".b", agentRoot+up2.key+".b."+ue.key+".a"
	earP, err := ofP.SubscribeSync(asks)
	if err != nil {
		t.Fatal(err)
	}
	earE, err := ofE.SubscribeSync(asked)
	if err != nil {
		t.Fatal(err)
	}
	if refused(t, ofP) || refused(t, ofE) {
		t.Fatal(ofP.LastError(), ofE.LastError())
	}
	data, err := hello("AD").MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	// together has one attacker ask the other, with a subject of others' for the answer. The answer says what it may not, and where it wants its own.
	together := func(says, hears *nats.Conn, ear *nats.Subscription, subj, at, reply string, payload []byte) {
		t.Helper()
		if err := says.PublishRequest(subj, at, nil); err != nil {
			t.Fatal(err)
		}
		m, err := ear.NextMsg(within)
		if err != nil {
			t.Fatalf("one attacker does not hear the other: %v, %v", err, says.LastError())
		}
		if err := hears.PublishRequest(m.Reply, reply, payload); err != nil {
			t.Fatal(err)
		}
		if refused(t, hears) {
			t.Fatalf("an attacker may not answer: %v", hears.LastError())
		}
	}
	boxP, boxE, own := inboxRoot+up2.key+".box.x", inboxRoot+ue.key+".box.x", clusterKey(up2.engine("f"), 0, 0)
	for _, at := range others {
		for _, payload := range [][]byte{data, opened} {
			together(ofP, ofE, earE, asked, at, boxE, payload)
			together(ofE, ofP, earP, asks, at, boxP, payload)
		}
	}
	// What JetStream and an honest agent answer is brought to the subject too.
	write := func(payload []byte) {
		t.Helper()
		if m, err := ofP.RequestWithContext(ctxOf(t, within), own, payload); err != nil || strings.Contains(string(m.Data), `"error"`) {
			t.Fatalf("a prefill engine cannot write its own entry: %+v, %v", m, err)
		}
	}
	info, get := "$JS.API.STREAM.INFO."+stream, "$JS.API.DIRECT.GET."+stream+"."+own
	for _, payload := range [][]byte{data, opened} {
		write(payload)
		for _, subj := range []string{"$JS.API.INFO", info, get, subject(victim, core.AgentID(up2.key+"-a"))} {
			for _, at := range others {
				if err := ofP.PublishRequest(subj, at, nil); err != nil {
					t.Fatal(err)
				}
			}
			if m, err := ofP.RequestWithContext(ctxOf(t, within), subj, nil); err != nil { // behind the others
				t.Fatalf("%s: %+v, %v", subj, m, err)
			}
		}
	}
	// So is what a message's trace says.
	traces := connAs(t, c.URL(), up2)
	for _, at := range others {
		m := nats.NewMsg(own)
		m.Header.Set("Nats-Trace-Dest", at)
		m.Data = data
		if err := traces.PublishMsg(m); err != nil {
			t.Fatal(err)
		}
	}
	if err := traces.FlushTimeout(within); err != nil {
		t.Fatal(err)
	}
	write(data) // behind what was written before
	if refused(t, ofP) || refused(t, ofE) {
		t.Error(ofP.LastError(), ofE.LastError())
	}

	if got := entryOf(t, prefill, entry); !strings.HasPrefix(got, "AP as ") {
		t.Errorf("the registry has %s", got)
	}
	keys, err := prefill.homeLink().list(ctxOf(t, within), subtree+">", 4)
	if err != nil || len(keys) != 2 || !slices.Contains(keys, entry) || !slices.Contains(keys, own) {
		t.Errorf("the registry has %v, %v", keys, err)
	}
	if st, err := registry.Info(ctxOf(t, within)); err != nil || !slices.Equal(st.Config.Subjects, []string{subtree + ">"}) {
		t.Errorf("the registry's stream is %+v, %v", st, err)
	}
	ask(t, d, "", "AP", "AP via : hello AD") // both hear it behind the others
	ask(t, prefill, "", "AD", "AD via : hello AP")
	mu.Lock()
	defer mu.Unlock()
	for name, peer := range map[string]string{"AP": "AD", "AD": "AP"} {
		if got := slices.DeleteFunc(heard[name], func(from string) bool { return from != peer }); len(got) != 1 {
			t.Errorf("%s was asked by %s %d times, and once by itself", name, peer, len(got))
		}
	}
}

// TestEnginesOfBothRoles: engines of role "both" have the account of a prefill engine with a line for each other one.
// Each asks and answers the others, and speaks for itself only.
func TestEnginesOfBothRoles(t *testing.T) {
	leaktest.Check(t)
	ua, ub, attacker := newUser(t), newUser(t), newUser(t)
	all := []string{ua.key, ub.key, attacker.key}
	c := nettest.NewNATS(t, "-c", nettest.ClusterOf(t, all, all))
	var buses []*Bus
	for name, u := range map[string]user{"BA": ua, "BB": ub} {
		b := newBus(t, Options{Identity: u.named(t, name), ClusterURL: c.URL(), Seed: u.seed, TTL: time.Hour})
		serve(b)
		register(t, b, u.engine(name))
		buses = append(buses, b)
	}
	for i, b := range buses {
		self, other := shortName(b.opt.Identity.ID()), shortName(buses[1-i].opt.Identity.ID())
		if a, _, err := b.Lookup(ctxOf(t, within), core.Target{EngineID: map[string]user{"BA": ua, "BB": ub}[other].engine(other)}); err != nil || shortName(a.ID) != other {
			t.Errorf("%s finds %+v, %v", self, a, err)
		}
		ask(t, b, "", core.AgentID(other), other+" via : hello "+self)
	}
	a, b := buses[0].opt.Identity.ID(), buses[1].opt.Identity.ID()
	for _, at := range []string{subject(a, b), subject(b, a), inboxOf(a) + ".1", "$JS.API.STREAM.UPDATE." + stream} {
		probesReplySubject(t, c.URL(), attacker, attacker, at)
		nc := connAs(t, c.URL(), attacker)
		if err := nc.PublishRequest(at, inboxRoot+attacker.key+".box.x", nil); err != nil || !refusedAt(t, nc, at) {
			t.Errorf("it says something at %s: %v", at, err)
		}
	}
}
