package natsbus

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
	"github.com/kvconn/kvconn/internal/nettest"
)

// TestLongEngineID: a key of the registry has the engine_id in it, and a server ends the connection of a client that names a key longer than a line of NATS. So an
// engine_id that no engine can have is refused by name before the server is asked, and the link to the prefill engine goes on. One that is as long as an engine_id may
// be is looked for, and found.
func TestLongEngineID(t *testing.T) {
	leaktest.Check(t)
	longest := strings.Repeat("ü", maxEngineID/2)
	p, _, decode, via := pair(t)
	other := newBus(t, Options{Identity: named("L"), Server: p.Server})
	serve(other)
	register(t, other, longest)
	l, err := decode.link(ctxOf(t, within), string(via))
	if err != nil {
		t.Fatal(err)
	}
	before, err := l.wait(ctxOf(t, within))
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{maxEngineID + 1, 4 << 10, 1 << 20} {
		_, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url(), EngineID: strings.Repeat("e", n)})
		if says := fmt.Sprintf("engine_id of %d bytes", n); !errors.Is(err, core.ErrNotRegistered) || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), p.addr) || len(err.Error()) > 1024 {
			t.Errorf("an engine_id of %d bytes: %.1024v, want %q", n, err, says)
		}
		ask(t, decode, via, "P", "P via : hello D")
		if before.Err() != nil {
			t.Fatalf("an engine_id of %d bytes has ended the link's connection", n)
		}
	}
	if a, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url(), EngineID: longest}); err != nil || nick(a.ID) != "L" {
		t.Errorf("the longest engine_id: %+v, %v", a, err)
	}
	if before.Err() != nil {
		t.Error("the longest engine_id has ended the link's connection")
	}
}

// TestStreamWithoutDirectGets: somebody has made the registry's stream so that it does not answer direct gets, by which agents read it. A decode engine is told the
// stream's name, the setting and the remedy, not that nobody answers. When the setting is right, the same engine finds what the stream has.
func TestStreamWithoutDirectGets(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATS(t)
	js := strangerAt(t, c)
	config := jetstream.StreamConfig{Name: stream, Subjects: []string{subtree + ">"}, MaxMsgsPerSubject: 1, AllowMsgTTL: true, AllowRollup: true, SubjectDeleteMarkerTTL: markerTTL}
	if _, err := js.CreateStream(ctxOf(t, within), config); err != nil {
		t.Fatal(err)
	}
	decode := newBus(t, Options{Identity: named("D"), ClusterURL: c.URL()})
	_, _, err := decode.Lookup(ctxOf(t, within), core.Target{EngineID: "e"})
	if err == nil || errors.Is(err, core.ErrNotRegistered) {
		t.Fatalf("a stream without direct gets: %v", err)
	}
	for _, says := range []string{"stream " + stream, "does not allow direct gets", "set its allow_direct, or delete it"} {
		if !strings.Contains(err.Error(), says) {
			t.Errorf("a stream without direct gets: %v, want %q", err, says)
		}
	}
	config.AllowDirect = true
	if _, err := js.UpdateStream(ctxOf(t, within), config); err != nil {
		t.Fatal(err)
	}
	value, err := agent("Z", "e").MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	strangeEntry{value: value}.put(t, js, rankKey("e", 0, 0))
	eventually(t, "the entry is found", func() error {
		_, _, err := decode.Lookup(ctxOf(t, within), core.Target{EngineID: "e"})
		return err
	})
}
