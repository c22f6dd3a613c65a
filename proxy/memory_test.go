package proxy

import (
	"runtime"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// Requests leave nothing behind: after a thousand and more of all kinds the heap is as
// large as after some hundred. bench-proxy --requests shows it for more of them.
func TestMemoryIsFlat(t *testing.T) {
	leaktest.Check(t)
	r, p1, p2, d1, d2 := twoOfEach(t, 2, status(500, "dead"), stream(`{"choices":[]}`, `{"choices":[]}`, "[DONE]"))
	serve := func(requests int) {
		for i := range requests {
			body := `{"prompt":"x","stream":true}`
			if i%8 == 0 {
				body = `{`
			}
			r.post(t, body)
			for _, e := range []*engine{p1, p2, d1, d2} {
				for len(e.calls) > 0 {
					<-e.calls
				}
			}
		}
		eventually(t, "no request is under way", func() bool { return len(r.Proxy.places) == 0 })
	}
	heap := func() uint64 {
		r.Server.Client().CloseIdleConnections()
		r.Proxy.client.CloseIdleConnections()
		runtime.GC()
		runtime.GC() // the first empties sync.Pools into their victims
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	serve(300)
	before := heap()
	serve(1500)
	// Connections that are closing have their memory a moment longer. If the router kept 700 bytes for each request, they
	// would stay.
	var after uint64
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if after = heap(); after <= before+1<<20 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the heap has %d bytes after 300 requests and %d after 1500 more", before, after)
		}
	}
}
