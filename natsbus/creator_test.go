package natsbus

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/internal/leaktest"
	"github.com/kvconn/kvconn/internal/nettest"
)

// TestRegistryOfAnIntruder: a user of a cluster that may create the registry's stream creates it
// before others do, so that it keeps what agents say to each other, or says it again. No engine
// registers there. Other settings are the operator's to choose.
func TestRegistryOfAnIntruder(t *testing.T) {
	leaktest.Check(t)
	up := newUser(t)
	c := nettest.NewNATS(t, "-c", nettest.ClusterUsers(t, up.key))
	prefill := newBus(t, Options{Identity: up.named(t, "CP"), ClusterURL: c.URL(), Seed: up.seed, TTL: within})
	for _, r := range []struct{ settings, says string }{
		{`"subjects":["$KV.kvconn_ranks.>","kvconn.v1.agent.>","_INBOX.>","_R_.>"],"no_ack":true`, "kvconn.v1.agent.>"},
		{`"subjects":["$KV.kvconn_ranks.>"],"republish":{"src":">","dest":"kvconn.v1.agent.x.>"}`, "kvconn.v1.agent.x.>"},
		{`"subjects":["$KV.kvconn_ranks.>"],"subject_transform":{"src":"$KV.kvconn_ranks.>","dest":"$KV.other.>"}`, "$KV.other.>"},
		{`"subjects":["$KV.kvconn_ranks.>"],"max_bytes":1000000`, ""},
	} {
		m, err := intruder(t, c.URL(), up).RequestWithContext(ctxOf(t, within), "$JS.API.STREAM.CREATE."+stream, fmt.Appendf(nil,
			`{"name":%q,"storage":"memory","max_msgs_per_subject":1,"allow_direct":true,"allow_msg_ttl":true,"allow_rollup_hdrs":true,"subject_delete_marker_ttl":10000000000,"num_replicas":1,%s}`, stream, r.settings))
		if err != nil || strings.Contains(string(m.Data), `"error"`) {
			t.Fatalf("%s: %q, %v", r.settings, m.Data, err)
		}
		err = prefill.Register(ctxOf(t, within), agent(string(prefill.opt.Identity.ID()), "e"))
		if r.says == "" && err != nil || r.says != "" && (err == nil || !strings.Contains(err.Error(), r.says)) {
			t.Errorf("%s: %v, want %q in it", r.settings, err, r.says)
		}
		c.Kill() // its memory is gone, with the stream
		c.Start()
	}
}

// TestNarrowRights: a prefill engine whose key may write its own entries only, and create nothing,
// registers in a stream that the operator has made. It cannot take another engine's place.
func TestNarrowRights(t *testing.T) {
	leaktest.Check(t)
	up, operator := newUser(t), newUser(t)
	file := nettest.ClusterUsers(t, up.key)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	conf := strings.NewReplacer(`"$KV.kvconn_ranks.>", "$JS.API.INFO", "$JS.API.STREAM.CREATE.KV_kvconn_ranks",`, `"$KV.kvconn_ranks.eZQ.>", "$JS.API.INFO",`,
		"    users: [\n      { nkey: "+up.key, "    users: [\n      { nkey: "+operator.key+" }\n      { nkey: "+up.key).Replace(string(text))
	if strings.Contains(conf, `"$JS.API.STREAM.CREATE`) || !strings.Contains(conf, operator.key) {
		t.Fatalf("the configuration is another one: %s", conf)
	}
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	c := nettest.NewNATS(t, "-c", file)
	if _, err := intruder(t, c.URL(), up).Request("$JS.API.STREAM.CREATE."+stream, []byte("{}"), 200*time.Millisecond); err == nil {
		t.Fatal("a prefill engine creates the stream")
	}
	js, err := jetstream.New(intruder(t, c.URL(), operator))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(ctxOf(t, within), jetstream.StreamConfig{Name: stream, Subjects: []string{subtree + ">"}, MaxMsgsPerSubject: 1,
		AllowDirect: true, AllowMsgTTL: true, AllowRollup: true, SubjectDeleteMarkerTTL: markerTTL}); err != nil {
		t.Fatal(err)
	}
	prefill := newBus(t, Options{Identity: up.named(t, "CP"), ClusterURL: c.URL(), Seed: up.seed, TTL: within})
	register(t, prefill, "e")
	nc := intruder(t, c.URL(), up)
	if err := nc.Publish(rankKey("f", 0, 0), nil); err != nil || !refused(t, nc) {
		t.Errorf("it writes the entry of another engine: %v", err)
	}
}
