package attack

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/internal/freeport"
)

// siege are connections from elsewhere to a port. Each comes again when it is ended.
type siege struct {
	opened atomic.Int64 // ever
	over   context.CancelFunc
	wg     sync.WaitGroup
}

// besiege makes so many connections, more than the port has places, says something on each, and waits until some have come again.
func besiege(t *testing.T, port string, conns int, say func(ctx context.Context, c net.Conn)) *siege {
	t.Helper()
	s := &siege{}
	var ctx context.Context
	ctx, s.over = context.WithCancel(t.Context())
	from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(elsewhere)}, Timeout: bound}
	for range conns {
		s.wg.Go(func() {
			for ctx.Err() == nil {
				if c, err := from.DialContext(ctx, "tcp", port); err == nil {
					end := context.AfterFunc(ctx, func() { _ = c.Close() })
					s.opened.Add(1)
					say(ctx, c)
					_, _ = io.Copy(io.Discard, c)
					end()
					_ = c.Close()
				}
				select {
				case <-ctx.Done():
				case <-time.After(200 * time.Millisecond): // the attack's own pace
				}
			}
		})
	}
	const again = 100
	for deadline := time.Now().Add(bound); s.opened.Load() < int64(conns+again) && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	if n := s.opened.Load(); n < int64(conns+again) {
		t.Errorf("%d connections were opened by %d: the attack itself has failed", n, conns)
	}
	return s
}

func (s *siege) end() {
	s.over()
	s.wg.Wait()
}

// asked is a connection that asks the bootstrap port, half of it now and the rest later.
type asked struct {
	c  net.Conn
	br *bufio.Reader
}

func ask(t *testing.T, p *victim, text string) *asked {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(p.boot, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(bound))
	_, _ = io.WriteString(c, text)
	return &asked{c, bufio.NewReader(c)}
}

// answers holds it to its answer.
func (a *asked) answers(t *testing.T, what, rest string) {
	t.Helper()
	_, _ = io.WriteString(a.c, rest)
	resp, err := http.ReadResponse(a.br, nil)
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("%s: %s", what, resp.Status)
	}
}

// TestHTTPConnections: strangers open more connections to the bootstrap port than it has places, and say nothing, or a part, or what costs
// the port something, and come again whenever one is ended. The oldest of all connections gave way, also one of an honest client: one that
// was idle between two requests, or had one under way. Now their own give way, and newcomers get in.
func TestHTTPConnections(t *testing.T) {
	const conns = 1500 // of 1,024 places, and 256 of those that ask for the control plane
	p := start(t, map[string]any{"role": "prefill"})
	d := start(t, map[string]any{"role": "decode"})
	calm := before(t, p, d)
	const body = "POST /query_dp_ranks HTTP/1.1\r\nHost: h\r\nContent-Length: 30000\r\n\r\n"
	says := func(text string) func(context.Context, net.Conn) {
		return func(_ context.Context, c net.Conn) { _, _ = io.WriteString(c, text) }
	}
	port := strings.TrimPrefix(p.boot, "http://")
	for i, a := range []struct {
		name string
		say  func(ctx context.Context, c net.Conn)
	}{
		{"silent", func(context.Context, net.Conn) {}},
		{"headers", says("GET /health HTTP/1.1\r\nHost: h\r\nX-A: " + strings.Repeat("x", 15<<10))},
		{"bodies", says(body + strings.Repeat("x", 29000))},
		{"slow bodies", func(ctx context.Context, c net.Conn) {
			_, err := io.WriteString(c, body)
			for err == nil && ctx.Err() == nil {
				time.Sleep(100 * time.Millisecond) // the attack's own pace
				_, err = io.WriteString(c, "x")
			}
		}},
		{"upgrades", says("GET /nats HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: nats\r\n\r\n")},
		{"CONNECT", says("CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n")},
		{"queries", says(strings.Repeat("GET /query HTTP/1.1\r\nHost: h\r\n\r\n", 3))},
	} {
		t.Run(strings.ReplaceAll(a.name, " ", "-"), func(t *testing.T) {
			const rooms = `{"bootstrap_rooms": [1]}`
			work := ask(t, p, fmt.Sprintf("POST /query_dp_ranks HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", len(rooms), rooms[:9]))
			const health = "GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
			idle := ask(t, p, "")
			idle.answers(t, "/health before", health)
			s := besiege(t, port, conns, a.say)
			work.answers(t, "a request that was under way", rooms[9:])
			h := &honest{}
			for n := range loadsBefore {
				h.load(t, p, d, fmt.Sprint("http", i, "-", n))
			}
			for range 10 {
				ask(t, p, health).answers(t, "/health", "")
				idle.answers(t, "/health on a connection that was idle", health)
			}
			n := newcomers(t, p, fmt.Sprint("new", i, "-"), 1)
			s.end()
			p.peak = max(p.peak, p.mib("VmHWM"))
			got(t, "the oldest connection of all gave way, an honest one too (read at aa8c3ce1)", "%d connections opened, %s, of newcomers %s, %s",
				s.opened.Load(), h.comparedWith(t, calm), n.went(t), p.growth(t))
		})
	}
}

// TestDataConnections: strangers open more connections to the data port than may wait for their hello, and say nothing, a part of a hello,
// one with a ticket of nobody's, or anything. The oldest of all gave way, also one of an honest newcomer. Now theirs do.
func TestDataConnections(t *testing.T) {
	const conns = 600 // of 256 places
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, map[string]any{"role": "prefill", "tcp_port": ports[0]})
	d := start(t, map[string]any{"role": "decode"})
	calm := before(t, p, d)
	random := func(n int) []byte {
		b := make([]byte, n)
		_, _ = rand.Read(b)
		return b
	}
	for i, a := range []struct {
		name string
		says func() []byte
	}{
		{"silent", func() []byte { return nil }},
		{"half a hello", func() []byte { return streamHello(random(32), 1, 0)[:20] }},
		{"a ticket of nobody's", func() []byte { return streamHello(random(32), 1, 0) }},
		{"anything", func() []byte { return random(4096) }},
	} {
		t.Run(strings.ReplaceAll(a.name, " ", "-"), func(t *testing.T) {
			port := fmt.Sprint("127.0.0.1:", ports[0])
			slow, err := net.Dial("tcp", port)
			if err != nil {
				t.Fatal(err)
			}
			defer slow.Close()
			_ = slow.SetDeadline(time.Now().Add(bound))
			hello := streamHello(random(32), 1, 0)
			_, _ = slow.Write(hello[:9])
			s := besiege(t, port, conns, func(_ context.Context, c net.Conn) { _, _ = c.Write(a.says()) })
			_, _ = slow.Write(hello[9:])
			var head [8]byte
			if _, err := io.ReadFull(slow, head[:]); err != nil || binary.BigEndian.Uint32(head[4:]) != frameLeave {
				t.Errorf("a hello from another address that came in two parts: %x, %v; want the answer that nobody has its ticket", head, err)
			}
			h := &honest{}
			for n := range loadsBefore {
				h.load(t, p, d, fmt.Sprint("data", i, "-", n))
			}
			n := newcomers(t, p, fmt.Sprint("new", i, "-"), 2)
			s.end()
			p.peak = max(p.peak, p.mib("VmHWM"))
			got(t, "the oldest connection of all gave way, an honest one too (read at aa8c3ce1)", "%d connections opened, %s, of newcomers %s, %s",
				s.opened.Load(), h.comparedWith(t, calm), n.went(t), p.growth(t))
		})
	}
}

// TestTableOfRanks: where there is no token a stranger fills the table of ranks with the longest names, and reads what the port says of it
// slowly, while it changes the table. An honest rank was refused, and 4.1 GiB were held. Now the rank gets in, and little is held.
func TestTableOfRanks(t *testing.T) {
	const places, told = 1024, 896 // as many may come by POST /register
	p := start(t, map[string]any{"role": "prefill"})
	d := start(t, map[string]any{"role": "decode"})
	calm := before(t, p, d)
	client := func(at string) *http.Client {
		dial := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(at)}}
		c := &http.Client{Timeout: bound, Transport: &http.Transport{DialContext: dial.DialContext}}
		t.Cleanup(c.CloseIdleConnections)
		return c
	}
	register := func(c *http.Client, engine string, dp int, addr string) int {
		resp, err := c.Post(p.boot+"/register", "application/json", strings.NewReader(fmt.Sprintf(`{"engine_id": %q, "dp_rank": %d, "tp_rank": 0, "pp_rank": 0, "addr": %q}`, engine, dp, addr)))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		return resp.StatusCode
	}
	rogue, in := client(elsewhere), 0
	for dp := range places {
		if register(rogue, strings.Repeat("<", 256), dp+1, strings.Repeat("<", 1024)) == http.StatusOK {
			in++
		}
	}
	if in < told || register(rogue, "one more", places+1, "a") == http.StatusOK {
		t.Errorf("%d ranks of a stranger are in the table of %d: the attack itself has failed", in, places)
	}
	for i := range 40 {
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(elsewhere)}}).Dial("tcp", strings.TrimPrefix(p.boot, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.(*net.TCPConn).SetReadBuffer(4 << 10)
		_ = c.SetDeadline(time.Now().Add(bound))
		_, _ = io.WriteString(c, "GET /query HTTP/1.1\r\nHost: h\r\n\r\n")
		if _, err := c.Read(make([]byte, 1)); err != nil && i == 0 { // later ones may push out this one
			t.Errorf("the first slow reader: %v: the attack itself has failed", err)
		}
		register(client("127.0.0.3"), "e", 2000+i, "a") // the table changes
	}
	if status := register(client("127.0.0.1"), "honest", 5000, "tcp://127.0.0.1:1"); status != http.StatusOK {
		t.Errorf("an honest rank: status %d", status)
	}
	h := &honest{}
	for n := range loadsBefore {
		h.load(t, p, d, fmt.Sprint("beside", n))
	}
	n := newcomers(t, p, "new", 2)
	p.peak = max(p.peak, p.mib("VmHWM"))
	got(t, "an honest rank was refused (read at aa8c3ce1)", "it is registered beside %d of a stranger's, %s, of newcomers %s, %s", in, h.comparedWith(t, calm), n.went(t), p.growth(t))
}
