package natsbus

import (
	"context"
	"errors"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

// behindForwarder is a decode agent whose link to a prefill agent can be cut.
func behindForwarder(t testing.TB) (f *nettest.Forwarder, prefill *Bus) {
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "t"})
	f = nettest.Forward(t, p.addr)
	prefill = newBus(t, Options{Identity: named("P"), Server: p.Server, Token: "t"})
	serve(prefill)
	register(t, prefill, "e")
	decode := newBus(t, Options{Identity: named("D"), Token: "t"})
	serve(decode)
	if _, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: "http://" + f.Addr()}); err != nil {
		t.Fatal(err)
	}
	return f, prefill
}

// TestAbsentAtOnesOwnServer: between the end of D's link and its return nobody
// listens as D at P's own server, which is not the absence of a cluster.
func TestAbsentAtOnesOwnServer(t *testing.T) {
	leaktest.Check(t)
	f, prefill := behindForwarder(t)
	ask(t, prefill, "", "D", "D via http://"+f.Addr()+": hello P")
	f.Shut(true)
	f.Cut()
	eventually(t, "nobody listens as D", func() error {
		// A request that is sent while the link breaks gets no answer.
		_, err := prefill.Request(ctxOf(t, 100*time.Millisecond), "", reach(prefill, "D"), hello("P"))
		if err == nil || !errors.Is(err, core.ErrAbsent) {
			return errors.Join(errors.New("not yet"), err)
		}
		if errors.Is(err, core.ErrAway) {
			t.Fatalf("%v: as if there were other servers", err)
		}
		return nil
	})
	f.Shut(false)
	eventually(t, "D is back", func() error {
		_, err := prefill.Request(ctxOf(t, within), "", reach(prefill, "D"), hello("P"))
		return err
	})
}

// TestDelay: only a link that has stood for long is dialled again nearly at once,
// and only once: a server that ends each connection is not asked again and again.
func TestDelay(t *testing.T) {
	for _, c := range []struct {
		kind  linkKind
		stood time.Duration
		tried int
		soon  bool
	}{
		{portLink, 2 * steadyLink, 1, true}, {homeLink, 2 * steadyLink, 1, true}, {portLink, 2 * steadyLink, 2, false},
		{portLink, 0, 1, false}, {clusterLink, 2 * steadyLink, 1, false},
	} {
		l := &link{endpoint: endpoint{kind: c.kind}, since: time.Now().Add(-c.stood)}
		for range 100 {
			if d := l.delay(c.tried); d < firstWait != c.soon || d >= 2*reconnectWait {
				t.Fatalf("%+v: dialled after %v", c, d)
			}
		}
	}
}

// BenchmarkHandshake measures what identity and proof add to the upgrade of a connection.
func BenchmarkHandshake(b *testing.B) {
	p := newPort(b, "127.0.0.1:0", ServerOptions{Token: "right"})
	d := named("D")
	for name, dial := range map[string]func() (net.Conn, error){
		"upgrade": func() (net.Conn, error) {
			conn, err := net.Dial("tcp", p.addr)
			if err != nil {
				return nil, err
			}
			return clientUpgrade(conn, p.addr)
		},
		"proved": func() (net.Conn, error) {
			e := &clientHandshake{self: d, secrets: secrets{token: "right"}, right: rightAsk}
			return dialUpgrade(Address{Host: p.addr, Name: "127.0.0.1"}, nil, nil, e)(context.Background())
		},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				conn, err := dial()
				if err != nil {
					b.Fatal(err)
				}
				_ = hangUp(conn)
			}
		})
	}
}

// BenchmarkReconnect measures how long a D whose link broke cannot be asked.
func BenchmarkReconnect(b *testing.B) {
	f, prefill := behindForwarder(b)
	var all []time.Duration
	for b.Loop() {
		time.Sleep(steadyLink + steadyLink/10)
		f.Cut()
		began := time.Now()
		for away := false; ; {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
			_, err := prefill.Request(ctx, "", reach(prefill, "D"), hello("P"))
			cancel()
			if away = away || err != nil; away && err == nil {
				break
			}
			time.Sleep(time.Millisecond)
		}
		all = append(all, time.Since(began))
	}
	slices.Sort(all)
	b.ReportMetric(float64(all[len(all)/2].Milliseconds()), "ms-median")
	b.ReportMetric(float64(all[len(all)-1].Milliseconds()), "ms-most")
}

// BenchmarkLookupAndHello measures all that a new decode agent does until prefill has answered its hello: the
// connection, the look-up, one request. An older commit takes it too, with the Options of its time.
func BenchmarkLookupAndHello(b *testing.B) {
	p := newPort(b, "127.0.0.1:0", ServerOptions{Token: "right"})
	prefill := newBus(b, Options{Identity: named("P"), Server: p.Server, Token: "right"})
	serve(prefill)
	register(b, prefill, "e")
	least := time.Hour
	for range b.N {
		b.StopTimer()
		d := newBus(b, Options{Identity: NewIdentity(), Token: "right"})
		b.StartTimer()
		began := time.Now()
		_, via, err := d.Lookup(ctxOf(b, within), core.Target{Bootstrap: p.url(), EngineID: "e"})
		if err == nil {
			_, err = d.Request(ctxOf(b, within), via, named("P").ID(), hello("D"))
		}
		if err != nil {
			b.Fatal(err)
		}
		least = min(least, time.Since(began))
		b.StopTimer()
		closeBus(b, d)
		b.StartTimer()
	}
	b.ReportMetric(float64(least.Microseconds())/1000, "least-ms")
}
