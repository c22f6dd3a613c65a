package natsbus

import (
	"errors"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

// TestLongEngineID: a load that names an engine by more bytes than an engine may have is refused before anything is asked. The
// control connection stands: a subject of that length would have ended it, and every transfer with it.
func TestLongEngineID(t *testing.T) {
	leaktest.Check(t)
	p, _, decode, via := pair(t)
	decode.mu.Lock()
	link := decode.links[via].link
	decode.mu.Unlock()
	before := link.nc.Stats()
	for _, length := range []int{maxEngineID + 1, 5000, 1 << 20} {
		_, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url(), EngineID: strings.Repeat("e", length)})
		if !errors.Is(err, core.ErrNotRegistered) || !strings.Contains(err.Error(), "no engine has one of more than 256") || len(err.Error()) > 1024 {
			t.Errorf("an engine_id of %d bytes: %.300v", length, err)
		}
	}
	if after := link.nc.Stats(); after.OutMsgs != before.OutMsgs || after.Reconnects != 0 {
		t.Errorf("%d messages were sent for them, %d reconnects", after.OutMsgs-before.OutMsgs, after.Reconnects)
	}
	_, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url(), EngineID: strings.Repeat("e", maxEngineID)})
	if !errors.Is(err, core.ErrNotRegistered) || !strings.Contains(err.Error(), `"e"`) {
		t.Errorf("an engine_id of %d bytes: %v, want the engines that are there", maxEngineID, err)
	}
	ask(t, decode, via, "P", "P via : hello D")
}

// TestStreamWithoutDirectGets: a registry that somebody made without allow_direct, which reads need, is refused by name and with the
// remedy, and is good as soon as it is set.
func TestStreamWithoutDirectGets(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATS(t)
	operator, err := nats.Connect(c.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(operator.Close)
	js, err := jetstream.New(operator)
	if err != nil {
		t.Fatal(err)
	}
	settings := jetstream.StreamConfig{Name: stream, Subjects: []string{subtree + ">"}, Storage: jetstream.MemoryStorage, MaxMsgsPerSubject: 1,
		AllowMsgTTL: true, AllowRollup: true, SubjectDeleteMarkerTTL: markerTTL}
	if _, err := js.CreateStream(ctxOf(t, within), settings); err != nil {
		t.Fatal(err)
	}
	decode := newBus(t, Options{Identity: named("D"), ClusterURL: c.URL()})
	_, _, err = decode.Lookup(ctxOf(t, within), core.Target{EngineID: "e"})
	if err == nil || !strings.Contains(err.Error(), "stream "+stream+" does not allow direct gets") || !strings.Contains(err.Error(), "set its allow_direct") {
		t.Error(err)
	}
	settings.AllowDirect = true
	if _, err := js.UpdateStream(ctxOf(t, within), settings); err != nil {
		t.Fatal(err)
	}
	if _, _, err := decode.Lookup(ctxOf(t, within), core.Target{EngineID: "e"}); !errors.Is(err, core.ErrNotRegistered) {
		t.Errorf("with direct gets: %v", err)
	}
}
