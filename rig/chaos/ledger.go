// The books of a run: each half that was ordered, how it ended, and which fault its end is put down to.

package chaos

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
)

// The states of a half in the books.
type halfState uint8

const (
	halfOrdered  halfState = iota // the engine was told to make the call
	halfAccepted                  // the call was accepted: a report is owed
	halfRefused                   // the call was refused, with a reason
	halfReported
	halfGone // its process was killed first
)

// entry is one half of a transfer in one life of a process.
type entry struct {
	half
	child      string
	life       int
	prefill    int // the pair
	decode     int
	state      halfState
	cancelled  bool // the driver asked for its end, on either side
	accepted   int64
	reported   int64
	code       core.Code
	reason     string
	transport  string        // that moved the bytes, if one did
	peer       core.AgentID  // the agent that it was with in the end, as far as it knew
	took       time.Duration // the call
	done       chan struct{} // closed with the end
	hits       []*fault      // that began while it was under way
	underFault bool          // a fault was on when it was ordered
	overloaded bool
	exhausted  bool
}

// over says whether the half has ended.
func (e *entry) over() bool { return e.state >= halfRefused }

type entryKey struct {
	child string
	life  int
	half
}

// ledger is the books of a run: every half that was ordered, and how it ended.
// Its methods may be called from any goroutine.
type ledger struct {
	mu       sync.Mutex
	entries  map[entryKey]*entry
	order    []*entry // as they were ordered
	problems []string
	dropped  int      // problems beyond maxProblems
	missed   []string // goals that were not reached, though nothing was lost
	tooLate  []string // the same of times
	wrong    int
	lags     map[string][]span // when a child did not run
	dead     map[string]int    // the last life of a child that is known to have ended
	on       map[*fault]bool   // the faults that are on
	agents   map[core.AgentID]processLife
}

// processLife is one process of a child.
type processLife struct {
	child string
	life  int
}

// span is a time on the clock that all share.
type span struct{ from, to int64 }

// maxProblems bounds what is told of one kind of misfortune many times over.
const maxProblems = 64

func newLedger() *ledger {
	return &ledger{entries: map[entryKey]*entry{}, lags: map[string][]span{}, dead: map[string]int{}, on: map[*fault]bool{}, agents: map[core.AgentID]processLife{}}
}

func (l *ledger) problem(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.addProblem(format, args...)
}

func (l *ledger) addProblem(format string, args ...any) {
	if len(l.problems) >= maxProblems {
		l.dropped++
		return
	}
	l.problems = append(l.problems, fmt.Sprintf(format, args...))
}

// miss writes down what was not reached; l.mu is held.
func (l *ledger) miss(format string, args ...any) {
	if len(l.missed) < maxProblems {
		l.missed = append(l.missed, fmt.Sprintf(format, args...))
	}
}

// late writes down that something took longer than it may; l.mu is held.
func (l *ledger) late(format string, args ...any) {
	if len(l.tooLate) < maxProblems {
		l.tooLate = append(l.tooLate, fmt.Sprintf(format, args...))
	}
}

// ordered opens the books of a half. An id is ordered once for each life.
func (l *ledger) ordered(child string, life int, h half, prefill, decode int) *entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := &entry{half: h, child: child, life: life, prefill: prefill, decode: decode, done: make(chan struct{})}
	l.entries[entryKey{child, life, h}] = e
	l.order = append(l.order, e)
	if life <= l.dead[child] {
		l.end(e, halfGone)
	}
	for f := range l.on {
		e.underFault = e.underFault || f.affects(e)
	}
	return e
}

// event takes a process's event.
func (l *ledger) event(child string, life int, ev event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch ev.Op {
	case evOpened:
		l.agents[ev.Agent] = processLife{child, life}
	case evCall:
		e := l.entries[entryKey{child, life, half{ev.Side, ev.ID}}]
		if e == nil || e.state != halfOrdered {
			// The report of an early end may be told before the call's own result.
			if e == nil || e.state != halfReported {
				l.addProblem("%s: a call for %s that was not ordered", child, ev.ID)
				return
			}
			e.took = time.Duration(ev.Took)
			return
		}
		e.took, e.accepted, e.exhausted = time.Duration(ev.Took), ev.At, ev.Exhausted
		if ev.Error == "" {
			e.state = halfAccepted
			return
		}
		e.reason, e.overloaded = ev.Error, ev.Overload
		l.end(e, halfRefused)
	case evReport:
		e := l.entries[entryKey{child, life, half{ev.Side, ev.ID}}]
		switch {
		case e == nil:
			l.addProblem("%s: a report of %s %s, which was not ordered: %s", child, ev.Side, ev.ID, ev.Code)
		case e.over():
			l.addProblem("%s: %s %s is reported twice: %s, then %s: %s", child, ev.Side, ev.ID, e.code, ev.Code, ev.Reason)
		default:
			e.accepted, e.reported, e.code, e.reason = ev.Called, ev.At, ev.Code, ev.Reason
			e.peer, e.transport = ev.Agent, ev.Transport
			l.end(e, halfReported)
		}
	case evWrong:
		l.wrong++
		l.addProblem("%s (life %d): %s: %s", child, life, ev.ID, ev.Error)
	case evLag:
		l.lags[child] = append(l.lags[child], span{ev.At, ev.Until})
	case "": // the process has ended
		l.dead[child] = life
		if ev.Error != "" {
			l.addProblem("%s (life %d): %s", child, life, ev.Error)
		}
		for _, e := range l.order {
			if e.child == child && e.life == life && !e.over() {
				l.end(e, halfGone)
			}
		}
	}
}

func (l *ledger) end(e *entry, s halfState) {
	e.state = s
	close(e.done)
}

// void ends a half whose command could not be given.
func (l *ledger) void(e *entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !e.over() {
		l.end(e, halfGone)
	}
}

// cancel notes that the driver asked for the end of a half.
func (l *ledger) cancel(e *entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.cancelled = true
}

// open returns the halves whose reports are owed, or whose calls are not told.
func (l *ledger) open() []*entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []*entry
	for _, e := range l.order {
		if !e.over() {
			out = append(out, e)
		}
	}
	return out
}

// begin notes the halves that a fault begins upon.
func (l *ledger) begin(f *fault) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.on[f] = true
	for _, e := range l.order {
		if e.state == halfAccepted && f.affects(e) {
			e.hits = append(e.hits, f)
			f.hits++
		}
	}
}

// over notes that a fault is over: the target works again.
func (l *ledger) over(f *fault) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.on, f)
}

// ends counts how halves ended, by side and code.
func (l *ledger) ends() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string]int{}
	for _, e := range l.order {
		out[e.outcome()]++
	}
	return out
}

// moved counts the loads that ended well, by transport.
func (l *ledger) moved() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string]int{}
	for _, e := range l.order {
		if e.side == core.SideLoad && e.state == halfReported && e.code == core.OK && e.transport != "" {
			out[e.transport]++
		}
	}
	return out
}

// reasons counts the texts of the halves that did not end well, without the parts that are
// of one transfer, peer or moment only.
func (l *ledger) reasons() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string]int{}
	for _, e := range l.order {
		if e.reason != "" && !e.cancelled {
			text, _, _ := strings.Cut(e.reason, " [") // cut off: the peer, the place and the time
			out[e.outcome()+": "+particulars.ReplaceAllString(text, "…")]++
		}
	}
	return out
}

var particulars = regexp.MustCompile(`[A-Z2-7]{24}|[a-z]+-[a-z0-9-]*p?d?[0-9]+|[0-9.:]*[0-9]+(m?s\b)?`)

func (e *entry) outcome() string {
	switch e.state {
	case halfReported:
		return e.side.String() + " " + e.code.String()
	case halfRefused:
		switch {
		case e.overloaded:
			return e.side.String() + " refused: too many"
		case e.exhausted:
			return e.side.String() + " not made: no free blocks"
		}
		return e.side.String() + " refused by the call"
	case halfGone:
		return e.side.String() + " died with its process"
	}
	return e.side.String() + " not ended"
}

// lag is how long of a time a child did not run.
func (l *ledger) lag(child string, s span) time.Duration {
	var sum int64
	for _, lag := range l.lags[child] {
		if from, to := max(lag.from, s.from), min(lag.to, s.to); to > from {
			sum += to - from
		}
	}
	return time.Duration(sum)
}

// notice is one time from a fault to the report of a half that it ended.
type notice struct {
	*entry
	fault *fault
	after time.Duration // less what the engine's process was stopped for
	alone bool          // no other fault hit it, and none was on
	anew  bool          // it found the P that was started in a killed one's place
}

func (n notice) String() string {
	var hits []string
	for _, h := range n.hits {
		hits = append(hits, fmt.Sprintf("%s of %s %s ms before", h.kind, h.target, milliseconds(time.Duration(n.reported-h.from))))
	}
	return fmt.Sprintf("%s: %s %s, called %s ms before its report, after %s: %s: %s", n.child, n.side, n.id,
		milliseconds(time.Duration(n.reported-n.accepted)), strings.Join(hits, ", "), n.code, n.reason)
}

// notices are the halves that faults ended: a side says that the other is lost or
// unreachable, or that the bytes could not be moved.
func (l *ledger) notices() []notice {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []notice
	for _, e := range l.order {
		if e.state != halfReported || e.cancelled {
			continue
		}
		f, alone, anew := l.cause(e)
		switch e.code {
		case core.PeerLost, core.Unreachable, core.Failed:
			anew = false // the P that it found has been lost too
		case core.NotOffered:
			if !anew {
				continue
			}
		default:
			continue
		}
		if f != nil {
			after := time.Duration(e.reported-f.from) - l.lag(e.child, span{f.from, e.reported})
			out = append(out, notice{e, f, max(after, 0), alone, anew})
		}
	}
	return out
}

// cause is the fault that a half's end is put down to. If the process that it was with has
// died, that death is the cause, else the first fault that hit it. A half may survive a
// death by finding the successor. If the successor then did not know the half, the death
// is the cause after all, and anew is true.
func (l *ledger) cause(e *entry) (f *fault, alone, anew bool) {
	with, known := l.agents[e.peer]
	n := 0
	var survived *fault
	for _, h := range e.hits {
		if h.from >= e.reported {
			continue // it had ended, which was not told yet
		}
		n++
		if h.kind.deadly() && known && with != h.victim {
			survived = h
			continue
		}
		if f == nil || h.kind.deadly() && !f.kind.deadly() {
			f = h
		}
	}
	if survived != nil && e.code == core.NotOffered {
		f, anew = survived, true
	}
	return f, n == 1 && !e.underFault, anew
}

// figures are the usual ones of a list of times.
type figures struct {
	N      int           `json:"n"`
	Median time.Duration `json:"median_ns"`
	P99    time.Duration `json:"p99_ns"`
	Max    time.Duration `json:"max_ns"`
}

func figuresOf(list []time.Duration) figures {
	if len(list) == 0 {
		return figures{}
	}
	s := slices.Sorted(slices.Values(list))
	return figures{N: len(s), Median: s[len(s)/2], P99: s[(len(s)*99+99)/100-1], Max: s[len(s)-1]}
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
