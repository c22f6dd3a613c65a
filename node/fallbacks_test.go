package node

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestFallbacksOnThePage: a pair whose local link is lost goes on by tcp. The page counts that load as one that did not take local,
// and no other, and each byte by its transport and way. When the pair is back on local the count stays.
func TestFallbacksOnThePage(t *testing.T) {
	leaktest.Check(t)
	p, _, _ := withLocal(t, RolePrefill)
	d, near, _ := withLocal(t, RoleBoth) // a decode agent that has a page
	const one = layers * blockBytes
	shows := func(when string, local, tcp, failed, fallbacks int) {
		t.Helper()
		page, rank := string(scrape(t, d)), `dp_rank="0",engine_id="engine-both",pp_rank="0",`
		for _, want := range []string{
			`kvconn_fallbacks_total{` + rank + fmt.Sprintf(`reason="lost",tp_rank="0",transport="local"} %d`, fallbacks),
			`kvconn_fallbacks_total{` + rank + `reason="lost",tp_rank="0",transport="tcp"} 0`,
			`kvconn_transport_available{` + rank + `tp_rank="0",transport="local"} 1`,
			`kvconn_bytes_total{direction="in",` + rank + fmt.Sprintf(`tp_rank="0",transport="local"} %d`, local*one),
			`kvconn_bytes_total{direction="in",` + rank + fmt.Sprintf(`tp_rank="0",transport="tcp"} %d`, tcp*one),
			`kvconn_transport_counters{counter="bytes_by_process_vm_readv",` + rank + fmt.Sprintf(`tp_rank="0",transport="local"} %d`, local*one),
			`kvconn_transport_counters{counter="bytes_by_mapping",` + rank + `tp_rank="0",transport="local"} 0`,
			`kvconn_transport_counters{counter="bytes_by_device",` + rank + `tp_rank="0",transport="local"} 0`,
			`kvconn_transport_counters{counter="bytes_past_caches",` + rank + `tp_rank="0",transport="local"} 0`,
			`kvconn_transport_counters{counter="peers_memory_mapped_bytes",` + rank + `tp_rank="0",transport="local"} 0`,
			`kvconn_transport_counters{counter="own_memory_shared_bytes",` + rank + `tp_rank="0",transport="local"} 0`,
			`kvconn_loads_total{` + rank + fmt.Sprintf(`result="ok",tp_rank="0"} %d`, local+tcp),
		} {
			if !strings.Contains(page, want+"\n") {
				t.Errorf("%s the page lacks %s:\n%s", when, want, page)
			}
		}
		if n := strings.Count(page, "\nkvconn_fallbacks_total{"); n != len(d.Stats().Transports)*len(core.Whys()) {
			t.Errorf("%s the page has %d lines of fallbacks, want one for each transport and each of %v:\n%s", when, n, core.Whys(), page)
		}
		lost := `kvconn_loads_total{` + rank + `result="` + core.PeerLost.String() + `",tp_rank="0"} `
		if got := strings.Contains(page, lost+fmt.Sprintln(failed)); got != (failed > 0) {
			t.Errorf("%s the page should have %s%d:\n%s", when, lost, failed, page)
		}
	}
	goes := func(id core.TransferID, by string) {
		t.Helper()
		clear(d.cache)
		transfer(t, p, d, id, p.BootstrapAddress())
		if r := d.seen[id]; r.Transport != by {
			t.Fatalf("%q went by %q, want %q", id, r.Transport, by)
		}
	}
	goes("first", viaLocal)
	shows("at first", 1, 0, 0, 0)
	announce(t, p, "waits")
	d.load("waits", p.BootstrapAddress(), 9)
	until(t, "the load waits at prefill", func() bool { return d.Stats().LoadsWaiting == 1 })
	cutSockets(t, socketsOfLocal(t, false))
	d.want("waits", core.PeerLost, "connection lost")
	goes("second", viaTCP)
	shows("after the link is lost", 1, 1, 1, 1)
	usable(t, near, p.ID())
	goes("third", viaLocal)
	shows("when the pair is back", 2, 1, 1, 1)
	if s := d.Stats(); len(s.Pairs) != 1 || s.Pairs[0].How != "process_vm_readv" || s.Pairs[0].Transport != viaLocal || s.Pairs[0].Reason != "" {
		t.Errorf("decode counts %+v", s.Pairs)
	}
}
