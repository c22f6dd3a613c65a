package attack

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Of 256 descriptors a quarter are for streams, 64 at most of one decode agent.
const (
	descriptors  = 256
	streamsOfAll = descriptors / 4
)

// streamsKept are streams that the attacker keeps open at a prefill engine.
type streamsKept struct {
	from   string       // the attacker's address
	opened atomic.Int64 // ever
	away   atomic.Int64 // sent away: prefill has no place for one more stream
}

// keep opens a stream with a ticket, and does not close it. If prefill ends the stream, keep opens another one.
func (k *streamsKept) keep(ctx context.Context, port string, ticket []byte, number uint64) {
	from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(k.from)}, Timeout: bound}
	for attempt := uint64(1); ctx.Err() == nil; attempt++ {
		if c, err := from.DialContext(ctx, "tcp", "127.0.0.1:"+port); err == nil {
			end := context.AfterFunc(ctx, func() { _ = c.Close() })
			if _, err := c.Write(streamHello(ticket, attempt, number)); err == nil {
				k.opened.Add(1)
				var head [8]byte
				if _, err := io.ReadFull(c, head[:]); err == nil && binary.BigEndian.Uint32(head[4:]) == frameLeave {
					k.away.Add(1)
				}
				_, _ = io.Copy(io.Discard, c)
			}
			end()
			_ = c.Close()
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond): // the attack's own pace
		}
	}
}

// TestAllStreams: decode agents of the attacker's open as many streams as prefill has places for: one agent all of them, from the
// address of honest engines, or many agents one each, from another address. They load nothing, and take each place again that they
// lose. New decode engines were sent away. Now they get in.
func TestAllStreams(t *testing.T) {
	inEachDeployment(t, func(s *scenario) {
		limited := exec.Command("sh", "-c", fmt.Sprintf(`ulimit -n %d && exec "$0"`, descriptors), os.Args[0])
		p := s.startAs(limited, "", "prefill", nil)
		for _, of := range []struct {
			agents, each int
			from         string
		}{{1, streamsOfAll, "127.0.0.1"}, {streamsOfAll, 1, elsewhere}} {
			ctx, over := context.WithCancel(s.Context())
			kept := &streamsKept{from: of.from}
			var wg sync.WaitGroup
			var tickets [][]byte
			port := ""
			for range of.agents + 1 { // one agent more, with one stream: when one is sent away, all places are taken
				r, got := s.met(p)
				_, port, _ = net.SplitHostPort(r.at.Endpoints[0].Address)
				tickets = append(tickets, got[0].Ticket)
			}
			for i, ticket := range tickets {
				each := of.each
				if i == of.agents {
					each = 1
				}
				for number := range each {
					wg.Go(func() { kept.keep(ctx, port, ticket, uint64(number)) })
				}
			}
			for deadline := time.Now().Add(bound); kept.away.Load() == 0 && time.Now().Before(deadline); {
				time.Sleep(time.Millisecond)
			}
			if kept.away.Load() == 0 {
				s.Errorf("%d agents have not taken all places: the attack itself has failed", of.agents)
			}
			h := s.newcomers(p, fmt.Sprint("new", of.agents, "-"), 6)
			over()
			wg.Wait()
			got(s, "6 of 6 new decode engines out within 5 ms (at 1a5364a)", "%d agents opened %d streams for %d places, %d were sent away, %s",
				of.agents, kept.opened.Load(), streamsOfAll, kept.away.Load(), h.went(s))
		}
	})
}
