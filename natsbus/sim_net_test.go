package natsbus

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvconn/kvconn/core"
)

// simNet stands in for a NATS server: each message that is published waits here until the simulator delivers, doubles, delays
// or loses it. Its connections are pipes, so that it runs in a bubble of testing/synctest. It holds clients to the permissions
// that the authenticator gives them, and asks of what passes them whether its client may say or hear it.
type simNet struct {
	auth *authenticator // nil: a cluster in which everybody may publish and hear everything

	mu     sync.Mutex
	conns  []*simConn
	flying []*simMessage
	heard  []*simMessage // all that was published since the hostile peer last looked
	denied int           // messages and subscriptions that the permissions forbid
	broken []string
	wg     sync.WaitGroup
}

type simMessage struct {
	from        *simConn // nil: of a hostile operator
	n           int      // its place among those of its connection
	subj, reply string
	data        []byte
	absent      bool      // it says that nobody listens
	due         time.Time // zero: its fate is not dealt yet
}

// simConn is a client's connection.
type simConn struct {
	net  *simNet
	n    int
	conn net.Conn
	out  *simWriter

	// Guarded by simNet.mu, as all that follows is.
	id      core.AgentID // of the agent whose connection it is
	home    bool         // it is this process's own agent
	perms   *server.Permissions
	subs    []simSub
	replies map[string]bool // subjects of requests that it has heard, at which it may answer once
	last    time.Time       // when its last message is due
	sent    int
	ended   bool
	cut     bool // the simulator has ended it
}

type simSub struct{ subj, queue, sid string }

// chance draws what happens to a message, and what the hostile peer makes of it.
func (m *simMessage) chance(seed, what uint64) *rand.Rand {
	return rand.New(rand.NewPCG(seed<<8|what, uint64(m.from.n)<<32|uint64(m.n)))
}

// simWriter writes what it is given in turn, so that who gives it waits for no reader.
type simWriter struct {
	mu    sync.Mutex
	queue [][]byte
	ended bool
	wake  chan struct{}
}

func newSimWriter() *simWriter { return &simWriter{wake: make(chan struct{}, 1)} }

func (w *simWriter) give(b []byte, ended bool) {
	w.mu.Lock()
	if len(b) > 0 {
		w.queue = append(w.queue, b)
	}
	w.ended = w.ended || ended
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// run ends when all is written after the end, or the connection is closed.
func (w *simWriter) run(conn io.WriteCloser) {
	defer conn.Close()
	for range w.wake {
		w.mu.Lock()
		queue, ended := w.queue, w.ended
		w.queue = nil
		w.mu.Unlock()
		for _, b := range queue {
			if _, err := conn.Write(b); err != nil {
				return
			}
		}
		if ended {
			return
		}
	}
}

// dial is a client's way in.
func (n *simNet) dial() (net.Conn, error) {
	inside, client := net.Pipe()
	c := &simConn{net: n, conn: inside, out: newSimWriter(), replies: map[string]bool{}}
	n.mu.Lock()
	c.n = len(n.conns)
	n.conns = append(n.conns, c)
	n.mu.Unlock()
	n.wg.Go(func() { c.out.run(inside) })
	n.wg.Go(c.read)
	return client, nil
}

func (c *simConn) read() {
	c.say(`INFO {"server_id":"S","server_name":"sim","version":"2.11.0","proto":1,"headers":true,"max_payload":%d}`, maxPayload)
	r := bufio.NewReaderSize(c.conn, maxLine)
	for {
		line, err := r.ReadString('\n')
		if err == nil {
			err = c.command(strings.TrimRight(line, "\r\n"), r)
		}
		if err != nil {
			break
		}
	}
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.ended, c.subs = true, nil
	c.out.give(nil, true)
}

func (c *simConn) say(format string, args ...any) {
	c.out.give(fmt.Appendf(nil, format+"\r\n", args...), false)
}

func (c *simConn) command(line string, r *bufio.Reader) error {
	verb, rest, _ := strings.Cut(line, " ")
	args := strings.Fields(rest)
	switch {
	case verb == "CONNECT":
		return c.connect(rest)
	case verb == "PING":
		c.say("PONG")
	case verb == "PONG":
	case verb == "SUB" && len(args) >= 2:
		s := simSub{subj: args[0], sid: args[len(args)-1]}
		if len(args) == 3 {
			s.queue = args[1]
		}
		c.subscribe(s)
	case verb == "UNSUB" && len(args) > 0:
		c.net.mu.Lock()
		defer c.net.mu.Unlock()
		c.subs = slices.DeleteFunc(c.subs, func(s simSub) bool { return s.sid == args[0] })
	case verb == "PUB" && len(args) >= 2:
		n, err := strconv.Atoi(args[len(args)-1])
		if err != nil {
			return err
		}
		m := &simMessage{from: c, subj: args[0], data: make([]byte, n+len(lineEnd))}
		if len(args) == 3 {
			m.reply = args[1]
		}
		if _, err := io.ReadFull(r, m.data); err != nil {
			return err
		}
		m.data = m.data[:n]
		c.publish(m)
	default:
		return fmt.Errorf("%q", line)
	}
	return nil
}

// connect asks the authenticator, as nats-server does.
func (c *simConn) connect(options string) error {
	who := &simCredentials{opts: &server.ClientOpts{}}
	if err := json.Unmarshal([]byte(options), who.opts); err != nil {
		return err
	}
	if c.net.auth != nil && !c.net.auth.Check(who) {
		c.say("-ERR 'Authorization Violation'")
		return server.ErrAuthentication
	}
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.id, c.perms = core.AgentID(strings.TrimPrefix(who.opts.Name, clientName)), who.perms
	c.home = c.net.auth != nil && c.perms == nil
	return nil
}

// simCredentials are a client's, for the authenticator.
type simCredentials struct {
	server.ClientAuthentication
	opts  *server.ClientOpts
	perms *server.Permissions
}

func (a *simCredentials) GetOpts() *server.ClientOpts { return a.opts }

func (a *simCredentials) RegisterUser(u *server.User) { a.perms = u.Permissions }

// subscribe lets a client hear a subject, if it may.
func (c *simConn) subscribe(s simSub) {
	n := c.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if c.perms != nil && !slices.ContainsFunc(c.perms.Subscribe.Allow, func(p string) bool { return covers(p, s.subj) }) {
		n.denied++
		c.say("-ERR 'Permissions Violation for Subscription to %q'", s.subj)
		return
	}
	if n.auth != nil && !c.home && !covers(subject(c.id, "*"), s.subj) && !covers(inboxOf(c.id)+".>", s.subj) {
		n.broken = append(n.broken, fmt.Sprintf("agent %s hears %s", c.id, s.subj))
	}
	c.subs = append(c.subs, s)
}

// publish takes a message, if its client may send it.
func (c *simConn) publish(m *simMessage) {
	n := c.net
	n.mu.Lock()
	defer n.mu.Unlock()
	answers := c.replies[m.subj]
	delete(c.replies, m.subj)
	if c.perms != nil && !answers && !slices.ContainsFunc(c.perms.Publish.Allow, func(p string) bool { return covers(p, m.subj) }) {
		n.denied++
		c.say("-ERR 'Permissions Violation for Publish to %q'", m.subj)
		return
	}
	if n.auth != nil && !c.home && !answers {
		words := strings.Split(m.subj, ".")
		switch {
		case words[len(words)-1] != tokens(c.id):
			n.broken = append(n.broken, fmt.Sprintf("agent %s sends to %s", c.id, m.subj))
		case !ownInbox(m.reply, c.id):
			n.broken = append(n.broken, fmt.Sprintf("agent %s sends to %s and wants the answer at %s", c.id, m.subj, m.reply))
		}
	}
	c.sent++
	m.n = c.sent
	n.flying, n.heard = append(n.flying, m), append(n.heard, m)
}

// deliver gives a message to all that hear its subject, and to one of each queue group.
func (n *simNet) deliver(m *simMessage) {
	n.mu.Lock()
	defer n.mu.Unlock()
	groups, heard := map[string]bool{}, false
	for _, c := range n.conns {
		for _, s := range c.subs {
			if !covers(s.subj, m.subj) || s.queue != "" && groups[s.queue] {
				continue
			}
			groups[s.queue], heard = s.queue != "", true
			if m.absent {
				c.sayAbsent(m.subj, s.sid)
				continue
			}
			head := fmt.Sprintf("MSG %s %s %d\r\n", m.subj, s.sid, len(m.data))
			if m.reply != "" {
				head = fmt.Sprintf("MSG %s %s %s %d\r\n", m.subj, s.sid, m.reply, len(m.data))
				c.replies[m.reply] = true
			}
			c.out.give(slices.Concat([]byte(head), m.data, []byte(lineEnd)), false)
		}
	}
	if heard || m.reply == "" || m.from == nil {
		return
	}
	for _, s := range m.from.subs {
		if covers(s.subj, m.reply) {
			m.from.sayAbsent(m.reply, s.sid)
		}
	}
}

// sayAbsent is a server's word that nobody listens.
func (c *simConn) sayAbsent(subj, sid string) {
	c.say("HMSG %s %s 16 16\r\nNATS/1.0 503\r\n\r\n", subj, sid)
}

// inject publishes a message of who may send everything.
func (n *simNet) inject(m *simMessage) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.flying = append(n.flying, m)
}

// listen takes what was published since the last call.
func (n *simNet) listen() []*simMessage {
	n.mu.Lock()
	defer n.mu.Unlock()
	heard := n.heard
	n.heard = nil
	return heard
}

// most is how many bytes of one connection's messages are under way.
func (n *simNet) most() (most int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	of := map[*simConn]int64{}
	for _, m := range n.flying {
		if m.from != nil {
			of[m.from] += int64(len(m.data))
			most = max(most, of[m.from])
		}
	}
	return most
}

// cut ends an agent's connections.
func (n *simNet) cut(id core.AgentID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.conns {
		if c.id == id && !c.ended {
			c.cut = true
			_ = c.conn.Close()
		}
	}
}

// endedAlone are the agents whose connections have ended, though the simulator has not cut them.
func (n *simNet) endedAlone() (list []core.AgentID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.conns {
		if c.ended && !c.cut {
			list = append(list, c.id)
		}
	}
	return list
}

// close ends all connections, and waits for their goroutines.
func (n *simNet) close() {
	n.mu.Lock()
	for _, c := range n.conns {
		_ = c.conn.Close()
		c.out.give(nil, true)
	}
	n.mu.Unlock()
	n.wg.Wait()
}

// covers says whether a pattern has all subjects of another.
func covers(pattern, subj string) bool {
	p, s := strings.Split(pattern, "."), strings.Split(subj, ".")
	for i, w := range p {
		switch {
		case w == ">":
			return len(s) > i
		case i >= len(s), w == "*" && s[i] == ">", w != "*" && w != s[i]:
			return false
		}
	}
	return len(p) == len(s)
}
