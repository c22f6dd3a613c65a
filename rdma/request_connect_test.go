package rdma

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
)

// helloRecorder are P's ends of the hellos: each takes an answer from the test.
type helloRecorder chan chan error

func (g helloRecorder) signal(ctx context.Context, _ core.AgentID, msg []byte) ([]byte, error) {
	s, err := decodeSignal(msg)
	if err != nil || s.Kind != signalHello {
		return (&reply{}).MarshalMsg(nil)
	}
	answer := make(chan error, 1)
	select {
	case g <- answer:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	select {
	case err := <-answer:
		if err != nil {
			return nil, err
		}
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return (&reply{}).MarshalMsg(nil)
}

// next is the next hello.
func (g helloRecorder) next(t *testing.T, what string) (answer chan error) {
	t.Helper()
	select {
	case answer = <-g:
	case <-time.After(patience):
		t.Fatalf("P gets no hello: %s", what)
	}
	return answer
}

// TestHelloAgain: a P that looked for D's memory before it was registered gets a hello again, at once, whatever D was
// doing when P told that it found no way. Who waits for P meanwhile is not told that P is lost.
func TestHelloAgain(t *testing.T) {
	hellos := make(helloRecorder)
	tr, gpus, _ := renewable(t, hellos.signal)
	tr.cfg.ConnectTimeout = 10 * patience // so nothing is asked again because time has passed
	ticket := []byte("ticket")
	if err := tr.Connect("p", "", ticket); err != nil {
		t.Fatal(err)
	}
	src := tr.receiver.source("p")
	ask := func(s *signal) *reply {
		t.Helper()
		s.Ticket = ticket
		rep, err := tr.receiver.signalled("p", s)
		if err != nil {
			t.Fatal(err)
		}
		return rep
	}
	waiting := func(what string) {
		t.Helper()
		src.mu.Lock()
		defer src.mu.Unlock()
		if src.cause != errUnsettled {
			t.Fatalf("%s: who waits for P was told: %v", what, src.cause)
		}
	}
	noWay := func(secret []byte) {
		t.Helper()
		ask(&signal{Kind: signalConnected, Secret: secret, Reason: "no port here reaches a port there"})
	}
	registered := func() {
		t.Helper()
		tr.Renew()
		gpus.says(nil)
		gpus.says(nil)
		tr.ended()
	}

	first := hellos.next(t, "at first")
	old := ask(&signal{Kind: signalPorts, Tries: true}).Secret
	tr.Forget(errors.New("region k has changed"))
	idle(t, tr)
	noWay(old) // P looked before the memory was another, and D has not the new one yet
	first <- nil
	second := hellos.next(t, "P looked at the memory of before")
	waiting("after the memory of before")

	now := ask(&signal{Kind: signalPorts, Tries: true})
	if now.Lacks == "" {
		t.Fatal("P finds memory that is not registered")
	}
	registered()
	noWay(now.Secret)
	second <- nil
	third := hellos.next(t, "P looked before the memory was registered")
	waiting("after a look too early")
	ask(&signal{Kind: signalConnected, Reason: "prefill's memory is another"}) // P has not looked again: its own memory is missing
	src.mu.Lock()
	if src.cause == nil || src.cause == errUnsettled {
		t.Errorf("P was asked again, and again says the same: who waits was told %v", src.cause)
	}
	src.mu.Unlock()

	// A hello whose outcome is known, but whose goroutine has not ended, begins again.
	ask(&signal{Kind: signalPorts, Tries: true})
	noWay(now.Secret)
	src.mu.Lock()
	if src.cause == nil || src.cause == errUnsettled || !src.requesting {
		t.Errorf("P found no way to memory that is registered: %v", src.cause)
	}
	src.mu.Unlock()
	src.returned()
	third <- nil
	hellos.next(t, "the memory came while a hello ended") <- core.ErrAbsent
}

// TestUsableWaitsForTheHello: while a registration ends, P is not yet asked anew. Who asks then waits.
func TestUsableWaitsForTheHello(t *testing.T) {
	tr, _, _ := renewable(t, silentPeer)
	if err := tr.Connect("p", "", []byte("ticket")); err != nil {
		t.Fatal(err)
	}
	tr.remapping.mu.Lock()
	tr.remapping.busy = make(chan struct{})
	tr.remapping.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := tr.Usable(ctx, "p"); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "registered again") {
		t.Errorf("before the peers are asked: %v", err)
	}
}
