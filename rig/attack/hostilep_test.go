package attack

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// hostilePrefill is a host that a client has named, and that does all that a prefill engine's host does: it
// answers a decode agent's look-up and hello, in its own name and with a ticket of its own. So the
// agent meets it, and takes it for a prefill engine.
type hostilePrefill struct {
	*attacker
	id, boot string
	names    string            // its engine_id
	bus      *rogue            // with which it speaks; nil: it is a host, see newHostilePrefill
	entry    []byte            // its own in the registry
	loads    chan *wire.Load   // that it was asked for
	streams  chan *evilStream  // that decode has opened
	met      chan *hostileLink // each time that an agent has said hello
	// answer, if it is set, answers in a way of its own, or returns false.
	answer func(l *hostileLink, reply string, req *wire.Request) bool
	// renewal, if it is set, answers renewals of who meets it by its bus.
	renewal atomic.Pointer[wire.Reply]
	// registry, if it is set, answers a question to the registry in a way of its own, or returns false.
	registry func(l *hostileLink, subject, reply string) bool
}

func newHostilePrefill(t testing.TB) *hostilePrefill {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	e := &hostilePrefill{attacker: newAttacker(t), names: "p0", loads: make(chan *wire.Load, 64), streams: make(chan *evilStream, 64), met: make(chan *hostileLink, 64)}
	go e.listen(ln)
	a := aHello().Hello
	e.id = idOf(e.public)
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	a.ID, a.EngineID, a.Endpoints[0].Address = e.id, e.names, ":"+port
	if e.entry, err = a.MarshalMsg(nil); err != nil {
		t.Fatal(err)
	}
	e.boot, _ = e.host("kvconn - -\n", e.serve)
	return e
}

// from is what a load from it names.
func (e *hostilePrefill) from() string { return e.boot + " " + e.names }

// await is the next of what a channel brings.
func await[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(bound):
		t.Fatalf("no %s within %v", what, bound)
		panic("not reached")
	}
}

// load waits until decode asks for a transfer.
func (e *hostilePrefill) load(t testing.TB, id string) *wire.Load {
	t.Helper()
	for {
		if l := await(t, "load of "+id, e.loads); l.TransferID == id {
			return l
		}
	}
}

// hostileLink is an agent's connection to it.
type hostileLink struct {
	*session
	answers
	asks  string            // the subject at which the agent hears it; "": not yet
	heard chan struct{}     // holds a value when the agent has answered
	mu    sync.Mutex        // held while it writes
	subs  map[string]string // by subject, with NATS's number
	wants map[string]string // by its beginning: the last subject at which the agent wants an answer
}

// answers are those of an agent to what the attacker asks it.
type answers struct {
	answered atomic.Int64
	unmet    atomic.Int64 // that want a hello first
	told     atomic.Int64 // transfers of which they say anything
}

func (a *answers) note(rep *wire.Reply) {
	for _, s := range rep.Statuses {
		if core.Status(s) != core.StatusUnknown {
			a.told.Add(1)
		}
	}
	if rep.Again == wire.AgainAfterHello {
		a.unmet.Add(1)
	}
	a.answered.Add(1)
}

// serve is the host's side of the NATS protocol.
func (e *hostilePrefill) serve(s *session) {
	e.t.Cleanup(func() { _ = s.conn.Close() })
	l := &hostileLink{session: s, subs: map[string]string{}, wants: map[string]string{}, heard: make(chan struct{}, 1)}
	l.write("ok\nINFO {\"server_id\":\"x\",\"version\":\"2.11.0\",\"proto\":1,\"headers\":true,\"max_payload\":8388608}\r\n")
	for {
		line, err := s.br.ReadString('\n')
		f := strings.Fields(line)
		if err != nil || len(f) == 0 {
			return
		}
		switch f[0] {
		case "PING":
			l.write("PONG\r\n")
		case "SUB":
			l.hear(f[1], f[len(f)-1])
		case "PUB", "HPUB":
			var size, head int
			fmt.Sscan(f[len(f)-1], &size)
			reply := ""
			if f[0] == "HPUB" {
				fmt.Sscan(f[len(f)-2], &head)
				f = slices.Delete(f, len(f)-2, len(f)-1)
			}
			if len(f) > 3 {
				reply = f[2]
			}
			b := make([]byte, size+2)
			if _, err := io.ReadFull(s.br, b); err != nil {
				return
			}
			e.came(l, f[1], reply, b[head:size])
		}
	}
}

func (l *hostileLink) hear(subject, sid string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.subs[subject] = sid
	if strings.HasPrefix(subject, "kvconn.v1.agent.") {
		l.asks = strings.Replace(subject, "*", l.id, 1)
	}
}

// came is a message of the agent's.
func (e *hostilePrefill) came(l *hostileLink, subject, reply string, data []byte) {
	switch {
	case strings.HasPrefix(subject, "_INBOX."): // an answer
		rep := new(wire.Reply)
		if wire.Decode(data, rep) != nil {
			return
		}
		l.note(rep)
		put(l.heard, struct{}{})
	case e.registry != nil && strings.HasPrefix(subject, "$JS.API.") && e.registry(l, subject, reply):
	case strings.Contains(subject, ".STREAM.INFO."):
		l.send(reply, "", []byte(`{"type":"io.nats.jetstream.api.v1.stream_info_response","config":{"name":"KV_kvconn_ranks","subjects":["$KV.kvconn_ranks.>"],"allow_direct":true},"state":{"messages":1}}`))
	case strings.Contains(subject, ".DIRECT.GET."):
		l.send(reply, "Nats-Stream: KV_kvconn_ranks\r\nNats-Subject: "+entryAt("p0")+"\r\nNats-Sequence: 1\r\nNats-Time-Stamp: 2026-01-01T00:00:00Z\r\n", e.entry)
	default:
		req := new(wire.Request)
		if wire.Decode(data, req) == nil && (e.answer == nil || !e.answer(l, reply, req)) {
			e.asPrefill(l, reply, req)
		}
	}
}

// asPrefill answers as an honest prefill agent does that never sends.
func (e *hostilePrefill) asPrefill(l *hostileLink, reply string, req *wire.Request) {
	data, err := answerOf(req).MarshalMsg(nil)
	if err != nil {
		e.t.Error(err)
	}
	l.send(reply, "", data)
	switch req.Kind {
	case wire.KindHello:
		put(e.met, l)
	case wire.KindLoad:
		put(e.loads, req.Load)
	}
}

// answerOf is the answer of a prefill agent that never sends.
func answerOf(req *wire.Request) *wire.Reply {
	rep := &wire.Reply{}
	switch req.Kind {
	case wire.KindHello:
		rep.Tickets, rep.AgeMS = []wire.Ticket{{Transport: "tcp", Ticket: ticketFor(req.Hello)}}, 1_000_000
	case wire.KindRenew:
		for range len(req.Renew.Loads) + len(req.Renew.Claims) {
			rep.Statuses = append(rep.Statuses, uint8(core.StatusSending))
		}
	}
	return rep
}

// put gives a value to the test, unless it has many that it has not taken.
func put[T any](c chan<- T, v T) {
	select {
	case c <- v:
	default:
	}
}

// to is the head of a message to the agent, with a payload of so many bytes.
func (l *hostileLink) to(subject, reply, head string, size int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	sid := l.subs[subject]
	for s, id := range l.subs {
		if begin, more := strings.CutSuffix(s, "*"); more && strings.HasPrefix(subject, begin) {
			sid = id
		}
	}
	if strings.HasPrefix(subject, "kvconn.") {
		sid = l.subs[strings.Replace(subject, l.id, "*", 1)]
	}
	if head == "" {
		return fmt.Sprintf("MSG %s %s %s %d\r\n", subject, sid, reply, size)
	}
	head = "NATS/1.0\r\n" + head + "\r\n"
	return fmt.Sprintf("HMSG %s %s %s %d %d\r\n%s", subject, sid, reply, len(head), len(head)+size, head)
}

// send answers the agent.
func (l *hostileLink) send(subject, head string, data []byte) {
	l.mu.Lock()
	l.wants[subject[:strings.LastIndexByte(subject, '.')+1]] = subject
	l.mu.Unlock()
	l.write(l.to(subject, "", head, len(data)) + string(data) + "\r\n")
}

func (l *hostileLink) write(text string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, err := io.WriteString(l.conn, text)
	return err
}

// flood sends the agent messages again and again, each as soon as the one before is read. It ends
// with the connection.
func (l *hostileLink) flood(messages ...string) {
	for i := 0; l.write(messages[i%len(messages)]) == nil; i++ {
	}
}

// ask is a request to the agent.
func (l *hostileLink) ask(t testing.TB, req *wire.Request) string {
	t.Helper()
	data, err := req.MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	return l.to(l.asks, "_INBOX."+l.id+".x", "", len(data)) + string(data) + "\r\n"
}

// evilStream is a stream that decode has opened to it.
type evilStream struct {
	net.Conn
	t             testing.TB
	data, answers *sealer // nil: it is in the clear
}

func (e *hostilePrefill) listen(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		e.t.Cleanup(func() { _ = c.Close() })
		go func() {
			s, hello := &evilStream{Conn: c, t: e.t}, make([]byte, frameHeader+16) // and its proof, or a random value before that
			if _, err := io.ReadFull(c, hello); err == nil && s.answersHello(hello) == nil {
				put(e.streams, s)
			}
		}()
	}
}

// The kinds of frames, see package tcp.
const (
	frameData  = 2
	frameAck   = 3
	frameNack  = 4
	frameLeave = 5
	frameFault = 7

	frameSealedHello = 8
	frameHelloReply  = 9
)

// frame is a frame's header, and its bytes.
func frame(kind uint32, key []byte, position, length uint64, bytes []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32('K')<<24|uint32('V')<<16|4)
	b = binary.BigEndian.AppendUint32(b, kind)
	b = append(b, slices.Concat(key, make([]byte, 16))[:16]...)
	b = binary.BigEndian.AppendUint64(b, position)
	return append(binary.BigEndian.AppendUint64(b, length), bytes...)
}

func (s *evilStream) say(frames ...[]byte) {
	s.t.Helper()
	_ = s.SetWriteDeadline(time.Now().Add(bound))
	for _, f := range frames {
		if err := s.send(f); err != nil {
			s.t.Fatal(err)
		}
	}
}

// hears waits until decode has answered a frame with a key: all before has been read then.
func (s *evilStream) hears(kind uint32, key []byte) {
	s.t.Helper()
	_ = s.SetReadDeadline(time.Now().Add(bound))
	want := frame(kind, key, 0, 0, nil)[:24]
	for {
		got, err := s.next()
		if err != nil {
			s.t.Fatalf("no answer of kind %d: %v", kind, err)
		}
		if slices.Equal(got[:24], want) {
			return
		}
	}
}
