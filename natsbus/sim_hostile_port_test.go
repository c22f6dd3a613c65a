package natsbus

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// hostileClient is an agent that the server behind the bootstrap port has let in. It knows more than such a one can: all ids, and
// the subjects at which the answers to others' requests are awaited.
type hostileClient struct {
	w      *simWorld
	self   *Identity
	from   string       // its address
	victim string       // the nkey's seed of an agent that a client sends to the hostile peer's own host
	id     core.AgentID // at the server
	conn   *hostileConn
	held   []*hostileConn        // have proved themselves, and not said CONNECT
	silent []net.Conn            // have not proved themselves
	awaits []string              // subjects of answers to requests of others
	others map[core.AgentID]bool // ids that it has made for connections that hold little; guarded by w.mu
	met    time.Time             // when its small requests last met a large one
	n      int
}

const (
	floodBytes = 100 << 10 // of each request of a flood
	largeBytes = 440 << 10 // of an honest agent's
)

// hostileConn is one of its connections.
type hostileConn struct {
	out   *simWriter
	ended atomic.Bool
}

func (h *hostileConn) say(format string, args ...any) {
	h.out.give(fmt.Appendf(nil, format+"\r\n", args...), false)
}

// enter proves itself as each agent does; nil if there is no place.
func (h *hostileClient) enter() *hostileConn { return h.enterAs(h.self) }

func (h *hostileClient) enterAs(self *Identity) *hostileConn {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	e := &clientHandshake{self: self, secrets: secrets{token: h.w.token}, right: rightAsk}
	conn, err := h.w.enter(ctx, h.from, e)
	if err != nil {
		h.w.tell("hostile-refused", "%v", err)
		return nil
	}
	c := &hostileConn{out: newSimWriter()}
	h.w.wg.Go(func() { c.out.run(conn) })
	h.w.wg.Go(func() {
		h.read(conn)
		c.ended.Store(true)
		c.out.give(nil, true)
	})
	return c
}

// read looks whether what it hears is for it.
func (h *hostileClient) read(conn net.Conn) {
	r := bufio.NewReader(conn)
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		words := strings.Fields(line)
		if len(words) == 0 || words[0] != "MSG" && words[0] != "HMSG" {
			continue
		}
		if subj := words[1]; !covers(inboxOf(h.id)+".>", subj) && !covers(subject(h.id, "*"), subj) {
			h.w.fault("the hostile peer hears a message to %s", subj)
		}
	}
}

// begin says CONNECT, and listens at its own subjects.
func (h *hostileClient) begin(c *hostileConn) {
	c.say("CONNECT {}\r\nPING")
	c.say("SUB %s.> 1\r\nSUB %s 2", inboxOf(h.id), subject(h.id, "*"))
}

func (h *hostileClient) listen() {
	for _, m := range h.w.net.listen() {
		if m.from.id != h.id && m.reply != "" {
			h.awaits = append(h.awaits, m.reply)
		}
	}
	h.awaits = h.awaits[max(0, len(h.awaits)-8):]
}

func (h *hostileClient) strike() {
	w := h.w
	if h.conn == nil || h.conn.ended.Load() {
		if h.conn = h.enter(); h.conn == nil {
			return
		}
		w.tell("hostile-enters", "%s", h.id)
		h.begin(h.conn)
		return
	}
	a, b := w.two()
	h.n++
	word, inbox := fmt.Sprint("attacker", h.n), inboxOf(h.id)+fmt.Sprint(".", h.n)
	switch w.rnd.IntN(11) {
	case 0:
		w.tell("hostile-name", "sends to %s as %s", a.name, b.name)
		h.publish(subject(a.id, b.id), inbox, message(wire.KindSignal, b.id, word))
	case 1:
		w.tell("hostile-from", "says to %s that it is %s", a.name, b.name)
		h.publish(subject(a.id, h.id), inbox, message(wire.KindHello, b.id, word))
	case 2:
		w.tell("hostile-elsewhere", "wants %s to answer it at %s", a.name, b.name)
		h.publish(subject(a.id, h.id), inboxOf(b.id)+"."+word, message(wire.KindSignal, h.id, word))
	case 3, 4:
		if len(h.awaits) > 0 {
			reply := h.awaits[w.rnd.IntN(len(h.awaits))]
			w.tell("hostile-answer", "answers at %s", reply)
			data, _ := (&wire.Reply{Reason: word}).MarshalMsg(nil)
			h.conn.say("PUB %s %d\r\n%s", reply, len(data), data)
		}
	case 5:
		w.tell("hostile-hears", "wants to hear %s", a.name)
		h.overhear(h.conn, a)
	case 6:
		h.relay()
	case 7:
		w.tell("hostile-flood", "asks %s much at once", a.name)
		for range 15 {
			h.n++
			h.publish(subject(a.id, h.id), inboxOf(h.id)+fmt.Sprint(".", h.n), message(wire.KindSignal, h.id, word+strings.Repeat(" ", floodBytes)))
		}
	case 8:
		h.holdLittle()
	default:
		h.late()
	}
}

// holdLittle has some connections hold little each, and together more than an honest agent, which asks for much then: so it is one of
// them that has to go. They hear no answers, so that what they hold stays.
func (h *hostileClient) holdLittle() {
	w := h.w
	if !h.met.IsZero() && time.Since(h.met) < 2*answerWithin { // what is not answered counts so long
		return
	}
	h.met = time.Now()
	var conns []*hostileConn
	for range 3 {
		self := NewIdentity() // an identity costs nothing
		id := self.At(w.agents[0].id).ID()
		w.mu.Lock()
		h.others[id] = true
		w.mu.Unlock()
		c := h.enterAs(self)
		if c == nil {
			break
		}
		conns = append(conns, c)
		c.say("CONNECT {}\r\nPING")
		for range 3 {
			h.n++
			c.publish(w.t, subject(w.agents[0].id, id), inboxOf(id)+fmt.Sprint(".", h.n), message(wire.KindSignal, id, fmt.Sprint("attacker", h.n, strings.Repeat(" ", floodBytes))))
		}
	}
	w.pass(10 * time.Millisecond)
	w.tell("hostile-small", "%d connections hold little each", len(conns))
	w.request(&simRequest{from: w.agents[1+w.rnd.IntN(3)], to: w.agents[0], kind: wire.KindSignal, padding: largeBytes}, 8*time.Second, nil)
	w.pass(10 * time.Millisecond)
	for _, c := range conns {
		c.out.give(nil, true)
	}
}

func (h *hostileClient) publish(subj, reply string, req *wire.Request) {
	h.conn.publish(h.w.t, subj, reply, req)
}

func (h *hostileConn) publish(t *testing.T, subj, reply string, req *wire.Request) {
	data, err := req.MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	h.say("PUB %s %s %d\r\n%s", subj, reply, len(data), data)
}

func (h *hostileClient) overhear(c *hostileConn, a *simAgent) {
	c.say("SUB %s 3\r\nSUB %s agent 4\r\nSUB %s.> 5", subject(a.id, "*"), subject(a.id, "*"), inboxOf(a.id))
}

// late enters, and says CONNECT only after others have entered: it is to be no other's right that it gets then.
func (h *hostileClient) late() {
	if len(h.held) == 0 {
		if c := h.enter(); c != nil {
			h.held = append(h.held, c)
		}
		return
	}
	h.w.tell("hostile-late", "says CONNECT")
	c := h.held[0]
	h.held = h.held[1:]
	h.begin(c)
	for _, a := range h.w.agents {
		h.overhear(c, a)
	}
	c.out.give(nil, true)
}

// relay passes the server's proof on to an agent that a client has sent here, and that agent's to the server. Or it gives the server its
// own proof back.
func (h *hostileClient) relay() {
	w := h.w
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	way := w.rnd.IntN(3)
	proves := []secrets{{token: w.token}, {seed: h.victim}, {}}[way]
	w.tell("hostile-relay", "way %d", way)
	theirs, mine := net.Pipe()
	deadline := time.Now().Add(time.Second)
	_, _ = theirs.SetDeadline(deadline), mine.SetDeadline(deadline)
	w.wg.Go(func() {
		defer theirs.Close()
		_, _ = (&clientHandshake{self: NewIdentity(), secrets: proves, right: rightAsk}).run(ctx, theirs)
	})
	defer mine.Close()
	up, err := w.upgraded(h.from)
	if err != nil {
		return
	}
	defer up.Close()
	_ = up.SetDeadline(deadline)
	host := NewIdentity()
	secure, err := host.serverTLS()
	if err != nil {
		w.t.Fatal(err)
	}
	agent, server := tls.Server(mine, secure), tls.Client(up, clientTLS(func(core.AgentID) *Identity { return host }))
	pass := func(to io.Writer, from io.Reader) (line string) {
		if line, err = readLine(from); err == nil {
			_, err = io.WriteString(to, line+"\n")
		}
		return line
	}
	if err = agent.HandshakeContext(ctx); err == nil {
		err = server.HandshakeContext(ctx)
	}
	proof := ""
	if err == nil {
		proof = pass(agent, server)
	}
	switch {
	case err != nil:
	case way == 2:
		_, err = fmt.Fprintf(server, "%s %s - %s\n", rightAsk, methodToken, strings.Fields(proof + " - -")[1])
	default:
		pass(server, agent)
	}
	if err != nil {
		return
	}
	if line, _ := readLine(server); line == "ok" {
		w.fault("a proof that an agent gave to the hostile peer's host lets the hostile peer in")
	}
}

// fill takes all places of those that have proved themselves, or of those that have not: a server whose places of the first kind
// are taken lets nobody of the attacker's address begin.
func (h *hostileClient) fill() {
	if h.w.rnd.IntN(2) == 0 {
		for len(h.silent) < maxHandshakes {
			up, err := h.w.upgraded(h.from)
			if err != nil {
				break
			}
			h.silent = append(h.silent, up)
		}
	} else {
		for range 2 * h.w.server.clients.max {
			c := h.enter()
			if c == nil {
				break
			}
			h.held = append(h.held, c)
		}
	}
	h.w.tell("hostile-fill", "%d connections, and %d that prove nothing", len(h.held), len(h.silent))
}

func (h *hostileClient) release() {
	for _, c := range h.silent {
		_ = c.Close()
	}
	h.silent = nil
}

func (h *hostileClient) forgotten(*simAgent) {}

func (h *hostileClient) leave() {
	h.release()
	for _, c := range append(h.held, h.conn) {
		if c != nil {
			c.out.give(nil, true)
		}
	}
}

func (h *hostileClient) owns(id, account string) bool {
	// A decode agent counts all who ask over a port under that, and the server's agent all who have gone under none.
	return (core.AgentID(id) == h.id || h.others[core.AgentID(id)]) && (account == "10.0.9.9/32" || account == string(simVia) || account == "")
}

func (h *hostileClient) check(broken func(string)) {
	c := h.w.server.clients
	c.mu.Lock()
	if c.authenticated > c.max {
		broken(fmt.Sprintf("%d clients have places, of %d", c.authenticated, c.max))
	}
	c.mu.Unlock()
	for _, id := range h.w.net.endedAlone() {
		for _, a := range h.w.agents {
			if a.id == id {
				broken("honest " + a.name + " lost its connection")
			}
		}
	}
	if most, limit := h.w.net.most(), h.w.server.unanswered.limit; most > limit+floodBytes {
		broken(fmt.Sprintf("%d bytes of requests of one connection are not answered, of %d", most, limit))
	}
	for what, b := range map[string]*budget{"requests": h.w.server.unanswered, "answers": h.w.server.unread} {
		b.mu.Lock()
		if b.total < b.ending || b.ending < 0 || b.total-b.ending > b.limit+2*floodBytes || b.total > 2*b.limit+2*floodBytes {
			broken(fmt.Sprintf("%d bytes of %s are held, %d of them by those who are ended; of %d", b.total, what, b.ending, b.limit))
		}
		b.mu.Unlock()
	}
}
