package attack

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// TestPagesWithoutEnd: a host that a client has named has no rank of the engine that is looked for, and lists
// others, a million on each page, of more pages than there is memory for. Decode asked for one page after the other
// and kept them all. Now it asks for one, and keeps the names that an error has room for.
func TestPagesWithoutEnd(t *testing.T) {
	p := start(t, map[string]any{"role": "prefill"})
	d := start(t, map[string]any{"role": "decode"})
	calm := before(t, p, d)
	e := newHostilePrefill(t)
	var pages, reads atomic.Int64
	e.registry = func(l *hostileLink, subject, reply string) bool {
		if !strings.Contains(subject, ".STREAM.INFO.") {
			reads.Add(1)
			l.send(reply, "Status: 404\r\nDescription: Message Not Found\r\n", nil)
			return true
		}
		var page strings.Builder
		page.WriteString(`{"type":"io.nats.jetstream.api.v1.stream_info_response","total":1099511627776,"offset":0,"limit":100000,"config":{"name":"KV_kvconn_ranks","subjects":["$KV.kvconn_ranks.>"],"allow_direct":true},"state":{"messages":1,"subjects":{"a":1`)
		for n, i := pages.Add(1), 0; page.Len() < 7<<20; i++ {
			fmt.Fprintf(&page, `,"%x.%x":1`, n, i)
		}
		page.WriteString("}}}")
		l.send(reply, "", []byte(page.String()))
		return true
	}
	const looked = 5 // one load, and four beside it that look for other engines
	for i := range looked {
		d.say("load paged%d 10 2 %s e%d", i, e.boot, i)
	}
	h := &honest{}
	for deadline := time.Now().Add(bound); h.all < loadsBefore || pages.Load() < looked && time.Now().Before(deadline); {
		h.load(t, p, d, honestID(h.all))
	}
	for i := range looked {
		if l := d.report(fmt.Sprint("paged", i)); l.Code == "ok" || len(l.Reason) > 8<<10 {
			t.Errorf("a load from it: %+v", l)
		}
	}
	d.peak = d.mib("VmHWM")
	if asked := pages.Load(); asked == 0 {
		t.Error("nobody asked for a page: the attack itself has failed")
	}
	got(t, "417 MiB by a load, 1,041 MiB by four claims (at 1a5364a)", "%d pages and %d entries asked for, start_load at most %.2f ms, %s, %s", pages.Load(), reads.Load(), d.slowest, h.comparedWith(t, calm), d.growth(t))
	settle(t, p, d)
}
