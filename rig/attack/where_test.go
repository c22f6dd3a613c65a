package attack

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// deployment is where the agents of an attack meet, and what lets them in.
type deployment struct {
	name    string
	cluster bool   // at a NATS server, else at prefill's own port
	nkeys   bool   // with examples/nats/kvconn.conf
	earlier bool   // that file as it was: each prefill engine may write all entries
	both    bool   // the decode engine is a prefill engine too
	token   string // "": none
	tls     bool
}

// deployments are all of them. Files that begin with "where" come last in the package: their attacks run in the minute before TestMemoryComesBack.
var deployments = []deployment{
	{name: "port"},
	{name: "port-token-tls", token: "a-token-0123456789", tls: true},
	{name: "cluster-token", cluster: true, token: "right"},
	{name: "cluster-nkeys", cluster: true, nkeys: true},
	{name: "cluster-nkeys-tls", cluster: true, nkeys: true, tls: true},
}

// scenario is a deployment under test.
type scenario struct {
	*testing.T
	deployment
	server            *nettest.NATSServer // nil: prefill's own port
	authority         *nettest.Authority  // nil without TLS
	cert, key         string
	prefill, decode   natsKey // of honest engines
	hostileP, hostile natsKey // of the attacker's: a prefill and a decode engine
}

// inEachDeployment makes an attack in each deployment.
func inEachDeployment(t *testing.T, attack func(s *scenario)) {
	for _, m := range deployments {
		t.Run(m.name, func(t *testing.T) { attack(newScenario(t, m)) })
	}
}

// atBoth makes an attack in the two deployments that differ most, at a port without anything and in a cluster with nkeys and TLS: it
// takes longer, and is the same wherever its messages come from.
func atBoth(t *testing.T, attack func(s *scenario)) {
	for _, m := range both() {
		t.Run(m.name, func(t *testing.T) { attack(newScenario(t, m)) })
	}
}

func both() []deployment { return []deployment{deployments[0], deployments[len(deployments)-1]} }

// atPorts makes an attack at prefill engines' own ports: without anything, and with all that there may be.
func atPorts(t *testing.T, attack func(s *scenario)) {
	for _, m := range deployments {
		if !m.cluster {
			t.Run(m.name, func(t *testing.T) { attack(newScenario(t, m)) })
		}
	}
}

func newScenario(t *testing.T, m deployment) *scenario {
	t.Helper()
	s := &scenario{T: t, deployment: m}
	var args []string
	if m.tls {
		s.authority = nettest.NewAuthority(t)
		s.cert, s.key = s.authority.Issue(time.Now().Add(time.Hour), "127.0.0.1")
		args = append(args, "--tls", "--tlscert", s.cert, "--tlskey", s.key)
	}
	if m.nkeys {
		s.prefill, s.decode, s.hostileP, s.hostile = newNATSKey(t), newNATSKey(t), newNATSKey(t), newNATSKey(t)
		prefills, decodes := []string{s.prefill.public, s.hostileP.public}, []string{s.decode.public, s.hostile.public}
		if m.both { // to each prefill engine all others are engines that ask
			decodes = append(decodes, prefills...)
			prefills = append(prefills, s.decode.public)
		}
		users := nettest.ClusterOf
		if m.earlier {
			users = nettest.EarlierClusterOf
		}
		args = append(args, "-c", users(t, prefills, decodes))
	} else if m.token != "" {
		args = append(args, "--auth", m.token)
	}
	if m.cluster {
		s.server = nettest.NewNATS(t, args...)
	}
	return s
}

// url is the NATS server's; "" if there is none.
func (s *scenario) url() string {
	switch {
	case s.server == nil:
		return ""
	case s.tls:
		return "tls://" + s.server.Addr()
	}
	return s.server.URL()
}

// config is an honest agent's.
func (s *scenario) config(role string) map[string]any {
	c := map[string]any{"role": role}
	if s.cluster {
		c["nats_url"] = s.url()
	}
	if s.cluster && role != "decode" {
		c["advertise_host"] = "127.0.0.1"
	}
	if s.token != "" {
		c["nats_token"] = s.token
	}
	if s.tls && (s.cluster || role == "decode") {
		c["tls_ca_file"] = s.authority.File
	} else if s.tls {
		c["tls_cert_file"], c["tls_key_file"] = s.cert, s.key
	}
	switch {
	case s.nkeys && role == "prefill":
		c["nats_nkey_seed_file"], c["engine_id"] = s.prefill.file, s.prefill.engine("p0")
	case s.nkeys && role == "both":
		c["nats_nkey_seed_file"], c["engine_id"] = s.decode.file, s.decode.engine("d0")
	case s.nkeys:
		c["nats_nkey_seed_file"], c["nats_js_prefix"] = s.decode.file, natsRegistry
	}
	return c
}

// start starts an honest agent, with more in its configuration.
func (s *scenario) start(role string, more map[string]any) *victim {
	s.Helper()
	return s.startAs(exec.Command(os.Args[0]), "", role, more)
}

// startPlain is start of an agent that has, at a port without anything, its defaults.
func (s *scenario) startPlain(role string, more map[string]any) *victim {
	s.Helper()
	return s.startOrdered("", role, more)
}

// startOrdered is startPlain of an agent whose blocks have tokens and heads; see ordered.
func (s *scenario) startOrdered(order, role string, more map[string]any) *victim {
	s.Helper()
	if s.cluster || s.token != "" || s.tls {
		return s.startAs(exec.Command(os.Args[0]), order, role, more)
	}
	c := map[string]any{"role": role}
	maps.Copy(c, more)
	return startOrdered(s.T, order, c)
}

// startAnother starts another honest prefill engine than p0. In a cluster with nkeys its key is the second that may be one.
func (s *scenario) startAnother(order, name string, more map[string]any) *victim {
	s.Helper()
	c := map[string]any{}
	maps.Copy(c, more)
	if s.nkeys {
		c["nats_nkey_seed_file"] = s.hostileP.file
	}
	if s.cluster { // at ports two engines may have one name
		c["engine_id"] = s.hostileEngine(name)
	}
	return s.startAs(exec.Command(os.Args[0]), order, "prefill", c)
}

// startAs is start by a command, with blocks as ordered says.
func (s *scenario) startAs(cmd *exec.Cmd, order, role string, more map[string]any) *victim {
	s.Helper()
	c := s.config(role)
	maps.Copy(c, more)
	return startAs(s.T, cmd, order, c)
}

// newcomers are decode agents that come while the attack goes on, and load.
func (s *scenario) newcomers(p *victim, when string, n int) *honest {
	s.Helper()
	h := &honest{}
	for i := range n {
		d := s.start("decode", map[string]any{"engine_id": fmt.Sprint("new", i)})
		h.load(s.T, p, d, fmt.Sprint(when, i))
		d.end()
	}
	return h
}

// newcomersPlain is newcomers that have, at a port without anything, their defaults.
func (s *scenario) newcomersPlain(p *victim, when string, n int) *honest {
	s.Helper()
	if s.cluster || s.token != "" || s.tls {
		return s.newcomers(p, when, n)
	}
	return newcomers(s.T, p, when, n)
}

// rogue is an agent of the attacker's. It proves who it is as agents do, and seals what it says where they do. What it says
// is the test's.
type rogue struct {
	*natsbus.Bus
	self *natsbus.Identity
	id   string
	via  core.Via
	at   *wire.Agent // what the registry has of the prefill engine that it has found
}

// options are what the attacker has: all that an engine of its own has, and its key.
func (s *scenario) options(role string) natsbus.Options {
	s.Helper()
	o := natsbus.Options{Identity: natsbus.NewIdentity(), ClusterURL: s.url(), Token: s.token, OnlyTLS: s.tls, ConnectTimeout: bound}
	if s.tls {
		o.TLS = s.authority.Client()
	}
	if !s.nkeys {
		return o
	}
	k := s.hostileP
	if role == "decode" {
		k, o.JSPrefix = s.hostile, natsRegistry
	}
	seed, err := os.ReadFile(k.file)
	if err == nil {
		o.Seed = string(seed)
		o.Identity, err = natsbus.NewKeyedIdentity(o.Seed)
	}
	if err != nil {
		s.Fatal(err)
	}
	return o
}

// insistent tries what fails while this machine is too busy: agents and NATS servers give who enters little time.
func insistent[T any](try func() (T, error)) (v T, err error) {
	for deadline := time.Now().Add(bound); ; time.Sleep(10 * time.Millisecond) {
		if v, err = try(); err == nil || time.Now().After(deadline) {
			return v, err
		}
	}
}

// open is an agent of the attacker's.
func (s *scenario) open(o natsbus.Options) *rogue {
	s.Helper()
	b, err := insistent(func() (*natsbus.Bus, error) { return natsbus.Open(o) })
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), bound)
		defer cancel()
		_ = b.Close(ctx) // what it has asked may be on its way still
	})
	return &rogue{Bus: b, self: o.Identity, id: string(o.Identity.ID())}
}

// decoder is a decode agent of the attacker's that has found a prefill engine.
func (s *scenario) decoder(p *victim) *rogue {
	s.Helper()
	r := s.open(s.options("decode"))
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	var via core.Via
	at, err := insistent(func() (at *wire.Agent, err error) {
		at, via, err = r.Lookup(ctx, core.Target{Bootstrap: p.boot, EngineID: p.names, DPRank: -1})
		return at, err
	})
	if err != nil {
		s.Fatal(err)
	}
	if at.ID != p.id {
		s.Fatalf("the registry has agent %s in the place of %s", at.ID, p.id)
	}
	r.at, r.via = at, via
	if s.server == nil { // it shows another id to each port
		r.id = string(r.self.At(core.AgentID(p.id)).ID())
	}
	return r
}

// met is decoder, after its hello; with the tickets that it got.
func (s *scenario) met(p *victim) (*rogue, []wire.Ticket) {
	s.Helper()
	r := s.decoder(p)
	rep, err := r.ask(p, aHello())
	if err != nil || rep.Code != 0 || len(rep.Tickets) != 1 {
		s.Fatalf("its hello: %+v, %v", rep, err)
	}
	return r, rep.Tickets
}

func (r *rogue) ask(p *victim, req *wire.Request) (*wire.Reply, error) {
	return r.within(bound, p, req)
}

// within is ask of who waits no longer.
func (r *rogue) within(d time.Duration, p *victim, req *wire.Request) (*wire.Reply, error) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return r.Request(ctx, r.via, core.AgentID(p.id), req)
}

// answer is that of a request that must be answered.
func (s *scenario) answer(r *rogue, p *victim, req *wire.Request) *wire.Reply {
	s.Helper()
	rep, err := r.ask(p, req)
	if err != nil {
		s.Fatal(err)
	}
	return rep
}
