package natsbus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

func signal() *wire.Request {
	return &wire.Request{Kind: wire.KindSignal, Signal: &wire.Signal{Transport: "x", Data: []byte("once")}}
}

// heardRequest is the first request to P that the observer heard.
func (s *sealedPair) heardRequest(t *testing.T) (m *nats.Msg) {
	t.Helper()
	eventually(t, "the observer hears a request", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		i := slices.IndexFunc(s.heard, func(m *nats.Msg) bool {
			return m.Subject == subject(s.p, s.d) && kindOfSealed(m.Data) == sealRequest
		})
		if i < 0 {
			return errors.New("only others")
		}
		m = s.heard[i]
		return nil
	})
	return m
}

// TestSignalIsHandledOnce: P handles a signal, and forgets its session. Who has heard the signal sends it again, so that P
// says that it does not know the session. D, which still waits, does not send it a second time. Its next one goes well.
func TestSignalIsHandledOnce(t *testing.T) {
	s := newSealedPair(t)
	hold := make(chan struct{})
	s.hold.Store(&hold)
	done := make(chan error, 1)
	go func() {
		_, err := s.decode.Request(context.Background(), "", s.p, signal())
		done <- err
	}()
	eventually(t, "P handles the signal", func() error {
		if s.handled.Load() == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	last := s.heardRequest(t)
	s.forget()
	if err := s.nc.PublishRequest(last.Subject, last.Reply, last.Data); err != nil {
		t.Fatal(err)
	}
	eventually(t, "D's signal ends", func() error {
		if len(done) == 0 && s.handled.Load() < 2 {
			return fmt.Errorf("it was handled %d times", s.handled.Load())
		}
		return nil
	})
	close(hold)
	mustBe(t, <-done, core.ErrUnreachable)
	if n := s.handled.Load(); n != 1 {
		t.Errorf("the signal was handled %d times", n)
	}
	if r, err := s.decode.Request(ctxOf(t, within), "", s.p, signal()); err != nil || r.Reason != "answer 2 to D" {
		t.Errorf("the next signal: %+v, %v", r, err)
	}
}

// TestSignalOfAnUnknownSession: it is sent once, also to an agent that never knew its session.
func TestSignalOfAnUnknownSession(t *testing.T) {
	s := newSealedPair(t)
	p, _, requests := s.forgetsSessions(t)
	for i := range int32(2) {
		_, err := s.decode.Request(ctxOf(t, within), "", p, signal())
		mustBe(t, err, core.ErrUnreachable)
		if n := requests.Load(); n != i+1 {
			t.Errorf("%d signals were sent %d times", i+1, n)
		}
	}
}

// TestOldRequest: P does not know of a request that is older than all numbers which it remembers whether it has come.
// It says nothing, since D may still wait for the answer, and would send the request again.
func TestOldRequest(t *testing.T) {
	s := newSealedPair(t)
	s.request(t, "answer 1 to D")
	old := s.heardRequest(t).Data
	seals := s.prefill.seals
	session, _ := seals.responder.find(sessionOf(old), 0, time.Now())
	seals.responder.use(session, 1<<20)
	answer := s.say(t, subject(s.p, s.d), old)
	counted(t, "an old request", &seals.repeated, 1, func() bool {
		n, _, _ := answer.Pending()
		return s.handled.Load() > 1 || seals.unknown.Load() > 0 || n > 0
	})
	// One that became old while it waited for a place is dropped too.
	v := &inboundRequest{link: s.prefill.homeLink(), from: s.d, m: unboundMessage(old), session: session}
	if s.prefill.unseal(v) || seals.repeated.Load() != 2 || seals.unknown.Load() != 0 {
		t.Errorf("%d requests are repeated, %d of unknown sessions", seals.repeated.Load(), seals.unknown.Load())
	}
}
