package natsbus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// sealedPair are P and D at a NATS server with a token, and a holder of the token who hears all.
type sealedPair struct {
	prefill, decode *Bus
	p, d            core.AgentID
	handled         atomic.Int32 // requests that P's handler was given
	hold            atomic.Pointer[chan struct{}]
	nc              *nats.Conn
	url             string

	mu    sync.Mutex
	heard []*nats.Msg
}

func newSealedPair(t *testing.T) *sealedPair {
	t.Helper()
	leaktest.Check(t)
	c := nettest.NewNATS(t, "--auth", "right")
	s := &sealedPair{p: named("P").ID(), d: named("D").ID(), url: c.URL()}
	nc, err := nats.Connect(c.URL(), nats.Token("right"), nats.NoReconnect())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	s.nc = nc
	if _, err := nc.Subscribe(">", func(m *nats.Msg) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.heard = append(s.heard, m)
	}); err != nil {
		t.Fatal(err)
	}
	if err := nc.FlushTimeout(within); err != nil {
		t.Fatal(err)
	}
	s.prefill = newBus(t, Options{Identity: named("P"), ClusterURL: c.URL(), Token: "right"})
	s.prefill.Serve(func(_ core.Via, req *wire.Request) *wire.Reply {
		n := s.handled.Add(1)
		if hold := s.hold.Load(); hold != nil {
			<-*hold
		}
		return &wire.Reply{Reason: fmt.Sprint("answer ", n, " to ", shortName(req.From))}
	})
	s.decode = newBus(t, Options{Identity: named("D"), ClusterURL: c.URL(), Token: "right", ConnectTimeout: time.Minute}) // no attempt to open a session ends by itself
	return s
}

// heardAt are the messages that the observer heard at a subject, when there are so many.
func (s *sealedPair) heardAt(t *testing.T, subject string, n int) (list []*nats.Msg) {
	t.Helper()
	eventually(t, "the observer hears "+subject, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		list = slices.DeleteFunc(slices.Clone(s.heard), func(m *nats.Msg) bool { return m.Subject != subject })
		if len(list) < n {
			return fmt.Errorf("%d messages", len(list))
		}
		return nil
	})
	return list
}

// forget has P forget its sessions.
func (s *sealedPair) forget() {
	served := s.prefill.seals.responder
	served.mu.Lock()
	defer served.mu.Unlock()
	for _, v := range served.by {
		served.drop(v)
	}
}

func (s *sealedPair) request(t *testing.T, want string) {
	t.Helper()
	r, err := s.decode.Request(ctxOf(t, within), "", s.p, hello(string(s.d)))
	if err != nil || r.Reason != want {
		t.Fatalf("%+v, %v; want %q", r, err, want)
	}
}

// say sends a message as whoever its subject says, with a subject for the answer that is D's own.
func (s *sealedPair) say(t *testing.T, subj string, data []byte) (answer *nats.Subscription) {
	t.Helper()
	reply := inboxOf(s.d) + "." + randomName()
	answer, err := s.nc.SubscribeSync(reply)
	if err == nil {
		err = s.nc.PublishRequest(subj, reply, data)
	}
	if err == nil {
		err = s.nc.FlushTimeout(within)
	}
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

// openTo is the session that an agent has with another; nil if there is none.
func openTo(b *Bus, peer core.AgentID) *sealSession {
	o := b.seals.requester
	o.mu.Lock()
	defer o.mu.Unlock()
	if a := o.by[peer]; a != nil {
		return a.session
	}
	return nil
}

// counted waits until something is refused, or was done in place of that.
func counted(t *testing.T, what string, n *atomic.Int64, want int64, instead func() bool) {
	t.Helper()
	eventually(t, what, func() error {
		if got := n.Load(); got < want && !instead() {
			return fmt.Errorf("%d, want %d", got, want)
		}
		return nil
	})
	if instead() {
		t.Fatalf("%s is taken", what)
	}
}

// TestPlainInACluster: what is not sealed is no request and no answer.
func TestPlainInACluster(t *testing.T) {
	s := newSealedPair(t)
	data, err := hello("D").MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	answer := s.say(t, subject(s.p, s.d), data)
	counted(t, "a plain request", &s.prefill.seals.plain, 1, func() bool { return s.handled.Load() > 0 })
	m, err := answer.NextMsg(within)
	if err != nil {
		t.Fatal(err)
	}
	r := new(wire.Reply)
	if err := wire.Decode(m.Data, r); err != nil || r.Code != int(core.Refused) || !strings.Contains(r.Reason, "same release of kvconn") {
		t.Errorf("an agent of an earlier release is told %+v, %v", r, err)
	}

	s.request(t, "answer 1 to D")
	hold := make(chan struct{})
	s.hold.Store(&hold)
	done := make(chan string, 1)
	go func() {
		r, err := s.decode.Request(context.Background(), "", s.p, hello(string(s.d)))
		done <- fmt.Sprint(r.Reason, err)
	}()
	last := s.heardAt(t, subject(s.p, s.d), 4)[3]
	forged, err := (&wire.Reply{Reason: "forged"}).MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	taken := func() bool { return len(done) > 0 }
	for i, m := range [][]byte{forged, nil, {sealMagic}, {sealMagic, sealVersion + 1, byte(sealAnswer)}, last.Data, slices.Concat(last.Data, last.Data)} {
		if err := s.nc.Publish(last.Reply, m); err != nil {
			t.Fatal(err)
		}
		counted(t, fmt.Sprint("answer ", i), &s.decode.seals.invalid, int64(i+1), taken)
	}
	close(hold)
	if got := <-done; got != "answer 2 to D<nil>" {
		t.Errorf("the answer is %q", got)
	}
}

// TestAnotherKey: nobody opens a session in D's name, or takes one in P's.
func TestAnotherKey(t *testing.T) {
	s := newSealedPair(t)
	asD := &Identity{signer: NewIdentity().signer, id: s.d}
	o, err := asD.open(s.p)
	if err != nil {
		t.Fatal(err)
	}
	answer := s.say(t, subject(s.p, s.d), o.message)
	counted(t, "a session in D's name", &s.prefill.seals.forged, 1, func() bool { n, _, _ := answer.Pending(); return n > 0 })

	absent := NewIdentity().id
	asAbsent := &Identity{signer: NewIdentity().signer, id: absent}
	if _, err := s.nc.Subscribe(subject(absent, s.d), func(m *nats.Msg) {
		if kindOfSealed(m.Data) == sealOpen {
			_, opened, _ := asAbsent.accept(s.d, m.Data, 1)
			to := requestTagOf(m.Data)
			_ = m.Respond(asAbsent.notice(s.d, &to, noticeRefused, "forged"))
			_ = m.Respond(opened)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.nc.FlushTimeout(within); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		_, err := s.decode.Request(ctx, "", absent, hello(string(s.d)))
		done <- err
	}()
	sessions := func() bool { return len(done) > 0 || openTo(s.decode, absent) != nil }
	counted(t, "an answer by another key", &s.decode.seals.invalid, 2, sessions)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "2 messages that it has not sealed") {
		t.Errorf("%v", err)
	}
}

// TestReplayedRequests: what an observer has recorded is worth nothing, also when P has forgotten
// the session.
func TestReplayedRequests(t *testing.T) {
	s := newSealedPair(t)
	s.request(t, "answer 1 to D")
	s.request(t, "answer 2 to D")
	recorded := s.heardAt(t, subject(s.p, s.d), 3) // an open and two requests
	seals := s.prefill.seals
	for i, m := range recorded {
		s.say(t, subject(s.p, s.d), m.Data)
		counted(t, fmt.Sprint("message ", i), &seals.repeated, int64(i+1), func() bool { return s.handled.Load() != 2 })
	}
	s.forget()
	opened := s.say(t, subject(s.p, s.d), recorded[0].Data)
	if m, err := opened.NextMsg(within); err != nil || kindOfSealed(m.Data) != sealOpened {
		t.Fatalf("%v", err)
	}
	for i, m := range recorded[1:] {
		s.say(t, subject(s.p, s.d), m.Data)
		counted(t, fmt.Sprint("request ", i), &seals.unknown, int64(i+1), func() bool { return s.handled.Load() != 2 })
	}
	s.request(t, "answer 3 to D") // it opens another session
	if n := seals.unknown.Load(); n != 3 {
		t.Errorf("%d requests of sessions that P does not know, want 3", n)
	}
	s.request(t, "answer 4 to D")
	if n := len(s.heardAt(t, subject(s.p, s.d), 3+3+3+3+1)); n != 13 {
		t.Errorf("%d messages to P, want 13", n)
	}
}

// TestSessionOfAnother: E's own session proves E, whatever subject E speaks at.
func TestSessionOfAnother(t *testing.T) {
	s := newSealedPair(t)
	e := NewIdentity()
	o, err := e.open(s.p)
	if err != nil {
		t.Fatal(err)
	}
	reply := inboxOf(e.id) + ".1"
	answer, err := s.nc.SubscribeSync(reply)
	if err == nil {
		err = s.nc.PublishRequest(subject(s.p, e.id), reply, o.message)
	}
	if err != nil {
		t.Fatal(err)
	}
	m, err := answer.NextMsg(within)
	if err != nil {
		t.Fatal(err)
	}
	session, err := o.finish(m.Data)
	if err != nil {
		t.Fatal(err)
	}
	data, err := hello("D").MarshalMsg(sealHeadroom(nil))
	if err != nil {
		t.Fatal(err)
	}
	s.say(t, subject(s.p, s.d), session.sealRequest(data))
	counted(t, "E's request in D's name", &s.prefill.seals.foreign, 1, func() bool { return s.handled.Load() > 0 })
	// As E it is taken.
	data, _ = hello("E").MarshalMsg(sealHeadroom(nil))
	if err := s.nc.PublishRequest(subject(s.p, e.id), reply, session.sealRequest(data)); err != nil {
		t.Fatal(err)
	}
	if m, err := answer.NextMsg(within); err != nil || kindOfSealed(m.Data) != sealAnswer || s.handled.Load() != 1 {
		t.Errorf("%v, %d requests handled", err, s.handled.Load())
	}
}

// TestAnswerOfAnotherRequest: P's answer to one request is not taken for the next one's.
func TestAnswerOfAnotherRequest(t *testing.T) {
	s := newSealedPair(t)
	s.request(t, "answer 1 to D")
	first := s.heardAt(t, subject(s.p, s.d), 2)[1]
	answer := s.heardAt(t, first.Reply, 1)[0]
	hold := make(chan struct{})
	s.hold.Store(&hold)
	done := make(chan string, 1)
	go func() {
		r, err := s.decode.Request(context.Background(), "", s.p, hello(string(s.d)))
		done <- fmt.Sprint(r.Reason, err)
	}()
	second := s.heardAt(t, subject(s.p, s.d), 3)[2]
	if err := s.nc.Publish(second.Reply, answer.Data); err != nil {
		t.Fatal(err)
	}
	counted(t, "the first request's answer", &s.decode.seals.invalid, 1, func() bool { return len(done) > 0 })
	close(hold)
	if got := <-done; got != "answer 2 to D<nil>" {
		t.Errorf("the answer is %q", got)
	}
}

// TestSealedRefusals: an agent that has no place left says so, sealed to a session, and signed where there
// is none. Nobody else can say it. A session is opened meanwhile.
func TestSealedRefusals(t *testing.T) {
	s := newSealedPair(t)
	forgotten, newcomer := newBus(t, Options{Identity: named("D2"), ClusterURL: s.url, Token: "right"}), newBus(t, Options{Identity: named("D3"), ClusterURL: s.url, Token: "right"})
	if _, err := forgotten.Request(ctxOf(t, within), "", s.p, hello("D2")); err != nil {
		t.Fatal(err)
	}
	s.forget()
	s.request(t, "answer 2 to D")
	for range cap(s.prefill.requestSlots) {
		s.prefill.requestSlots <- struct{}{}
	}
	for who, b := range map[string]*Bus{"with a session": s.decode, "with one that is forgotten": forgotten, "a newcomer": newcomer} {
		r, err := b.Request(ctxOf(t, within), "", s.p, hello(string(b.opt.Identity.ID())))
		if err != nil || r.Code != int(core.Refused) || !strings.Contains(r.Reason, "overloaded: 64 requests") {
			t.Errorf("%s: %+v, %v", who, r, err)
		}
	}
	for range cap(s.prefill.requestSlots) {
		<-s.prefill.requestSlots
	}
	if openTo(newcomer, s.p) == nil {
		t.Error("while requests have all places, no session is opened")
	}
	s.request(t, "answer 3 to D")
	for _, m := range s.heardAt(t, subject(s.p, s.d), 4) {
		if m.Reply == "" || kindOfSealed(s.heardAt(t, m.Reply, 1)[0].Data) == 0 {
			t.Errorf("a plain answer at %q", m.Reply)
		}
	}
}

// TestSealedSizes: a sealed request may be as long as the servers carry, with its seal.
func TestSealedSizes(t *testing.T) {
	s := newSealedPair(t)
	limit := s.decode.homeLink().nc.MaxPayload()
	request := func(bytes int64) error {
		signal := &wire.Request{Kind: wire.KindSignal, Signal: &wire.Signal{Transport: "x", Data: make([]byte, bytes)}}
		_, err := s.decode.Request(ctxOf(t, within), "", s.p, signal)
		return err
	}
	data, err := (&wire.Request{Kind: wire.KindSignal, Signal: &wire.Signal{Transport: "x", Data: make([]byte, 1<<16)}}).MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	buf := limit - int64(len(data)-1<<16) - sealOverhead
	if err := request(buf); err != nil {
		t.Errorf("%d bytes: %v", buf, err)
	}
	if err := request(buf + 1); !errors.Is(err, core.ErrTooLarge) {
		t.Errorf("%d bytes: %v", buf+1, err)
	}
}

// TestSessionsOverReconnects: the sessions outlive the connections that carried them.
func TestSessionsOverReconnects(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATS(t)
	prefill := newBus(t, Options{Identity: named("P"), ClusterURL: c.URL()})
	serve(prefill)
	decode := newBus(t, Options{Identity: named("D"), ClusterURL: c.URL()})
	ask(t, decode, "", "P", "P via : hello D")
	before := openTo(decode, named("P").ID())
	c.Kill()
	c.Start()
	eventually(t, "P is reached again", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := decode.Request(ctx, "", named("P").ID(), hello("D"))
		return err
	})
	if after := openTo(decode, named("P").ID()); after != before {
		t.Error("another session was opened")
	}
}
