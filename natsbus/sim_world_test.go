package natsbus

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// simWorld is one run of TestHostileSim: some honest agents, whose buses are the product's, and a hostile peer.
type simWorld struct {
	t        *testing.T
	seed     uint64
	rnd      *rand.Rand
	net      *simNet
	token    string
	server   *Server     // of the first agent; nil in a cluster
	agents   []*simAgent // the simulator's goroutine adds to them, with mu held
	attacker hostilePeer
	calm     bool // messages are neither lost nor doubled, and nothing breaks any more
	wg       sync.WaitGroup

	mu     sync.Mutex
	asked  map[string]*simRequest // by their words
	faults map[string]int         // what happened, by its kind
	broken []string
	story  []string
}

// hostilePeer is one peer that may do whatever its permissions allow.
type hostilePeer interface {
	strike()                        // does one thing of its choice
	forgotten(a *simAgent)          // who has forgotten its sessions
	listen()                        // hears what was said
	fill()                          // takes all places that it can
	release()                       // what it has filled is emptied again
	leave()                         // ends its connections
	owns(id, account string) bool   // a request of that sender may be its
	check(broken func(what string)) // what it holds
}

// simAgent is an honest agent.
type simAgent struct {
	name string
	id   core.AgentID
	bus  *Bus
	via  core.Via
}

// simRequest is a request of an honest agent. Its word says which it is.
type simRequest struct {
	word     string
	from, to *simAgent
	kind     wire.Kind
	until    time.Time // it has ended then
	padding  int       // bytes of a signal
	handled  int
	ended    bool
}

const simVia core.Via = "sim"

func newSimWorld(t *testing.T, seed uint64) *simWorld {
	w := &simWorld{t: t, seed: seed, rnd: rand.New(rand.NewPCG(seed, 0)), net: &simNet{}, asked: map[string]*simRequest{}, faults: map[string]int{}}
	if seed%2 == 0 {
		w.openPort()
	} else {
		w.openCluster()
	}
	return w
}

func (w *simWorld) count(kind string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults[kind]++
}

// tell adds to what is printed when the seed fails; mu is not held.
func (w *simWorld) tell(kind, format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults[kind]++
	w.story = append(w.story, fmt.Sprintf("%v %s: ", time.Since(simStart), kind)+fmt.Sprintf(format, args...))
}

// simStart is the time in a bubble when it begins.
var simStart = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

func (w *simWorld) fault(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken = append(w.broken, fmt.Sprintf(format, args...))
}

// openPort begins a world of a prefill agent with a server, which decode agents reach through its bootstrap port.
func (w *simWorld) openPort() {
	w.token = "right"
	p := NewIdentity()
	secure, err := p.serverTLS()
	if err != nil {
		w.t.Fatal(err)
	}
	seed, public := newNKey(w.t)
	w.net.auth, err = newAuthenticator(secrets{token: w.token}, "", []string{public})
	if err != nil {
		w.t.Fatal(err)
	}
	w.server = &Server{opt: ServerOptions{Identity: p, Token: w.token, AuthTimeout: defaultProof}, log: nopLog, authenticator: w.net.auth, tls: secure,
		unanswered: newBudget(1 << 20), unread: newBudget(1 << 20), queries: newRegistryQueries(), clients: newClients(6), inside: w.net.dial}
	w.addAgent(p, "P", endpoint{kind: homeLink, name: "home", urls: inProcess, open: w.server.dialContext}, func(b *Bus) { b.opt.Server = w.server })
	for i := range 3 {
		w.addDecode(i + 1)
	}
	attacker := NewIdentity()
	w.attacker = &hostileClient{w: w, self: attacker, id: attacker.At(p.ID()).ID(), others: map[core.AgentID]bool{}, from: "10.0.9.9:1", victim: seed}
}

// addDecode adds a decode agent of an address of its own.
func (w *simWorld) addDecode(n int) *simAgent {
	self, from := NewIdentity(), fmt.Sprintf("10.0.0.%d:1", n)
	e := &clientHandshake{self: self, secrets: secrets{token: w.token}, right: rightAsk}
	open := func(ctx context.Context) (net.Conn, error) { return w.enter(ctx, from, e) }
	return w.addAgent(self, fmt.Sprint("D", n), endpoint{kind: portLink, via: simVia, name: "port", urls: inProcess, open: open, handshake: e}, func(b *Bus) { b.opt.Token = w.token })
}

// enter connects to the server by its bootstrap port.
func (w *simWorld) enter(ctx context.Context, from string, e *clientHandshake) (net.Conn, error) {
	up, err := w.upgraded(from)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = up.SetDeadline(time.Unix(1, 0)) })
	conn, err := e.run(ctx, up)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = up.Close()
		return nil, err
	}
	return conn, nil
}

// upgraded is a connection that has not proved itself yet.
func (w *simWorld) upgraded(from string) (net.Conn, error) {
	head, err := http.NewRequest(http.MethodGet, "http://h"+Path, nil)
	if err != nil {
		return nil, err
	}
	head.Header.Set("Connection", "Upgrade")
	head.Header.Set("Upgrade", protocol)
	head.RemoteAddr = from
	inside, client := net.Pipe()
	w.wg.Go(func() {
		h := &hijacked{ResponseRecorder: httptest.NewRecorder(), conn: inside}
		if w.server.upgrade(h, head); !h.took {
			_ = h.Result().Write(inside)
			_ = inside.Close()
		}
	})
	r := bufio.NewReader(client)
	resp, err := http.ReadResponse(r, nil)
	if err == nil && resp.StatusCode != http.StatusSwitchingProtocols {
		err = errBusy
	}
	if err != nil {
		_ = client.Close()
		return nil, err
	}
	return &headConn{client, r}, nil
}

// openCluster begins a world of agents with nkeys at a NATS cluster, whose operator the hostile peer is: it hears all, and sends
// in any name.
func (w *simWorld) openCluster() {
	for i := range 4 {
		w.addMember(fmt.Sprint("A", i))
	}
	w.attacker = newHostileOperator(w)
}

func (w *simWorld) addMember(name string) *simAgent {
	open := func(context.Context) (net.Conn, error) { return w.net.dial() }
	return w.addAgent(keyedIdentity(w.t), name, endpoint{kind: clusterLink, name: "cluster", urls: inProcess, open: open}, func(b *Bus) {
		b.opt.ClusterURL, b.seals, b.sessionless = inProcess, newSeals(b.opt.Identity), newSessionless(b.opt.Identity.ownerIn)
	})
}

// addAgent opens a bus as Open does, but for the way of its link.
func (w *simWorld) addAgent(self *Identity, name string, to endpoint, set func(*Bus)) *simAgent {
	b, err := open(Options{Identity: self})
	if err != nil {
		w.t.Fatal(err)
	}
	set(b)
	a := &simAgent{name: name, bus: b, via: to.via}
	l, err := connect(&b.common, to)
	if err != nil {
		w.fault("honest %s does not get in: %v", name, err)
		_ = b.Close(context.Background())
		return nil
	}
	a.id = l.id
	h := core.Handler(func(_ core.Via, req *wire.Request) *wire.Reply { return w.handle(a, req) })
	b.handler.Store(&h)
	if err = l.subscribe(); err != nil {
		w.t.Fatal(err)
	}
	if to.via == "" {
		b.openHome, b.home = func() (*link, error) { return nil, errClosed }, l
	} else {
		ready := make(chan struct{})
		close(ready)
		b.links[to.via] = &entry{ready: ready, link: l}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.agents = append(w.agents, a)
	return a
}

// handle is the handler of an honest agent. It holds each request to who sent it.
func (w *simWorld) handle(at *simAgent, req *wire.Request) *wire.Reply {
	w.mu.Lock()
	defer w.mu.Unlock()
	word := ""
	switch {
	case req.Kind == wire.KindHello && req.Hello != nil:
		word = req.Hello.EngineID
	case req.Kind == wire.KindSignal && req.Signal != nil:
		word = strings.TrimRight(string(req.Signal.Data), " ")
	}
	broken := func(format string, args ...any) {
		w.broken = append(w.broken, fmt.Sprintf("%s is asked %.10q: ", at.name, word)+fmt.Sprintf(format, args...))
	}
	q := w.asked[word]
	switch {
	case q == nil:
		if !w.attacker.owns(req.From, req.Account) {
			broken("the hostile peer's request is taken for one of %s (account %s)", w.nameOf(core.AgentID(req.From)), req.Account)
		}
		w.faults["hostile-heard"]++
		return &wire.Reply{Reason: "for the hostile peer"}
	case core.AgentID(req.From) != q.from.id:
		broken("it is taken for one of %s, and is of %s", w.nameOf(core.AgentID(req.From)), q.from.name)
	case q.to != at:
		broken("it was for %s", q.to.name)
	}
	q.handled++
	if most := w.mostHandled(q); q.handled > most {
		broken("it is handled %d times", q.handled)
	}
	return &wire.Reply{Reason: q.answer()}
}

func (q *simRequest) answer() string { return q.to.name + " answers " + q.from.name + ": " + q.word }

// mostHandled: in a cluster a request that may be repeated is, once, when its session is forgotten.
func (w *simWorld) mostHandled(q *simRequest) int {
	if w.server == nil && repeatable(q.kind) {
		return 2
	}
	return 1
}

// nameOf is an agent's name; the simulator's goroutine calls it, or mu is held.
func (w *simWorld) nameOf(id core.AgentID) string {
	for _, a := range w.agents {
		if a.id == id {
			return a.name
		}
	}
	return string(id)
}

// message is a request that has a word.
func message(kind wire.Kind, from core.AgentID, word string) *wire.Request {
	if kind == wire.KindSignal {
		return &wire.Request{Kind: kind, From: string(from), Signal: &wire.Signal{Transport: "sim", Data: []byte(word)}}
	}
	return &wire.Request{Kind: wire.KindHello, From: string(from), Hello: &wire.Agent{Version: wire.Version, ID: string(from), EngineID: word, Model: "m"}}
}

// ask has an honest agent ask another. It ends with that one's answer or an error. ended, if it is not nil, hears which.
func (w *simWorld) ask(from, to *simAgent, kind wire.Kind, limit time.Duration, ended chan<- error) {
	w.request(&simRequest{from: from, to: to, kind: kind}, limit, ended)
}

func (w *simWorld) request(q *simRequest, limit time.Duration, ended chan<- error) {
	from, to, kind := q.from, q.to, q.kind
	w.mu.Lock()
	q.word, q.until = fmt.Sprint("w", len(w.asked)), time.Now().Add(limit)
	w.asked[q.word] = q
	w.mu.Unlock()
	w.tell("ask", "%s asks %s %q", from.name, to.name, q.word)
	w.wg.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		r, err := from.bus.Request(ctx, from.via, to.id, message(kind, from.id, q.word+strings.Repeat(" ", q.padding)))
		switch {
		case err == nil && r.Code != 0 && strings.HasPrefix(r.Reason, "agent "+string(to.id)+" "):
			err = errors.New(r.Reason)
		case err == nil && (r.Code != 0 || r.Reason != q.answer()):
			w.fault("%s asks %s %q and is told %+v", from.name, to.name, q.word, r)
		}
		w.tell(map[bool]string{true: "answered", false: "unanswered"}[err == nil], "%s %q: %v", from.name, q.word, err)
		w.mu.Lock()
		if q.ended = true; errors.Is(err, errUncertain) && q.handled > 0 {
			w.faults["uncertain"]++
		}
		w.mu.Unlock()
		if ended != nil {
			ended <- err
		}
	})
}

// two are different agents.
func (w *simWorld) two() (a, b *simAgent) {
	i := w.rnd.IntN(len(w.agents))
	j := (i + 1 + w.rnd.IntN(len(w.agents)-1)) % len(w.agents)
	return w.agents[i], w.agents[j]
}
