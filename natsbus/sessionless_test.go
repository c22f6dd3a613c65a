package natsbus

import (
	"crypto/rand"
	"fmt"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
)

// flood sends P messages of no session in the names of the agents of a key, those of others where from is "", and waits
// until the server has them.
func (s *sealedPair) flood(t *testing.T, n int, kind sealKind, from core.AgentID, header nats.Header) {
	t.Helper()
	bytes := map[sealKind]int{sealOpen: openBytes, sealRequest: sealOverhead + 4000}[kind]
	for i := range n {
		m := make([]byte, bytes)
		_, _ = rand.Read(m)
		m[0], m[1], m[2] = sealMagic, sealVersion, byte(kind)
		name := from + core.AgentID(fmt.Sprint(keySeparator, i))
		if from == "" {
			name = core.AgentID(fmt.Sprint("unknown", i/maxSessionlessOf))
		}
		if err := s.nc.PublishMsg(&nats.Msg{Subject: subject(s.p, name), Reply: inboxOf(name) + ".1", Data: m, Header: header}); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.nc.FlushTimeout(within); err != nil {
		t.Fatal(err)
	}
}

// TestFloodOfUnknownSenders: opens, and requests of sessions that are not known, wait in places of their own, take none of a
// request's, and are not held beyond a bound, whatever headers they have. When they are answered, honest agents open
// sessions as before.
func TestFloodOfUnknownSenders(t *testing.T) {
	for kind, name := range map[sealKind]string{sealOpen: "opens", sealRequest: "requests"} {
		t.Run(name, func(t *testing.T) {
			s := newSealedPair(t)
			s.request(t, "answer 1 to D")
			waits := s.prefill.sessionless
			waits.responders <- struct{}{} // one answer takes long
			const excess = 10
			seals := s.prefill.seals
			s.flood(t, maxSessionless+excess, kind, "", nats.Header{"Long": []string{string(make([]byte, 1000))}})
			counted(t, "messages beyond the bound", &seals.queueFull, excess, func() bool { return false })
			if n := waits.len(); n != maxSessionless {
				t.Errorf("%d messages wait, want %d", n, maxSessionless)
			}
			s.request(t, "answer 2 to D")
			held := 0
			waits.mu.Lock()
			for v := range waits.waits.All() {
				if held += cap(v.m.Data); v.m.Header != nil {
					t.Error("a header is held")
				}
			}
			waits.mu.Unlock()
			if held > maxSessionless*2*openBytes {
				t.Errorf("%d bytes are held of %d messages", held, maxSessionless)
			}
			<-waits.responders
			s.prefill.answerSessionless()
			other := newBus(t, Options{Identity: named("D2"), ClusterURL: s.url, Token: "right", ConnectTimeout: within})
			if r, err := other.Request(ctxOf(t, within), "", s.p, hello("D2")); err != nil || r.Reason != "answer 3 to D2" {
				t.Errorf("%+v, %v", r, err)
			}
			of := &seals.forged
			if kind == sealRequest {
				of = &seals.unknown
			}
			counted(t, "messages that are answered, or not", of, maxSessionless, func() bool { return false })
			eventually(t, "no message waits", func() error { // D2 may have sent a second open meanwhile
				if n := waits.len(); n != 0 {
					return fmt.Errorf("%d wait", n)
				}
				return nil
			})
		})
	}
}

// TestFloodOfOneSender: the messages of one key's agents that wait leave places to those of others.
func TestFloodOfOneSender(t *testing.T) {
	s := newSealedPair(t)
	s.request(t, "answer 1 to D")
	waits := s.prefill.sessionless
	waits.responders <- struct{}{}
	s.flood(t, maxSessionless, sealOpen, "greedy", nil)
	counted(t, "messages beyond its share", &s.prefill.seals.queueFull, maxSessionless-maxSessionlessOf, func() bool { return false })
	if n := waits.len(); n != maxSessionlessOf {
		t.Errorf("%d messages of one key wait, want %d", n, maxSessionlessOf)
	}
	<-waits.responders
	s.prefill.answerSessionless()
	other := newBus(t, Options{Identity: named("D2"), ClusterURL: s.url, Token: "right", ConnectTimeout: within})
	if r, err := other.Request(ctxOf(t, within), "", s.p, hello("D2")); err != nil || r.Reason != "answer 2 to D2" {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestFloodOfManyKeys: messages of many keys that fill all places leave some to a key of which fewer wait. Those of the keys that have the
// most get no answer.
func TestFloodOfManyKeys(t *testing.T) {
	waits := newSessionless(ownerOf)
	message := func(key string, i int) *inboundRequest {
		return &inboundRequest{from: core.AgentID(fmt.Sprint(key, keySeparator, i)), m: &nats.Msg{}}
	}
	for key := range maxSessionless / maxSessionlessOf {
		for i := range maxSessionlessOf {
			if waits.put(message(fmt.Sprint("greedy", key), i)) != nil {
				t.Fatalf("message %d of key %d finds no room", i, key)
			}
		}
	}
	for i := range 100 {
		v := message("newcomer", i)
		if lost := waits.put(v); lost == nil || ownerOf(lost.from) == "newcomer" {
			t.Fatalf("for message %d of another key %v gives way", i, lost)
		}
		v = message("greedy0", i)
		if lost := waits.put(v); lost == nil || ownerOf(lost.from) == "newcomer" {
			t.Fatalf("for one of a key that has the most %v gives way", lost)
		}
	}
	if n := waits.waits.Of("newcomer"); n != 100 || waits.len() != maxSessionless {
		t.Errorf("%d of another key's messages wait, %d in all", n, waits.len())
	}
	for i := 0; waits.len() > 0; i++ {
		if v := waits.take(); i == maxSessionless-1 && v.from != core.AgentID(fmt.Sprint("greedy0", keySeparator, 99)) {
			t.Errorf("the last is %s", v.from)
		}
	}
}
