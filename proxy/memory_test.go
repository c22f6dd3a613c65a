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
	// Connections that are closing have their memory a moment longer, and what others in this process have may grow once. If the router
	// kept 700 bytes for each request, the heap would grow by 1 MiB with 1500 of them, and by twice that with each 3000 more.
	said := []uint64{heap()}
	for n := 0; ; n++ {
		before := said[n]
		serve(1500 * min(n+1, 2))
		after := heap()
		for end := time.Now().Add(patience); after > before+1<<20 && time.Now().Before(end); after = heap() {
			time.Sleep(10 * time.Millisecond)
		}
		if said = append(said, after); after <= before+1<<20 {
			break
		}
		if n == 2 {
			t.Fatalf("the heap has so many bytes after 300 requests, 1500 more, and twice 3000 more: %d", said)
		}
	}
}
