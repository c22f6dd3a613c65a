package natsbus

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
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

// upgradedRig is a prefill agent with a token or without, a decode agent beside it, and the
// identities with which somebody enters who has what it takes to ask, or to be a rank.
type upgradedRig struct {
	secrets secrets
	port    *port
	via     core.Via
	honest  *Bus
	enters  map[right]*Identity
	as      map[right]core.AgentID // under which the server knows them
	names   *strings.Replacer      // of an input: ids differ from process to process
	victim  core.AgentID
	entry   string // prefill's, in the registry
	prefill *Bus

	mu    sync.Mutex
	asked map[wire.Kind]int // of the agent that enters, by the kinds that prefill's handler was given
	wrong []string
}

// The ids in an input: prefill's, the honest decode agent's, and of who has entered, who asks.
const inPrefill, inVictim, inRequester, inRank = "{P}", "{V}", "{E}", "{R}"

func newUpgradedRig(t testing.TB, k secrets) *upgradedRig {
	t.Helper()
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: k.token, JoinToken: k.join})
	p.queries.within = time.Millisecond // who hides its answers waits for it
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server, TTL: time.Hour})
	u := &upgradedRig{secrets: k, port: p, prefill: prefill, asked: map[wire.Kind]int{}, enters: map[right]*Identity{rightAsk: named("E").At(p.opt.Identity.ID()), rightJoin: named("R")}, as: map[right]core.AgentID{}}
	for r, i := range u.enters {
		u.as[r] = i.ID()
	}
	prefill.Serve(u.handle("P"))
	register(t, prefill, "e")
	u.honest = newBus(t, Options{Identity: named("V"), Token: k.token})
	u.honest.Serve(u.handle("V"))
	var err error
	if _, u.via, err = u.honest.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url(), EngineID: "e"}); err != nil {
		t.Fatal(err)
	}
	u.victim = named("V").At(p.opt.Identity.ID()).ID()
	u.names = strings.NewReplacer(inPrefill, string(named("P").ID()), inVictim, string(u.victim), inRequester, string(u.as[rightAsk]), inRank, string(u.as[rightJoin]))
	u.entry = u.registry(t)
	return u
}

// registry is prefill's entry.
func (u *upgradedRig) registry(t testing.TB) string {
	t.Helper()
	return entryOf(t, u.prefill, rankKey("e", 0, 0))
}

// handle answers, and holds each request to who may have sent it.
func (u *upgradedRig) handle(at string) core.Handler {
	return func(_ core.Via, req *wire.Request) *wire.Reply {
		u.mu.Lock()
		defer u.mu.Unlock()
		from := core.AgentID(req.From)
		switch {
		case from == u.victim && req.Kind == wire.KindHello && req.Hello.EngineID == "honest":
		case from != u.as[rightAsk] && from != u.as[rightJoin], req.Kind == wire.KindJoin && from != u.as[rightJoin]:
			u.wrong = append(u.wrong, fmt.Sprintf("%s is asked by %s: %+v", at, shortName(from), req))
		default:
			u.asked[req.Kind]++
		}
		return &wire.Reply{Reason: at + " has heard it"}
	}
}

// connections are the server's, with the honest agent's.
func (u *upgradedRig) connections() int {
	c := u.port.clients
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.conns)
}

// enter carries text to the server as one that has proved itself, and says no more when it has so
// many answers. It returns what the server has said, when the server has let go of the connection.
func (u *upgradedRig) enter(t testing.TB, r right, text []byte, answers int) (said []byte) {
	t.Helper()
	head, err := http.NewRequest(http.MethodGet, "http://h/nats", nil)
	if err != nil {
		t.Fatal(err)
	}
	head.Header.Set("Connection", "Upgrade")
	head.Header.Set("Upgrade", protocol)
	server, client := net.Pipe()
	_ = client.SetDeadline(time.Now().Add(3 * within)) // a hang ends here, and is told below
	let := make(chan struct{})
	began := time.Now()
	go func() {
		defer close(let)
		defer server.Close()
		u.port.upgrade(&hijacked{ResponseRecorder: httptest.NewRecorder(), conn: server}, head)
		for u.connections() > 1 && time.Since(began) < 3*within { // the handler is over before the connection is
			time.Sleep(50 * time.Microsecond)
		}
	}()
	br := bufio.NewReader(client)
	if resp, err := http.ReadResponse(br, nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("no upgrade: %+v, %v", resp, err)
	}
	e := &clientHandshake{self: u.enters[r], shown: u.enters[r], secrets: u.secrets, right: r}
	conn, err := e.run(ctxOf(t, 3*within), &headConn{client, br})
	if err != nil {
		t.Fatalf("a true proof does not let it in: %v", err)
	}
	ended, answered := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		piece := make([]byte, 4<<10)
		for done := false; ; {
			if !done && bytes.Count(said, answerLine) >= answers {
				done = true
				close(answered)
			}
			n, err := conn.Read(piece)
			if said = append(said, piece[:n]...); err != nil {
				return
			}
		}
	}()
	if _, err := conn.Write(text); err == nil {
		select {
		case <-answered:
		case <-ended:
		}
		// All that it has sent is read before its end.
		_ = conn.(*guardedConn).Conn.(*pacedConn).Conn.(*tls.Conn).CloseWrite()
	}
	<-let
	_ = client.Close()
	if <-ended; time.Since(began) >= 3*within {
		t.Errorf("%q: the connection does not end", text)
	}
	return said
}

var answerLine = []byte("MSG " + inboxRoot)

// check is what must hold after any text.
func (u *upgradedRig) check(t testing.TB, text, said []byte) {
	t.Helper()
	// The honest agent's query comes behind all that the server was told.
	req := hello("V")
	req.Hello.EngineID = "honest"
	if rep, err := u.honest.Request(ctxOf(t, 3*within), u.via, reach(u.honest, "P"), req); err != nil || rep.Code != 0 {
		t.Errorf("after %q the honest agent is told %+v, %v", text, rep, err)
	}
	if got := u.registry(t); got != u.entry {
		t.Errorf("after %q prefill's entry is %s, it was %s", text, got, u.entry)
	}
	if bytes.Contains(said, []byte(u.victim)) && !bytes.Contains(text, []byte(u.victim)) {
		t.Errorf("%q is answered with another agent's id: %q", text, said)
	}
	u.mu.Lock()
	if len(u.wrong) > 0 {
		t.Errorf("after %q: %v", text, u.wrong)
	}
	u.wrong = nil
	u.mu.Unlock()
	c := u.port.clients
	c.mu.Lock()
	conns, in := len(c.conns), c.authenticated
	c.mu.Unlock()
	if conns != 1 || in != 1 { // the honest agent's
		t.Fatalf("after %q %d connections are there, %d of them in", text, conns, in)
	}
	u.port.authenticator.mu.Lock()
	if n := len(u.port.authenticator.users); n != 1 {
		t.Errorf("after %q %d users are left", text, n)
	}
	u.port.authenticator.mu.Unlock()
	for what, b := range map[string]*budget{"requests": u.port.unanswered, "answers": u.port.unread} {
		b.mu.Lock()
		if b.total < 0 || b.total > 64<<10 || b.shares.Holders() > 1 { // the honest agent's
			t.Errorf("after %q %d bytes of %s are counted, of %d connections", text, b.total, what, b.shares.Holders())
		}
		b.mu.Unlock()
	}
}

// upgradedSeed is a text of one that has entered, and what it makes prefill's handler hear.
type upgradedSeed struct {
	rank    bool
	text    string
	hears   wire.Kind // 0: nothing
	answers int       // messages that come back; the server's errors are none
}

func upgradedSeeds(t testing.TB) []upgradedSeed {
	t.Helper()
	const connect, listen = "CONNECT {}\r\n", "SUB _INBOX.{E}.> 1\r\n"
	pub := func(to, from, reply string, req *wire.Request) string {
		data, err := req.MarshalMsg(nil)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("PUB %s%s.%s %s %d\r\n%s\r\n", agentRoot, to, from, reply, len(data), data)
	}
	hello := &wire.Request{Kind: wire.KindHello, From: "x", Hello: &wire.Agent{Version: wire.Version, ID: "x", EngineID: "attacker"}}
	renew := &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{Loads: []string{"t"}, Claims: []string{"u"}}}
	load := &wire.Request{Kind: wire.KindLoad, Load: &wire.Load{TransferID: "t", Transport: "tcp", Grant: []byte{1}, Groups: []wire.Blocks{{IDs: []uint32{1}}}}}
	finish := &wire.Request{Kind: wire.KindFinish, Finishes: []wire.Finish{{TransferID: "t"}}}
	signal := &wire.Request{Kind: wire.KindSignal, Signal: &wire.Signal{Transport: "rdma", Data: []byte("x")}}
	join := &wire.Request{Kind: wire.KindJoin, Join: &wire.Join{New: true, Since: 1 << 62, Agent: &wire.Agent{Version: wire.Version, ID: "x", EngineID: "e"}}}
	joining, err := join.MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	enters := connect + listen
	seeds := []upgradedSeed{
		{false, enters + "SUB " + agentRoot + "{E}.* 2\r\nPING\r\n", 0, 0},
		{false, enters + "PUB $JS.API.STREAM.INFO." + stream + " _INBOX.{E}.1 0\r\n\r\n", 0, 1},
		{false, enters + "PUB $JS.API.DIRECT.GET." + stream + "." + rankKey("e", 0, 0) + " _INBOX.{E}.1 0\r\n\r\n", 0, 1},
		{true, connect + "SUB _INBOX.{R}.> 1\r\n" + fmt.Sprintf("PUB %s{R} _INBOX.{R}.1 %d\r\n%s\r\n", joinRoot, len(joining), joining), wire.KindJoin, 1},
		{true, connect + "SUB _INBOX.{R}.> 1\r\n" + pub(inPrefill, inRank, "_INBOX.{R}.1", hello), wire.KindHello, 1},
		// What none may do.
		{false, enters + pub(inPrefill, inVictim, "_INBOX.{E}.1", finish), 0, 0},
		{false, enters + pub(inVictim, inPrefill, "_INBOX.{E}.1", load), 0, 0},
		{false, enters + pub(inPrefill, inVictim, "_INBOX.{V}.1", finish), 0, 0},
		{false, enters + pub(inPrefill, inRequester, "_INBOX.{V}.1", hello), 0, 0},
		{false, enters + "PUB $JS.API.STREAM.INFO." + stream + " " + rankKey("e", 0, 0) + " 0\r\n\r\n", 0, 0}, // JetStream answers
		{false, enters + pub(inPrefill, inRequester, rankKey("e", 0, 0), hello), 0, 0},
		{false, enters + pub(inPrefill, inRequester, "_INBOX.{E}.1", join), 0, 1}, // refused: on a subject of others
		{false, enters + fmt.Sprintf("PUB %s{E} _INBOX.{E}.1 %d\r\n%s\r\n", joinRoot, len(joining), joining), 0, 0},
		{false, enters + "SUB " + agentRoot + "{P}.* agent 2\r\nSUB > 3\r\nSUB _INBOX.{V}.> 4\r\n", 0, 0},
		{false, enters + "PUB " + rankKey("e", 0, 0) + " _INBOX.{E}.1 0\r\n\r\nPUB $JS.API.STREAM.PURGE." + stream + " _INBOX.{E}.2 0\r\n\r\n", 0, 0},
		{false, enters + "PUB " + agentRoot + "{P}.{E} _INBOX.{E}.1 8388609\r\n", 0, 0},
		{false, enters + "PUB " + agentRoot + "{P}.{E} _INBOX.{E}.1 8388608\r\nxx", 0, 0},
		{false, enters + "HPUB " + agentRoot + "{P}.{E} _INBOX.{E}.1 12 12\r\nNATS/1.0\r\n\r\n\r\n", 0, 0},
		{false, "PING\r\n" + enters, 0, 0},
		{true, connect + "SUB _INBOX.{E}.> 1\r\n" + fmt.Sprintf("PUB %s{P} _INBOX.{R}.1 %d\r\n%s\r\n", joinRoot, len(joining), joining), 0, 0},
	}
	for _, req := range []*wire.Request{hello, renew, load, finish, signal} {
		seeds = append(seeds, upgradedSeed{false, enters + pub(inPrefill, inRequester, "_INBOX.{E}.1", req), req.Kind, 1},
			upgradedSeed{false, enters + pub(inVictim, inRequester, "_INBOX.{E}.1", req), req.Kind, 1})
	}
	return seeds
}

// upgradedSecrets are a deployment's: with tokens, and without.
var upgradedSecrets = map[bool]secrets{true: {}, false: {token: "right", join: "ranks"}}

// FuzzUpgraded: what somebody says who has proved the token, or the ranks' one, behind the upgrade
// and the proof; or, to an open server, who has proved an identity only. Prefill and another decode agent hear it in its own name only, and of a rank's
// kind only as a rank. It is told no other agent's id. Prefill's entry stays, the connection ends
// with the client's, all that it held is free again, and the honest agent is answered.
func FuzzUpgraded(f *testing.F) {
	rigs := map[bool]*upgradedRig{}
	for open, k := range upgradedSecrets {
		rigs[open] = newUpgradedRig(f, k)
		for _, s := range upgradedSeeds(f) {
			f.Add(open, s.rank, []byte(s.text))
		}
	}
	f.Fuzz(func(t *testing.T, open, rank bool, text []byte) {
		if len(text) > 4<<10 { // no more requests than may wait for their answers
			return
		}
		r := rightAsk
		if rank {
			r = rightJoin
		}
		u := rigs[open]
		text = []byte(u.names.Replace(string(text)))
		u.check(t, text, u.enter(t, r, text, 0))
	})
}

// TestSeedsOfFuzzUpgraded: of the seeds, each that is a request reaches prefill's handler, or the
// other decode agent's, and is answered; what none may do reaches nobody. A token makes no
// difference to what somebody may do who is in.
func TestSeedsOfFuzzUpgraded(t *testing.T) {
	for open, k := range upgradedSecrets {
		t.Run(fmt.Sprintf("open %t", open), func(t *testing.T) { checkUpgradedSeeds(t, newUpgradedRig(t, k)) })
	}
}

func checkUpgradedSeeds(t *testing.T, u *upgradedRig) {
	reached := map[wire.Kind]int{}
	for _, s := range upgradedSeeds(t) {
		r := rightAsk
		if s.rank {
			r = rightJoin
		}
		text := []byte(u.names.Replace(s.text))
		u.mu.Lock()
		u.asked = map[wire.Kind]int{}
		u.mu.Unlock()
		said := u.enter(t, r, text, s.answers)
		u.check(t, text, said)
		u.mu.Lock()
		n, all := u.asked[s.hears], len(u.asked)
		u.mu.Unlock()
		if s.hears == 0 && all != 0 || s.hears != 0 && (n != 1 || all != 1) {
			t.Errorf("%q: the handlers hear %v, want one of kind %d", s.text, u.asked, s.hears)
		}
		if got := bytes.Count(said, answerLine); got != s.answers {
			t.Errorf("%q: %d answers, want %d: %q", s.text, got, s.answers, said)
		}
		reached[s.hears]++
	}
	for _, k := range []wire.Kind{wire.KindHello, wire.KindLoad, wire.KindRenew, wire.KindFinish, wire.KindSignal, wire.KindJoin} {
		if reached[k] == 0 {
			t.Errorf("no seed of kind %d", k)
		}
	}
}
