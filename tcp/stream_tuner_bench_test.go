package tcp

import (
	"fmt"
	"io"
	"net"
	"runtime/pprof"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
)

// slack is how late a narrow link may be, as on a busy machine, and yet keep its rate.
const slack = 250 * time.Millisecond

// narrow is a link of a fixed rate for all its connections together.
type narrow struct {
	net.Listener
	rate float64 // bytes a second
	mu   sync.Mutex
	free time.Time // when the bytes so far have gone
}

func newNarrow(b *testing.B, to string, rate float64) *narrow {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	w := &narrow{Listener: l, rate: rate}
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				near.Close()
				continue
			}
			go func() { // D's bytes
				defer far.Close()
				_, _ = io.Copy(far, near)
			}()
			go w.carry(near, far)
		}
	}()
	return w
}

// carry takes P's bytes to D.
func (w *narrow) carry(d, p net.Conn) {
	defer d.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := p.Read(buf)
		if err != nil {
			return
		}
		w.mu.Lock()
		if now := time.Now(); w.free.Before(now.Add(-slack)) {
			w.free = now.Add(-slack)
		}
		w.free = w.free.Add(time.Duration(float64(n) / w.rate * float64(time.Second)))
		ahead := time.Until(w.free)
		w.mu.Unlock()
		time.Sleep(ahead)
		if _, err := d.Write(buf[:n]); err != nil {
			return
		}
	}
}

// state is what an agent knows of a peer's streams and transfers, and what its goroutines do.
func (a *agent) state(peer core.AgentID) string {
	s, out := &a.sender, &strings.Builder{}
	s.mu.Lock()
	p := s.peers[peer]
	fmt.Fprintf(out, "%d transfers of %d are in the queue; asks: %v; %+v\n", len(p.queue), len(p.byGrant), p.asks, p.tuner)
	for _, o := range p.byGrant {
		fmt.Fprintf(out, "%s: %d bytes left, %d frames under way, waits by %+v\n", o.id, o.left, o.frames, o.wait)
	}
	var streams []*outStream
	for i := range p.slots {
		if st := p.slots[i].stream; st != nil {
			streams = append(streams, st)
			fmt.Fprintf(out, "stream %d: in use: %v, shut: %v, stalled: %v, named stuck: %v\n", i, p.uses(st), st.shut, st.stalled, p.stuck == st)
		}
	}
	s.mu.Unlock()
	for _, st := range streams {
		fmt.Fprintf(out, "stream %d: %+v\n", st.number, st.info())
	}
	_ = pprof.Lookup("goroutine").WriteTo(out, 2) // into memory: no error
	return out.String()
}

// BenchmarkSlowLink is transfers over a link that one stream fills: how many streams are found, in the end and at most.
func BenchmarkSlowLink(b *testing.B) {
	for _, rate := range []float64{50e6} {
		b.Run(fmt.Sprintf("%.0f MB/s", rate/1e6), func(b *testing.B) {
			const ahead = 2
			p, d := newSizedAgent(b, Config{}, testBlocks, testBlock), newSizedAgent(b, Config{}, testBlocks, testBlock)
			link := newNarrow(b, p.Endpoint(), rate)
			if err := d.Connect("p", link.Addr().String(), p.admit(b, "d")); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(testBlocks * testBlock)
			most, found := 0, 0
			ends := func(i int) {
				id := core.TransferID(fmt.Sprint(i))
				late := time.AfterFunc(bound-5*time.Second, func() { b.Log(p.state("d")) }) // Wait fails soon after
				defer late.Stop()
				if o := p.sink.Wait("written", id, 1); o.Err != nil {
					b.Fatal(o.Err)
				}
				p.sender.mu.Lock()
				found = p.sender.peers["d"].tuner.found
				p.sender.mu.Unlock()
				most = max(most, found)
			}
			n := 0
			for ; b.Loop(); n++ {
				id := core.TransferID(fmt.Sprint(n))
				grant := d.expect(b, id, "p", allBlocks(testBlocks))
				pairs, err := p.layout.Plan(allBlocks(testBlocks), p.layout.Shapes(), allBlocks(testBlocks))
				if err != nil {
					b.Fatal(err)
				}
				p.Write(core.WriteOp{ID: id, Peer: "d", Grant: grant[:], Pairs: pairs})
				if n >= ahead {
					ends(n - ahead)
				}
			}
			for i := max(0, n-ahead); i < n; i++ {
				ends(i)
			}
			b.ReportMetric(float64(found), "streams-found")
			b.ReportMetric(float64(most), "streams-at-most")
		})
	}
}
