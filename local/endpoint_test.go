package local

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

func TestEndpoints(t *testing.T) {
	own, err := here(linux{})
	if err != nil {
		t.Fatal(err)
	}
	own.name = namePrefix + "abc"
	if got, err := parsePlace(own.String()); err != nil || got != own {
		t.Errorf("%v, %v; want %v", got, err, own)
	}
	if len(own.String()) > 512 {
		t.Errorf("an endpoint of %d bytes, and the registry takes 512", len(own.String()))
	}
	for _, bad := range []string{
		"", "10.0.0.1:4000", own.String() + " more", own.String() + "\n", strings.Replace(own.String(), "local3", "local2", 1),
		strings.Replace(own.String(), namePrefix, "other-", 1), strings.Replace(own.String(), "abc", strings.Repeat("a", 100), 1),
		strings.Replace(own.String(), "uid=", "uid=x", 1), strings.Replace(own.String(), "boot=", "", 1),
	} {
		if p, err := parsePlace(bad); err == nil {
			t.Errorf("%q is taken for %v", bad, p)
		}
	}
}

// TestElsewhere: what is not on this host, or cannot be reached, is refused at once and says why.
func TestElsewhere(t *testing.T) {
	p, d := two(t, nil)
	for part, change := range map[string]func(*place){
		"boot id":           func(p *place) { p.boot = "0d9f0e0c-0000-0000-0000-000000000000" },
		"network namespace": func(p *place) { p.net = "1" },
		"as one user":       func(p *place) { p.uid++ },
	} {
		there := p.tr.here
		change(&there)
		wants(t, d.tr.Connect("other", there.String(), make([]byte, 16)), part, "other")
	}
	wants(t, d.tr.Connect("other", "tcp:1", make([]byte, 16)), "same kvconn")
	wants(t, d.tr.Connect("other", p.tr.Endpoint(), make([]byte, 15)), "ticket of 15 bytes")
	moves(t, "t", p, d)
}

func TestDeviceMemoryIsRefused(t *testing.T) {
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: 1 << 20, BlockStride: 4096, BlockBytes: 4096, NumBlocks: 2, Memory: kv.DeviceMemory(0)}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = New(Config{}, l, nil)
	wants(t, err, `region "k"`, "device")
}

func TestNobodyListens(t *testing.T) {
	p, d := two(t, nil)
	moves(t, "t", p, d)
	where, ticket := p.tr.Endpoint(), p.ticket("e")
	if err := p.tr.Close(); err != nil {
		t.Fatal(err)
	}
	e := start(t, "e", Config{}, nil)
	if err := e.tr.Connect("p", where, ticket); err != nil {
		t.Fatal(err)
	}
	e.down("nobody listens")
	if err := e.tr.Usable(t.Context(), "p"); !errors.Is(err, core.ErrConnectionLost) {
		t.Errorf("usable: %v", err)
	}
	if _, err := e.tr.Expect("t", "p", nil); !errors.Is(err, core.ErrConnectionLost) {
		t.Errorf("expected: %v", err)
	}
}
