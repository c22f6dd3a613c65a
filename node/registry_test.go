package node

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// TestRegistryOfAnotherVersion: somebody has written an engine's entry in a cluster's registry. A
// load from that engine fails with what is wrong with the entry, and the agent that it names hears
// nothing. The engine itself writes over the entry when it comes: then loads go.
func TestRegistryOfAnotherVersion(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATS(t)
	nc, err := nats.Connect(c.URL(), nats.NoReconnect())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	heard, err := nc.SubscribeSync("kvconn.v1.agent.UNKNOWN.>")
	if err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "kvconn_ranks", Storage: jetstream.MemoryStorage, LimitMarkerTTL: 10 * time.Second}); err != nil {
		t.Fatal(err)
	}
	a := &wire.Agent{Version: wire.Version + 1, ID: "UNKNOWN", EngineID: "p", TPSize: 1, PPSize: 1, Endpoints: []wire.Endpoint{{Transport: "tcp", Address: "127.0.0.1:1"}}}
	for l := range layers { // but for its version it fits
		a.Shapes = append(a.Shapes, wire.Shape{Name: fmt.Sprint("layer.", l), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks})
	}
	other, err := a.MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg := testConfig(RoleDecode)
	cfg.NATSURL, cfg.ConnectTimeout = c.URL(), Seconds(bound)
	d := open(t, cfg)
	load := func(id core.TransferID) core.Report {
		t.Helper()
		from := core.Target{Bootstrap: "http://127.0.0.1:1", EngineID: "p", DPRank: -1}
		if _, err := d.StartLoad([]core.LoadRequest{{ID: id, From: from, Selection: kv.Selection{Blocks: [][]kv.BlockID{{1}}}}}); err != nil {
			t.Fatal(err)
		}
		return d.report(id)
	}
	for i, e := range []struct {
		value []byte
		says  string
	}{
		{other, fmt.Sprintf("wire version %d at the prefill engine, %d at the decode engine", wire.Version+1, wire.Version)},
		{[]byte("garbage"), `the entry of "p" rank 0.0: malformed`},
		{other[:len(other)-1], `the entry of "p" rank 0.0: malformed`},
		{make([]byte, 900<<10), `the entry of "p" rank 0.0: malformed`},
		{other, "wire version"}, // stays until the engine comes
	} {
		m := nats.NewMsg("$KV.kvconn_ranks.e" + base64.RawURLEncoding.EncodeToString([]byte("p")) + ".0.0")
		m.Data = e.value
		m.Header.Set("Kvconn-Since", "9223372036854775807")
		if i == 4 {
			m.Header.Del("Kvconn-Since") // as one that is older
		}
		if _, err := js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		if r := load(core.TransferID(fmt.Sprint("t", i))); r.Code == core.OK || !strings.Contains(r.Reason, e.says) {
			t.Errorf("entry %d: %v, %q, want %q in it", i, r.Code, r.Reason, e.says)
		}
	}
	if err := nc.FlushTimeout(bound); err != nil {
		t.Fatal(err)
	}
	if n, _, err := heard.Pending(); n != 0 || err != nil {
		t.Errorf("the agent of the entry hears %d messages, %v", n, err)
	}
	pc := testConfig(RolePrefill)
	pc.NATSURL, pc.EngineID, pc.AdvertiseHost, pc.ConnectTimeout = c.URL(), "p", "127.0.0.1", Seconds(bound)
	p := open(t, pc)
	p.fill(3, 5)
	p.offer("well", 5)
	if r := load("well"); r.Code != core.OK {
		t.Errorf("with the engine's own entry: %+v", r)
	}
	p.want("well", core.OK)
}
