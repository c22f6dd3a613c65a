package proxy

import (
	"math"
	"runtime/debug"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// TestBodyMemorySettings: a budget that cannot work is refused by name.
func TestBodyMemorySettings(t *testing.T) {
	servers := []string{"--prefill", "http://p:1", "--decode", "http://d:1"}
	for args, want := range map[string]string{
		"--body-memory 0":                                `--body-memory "0"`,
		"--body-memory -1":                               `--body-memory "-1"`,
		"--body-memory 1GiB":                             `--body-memory "1GiB"`,
		"--body-memory":                                  "--body-memory needs a number",
		"--body-memory 37748735":                         "--body-memory 37748735 has no room for a body of --max-body 33554432 and 4194304 beside it: raise --body-memory to 37748736",
		"--max-body 134217728":                           "--body-memory 134217728 has no room for a body of --max-body 134217728",
		"--body-memory 37748736":                         "",
		"--max-body 1073741824 --body-memory 2000000000": "",
	} {
		_, err := ParseArgs(append(strings.Fields(args), servers...))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", args, err)
		}
	}
	if err := (Config{Prefill: []Prefill{{URL: "http://p:1"}}, Decode: []string{"http://d:1"}, BodyMemory: -1}).validate(); err == nil || !strings.Contains(err.Error(), "--body-memory -1: give at least 37748736") {
		t.Error(err)
	}
}

// TestMemoryBound: at its defaults the router's memory grows by 256 MiB at the most, whatever clients do.
func TestMemoryBound(t *testing.T) {
	if got := memoryBound(DefaultConfig()); got != 256<<20 {
		t.Errorf("the router may grow by %d MiB by its defaults", got>>20)
	}
	if got := maxConns(DefaultConfig()); got != 2048 {
		t.Errorf("%d connections", got)
	}
	if got := maxConns(Config{MaxRequests: 1}); got != 2048 {
		t.Errorf("%d connections for one request", got)
	}
}

// TestBoundHeap: while the router runs its heap has a bound, unless there is one already.
func TestBoundHeap(t *testing.T) {
	before := debug.SetMemoryLimit(math.MaxInt64)
	defer debug.SetMemoryLimit(before)
	undo := boundHeap(Config{BodyMemory: 1 << 30, MaxBody: 1 << 26, MaxRequests: 4096})
	const want = 1<<30 + 1<<28 + 1<<26 + 8192*connMemory
	if got := debug.SetMemoryLimit(-1); got != want {
		t.Errorf("the bound is %d, want %d", got, want)
	}
	boundHeap(DefaultConfig())()
	if got := debug.SetMemoryLimit(-1); got != want {
		t.Errorf("the bound is %d after another router, want %d", got, want)
	}
	if undo(); debug.SetMemoryLimit(-1) != math.MaxInt64 {
		t.Error("the bound is there after the end")
	}
}

// TestTightMemory: where there is less memory than the places take, the router says so when it starts, with what would do.
func TestTightMemory(t *testing.T) {
	for requests, want := range map[int]string{1024: "", 1171: "raise --body-memory to 153485312", 4096: "raise --body-memory to 536870912"} {
		cfg := DefaultConfig()
		core, logged := observer.New(zap.WarnLevel)
		cfg.MaxRequests, cfg.Prefill, cfg.Decode, cfg.Logger = requests, []Prefill{{URL: "http://127.0.0.1:1"}}, []string{"http://127.0.0.1:2"}, zap.New(core)
		if err := must(New(cfg)).Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		said := logged.Filter(func(e observer.LoggedEntry) bool { return strings.Contains(e.Message, "--max-requests") }).All()
		if want == "" && len(said) == 0 || want != "" && len(said) == 1 && strings.HasSuffix(said[0].Message, want) {
			continue
		}
		t.Errorf("with --max-requests %d: %v, want %q", requests, said, want)
	}
}
