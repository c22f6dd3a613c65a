// What a run has found, as a table and as a verdict.

package chaos

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Result is the findings of a run.
type Result struct {
	Seed      uint64            `json:"seed"`
	Short     bool              `json:"short"`
	Strict    bool              `json:"strict"`
	Took      time.Duration     `json:"took_ns"`
	Injected  int               `json:"faults"`
	Faults    []faultRow        `json:"faults_by_kind"`
	NotRun    map[string]string `json:"faults_not_run,omitempty"`
	Starts    map[string]int    `json:"failed_starts,omitempty"` // of killed processes, tried again
	Ends      map[string]int    `json:"transfers"`
	Moved     map[string]int    `json:"loads_by_transport"` // that ended well
	Reasons   map[string]int    `json:"reasons"`
	Halves    int               `json:"halves"`
	Wrong     int               `json:"wrong_bytes"`
	Lost      int               `json:"lost"` // blocks and reports
	Notice    []noticeRow       `json:"notice"`
	Killed    figures           `json:"p_killed"` // all loads that P's death ended
	Notices   []string          `json:"notices"`  // the slowest first
	Late      int               `json:"p_killed_late"`
	Missed    []string          `json:"missed"`   // not reached, though nothing was lost; a failure if Strict
	TooLate   []string          `json:"too_late"` // the same of times
	Call      figures           `json:"calls"`    // how long the engines' calls took
	Drain     time.Duration     `json:"drain_ns"`
	Parts     []partRow         `json:"overload"`
	Processes []processRow      `json:"processes"`
	Problems  []string          `json:"problems"`
	Untold    int               `json:"problems_untold,omitempty"`
	OK        bool              `json:"ok"`
}

// newP marks loads that found the killed P's successor, and ended because the successor
// does not know them.
const newP = ", new P asked"

type faultRow struct {
	Kind string `json:"kind"`
	N    int    `json:"n"`
	Hits int    `json:"transfers_hit"`
}

type noticeRow struct {
	Kind  string `json:"kind"`
	Side  string `json:"side"`
	Alone bool   `json:"alone"` // no other fault hit the transfer too
	figures
}

// partRow is the line of one part of the overload.
type partRow struct {
	Name string `json:"name"`
	Text string `json:"text"`
}

type processRow struct {
	Name   string `json:"name"`
	Lives  int    `json:"lives"`
	Before counts `json:"before"`
	After  counts `json:"after"`
}

func (r *Result) addFaults(in *injector) {
	in.mu.Lock()
	defer in.mu.Unlock()
	r.Injected, r.Starts = len(in.faults), in.startErrors
	for _, m := range in.mixture {
		row := faultRow{Kind: string(m.kind)}
		for _, f := range in.faults {
			if f.kind == m.kind {
				row.N++
				row.Hits += f.hits
			}
		}
		if row.N > 0 {
			r.Faults = append(r.Faults, row)
		}
	}
	if len(in.notRun) > 0 {
		r.NotRun = map[string]string{}
		for kind, why := range in.notRun {
			r.NotRun[string(kind)] = why
		}
	}
}

// close draws the sums of the books, and the verdict.
func (r *Result) close(led *ledger) {
	r.Ends, r.Reasons, r.Moved = led.ends(), led.reasons(), led.moved()
	notices := led.notices()
	times := map[noticeRow][]time.Duration{}
	var killed []time.Duration
	for _, n := range notices {
		row := noticeRow{Kind: string(n.fault.kind), Side: n.side.String(), Alone: n.alone}
		if n.anew {
			row.Kind += newP
		}
		times[row] = append(times[row], n.after)
		if n.fault.kind == killP && !n.anew {
			killed = append(killed, n.after)
			if n.after > noticeBound {
				r.Late++
				r.TooLate = append(r.TooLate, fmt.Sprintf("later than %v: %v", noticeBound, n))
			}
		}
	}
	r.Killed = figuresOf(killed)
	slices.SortFunc(notices, func(a, b notice) int { return cmp.Compare(b.after, a.after) })
	for _, n := range notices {
		r.Notices = append(r.Notices, n.String())
	}
	for row, list := range times {
		row.figures = figuresOf(list)
		r.Notice = append(r.Notice, row)
	}
	slices.SortFunc(r.Notice, func(a, b noticeRow) int {
		return cmp.Or(cmp.Compare(a.Side, b.Side), cmp.Compare(a.Kind, b.Kind), cmp.Compare(b.N, a.N))
	})
	led.mu.Lock()
	defer led.mu.Unlock()
	var calls []time.Duration
	for _, e := range led.order {
		if e.state != halfGone {
			calls = append(calls, e.took)
		}
	}
	r.Call = figuresOf(calls)
	r.Halves = len(led.order)
	r.Wrong = led.wrong
	for _, p := range led.problems {
		if strings.HasPrefix(p, "lost ") {
			r.Lost++
		}
	}
	r.Problems, r.Untold = append([]string{}, led.problems...), led.dropped
	r.Missed, r.TooLate = append(r.Missed, led.missed...), append(r.TooLate, led.tooLate...)
	r.OK = len(r.Problems) == 0 && (!r.Strict || len(r.Missed)+len(r.TooLate) == 0)
}

// Print writes the report for people.
func (r *Result) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	p := func(format string, args ...any) { fmt.Fprintf(t, format+"\n", args...) }
	p("FAULTS\tinjected\ttransfers hit")
	for _, f := range r.Faults {
		p("%s\t%d\t%d", f.Kind, f.N, f.Hits)
	}
	for _, kind := range sortedKeys(r.NotRun) {
		p("%s\tnot run: %s", kind, r.NotRun[kind])
	}
	p("all\t%d", r.Injected)
	for _, why := range sortedKeys(r.Starts) {
		p("a process did not start, and then did: %s\t%d", why, r.Starts[why])
	}
	p("\nTRANSFERS\thalves")
	for _, end := range sortedKeys(r.Ends) {
		p("%s\t%d", end, r.Ends[end])
	}
	p("all\t%d", r.Halves)
	for _, name := range sortedKeys(r.Moved) {
		p("loads that %s moved\t%d", name, r.Moved[name])
	}
	p("\nTIME TO NOTICE\tside\tn\tmedian ms\tp99 ms\tmax ms")
	for _, n := range r.Notice {
		kind := n.Kind
		if !n.Alone {
			kind += ", among others"
		}
		p("%s\t%s\t%d\t%s\t%s\t%s", kind, n.Side, n.N, milliseconds(n.Median), milliseconds(n.P99), milliseconds(n.Max))
	}
	p("P killed, all loads\tload\t%d\t%s\t%s\t%s", r.Killed.N, milliseconds(r.Killed.Median), milliseconds(r.Killed.P99), milliseconds(r.Killed.Max))
	p("the engines' calls\t\t%d\t%s\t%s\t%s", r.Call.N, milliseconds(r.Call.Median), milliseconds(r.Call.P99), milliseconds(r.Call.Max))
	if len(r.Parts) > 0 {
		p("\nOVERLOAD")
		for _, part := range r.Parts {
			p("%s\t%s", part.Name, part.Text)
		}
	}
	p("\nPROCESSES\tlives\tgoroutines\tfiles\theap KiB\tRSS MiB")
	for _, c := range r.Processes {
		p("%s\t%d\t%d → %d\t%d → %d\t%d → %d\t%d → %d", c.Name, c.Lives, c.Before.Goroutines, c.After.Goroutines,
			c.Before.Files, c.After.Files, c.Before.Heap>>10, c.After.Heap>>10, c.Before.RSS>>20, c.After.RSS>>20)
	}
	p("")
	for _, slow := range r.Notices[:min(len(r.Notices), 5)] {
		p("SLOW: %s", slow)
	}
	for _, missed := range slices.Concat(r.Missed, r.TooLate) {
		p("MISSED: %s", missed)
	}
	for _, problem := range r.Problems {
		p("PROBLEM: %s", problem)
	}
	if r.Untold > 0 {
		p("PROBLEM: %d more", r.Untold)
	}
	verdict := "OK: nothing was lost, nothing came twice, every byte is right"
	if !r.OK {
		verdict = "FAILED"
	}
	if r.Killed.N > 0 {
		p("P's death was reported after %s ms in the middle, %s ms at most, %d times later than %v", milliseconds(r.Killed.Median),
			milliseconds(r.Killed.Max), r.Late, noticeBound)
	}
	p("%s: %d faults, %d wrong bytes, %d lost blocks or reports, all quiet %s ms after the last fault, with the transfers begun before; seed %d, %.0f s",
		verdict, r.Injected, r.Wrong, r.Lost, milliseconds(r.Drain), r.Seed, r.Took.Seconds())
	return t.Flush()
}
