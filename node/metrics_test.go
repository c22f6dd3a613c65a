package node

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

func scrape(t *testing.T, a *side) []byte {
	t.Helper()
	resp, err := http.Get(a.BootstrapAddress() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	page, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%v, %v: %s", resp.Status, err, page)
	}
	return page
}

func TestMetrics(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	p.fill(1, 4, 5)
	p.offer("a", 4, 5)
	d.load("a", p.BootstrapAddress(), 8, 9)
	d.want("a", core.OK)
	p.want("a", core.OK)
	p.offer("b", 6)
	if _, err := p.Cancel([]core.TransferID{"b"}, "test"); err != nil {
		t.Fatal(err)
	}
	p.want("b", core.Cancelled)
	page := scrape(t, p)
	rank := `dp_rank="0",engine_id="engine-prefill",pp_rank="0",`
	for _, want := range []string{
		"kvconn_offers_total{" + rank + `result="ok",tp_rank="0"} 1`,
		"kvconn_offers_total{" + rank + `result="cancelled",tp_rank="0"} 1`,
		`kvconn_calls_total{call="offer",` + rank + `tp_rank="0"} 2`,
		`kvconn_bytes_total{direction="out",` + rank + fmt.Sprintf(`tp_rank="0",transport="local"} %d`, 2*layers*blockBytes),
		`kvconn_bytes_total{direction="out",` + rank + `tp_rank="0",transport="tcp"} 0`,
		`kvconn_transport_available{` + rank + `tp_rank="0",transport="local"} 1`,
		`kvconn_transport_available{` + rank + `tp_rank="0",transport="tcp"} 1`,
		"kvconn_transfer_seconds_count{" + rank + `side="offer",tp_rank="0"} 1`,
		`kvconn_under_way{` + rank + `side="offer",state="known",tp_rank="0"} 0`,
	} {
		if !strings.Contains(string(page), want+"\n") {
			t.Errorf("the page lacks %s:\n%s", want, page)
		}
	}
	problems, err := promlint.New(bytes.NewReader(page)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
}

// TestMetricsOfACluster: the page counts the messages over a NATS cluster that were not taken. One of an agent's own server
// has none of them.
func TestMetricsOfACluster(t *testing.T) {
	leaktest.Check(t)
	if page := scrape(t, open(t, testConfig(RolePrefill))); bytes.Contains(page, []byte("kvconn_cluster_refused_total")) {
		t.Errorf("without a cluster: %s", page)
	}
	c := testConfig(RolePrefill)
	c.NATSURL, c.AdvertiseHost = nettest.NewNATS(t).URL(), "127.0.0.1"
	p := open(t, c)
	for _, reason := range []string{"plain", "version", "forged", "repeated", "foreign", "unknown", "queue_full", "invalid"} {
		want := fmt.Sprintf(`kvconn_cluster_refused_total{dp_rank="0",engine_id="engine-prefill",pp_rank="0",reason=%q,tp_rank="0"} 0`, reason)
		if page := scrape(t, p); !strings.Contains(string(page), want+"\n") {
			t.Errorf("the page lacks %s:\n%s", want, page)
		}
	}
	nc, err := nats.Connect(c.NATSURL, nats.NoReconnect())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if err := nc.PublishRequest("kvconn.v1.agent."+string(p.ID())+".S", "_INBOX.S.1", []byte("plain")); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	until(t, "the message is counted", func() bool { return p.Stats().ClusterRefused["plain"] == 1 })
}

// The page may be asked for before there is anything, and an agent may have none.
func TestMetricsOfNothing(t *testing.T) {
	leaktest.Check(t)
	m := newAgent(testConfig(RolePrefill), Options{}, natsbus.NewIdentity()).completions.metrics
	if _, err := m.registry.Gather(); err != nil {
		t.Errorf("before memory is registered: %v", err)
	}
	var none *metrics
	none.observe(core.Report{})
}
