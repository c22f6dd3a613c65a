package natsbus

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// invalidEntry is what somebody else writes under an engine's key. says is in the reason for
// which a reader refuses it.
type invalidEntry struct {
	value []byte
	since int64
	says  string
}

func invalidEntries(t testing.TB) map[string]invalidEntry {
	t.Helper()
	enc := func(change func(*wire.Agent)) []byte {
		a := agent("Z", "e")
		change(a)
		b, err := a.MarshalMsg(nil)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	good := enc(func(*wire.Agent) {})
	return map[string]invalidEntry{
		"nothing":           {nil, 0, "malformed"},
		"text":              {[]byte("garbage"), math.MaxInt64, "malformed"},
		"cut off":           {good[:len(good)-1], math.MaxInt64, "malformed"},
		"with more":         {append(slices.Clone(good), 0xc0), math.MaxInt64, "1 bytes after its end"},
		"zeros of 900 KiB":  {make([]byte, 900<<10), 0, "malformed"},
		"a huge array":      {[]byte("\x81\xa1s\xdd\xff\xff\xff\xff"), 0, "malformed"},
		"a long name":       {enc(func(a *wire.Agent) { a.EngineID = strings.Repeat("e", 800<<10) }), math.MaxInt64, "engine_id of 819200 bytes"},
		"another rank":      {enc(func(a *wire.Agent) { a.TPRank = 1 }), math.MaxInt64, "tp 1"},
		"another engine":    {enc(func(a *wire.Agent) { a.EngineID = "f" }), math.MaxInt64, `"f"`},
		"an id for all":     {enc(func(a *wire.Agent) { a.ID = "*" }), math.MaxInt64, `"*"`},
		"an id of commands": {enc(func(a *wire.Agent) { a.ID = "x 1\r\nPUB y 0" }), math.MaxInt64, `describes agent "x 1\r\n`},
	}
}

// put writes an entry as no agent would.
func (e invalidEntry) put(t testing.TB, js jetstream.JetStream, key string) {
	t.Helper()
	m := nats.NewMsg(key)
	m.Data = e.value
	m.Header.Set(sinceHeader, strconv.FormatInt(e.since, 10))
	if _, err := js.PublishMsg(ctxOf(t, 3*within), m); err != nil {
		t.Fatal(err)
	}
}

// unsignedAt is somebody's own client of a cluster that lets everybody in.
func unsignedAt(t testing.TB, c *nettest.NATSServer) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(c.URL(), nats.NoReconnect())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// TestEntryOfTheFuture: another agent's entry whose time no clock shows keeps nobody out.
func TestEntryOfTheFuture(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATS(t)
	prefill := newBus(t, Options{Identity: named("P"), ClusterURL: c.URL(), TTL: time.Hour})
	decode := newBus(t, Options{Identity: named("D"), ClusterURL: c.URL()})
	register(t, newBus(t, Options{Identity: named("O"), ClusterURL: c.URL(), TTL: time.Hour}), "other") // makes the registry
	value, err := agent("Z", "e").MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	invalidEntry{value: value, since: math.MaxInt64}.put(t, unsignedAt(t, c), rankKey("e", 0, 0))
	register(t, prefill, "e")
	eventually(t, "engine e is found", func() error {
		a, _, err := decode.Lookup(ctxOf(t, 3*within), core.Target{EngineID: "e"})
		if err == nil && shortName(a.ID) != "P" {
			err = fmt.Errorf("it is agent %s", shortName(a.ID))
		}
		return err
	})
}

// TestEntriesOfAnotherUser: whatever somebody writes under an engine's key in a cluster's registry,
// a decode engine is told what is wrong with it, it hides no other engine, and the engine writes
// over it: at its next renewal, and when it registers. No renewal comes by itself here.
func TestEntriesOfAnotherUser(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATS(t)
	log, logs := observed()
	prefill := newBus(t, Options{Identity: named("P"), ClusterURL: c.URL(), TTL: time.Hour, Logger: log})
	register(t, prefill, "e")
	decode := newBus(t, Options{Identity: named("D"), ClusterURL: c.URL()})
	js, key := unsignedAt(t, c), rankKey("e", 0, 0)
	finds := func(b *Bus, engine, want string) {
		t.Helper()
		eventually(t, "engine "+engine+" is found", func() error {
			a, _, err := b.Lookup(ctxOf(t, 3*within), core.Target{EngineID: engine})
			if err == nil && shortName(a.ID) != want {
				err = fmt.Errorf("it is agent %s", shortName(a.ID))
			}
			return err
		})
	}
	finds(decode, "e", "P")
	for what, e := range invalidEntries(t) {
		e.put(t, js, key)
		a, _, err := decode.Lookup(ctxOf(t, 3*within), core.Target{EngineID: "e"})
		if err == nil || errors.Is(err, core.ErrNotRegistered) || !strings.Contains(err.Error(), e.says) || !strings.Contains(err.Error(), `"e" rank 0.0`) {
			t.Errorf("%s is read as %v, %v; want %q of the entry", what, a, err, e.says)
		}
		if err != nil && (len(err.Error()) > 2000 || strings.ContainsAny(err.Error(), "\r\n")) {
			t.Errorf("%s: a reason of %d bytes: %.100q", what, len(err.Error()), err)
		}
		e.put(t, js, rankKey("h", 0, 0)) // of nobody
		prefill.renewNow()
		finds(decode, "e", "P")
		finds(decode, "", "P")
	}
	if n := logs.FilterMessageSnippet("could not be renewed").Len(); n != 0 {
		t.Errorf("%d renewals failed: %v", n, logs.All())
	}
	again := 0
	for what, e := range invalidEntries(t) { // and an engine that comes then
		engine := fmt.Sprint("later", again)
		again++
		e.put(t, js, rankKey(engine, 0, 0))
		later := newBus(t, Options{Identity: named(engine), ClusterURL: c.URL(), TTL: time.Hour})
		if err := later.Register(ctxOf(t, 3*within), agent(engine, engine)); err != nil {
			t.Errorf("behind %s: %v", what, err)
			continue
		}
		finds(decode, engine, engine)
	}
	// nkeys takes this for a public nkey: its first byte and its sum are right, and it has one byte of a key.
	for _, e := range invalidEntries(t) {
		e.put(t, js, subtree+"UAAABHF5.e.0.0")
	}
	if _, _, err := decode.Lookup(ctxOf(t, 3*within), core.Target{}); !errors.Is(err, ErrAmbiguous) {
		t.Errorf("beside the entry of a short key any engine is %v", err)
	}
	_, _, err := decode.Lookup(ctxOf(t, 3*within), core.Target{EngineID: "absent"})
	mustBe(t, err, core.ErrNotRegistered)
}

// TestEntryOfAnotherVersion: an entry that is older than its owner's is written over too, whatever
// it says. Until then who reads it is told the version that it claims, for which it is refused
// before anything is sent to its agent (node's TestRegistryOfAnotherVersion).
func TestEntryOfAnotherVersion(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATS(t)
	prefill := newBus(t, Options{Identity: named("P"), ClusterURL: c.URL(), TTL: time.Hour})
	register(t, prefill, "e")
	decode := newBus(t, Options{Identity: named("D"), ClusterURL: c.URL()})
	js, key := unsignedAt(t, c), rankKey("e", 0, 0)
	for _, version := range []int{0, wire.Version - 1, wire.Version + 1, math.MaxInt32} {
		for _, since := range []int64{0, -1, math.MinInt64} {
			a := agent("Z", "e")
			a.Version = version
			value, err := a.MarshalMsg(nil)
			if err != nil {
				t.Fatal(err)
			}
			invalidEntry{value: value, since: since}.put(t, js, key)
			if got, _, err := decode.Lookup(ctxOf(t, 3*within), core.Target{EngineID: "e"}); err != nil || got.Version != version {
				t.Errorf("version %d is read as %+v, %v", version, got, err)
			}
			prefill.renewNow()
			eventually(t, "the owner's entry", func() error {
				got, _, err := decode.Lookup(ctxOf(t, 3*within), core.Target{EngineID: "e"})
				if err == nil && (shortName(got.ID) != "P" || got.Version != wire.Version) {
					err = fmt.Errorf("it is agent %s of version %d", shortName(got.ID), got.Version)
				}
				return err
			})
		}
	}
}
