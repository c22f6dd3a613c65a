package attack

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
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

// prefills is a prefill engine of the attacker's that has all that a prefill engine of the deployment has. It is registered, and
// decode agents that load from it meet it. a is what it says of itself.
func (s *scenario) prefills(engine string, a *wire.Agent) *hostilePrefill {
	s.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = ln.Close() })
	e := &hostilePrefill{attacker: newAttacker(s.T), loads: make(chan *wire.Load, 64), streams: make(chan *evilStream, 64)}
	go e.listen(ln)
	o := s.options("prefill")
	e.boot = "http://127.0.0.1:1" // nobody asks there: all meet at the cluster
	if s.server == nil {
		o.Server, e.boot = s.port(o.Identity)
	}
	r := s.open(o)
	e.id = r.id
	r.Serve(func(_ core.Via, req *wire.Request) *wire.Reply {
		if req.Kind == wire.KindLoad {
			put(e.loads, req.Load)
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
