package attack

import (
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

const (
	natsRoot     = "$KV.kvconn_ranks."
	natsEntry    = natsRoot + "e"
	natsStream   = "KV_kvconn_ranks"
	natsRegistry = "kvconn.v1.registry" // where examples/nats/kvconn.conf has it for decode engines
)

// natsKey is a user of a NATS server.
type natsKey struct {
	nkeys.KeyPair
	public, file string
}

func newNATSKey(t testing.TB) natsKey {
	t.Helper()
	key, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	seed, _ := key.Seed()
	k := natsKey{KeyPair: key, file: filepath.Join(t.TempDir(), "seed")}
	k.public, _ = key.PublicKey()
	if err := os.WriteFile(k.file, seed, 0o600); err != nil {
		t.Fatal(err)
	}
	return k
}

// engine is an engine id of that user's.
func (k natsKey) engine(name string) string { return k.public + "-" + name }

// at is a victim's configuration at a NATS server.
func (k natsKey) at(c *nettest.NATSServer, role string) map[string]any {
	cfg := map[string]any{"role": role, "nats_url": c.URL(), "nats_nkey_seed_file": k.file}
	if role == "decode" {
		cfg["nats_js_prefix"] = natsRegistry
	} else {
		cfg["advertise_host"], cfg["engine_id"] = "127.0.0.1", k.engine("p0")
	}
	return cfg
}

// client is the attacker's connection to a NATS server.
func client(t testing.TB, c *nettest.NATSServer, opts ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(c.URL(), append(opts, nats.NoReconnect(), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// barred says whether the server refuses what was just sent.
func barred(t testing.TB, nc *nats.Conn) bool {
	t.Helper()
	if err := nc.FlushTimeout(2 * bound); err != nil {
		t.Fatal(err)
	}
	return errors.Is(nc.LastError(), nats.ErrPermissionViolation)
}

// spoken is an agent's id as a part of a subject.
func spoken(id string) string { return strings.Replace(id, "-", ".", 1) }

// entryAt is the key of an engine.
func entryAt(engine string) string {
	if owner := engine[:min(len(engine), 56)]; nkeys.IsValidPublicUserKey(owner) {
		return natsRoot + owner + ".e" + base64.RawURLEncoding.EncodeToString([]byte(engine[56:])) + ".0.0"
	}
	return natsEntry + base64.RawURLEncoding.EncodeToString([]byte(engine)) + ".0.0"
}

// TestStrangerAtANATSServer: somebody who reaches the NATS server of a deployment, with no
// credential, a forged one, or the key of another decode engine. The server has the users of
// examples/nats/kvconn.conf. Nobody enters without a key of the deployment. With the other decode
// engine's it asks in its own name, and can do nothing else.
func TestStrangerAtANATSServer(t *testing.T) {
	up, ud, ue, unknown := newNATSKey(t), newNATSKey(t), newNATSKey(t), newNATSKey(t)
	c := nettest.NewNATS(t, "-c", nettest.ClusterUsers(t, up.public, ud.public, ue.public))
	for what, opt := range map[string]nats.Option{
		"no credential":        nats.Name("unknown"),
		"an unknown key":       nats.Nkey(unknown.public, unknown.Sign),
		"prefill's public key": nats.Nkey(up.public, unknown.Sign),
		"a token":              nats.Token(ud.public),
	} {
		if nc, err := nats.Connect(c.URL(), opt, nats.NoReconnect()); !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("with %s it gets in: %v", what, err)
			nc.Close()
		}
	}
	p := start(t, up.at(c, "prefill"))
	d := start(t, ud.at(c, "decode"))
	calm := before(t, p, d)
	mine := ue.public + ".EVIL"
	box := "_INBOX." + mine
	enter := func() *nats.Conn { return client(t, c, nats.Nkey(ue.public, ue.Sign), nats.CustomInboxPrefix(box)) }
	nc := enter()
	data, err := aHello().MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	read := func() *wire.Agent {
		t.Helper()
		m, err := nc.Request(natsRegistry+".DIRECT.GET."+natsStream+"."+entryAt(p.names), nil, bound)
		if err != nil {
			t.Fatal(err)
		}
		a := new(wire.Agent)
		if err := wire.Decode(m.Data, a); err != nil {
			t.Fatal(err)
		}
		return a
	}
	if a := read(); a.ID != p.id {
		t.Fatalf("prefill's entry is of %s", a.ID)
	}

	h, listens, says := &honest{}, 0, 0
	load := func() { h.load(t, p, d, fmt.Sprint("beside", h.all)) }
	for _, subject := range []string{ // what others are asked and answered
		"kvconn.v1.agent." + spoken(p.id) + ".>", "kvconn.v1.agent." + spoken(d.id) + ".>", "kvconn.v1.agent.*.*.*.*", "kvconn.v1.join.>", "kvconn.>",
		"_INBOX." + spoken(p.id) + ".>", "_INBOX." + spoken(d.id) + ".>", "_INBOX.>", "_R_.>", "$KV.>", "$JS.API.>", "$SYS.>", ">",
	} {
		for _, queue := range []string{"", "agent"} {
			nc := enter()
			if _, err := nc.QueueSubscribe(subject, queue, func(*nats.Msg) { t.Error("it hears what is for others") }); err != nil {
				t.Fatal(err)
			}
			if listens++; !barred(t, nc) {
				t.Errorf("it listens at %s", subject)
			}
		}
		load()
	}
	publish := []string{ // in another's name, in another's place
		"kvconn.v1.agent." + spoken(p.id) + "." + spoken(d.id), "kvconn.v1.agent." + spoken(d.id) + "." + spoken(p.id), "kvconn.v1.agent." + spoken(p.id) + ".x", "kvconn.v1.join." + mine,
		"_INBOX." + spoken(d.id) + ".x", "_INBOX." + spoken(p.id) + ".x", entryAt(p.names), natsEntry + "ZZ.0.0", "$JS.API.INFO", "$JS.API.STREAM.NAMES", "$SYS.REQ.SERVER.PING",
	}
	apis := []string{"STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE", "STREAM.MSG.GET", "STREAM.SNAPSHOT", "STREAM.RESTORE", "CONSUMER.CREATE", "CONSUMER.NAMES"}
	for _, api := range apis {
		publish = append(publish, "$JS.API."+api+"."+natsStream)
	}
	for _, subject := range publish {
		nc := enter()
		if err := nc.PublishRequest(subject, box+".x", data); err != nil {
			t.Fatal(err)
		}
		if says++; !barred(t, nc) {
			t.Errorf("it says something at %s", subject)
		}
		load()
	}
	// Who hears a message may answer it: it has one sent to itself that wants its answer at others' subjects.
	for _, subject := range publish {
		nc := enter()
		if _, err := nc.SubscribeSync("kvconn.v1.agent." + ue.public + ".*.>"); err != nil {
			t.Fatal(err)
		}
		for _, say := range [][2]string{{"kvconn.v1.agent." + mine + "." + mine, subject}, {subject, box + ".x"}} {
			if err := nc.PublishRequest(say[0], say[1], data); err != nil {
				t.Fatal(err)
			}
			if says++; !barred(t, nc) || !strings.Contains(nc.LastError().Error(), strconv.Quote(say[0])) {
				t.Errorf("it says something at %s, and wants the answer at %s", say[0], say[1])
			}
		}
		load()
	}
	for _, api := range apis { // its account has no JetStream, and imports two subjects
		if m, err := nc.Request(natsRegistry+"."+api+"."+natsStream, []byte("{}"), bound); !errors.Is(err, nats.ErrNoResponders) {
			t.Errorf("it asks for %s: %+v, %v", api, m, err)
		}
	}
	// It asks in its own name, and names others' subjects for the answers.
	for _, reply := range []string{entryAt(p.names), natsEntry + "ZZ.0.0", "_INBOX." + spoken(d.id) + ".x", "kvconn.v1.agent." + spoken(d.id) + "." + mine} {
		for _, subject := range []string{"kvconn.v1.agent." + spoken(p.id) + "." + mine, natsRegistry + ".STREAM.INFO." + natsStream, natsRegistry + ".DIRECT.GET." + natsStream + "." + entryAt(p.names)} {
			if err := nc.PublishRequest(subject, reply, data); err != nil {
				t.Fatal(err)
			}
		}
		load()
	}
	if m, err := nc.Request("kvconn.v1.agent."+spoken(p.id)+"."+mine, data, bound); err != nil || wire.Decode(m.Data, new(wire.Reply)) != nil || !strings.Contains(string(m.Data), "sealed messages only") {
		t.Errorf("its own hello, plain: %+v, %v", m, err)
	}
	if rep, err := sealedHello(t, c, ue, p.id); err != nil || rep.Code != 0 || len(rep.Tickets) != 1 {
		t.Errorf("its own hello: %+v, %v", rep, err)
	}
	if barred(t, nc) {
		t.Error(nc.LastError())
	}
	if a := read(); a.ID != p.id {
		t.Errorf("prefill's entry is of %s", a.ID)
	}
	if l := transfer(t, p, start(t, ud.at(c, "decode")), "after"); l.Code != "ok" {
		t.Errorf("a new decode engine: %+v", l)
	}
	got(t, "not tried; README's permissions let each user hear, ask and answer as any other",
		"0 of %d subjects heard, 0 of %d said, no entry written, %s", listens, says, h.comparedWith(t, calm))
}

// TestTokenHolderAtANATSServer: where a NATS server asks for one token, all who have it are one
// user. One of them writes over prefill's entry, purges the registry and deletes it. Agents that
// have met go on, and new ones find prefill again when it renews its entry, at most 10 s later.
func TestTokenHolderAtANATSServer(t *testing.T) {
	c := nettest.NewNATS(t, "--auth", "right")
	for what, opt := range map[string]nats.Option{"no token": nats.Name("unknown"), "another token": nats.Token("wrong")} {
		if nc, err := nats.Connect(c.URL(), opt, nats.NoReconnect()); !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("with %s it gets in: %v", what, err)
			nc.Close()
		}
	}
	cfg := func(role string) map[string]any {
		return map[string]any{"role": role, "nats_url": c.URL(), "nats_token": "right", "advertise_host": "127.0.0.1"}
	}
	p := start(t, cfg("prefill"))
	d := start(t, cfg("decode"))
	calm := before(t, p, d)
	nc := client(t, c, nats.Token("right"))
	h, worst := &honest{}, time.Duration(0)
	for _, attack := range [][][2]string{{{entryAt(p.names), "garbage"}}, {{"$JS.API.STREAM.PURGE." + natsStream, "{}"}, {"$JS.API.STREAM.DELETE." + natsStream, "{}"}}} {
		for _, say := range attack {
			if m, err := nc.Request(say[0], []byte(say[1]), bound); err != nil || strings.Contains(string(m.Data), `"error"`) {
				t.Fatalf("%s: %+v, %v", say[0], m, err)
			}
		}
		began := time.Now()
		fresh := start(t, cfg("decode"))
		for i := 0; ; i++ {
			h.load(t, p, d, fmt.Sprint("beside", h.all))
			l := transfer(t, p, fresh, fmt.Sprint("fresh", i, "-", h.all))
			if l.Code == "ok" {
				break
			}
			if time.Since(began) > 2*bound {
				t.Fatalf("%v after %q a new decode engine gets %+v", time.Since(began), attack, l)
			}
			time.Sleep(200 * time.Millisecond) // a poll of another process's state
		}
		worst = max(worst, time.Since(began))
	}
	got(t, "one entry that cannot be read: no new decode engine until prefill's restart", "a new decode engine loads %.1f s later, %s", worst.Seconds(), h.comparedWith(t, calm))
}
