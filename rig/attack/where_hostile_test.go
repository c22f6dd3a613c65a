package attack

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/wire"
)

// hostileEngine is an engine id that the attacker's prefill engine may have.
func (s *scenario) hostileEngine(name string) string {
	if s.nkeys {
		return s.hostileP.engine(name)
	}
	return name
}

// hostilePrefill is a prefill engine of the attacker's that decode agents meet: at a port without anything a host that a client has named,
// elsewhere an engine that is let in as others are.
func (s *scenario) hostilePrefill(name string) *hostilePrefill {
	s.Helper()
	if s.server == nil {
		return newHostilePrefill(s.T)
	}
	return s.prefills(s.hostileEngine(name), aHello().Hello)
}

// prefills is a prefill engine of the attacker's that has all that a prefill engine of the deployment has. It is registered, and
// decode agents that load from it meet it. a is what it says of itself.
func (s *scenario) prefills(engine string, a *wire.Agent) *hostilePrefill {
	s.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = ln.Close() })
	e := &hostilePrefill{attacker: newAttacker(s.T), names: engine, loads: make(chan *wire.Load, 64), streams: make(chan *evilStream, 64)}
	go e.listen(ln)
	o := s.options("prefill")
	e.boot = "http://127.0.0.1:1" // nobody asks there: all meet at the cluster
	if s.server == nil {
		o.Server, e.boot = s.port(o.Identity)
	}
	r := s.open(o)
	e.id, e.bus = r.id, r
	r.Serve(func(_ core.Via, req *wire.Request) *wire.Reply {
		switch {
		case req.Kind == wire.KindLoad:
			put(e.loads, req.Load)
		case req.Kind == wire.KindRenew && e.renewal.Load() != nil:
			rep := *e.renewal.Load()
			return &rep
		}
		return answerOf(req)
	})
	a.ID, a.EngineID, a.Endpoints[0].Address = r.id, engine, ln.Addr().String()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	if err := r.Register(ctx, a); err != nil {
		s.Fatal(err)
	}
	return e
}

// floodBy asks an agent that r has found again and again, many times at once, until the test ends. In a cluster it need not look for it.
func (s *scenario) floodBy(r *rogue, to string, requests ...*wire.Request) *answers {
	a := &answers{}
	ctx, over := context.WithCancel(s.Context())
	var wg sync.WaitGroup
	for first := range 8 {
		wg.Go(func() {
			for n := first; ctx.Err() == nil; n++ {
				within, cancel := context.WithTimeout(ctx, 5*time.Second)
				rep, err := r.Request(within, r.via, core.AgentID(to), requests[n%len(requests)])
				if cancel(); err == nil {
					a.note(rep)
				} else {
					time.Sleep(10 * time.Millisecond) // the attack's own pace: its connection may have ended
				}
			}
		})
	}
	s.Cleanup(func() {
		over()
		wg.Wait()
	})
	return a
}

// underWay waits until an attack has got so far.
func underWay(t testing.TB, what string, now func() int64, most int64) {
	t.Helper()
	for deadline := time.Now().Add(bound); now() < most && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	if n := now(); n < most {
		t.Errorf("%s: %d, want %d: the attack itself has failed", what, n, most)
	}
}

// port is a bootstrap port of the attacker's.
func (s *scenario) port(i *natsbus.Identity) (server *natsbus.Server, boot string) {
	s.Helper()
	server, err := natsbus.StartServer(natsbus.ServerOptions{Identity: i, Token: s.token})
	if err != nil {
		s.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.Fatal(err)
	}
	boot = "http://" + ln.Addr().String()
	if s.tls {
		boot = "https://" + ln.Addr().String()
		ln = tls.NewListener(ln, s.authority.Server(time.Now().Add(time.Hour), "127.0.0.1"))
	}
	mux := http.NewServeMux()
	mux.Handle(natsbus.Path, server.Handler())
	web := &http.Server{Handler: mux, ReadHeaderTimeout: bound}
	go func() { _ = web.Serve(ln) }()
	s.Cleanup(func() {
		_ = web.Close()
		_ = server.Close()
	})
	return server, boot
}
