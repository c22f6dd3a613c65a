package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
)

func TestParseSize(t *testing.T) {
	for in, want := range map[string]int{"1": 1, "4096": 4096, "4K": 4 << 10, "16k": 16 << 10, "1M": 1 << 20, "2G": 2 << 30} {
		got, err := parseSize(in)
		if err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", in, got, err, want)
		}
		if again, err := parseSize(formatSize(want)); err != nil || again != want {
			t.Errorf("%d is written %q, which reads as %d, %v", want, formatSize(want), again, err)
		}
	}
	for _, in := range []string{"", "K", "0", "-1", "1.5M", "4KB", "99999999G", "x"} {
		if got, err := parseSize(in); !errors.Is(err, errUsage) {
			t.Errorf("%q: %d, %v; want an error of usage", in, got, err)
		}
	}
}

func TestBadArguments(t *testing.T) {
	for _, args := range [][]string{
		{"bench", "--block", "7"}, {"bench", "--transport", "pigeon"}, {"bench", "more"}, {"bench", "--rounds", "1"},
		{"bench", "--nope"}, {"demo", "--nope"}, {"demo", "--transport", "pigeon"}, {"bench", "--agents", "-1"}, {"bench", "--agents", "3001"},
	} {
		run := runBench
		if args[0] == "demo" {
			run = runDemo
		}
		if err := run(context.Background(), args[1:], &bytes.Buffer{}); !errors.Is(err, errUsage) {
			t.Errorf("%v: %v, want an error of usage", args, err)
		}
	}
	if err := runProxy(context.Background(), []string{"--prefill", "http://h:1"}, &bytes.Buffer{}); !errors.Is(err, errUsage) || !strings.Contains(err.Error(), "--decode") {
		t.Errorf("proxy without a decode server: %v", err)
	}
}

// TestPoolFindsWrongBytes: the check of demo and bench must see what it is for.
func TestPoolFindsWrongBytes(t *testing.T) {
	p, err := newPool(2, 8, 64)
	if err != nil {
		t.Fatal(err)
	}
	defer p.free()
	ids := []core.BlockID{3, 1, 6}
	fresh := func() {
		p.clear()
		p.fill(5, ids)
	}
	fresh()
	if err := p.check(5, 0, ids); err != nil {
		t.Fatal(err)
	}
	for name, harm := range map[string]func(){
		"a byte inside":            func() { p.mem[3*64+9] ^= 1 },
		"a byte outside":           func() { p.mem[2*64] ^= 1 },
		"two blocks in exchange":   func() { p.fill(5, []core.BlockID{1, 3, 6}) },
		"another transfer's bytes": func() { p.fill(6, ids) },
		"another layer's block":    func() { copy(p.mem[8*64+3*64:][:64], p.mem[3*64:][:64]) },
	} {
		fresh()
		harm()
		if p.check(5, 0, ids) == nil {
			t.Errorf("%s went unseen", name)
		}
	}
	fresh()
	if p.check(5, 1, ids) == nil {
		t.Error("blocks of other positions went unseen")
	}
}

// TestPeerObeys drives the second process's loop in this one.
func TestPeerObeys(t *testing.T) {
	leaktest.Check(t)
	orders := []peerOrder{
		{Op: "open", Layers: 2, Blocks: 8, Block: 4096},
		{Op: "announce", ID: "t"},
		{Op: "offer", ID: "t", Transfer: 1, Count: 3},
		{Op: "offer", ID: "t", Transfer: 1, Count: 3},
		{Op: "dance"},
		{Op: "close"},
	}
	var in, out bytes.Buffer
	for _, o := range orders {
		b, _ := json.Marshal(o)
		in.Write(append(b, '\n'))
	}
	in.WriteString("no json\n")
	if err := runPeer(context.Background(), &in, &out); err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(&out)
	for i, says := range []string{"", "", "", "offered already", "dance", "", "invalid character"} {
		var a peerAnswer
		if err := dec.Decode(&a); err != nil {
			t.Fatal(err)
		}
		if (says == "") != (a.Error == "") || !strings.Contains(a.Error, says) {
			t.Errorf("answer %d is %+v, want an error with %q", i, a, says)
		}
	}
}
