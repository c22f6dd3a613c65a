package natsbus

import (
	"bytes"
	"crypto/rand"
	"encoding/base32"
	"fmt"
	"os"
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

// eavesdropper hears all that agents say to each other in a cluster, and answers in their place as
// fast as it can.
type eavesdropper struct {
	t        *testing.T
	attacker *Identity
	conns    []*nats.Conn

	mu      sync.Mutex
	heard   []intercepted // each once
	known   map[string]bool
	answers [][]byte // sealed ones
	said    int
}

type intercepted struct {
	by *nats.Conn
	m  *nats.Msg
}

func (o *eavesdropper) listen(nc *nats.Conn) {
	o.t.Helper()
	o.conns = append(o.conns, nc)
	_, err := nc.Subscribe(">", func(m *nats.Msg) { o.hear(nc, m) })
	if err == nil {
		err = nc.FlushTimeout(within)
	}
	if err != nil {
		o.t.Fatal(err)
	}
}

func (o *eavesdropper) hear(nc *nats.Conn, m *nats.Msg) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if name := m.Subject + string(m.Data); !o.known[name] { // two accounts hear one message
		o.known[name] = true
		o.heard = append(o.heard, intercepted{nc, m})
	}
	switch kindOfSealed(m.Data) {
	case sealAnswer:
		o.answers = append(o.answers, m.Data)
		return
	case sealOpen, sealRequest:
	default:
		return
	}
	if m.Reply == "" || strings.HasPrefix(m.Reply, importedReply) { // there the first answer is the last one: who may say it can also drop the agent's
		return
	}
	forged := [][]byte{{}, {sealMagic}, m.Data}
	if data, err := (&wire.Reply{Reason: "forged", Tickets: []wire.Ticket{{Transport: "tcp", Ticket: []byte("forged")}}}).MarshalMsg(nil); err == nil {
		forged = append(forged, data)
	}
	if n := len(o.answers); n > 0 {
		forged = append(forged, o.answers[n-1], o.answers[0])
	}
	to := requestTagOf(m.Data)
	requester, responder := partiesOf(m.Subject)
	attacker := &Identity{signer: o.attacker.signer, id: responder}
	forged = append(forged, attacker.notice(requester, &to, noticeAgain, ""), attacker.notice(requester, &to, noticeRefused, "forged"))
	if kindOfSealed(m.Data) == sealOpen {
		if _, opened, err := o.attacker.accept(requester, m.Data, 1); err == nil {
			forged = append(forged, opened)
		}
	}
	for _, data := range forged {
		if nc.Publish(m.Reply, data) == nil {
			o.said++
		}
	}
}

// partiesOf are the two of a subject, an id of a key as the two tokens that it is there.
func partiesOf(subj string) (requester, responder core.AgentID) {
	words := strings.Split(strings.TrimPrefix(subj, agentRoot), ".")
	half := len(words) / 2
	return core.AgentID(strings.Join(words[half:], keySeparator)), core.AgentID(strings.Join(words[:half], keySeparator))
}

// sealed are the requests and opens that it has heard.
func (o *eavesdropper) sealed() (list []intercepted) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, h := range o.heard {
		if kind := kindOfSealed(h.m.Data); h.m.Reply != "" && (kind == sealOpen || kind == sealRequest) {
			list = append(list, h)
		}
	}
	return list
}

// replyTo is the subject at which the requester of a message hears. nats-server's own for another account cannot be said.
func (o *eavesdropper) replyTo(h intercepted) string {
	if strings.HasPrefix(h.m.Reply, importedReply) {
		requester, _ := partiesOf(h.m.Subject)
		return inboxOf(requester) + ".x"
	}
	return h.m.Reply
}

// dialogue is of two agents that say all that agents say, with secrets in it.
type dialogue struct {
	t       *testing.T
	p, d    *Bus
	secrets [][]byte
	handled atomic.Int64
	before  atomic.Int64 // messages that the requester had refused when it began to ask
}

func (s *dialogue) secret() []byte {
	b := make([]byte, 20)
	rand.Read(b)
	text := []byte(base32.StdEncoding.EncodeToString(b))
	s.secrets = append(s.secrets, text)
	return text
}

// serve answers when the requester has heard the observer's answer.
func (s *dialogue) serve(b, requester *Bus, rep *wire.Reply) {
	b.Serve(func(core.Via, *wire.Request) *wire.Reply {
		s.handled.Add(1)
		for end := time.Now().Add(within); requester.seals.invalid.Load() < s.before.Load()+1; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				s.t.Error("the observer's answers do not come")
				break
			}
		}
		return rep
	})
}

// say makes one request, and wants its honest answer.
func (s *dialogue) say(from, to *Bus, req *wire.Request, want *wire.Reply) {
	s.t.Helper()
	before := s.handled.Load()
	s.before.Store(from.seals.invalid.Load())
	got, err := from.Request(ctxOf(s.t, within), "", to.opt.Identity.ID(), req)
	if err != nil || got.Reason != want.Reason || len(got.Tickets) != len(want.Tickets) {
		s.t.Fatalf("a request of kind %d is answered %+v, %v", req.Kind, got, err)
	}
	if n := s.handled.Load(); n != before+1 {
		s.t.Fatalf("a request of kind %d is handled %d times", req.Kind, n-before)
	}
}

// TestObserverOfACluster: a user who hears all that agents say, the operator of the cluster among them, reads
// nothing of it. What it sends again is taken by nobody, and what it answers in others' places is not believed:
// each request gets its honest answer.
func TestObserverOfACluster(t *testing.T) {
	t.Run("a token", func(t *testing.T) {
		leaktest.Check(t)
		c := nettest.NewNATS(t, "--auth", "right")
		nc, err := nats.Connect(c.URL(), nats.Token("right"), nats.NoReconnect())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		observed := func(name string) *Bus {
			return newBus(t, Options{Identity: named(name), ClusterURL: c.URL(), Token: "right"})
		}
		eavesdrop(t, observed("P"), observed("D"), nc)
	})
	t.Run("the operator of three servers", func(t *testing.T) {
		leaktest.Check(t)
		ca := nettest.NewAuthority(t)
		cert, key := ca.Issue(time.Now().Add(time.Hour), "127.0.0.1")
		up, ud := newUser(t), newUser(t)
		file := nettest.ClusterUsers(t, up.key, ud.key)
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		// The operator enters each account, with all rights there.
		var operators []user
		conf := ""
		for line := range strings.Lines(string(text)) {
			if conf += line; strings.HasSuffix(strings.TrimSpace(line), "users: [") {
				operators = append(operators, newUser(t))
				conf += "{ nkey: " + operators[len(operators)-1].key + " }\n"
			}
		}
		if err := os.WriteFile(file, []byte(conf), 0o600); err != nil || len(operators) < 2 {
			t.Fatalf("%d accounts, %v", len(operators), err)
		}
		c := nettest.NewNATSTrio(t, "-c", file, "--tls", "--tlscert", cert, "--tlskey", key)
		urls := strings.ReplaceAll(c.URLs(), "nats://", "tls://")
		var conns []*nats.Conn
		for _, u := range operators {
			conns = append(conns, connAs(t, urls, u, nats.Secure(ca.Client())))
		}
		keyed := func(u user, name string) *Bus {
			return newBus(t, Options{Identity: u.named(t, name), ClusterURL: urls, Seed: u.seed, TLS: ca.Client(), JSPrefix: registryPrefix})
		}
		eavesdrop(t, keyed(up, "OP"), keyed(ud, "OD"), conns...)
	})
}

func eavesdrop(t *testing.T, p, d *Bus, conns ...*nats.Conn) {
	s := &dialogue{t: t, p: p, d: d}
	o := &eavesdropper{t: t, attacker: NewIdentity(), known: map[string]bool{}}
	for _, nc := range conns {
		o.listen(nc)
	}
	ofP := &wire.Reply{Reason: "P answers " + string(s.secret()), Tickets: []wire.Ticket{{Transport: "tcp", Ticket: s.secret()}}, Signal: s.secret()}
	ofD := &wire.Reply{Reason: "D answers " + string(s.secret())}
	s.serve(p, d, ofP)
	s.serve(d, p, ofD)
	eventually(t, "P and D hear each other", func() error {
		for _, to := range [][2]*Bus{{p, d}, {d, p}} {
			// The servers may not know yet that the agent listens. The observer does, so nobody says that the request is lost.
			if _, err := to[0].Request(ctxOf(t, time.Second), "", to[1].opt.Identity.ID(), &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{}}); err != nil {
				return err
			}
		}
		return nil
	})
	for range 8 { // loads
		id, grant := string(s.secret()), s.secret()
		s.say(d, p, hello("D"), ofP)
		s.say(d, p, &wire.Request{Kind: wire.KindLoad, Load: &wire.Load{TransferID: id, Transport: "tcp", Grant: grant, Groups: []wire.Blocks{{IDs: []uint32{1, 2, 3}}}}}, ofP)
		s.say(d, p, &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{Loads: []string{id}, Claims: []string{string(s.secret())}}}, ofP)
		s.say(p, d, &wire.Request{Kind: wire.KindSignal, Signal: &wire.Signal{Transport: "rdma", Data: s.secret()}}, ofD)
		s.say(d, p, &wire.Request{Kind: wire.KindFinish, Finishes: []wire.Finish{{TransferID: id, Reason: string(s.secret())}}}, ofP)
		s.say(p, d, &wire.Request{Kind: wire.KindFinish, Finishes: []wire.Finish{{TransferID: id, Reason: string(s.secret())}}}, ofD)
	}
	recorded := o.sealed()
	if len(recorded) < 2+8*6 {
		t.Fatalf("the observer has heard %d requests", len(recorded))
	}
	o.mu.Lock()
	for _, h := range o.heard {
		for _, secret := range s.secrets {
			if bytes.Contains(h.m.Data, secret) || strings.Contains(h.m.Subject+h.m.Reply+fmt.Sprint(h.m.Header), string(secret)) {
				t.Errorf("a message at %s has a secret in it", h.m.Subject)
			}
		}
	}
	o.mu.Unlock()

	// It sends all that again, as it was.
	handled := s.handled.Load()
	refused := func() int64 { // an open that had not reached its agent gets a session, which nobody can use
		return p.seals.repeated.Load() + d.seals.repeated.Load() + p.seals.accepted.Load() + d.seals.accepted.Load()
	}
	before := refused()
	for _, h := range recorded {
		if err := h.by.PublishRequest(h.m.Subject, o.replyTo(h), h.m.Data); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "what the observer has sent again", func() error {
		if n := refused() - before; n < int64(len(recorded)) && s.handled.Load() == handled {
			return fmt.Errorf("%d of %d are refused", n, len(recorded))
		}
		return nil
	})
	// It speaks as each.
	forged := p.seals.forged.Load() + d.seals.forged.Load()
	for i, h := range recorded[:2] {
		requester, responder := partiesOf(h.m.Subject)
		open, err := (&Identity{signer: o.attacker.signer, id: requester}).open(responder)
		if err == nil {
			err = h.by.PublishRequest(h.m.Subject, o.replyTo(h), open.message)
		}
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "what the observer says as another", func() error {
			if n := p.seals.forged.Load() + d.seals.forged.Load() - forged; n <= int64(i) {
				return fmt.Errorf("%d are refused", n)
			}
			return nil
		})
	}
	if n := s.handled.Load(); n != handled {
		t.Errorf("%d of its requests were handled", n-handled)
	}
	s.say(d, p, hello("D"), ofP)
	s.say(p, d, &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{}}, ofD)
	o.mu.Lock()
	defer o.mu.Unlock()
	t.Logf("%d requests heard, %d answers in others' places, %d secrets", len(recorded), o.said, len(s.secrets))
}
