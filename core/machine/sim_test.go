package machine_test

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/coretest/sim"
	"github.com/kvconn/kvconn/rig/leaktest"
)

var (
	simSeeds = flag.Uint64("sim.seeds", wholeSim(), "how many seeds TestSim runs")
	simFrom  = flag.Uint64("sim.from", 0, "the first seed of TestSim")
	simSoak  = flag.Duration("sim.soak", 0, "how long TestSoak runs seeds from a random start; 0: not at all")
	simOut   = flag.String("sim.out", "", "directory for the files of a seed that fails; empty: a temporary one")
)

// wholeSim is how many seeds show each fault and each end. With the race detector a tenth shows what seeds share.
func wholeSim() uint64 {
	if machine.Raced {
		return fixedSeeds / 10
	}
	return fixedSeeds
}

var simWords = &sim.Words{Action: describe}

// TestSim runs seeds of the simulator, whose package comment describes a seed's run and
// the checks.
func TestSim(t *testing.T) {
	leaktest.Check(t)
	seeds := *simSeeds
	if testing.Short() {
		seeds = min(seeds, 200)
	}
	began := time.Now()
	sum := runSeeds(t, *simFrom, func(seed uint64) bool { return seed < *simFrom+seeds })
	t.Logf("%d seeds in %v, %d steps, %v of virtual time", seeds, time.Since(began).Round(time.Millisecond), sum.Steps, sum.Took.Round(time.Second))
	t.Logf("ends: %v", sum.Codes)
	t.Logf("states: %v", sum.States)
	t.Logf("faults: %v", sum.Faults)
	sum.checkRows(t)
	if t.Failed() || seeds < fixedSeeds {
		return
	}
	if *simFrom == 0 {
		checkUntaken(t, sum.first)
	}
	// A world so hostile that nothing arrives, or so kind that nothing fails,
	// would prove nothing.
	for _, want := range []string{"load ok", "offer ok", "load cancelled", "offer cancelled", "load peer-cancelled", "offer peer-cancelled",
		"load peer-lost", "offer peer-lost", "load not-offered", "offer not-offered", "load expired", "offer expired", "load failed", "offer failed",
		"load refused", "offer refused", "load unreachable", "load closed", "offer closed", "claim peer-lost", "claim peer-cancelled", "claim not-offered"} {
		if sum.Codes[want] == 0 {
			t.Errorf("in %d seeds no transfer ended with %q", seeds, want)
		}
	}
	for _, want := range []string{"loss", "delay", "double", "one-way", "partition", "break", "stop", "crash", "restart", "clock-jump", "close",
		"resurrection", "cancel-d", "cancel-p", "cancel-both", "abort-first", "id-twice", "two-decoders", "empty", "queued", "claim", "claim-left", "probe", "retry", "finish-lost", "deaf", "hang", "late-prefill", "slow-look", "stuck-look", "killed-when-asked", "several-sources", "several-shares", "found-parts", "abort-found", "crossed", "lost-loaded", "lost-cancelled", "lost-dropped",
		"smaller-blocks", "larger-blocks", "other-order", "cut-heads", "gathered-heads", "half-block",
		"hostile-message", "hostile-relay", "hostile-answer", "hostile-stream", "hostile-crowd", "hostile-hoard", "drip",
		"moment", "moment-shared", "moment-failed", "moment-stuck", "moment-late", "sleep", "elsewhere",
		"slots", "rings", "ring-wraps", "misplaced", "other-index", "stages", "decode-stages", "stage-without",
		"pulls", "slow-copy", "stopped-in-copy", "copied-too-late"} {
		if sum.Faults[want] == 0 {
			t.Errorf("in %d seeds there was no %q", seeds, want)
		}
	}
	for _, want := range []string{"load cancelled resolving", "load cancelled expecting", "load cancelled requesting", "load cancelled waiting",
		"load ok claimed", "load not-offered claimed", "load peer-cancelled claimed", "load peer-lost claimed", "load peer-lost requesting",
		"load peer-lost waiting", "offer cancelled ended", "offer cancelled ready", "offer cancelled sending", "offer peer-cancelled ready",
		"offer peer-cancelled sending", "offer peer-lost ready", "offer peer-lost sending", "offer ok ready", "offer ok sending",
		"load failed awaiting", "load cancelled awaiting", "load peer-lost awaiting", "offer failed awaiting", "offer cancelled awaiting"} {
		if sum.States[want] == 0 {
			t.Errorf("in %d seeds no transfer ended with %q", seeds, want)
		}
	}
	for n := 2; n <= 8; n++ {
		if sum.agents[n] == 0 {
			t.Errorf("in %d seeds there was none with %d agents", seeds, n)
		}
	}
}

// TestSoak runs seeds until the time is over (make soak).
func TestSoak(t *testing.T) {
	if *simSoak == 0 {
		t.Skip("runs with -sim.soak only")
	}
	from, end := rand.Uint64()>>1, time.Now().Add(*simSoak)
	var n atomic.Uint64
	sum := runSeeds(t, from, func(uint64) bool { n.Add(1); return time.Now().Before(end) })
	t.Logf("%d seeds from %d on, %d steps, %v of virtual time", n.Load(), from, sum.Steps, sum.Took.Round(time.Second))
	t.Logf("ends: %v", sum.Codes)
	sum.checkRows(t)
}

type simSum struct {
	sim.Result
	agents map[int]int
	first  map[core.Transition]uint64 // the lowest seed that has each
}

// checkRows fails for what the halves have done that the tables do not have.
func (sum *simSum) checkRows(t *testing.T) {
	t.Helper()
	table := readTransitions(t)
	changes := slices.SortedFunc(maps.Keys(sum.first), func(x, y core.Transition) int { return cmp.Compare(sum.first[x], sum.first[y]) })
	for _, change := range changes {
		if wrong := table.take(change); wrong != "" {
			t.Errorf("seed %d: %s", sum.first[change], wrong)
		}
	}
}

// runSeeds runs seeds from the first one on, on all processors, while more says so. It
// stops at the first that fails.
func runSeeds(t *testing.T, from uint64, more func(seed uint64) bool) simSum {
	t.Helper()
	sum := simSum{sim.Result{Codes: map[string]int{}, States: map[string]int{}, Faults: map[string]int{}, Transitions: map[core.Transition]int{}}, map[int]int{}, map[core.Transition]uint64{}}
	var failed []uint64
	var next atomic.Uint64
	var stop atomic.Bool
	var mu sync.Mutex
	var wg sync.WaitGroup
	next.Store(from)
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for !stop.Load() {
				seed := next.Add(1) - 1
				if !more(seed) {
					return
				}
				r := sim.Run(seed, nil)
				mu.Lock()
				for k, n := range r.Codes {
					sum.Codes[k] += n
				}
				for k, n := range r.Faults {
					sum.Faults[k] += n
				}
				for k, n := range r.States {
					sum.States[k] += n
				}
				for k, n := range r.Transitions {
					if at, known := sum.first[k]; !known || seed < at {
						sum.first[k] = seed
					}
					sum.Transitions[k] += n
				}
				sum.agents[r.Agents]++
				sum.Steps += r.Steps
				sum.Took += r.Took
				if r.Broken != nil {
					failed = append(failed, seed)
					stop.Store(true)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if failed != nil {
		tellSeed(t, slices.Min(failed))
	}
	return sum
}

// tellSeed runs a seed that fails again and writes its story down.
func tellSeed(t *testing.T, seed uint64) {
	t.Helper()
	r := sim.Run(seed, simWords)
	dir := *simOut
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "kvconn-sim-"); err != nil {
			t.Fatal(err)
		}
	}
	name := filepath.Join(dir, fmt.Sprintf("seed%d", seed))
	for suffix, text := range map[string]string{".txt": r.Transcript, ".short.txt": r.Short, ".story": r.Story} {
		if err := os.WriteFile(name+suffix, []byte(text), 0o644); err != nil {
			t.Error(err)
		}
	}
	t.Errorf("seed %d: %s\n\nwhat happened around the machines:\n%s\n\nwhat the machines were told about it:\n%s\n"+
		"the whole transcript, which core/machine/testdata can hold: %s.txt\nto repeat it: go test ./core/machine -run '^TestSim$' -sim.from %d -sim.seeds 1",
		seed, strings.Join(r.Broken, "\n\t"), r.Story, r.Short, name, seed)
}

// TestSimRepeats: a seed is a run, to the last word.
func TestSimRepeats(t *testing.T) {
	for seed := range uint64(40) {
		a, b := sim.Run(seed, simWords), sim.Run(seed, simWords)
		if a.Transcript != b.Transcript || a.Story != b.Story {
			t.Fatalf("seed %d ran differently the second time", seed)
		}
		if c := sim.Run(seed, nil); c.Steps != a.Steps || c.Took != a.Took {
			t.Fatalf("seed %d ran differently without a transcript: %d steps, %d with", seed, c.Steps, a.Steps)
		}
	}
}

// TestSimTranscript: a seed's transcript has the form of testdata's files. If it is run as such a file, the machines do the same again.
func TestSimTranscript(t *testing.T) {
	dir := t.TempDir()
	for seed := range uint64(20) {
		r := sim.Run(seed, simWords)
		if n := strings.Count(r.Transcript, "\nreport ") + strings.Count(r.Transcript, "report load"); n == 0 {
			t.Errorf("seed %d: no report in its transcript", seed)
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("seed%d.txt", seed)), []byte(r.Transcript), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	coretest.RunTranscripts(t, filepath.Join(dir, "*.txt"), newScript)
}

// TestSimOfBefore: seeds far behind those of TestSim that have failed once.
func TestSimOfBefore(t *testing.T) {
	for _, seed := range []uint64{
		108289, 8000329, // a dead D's claims had to wait: a step had ended as many offers as it may
	} {
		if r := sim.Run(seed, nil); r.Broken != nil {
			tellSeed(t, seed)
		}
	}
}
