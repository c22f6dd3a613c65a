package chaos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	double "github.com/kvconn/kvconn/rig/testdouble/engine"
)

// TestMain is the engines' main function too: the driver starts this very
// program.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == engineArgument {
		if err := RunEngine(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

const engineArgument = "engine"

func run(t *testing.T, opt Options) *Result {
	t.Helper()
	leaktest.Check(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	opt.Self, opt.Short, opt.quick, opt.Progress = []string{exe, engineArgument}, true, true, t.Logf
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	res, err := Run(ctx, opt)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

// A few faults on real processes: nothing may be lost.
func TestFewFaults(t *testing.T) {
	res := run(t, Options{Faults: 8, Seed: 7, Parts: []string{"faults"}})
	if !res.OK {
		t.Errorf("problems: %s", strings.Join(res.Problems, "\n"))
	}
	if res.Injected != 8 {
		t.Errorf("%d faults were injected, want 8", res.Injected)
	}
	if res.Ends["load ok"] == 0 || res.Ends["offer ok"] == 0 {
		t.Errorf("nothing was carried: %v", res.Ends)
	}
	var b strings.Builder
	if err := res.Print(&b); err != nil || !strings.Contains(b.String(), "OK: nothing was lost") {
		t.Errorf("the report: %v\n%s", err, b.String())
	}
}

// The same with the agents' memory on devices of the driver double: bytes are read and written
// after their moments, through slots of which there are few.
func TestFewFaultsOnDevices(t *testing.T) {
	double.Library(t)
	res := run(t, Options{Faults: 8, Seed: 7, Parts: []string{"faults"}, Kinds: []string{"SIGKILL", "SIGSTOP"}, Memory: memoryDouble})
	if len(res.Faults) != 4 || slices.ContainsFunc(res.Faults, func(f faultRow) bool { return !strings.HasPrefix(f.Kind, "SIG") || f.N != 2 }) {
		t.Errorf("%d faults: %v", res.Injected, res.Faults)
	}
	if !res.OK {
		t.Errorf("problems: %s", strings.Join(res.Problems, "\n"))
	}
	if res.Ends["load ok"] == 0 || res.Ends["offer ok"] == 0 {
		t.Errorf("nothing was carried: %v", res.Ends)
	}
}

// A run that is interrupted leaves no process behind.
func TestInterrupted(t *testing.T) {
	leaktest.Check(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	opt := Options{Self: []string{exe, engineArgument}, Faults: 1000, Seed: 7, Parts: []string{"faults"}, quick: true}
	opt.Progress = func(format string, args ...any) {
		if strings.HasPrefix(format, "%d of %d faults") {
			cancel()
		}
	}
	if res, err := Run(ctx, opt); !errors.Is(err, context.Canceled) || res != nil {
		t.Fatalf("%v, %v", res, err)
	}
	left, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range left {
		if b, err := os.ReadFile(name); err == nil && len(b) > 0 {
			t.Errorf("processes are left: %s", b)
		}
	}
}

// Whatever the test breaks on purpose makes the verdict red, and is named.
func TestVerdictTurnsRed(t *testing.T) {
	broken := map[string]string{
		sabotageByte:   "a load that ended well: region 0",
		sabotageLate:   "a block that nobody ha",
		sabotageForget: "lost blocks",
		sabotageMute:   "lost report",
		sabotageTwice:  "is reported twice",
	}
	res := run(t, Options{Faults: 1, Seed: 7, sabotage: sortedKeys(broken), Parts: []string{"faults"}, drain: 20 * time.Second})
	if res.OK || res.Wrong == 0 || res.Lost == 0 {
		t.Errorf("the verdict is %v: %d wrong bytes, %d lost", res.OK, res.Wrong, res.Lost)
	}
	for what, want := range broken {
		if !slices.ContainsFunc(res.Problems, func(p string) bool { return strings.Contains(p, want) }) {
			t.Errorf("%s: no problem holds %q: %s", what, want, strings.Join(res.Problems, "\n"))
		}
	}
	var b strings.Builder
	if err := res.Print(&b); err != nil || !strings.Contains(b.String(), "FAILED") {
		t.Errorf("the report: %v\n%s", err, b.String())
	}
}

// A process that ends by itself is a problem, and its last words are told.
func TestCrash(t *testing.T) {
	leaktest.Check(t)
	led := newLedger()
	c := &child{name: "x", self: []string{"/bin/sh", "-c", "echo it hurts >&2; exit 3"}, on: func(c *child, life int, ev event) { led.event(c.name, life, ev) }}
	if err := c.start(context.Background()); err == nil || !strings.Contains(err.Error(), "it hurts") {
		t.Errorf("start: %v", err)
	}
	if len(led.problems) != 1 || !strings.Contains(led.problems[0], "exit status 3: it hurts") {
		t.Errorf("problems: %q", led.problems)
	}
}

func TestLedger(t *testing.T) {
	const ms = int64(time.Millisecond)
	load := half{core.SideLoad, "a"}
	call := event{Op: evCall, ID: "a", Side: core.SideLoad, At: 10 * ms}
	report := event{Op: evReport, ID: "a", Side: core.SideLoad, Code: core.PeerLost, At: 900 * ms}
	stray := event{Op: evReport, ID: "b", Side: core.SideLoad}
	end := event{}
	crash := event{Error: "the process ended by itself"}
	for name, c := range map[string]struct {
		events  []event
		outcome string
		open    int
		problem string
	}{
		"reported":           {[]event{call, report}, "load peer-lost", 0, ""},
		"report before call": {[]event{report, call}, "load peer-lost", 0, ""},
		"owed":               {[]event{call}, "load not ended", 1, ""},
		"ordered only":       {nil, "load not ended", 1, ""},
		"died":               {[]event{call, end}, "load died with its process", 0, ""},
		"crashed":            {[]event{call, crash}, "load died with its process", 0, "by itself"},
		"refused":            {[]event{{Op: evCall, ID: "a", Side: core.SideLoad, Error: "no"}}, "load refused by the call", 0, ""},
		"overload":           {[]event{{Op: evCall, ID: "a", Side: core.SideLoad, Error: "no", Overload: true}}, "load refused: too many", 0, ""},
		"twice":              {[]event{call, report, report}, "load peer-lost", 0, "reported twice"},
		"reported, refused":  {[]event{{Op: evCall, ID: "a", Side: core.SideLoad, Error: "no"}, report}, "load refused by the call", 0, "reported twice"},
		"not ordered":        {[]event{call, report, stray}, "load peer-lost", 0, "not ordered"},
		"wrong byte":         {[]event{call, report, {Op: evWrong, ID: "a", Error: "byte 8"}}, "load peer-lost", 0, "byte 8"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLedger()
			e := l.ordered("d0", 1, load, 0, 0)
			for _, ev := range c.events {
				l.event("d0", 1, ev)
			}
			if got := e.outcome(); got != c.outcome {
				t.Errorf("outcome %q, want %q", got, c.outcome)
			}
			if n := len(l.open()); n != c.open {
				t.Errorf("%d are open, want %d", n, c.open)
			}
			if (len(l.problems) > 0) != (c.problem != "") || c.problem != "" && !strings.Contains(l.problems[0], c.problem) {
				t.Errorf("problems %q, want %q", l.problems, c.problem)
			}
		})
	}
	l := newLedger()
	l.event("d0", 1, end)
	if e := l.ordered("d0", 1, load, 0, 0); e.state != halfGone {
		t.Error("a half that is ordered of a dead process stays open")
	}
}

// The time to notice is put down to a death before other faults, and counts no
// time that the engine itself was stopped.
func TestNotice(t *testing.T) {
	const ms = int64(time.Millisecond)
	l := newLedger()
	e := l.ordered("d0", 1, half{core.SideLoad, "a"}, 0, 0)
	l.event("d0", 1, event{Op: evCall, ID: "a", Side: core.SideLoad, At: 1 * ms})
	all := func(*entry) bool { return true }
	cut, kill, late := &fault{kind: cutReset, from: 10 * ms, affects: all}, &fault{kind: killP, from: 20 * ms, affects: all}, &fault{kind: killP, from: 1000 * ms, affects: all}
	for _, f := range []*fault{cut, kill, late} {
		if l.begin(f); f.hits != 1 {
			t.Fatalf("%s hit %d", f.kind, f.hits)
		}
	}
	if l.ordered("d0", 1, half{core.SideLoad, "b"}, 0, 0); !l.entries[entryKey{"d0", 1, half{core.SideLoad, "b"}}].underFault {
		t.Error("a half that was ordered under a fault does not know of it")
	}
	l.event("p0", 4, event{Op: evOpened, Agent: "fourth"})
	kill.victim, late.victim = processLife{"p0", 4}, processLife{"p0", 5}
	l.event("d0", 1, event{Op: evReport, ID: "a", Side: core.SideLoad, Code: core.PeerLost, Agent: "fourth", At: 920 * ms})
	l.event("d0", 1, event{Op: evLag, At: 0, Until: 120 * ms})
	l.event("d1", 1, event{Op: evLag, At: 0, Until: 900 * ms})
	got := l.notices()
	if len(got) != 1 || got[0].fault != kill || got[0].alone || got[0].after != 800*time.Millisecond {
		t.Fatalf("%+v", got)
	}
	if l.begin(kill); kill.hits != 1 {
		t.Errorf("a fault hit %d halves, one of them twice or when it had ended", kill.hits)
	}
	for _, f := range []*fault{cut, kill, late} {
		l.over(f)
	}
	if e := l.ordered("d0", 1, half{core.SideLoad, "c"}, 0, 0); e.underFault {
		t.Error("a half is ordered under a fault that is over")
	}
	kill.victim.life = 3
	if got := l.notices(); len(got) != 1 || got[0].fault != cut {
		t.Errorf("a death that the load survived is the cause of its end: %+v", got)
	}
	e.code = core.NotOffered
	if got := l.notices(); len(got) != 1 || got[0].fault != kill || !got[0].anew {
		t.Errorf("a load that the next process did not know: %+v", got)
	}
	e.cancelled = true
	if n := len(l.notices()); n != 0 {
		t.Errorf("%d notices of what the driver cancelled", n)
	}
}

func TestFigures(t *testing.T) {
	var list []time.Duration
	for i := 100; i > 0; i-- {
		list = append(list, time.Duration(i))
	}
	if got, want := figuresOf(list), (figures{100, 51, 99, 100}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := figuresOf(nil); got != (figures{}) {
		t.Errorf("of nothing: %+v", got)
	}
}

func TestMemory(t *testing.T) {
	m, err := newMemory(memoryHost, 2, 4, 64)
	if err != nil {
		t.Fatal(err)
	}
	defer m.unmap()
	ids, err := m.take(3)
	if err != nil || len(ids) != 3 {
		t.Fatalf("%v, %v", ids, err)
	}
	if more, err := m.take(2); more != nil || err != nil {
		t.Fatalf("took %v, %v of one block", more, err)
	}
	m.fill(ids[1], 5, 1)
	if err := m.check(ids[1], 5, 1); err != nil {
		t.Error(err)
	}
	for _, c := range [][2]int{{5, 0}, {4, 1}} { // another position, another tag
		if m.check(ids[1], uint64(c[0]), c[1]) == nil {
			t.Errorf("the pattern of %v passes for another", c)
		}
	}
	m.give(ids)
	if err := m.checkFree(); err != nil {
		t.Error(err)
	}
	m.words(1, ids[2])[7] ^= 1 << 40
	if err := m.checkFree(); err == nil || !strings.Contains(err.Error(), "byte 56") {
		t.Errorf("a changed byte: %v", err)
	}
	m.words(0, ids[0])[0]++
	want := fmt.Sprintf("region 1, block %d: 8 bytes from 56 to 64; region 0, block %d: 8 bytes from 0 to 8", ids[2], ids[0])
	if _, err := m.take(1); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("changed blocks: %v, want %q in it", err, want)
	}
}
