package attack

import (
	"context"
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

// open are the descriptors that a victim has.
func (v *victim) open() int {
	v.t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", v.cmd.Process.Pid))
	if err != nil {
		v.t.Fatal(err)
	}
	return len(list)
}

// keepStream keeps a stream with a ticket open, from an address that no honest engine has. If prefill ends it, it opens another one.
func (s *scene) keepStream(ctx context.Context, port string, ticket []byte, number uint64, opened *atomic.Int64) {
	from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(elsewhere)}, Timeout: bound}
	for attempt := uint64(1); ctx.Err() == nil; attempt++ {
		if c, err := from.DialContext(ctx, "tcp", "127.0.0.1:"+port); err == nil {
			end := context.AfterFunc(ctx, func() { _ = c.Close() })
			if _, err := c.Write(streamHello(ticket, attempt, number)); err == nil {
				opened.Add(1)
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

// TestAllStreams: decode agents of the attacker's open as many streams as prefill has places for, one agent all of them, or many
// agents one each. They load nothing, and take each place again that they lose. New decode engines were sent away. Now they get in.
func TestAllStreams(t *testing.T) {
	everywhere(t, func(s *scene) {
		limited := exec.Command("sh", "-c", fmt.Sprintf(`ulimit -n %d && exec "$0"`, descriptors), os.Args[0])
		p := s.startAs(limited, "", "prefill", nil)
		calm := s.newcomers(p, "early", 5)
		for _, of := range []struct{ agents, each int }{{1, streamsOfAll}, {streamsOfAll, 1}} {
			ctx, over := context.WithCancel(s.Context())
			var opened atomic.Int64
			var wg sync.WaitGroup
			var tickets [][]byte
			port := ""
			for range of.agents {
				r, got := s.met(p)
				_, port, _ = net.SplitHostPort(r.at.Endpoints[0].Address)
				tickets = append(tickets, got[0].Ticket)
			}
			before := p.open()
			for _, ticket := range tickets {
				for number := range of.each {
					wg.Go(func() { s.keepStream(ctx, port, ticket, uint64(number), &opened) })
				}
			}
			for deadline := time.Now().Add(bound); p.open() < before+streamsOfAll && time.Now().Before(deadline); {
				time.Sleep(time.Millisecond) // a poll of another process's state
			}
			if n := p.open() - before; n < streamsOfAll {
				s.Errorf("%d streams of %d agents are open: the attack itself has failed", n, of.agents)
			}
			h := s.newcomers(p, fmt.Sprint("new", of.agents, "-"), 6)
			over()
			wg.Wait()
			got(s, "6 of 6 new decode engines out within 5 ms (at 1a5364a)", "%d agents opened %d streams for %d places, %s", of.agents, opened.Load(), streamsOfAll, h.beside(s, calm))
		}
	})
}
