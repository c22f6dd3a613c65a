// What a claim and its load have in common: the maps of both, and the ends that P must still hear of while D looks P up.

package half

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// asked is what a load takes over from its claim, beside the load's own seq and token. By itself it is a pending
// finish: the end of a claim or load, which P must hear of while D is still looking P up.
type asked struct {
	id           ID
	seq          uint64
	from         core.Target
	rank         bool // from is one rank of an engine, which D loads from beside others
	token        uint64
	since        time.Time    // the engine's first word of it: its claim, if there was one
	end          Ending       // how it ended or is ending; a claim has it in claimVoid, or when it was lost
	peer         core.AgentID // the P agent that it is with; "" while P is looked up
	previousPeer core.AgentID // the agent before P was looked up once more; "": P was looked up once
	confirmedBy  core.AgentID // the agent that has answered the claim; no other agent knows the request
	nameBy       time.Time    // if the agent opened after the request: its engine must name the request by then; else zero
}

func (a *asked) withRank() bool { return a.rank }

func (a *asked) lookUp(fresh bool) core.Resolve {
	return core.Resolve{ID: core.TransferID(a.id), Seq: a.seq, From: a.from, Part: a.rank, Fresh: fresh}
}

// replaced is called when the agent at hand may have taken another's place. It says why this agent
// cannot know the request; "" if it can. younger says that the agent opened after the request was made.
func (a *asked) replaced(younger bool) string {
	switch by := a.peer; {
	case a.confirmedBy != "" && a.confirmedBy != by:
		return fmt.Sprintf("prefill agent %s was replaced by agent %s, and only %s had the request: send the request again", a.confirmedBy, by, a.confirmedBy)
	case a.previousPeer != "" && a.previousPeer != by && younger && !fault.On("to-the-successor"):
		return fmt.Sprintf("prefill agent %s was replaced by agent %s, which was opened after the request was made: send the request again", a.previousPeer, by)
	}
	return ""
}

func (a *asked) noSuccessor() string {
	return fmt.Sprintf("prefill agent %s is gone, and no agent was found in its place: send the request again when its engine is up", a.previousPeer)
}

// halves are all halves of one kind that D has, by their ids. Those that are with one rank of an engine are counted apart.
type halves[T interface{ withRank() bool }] struct {
	byID  map[ID]T
	ranks int
}

func newHalves[T interface{ withRank() bool }]() halves[T] { return halves[T]{byID: map[ID]T{}} }

func (h *halves[T]) put(id ID, v T) {
	if _, there := h.byID[id]; !there && v.withRank() {
		h.ranks++
	}
	h.byID[id] = v
}

func (h *halves[T]) drop(id ID) {
	if v, there := h.byID[id]; there && v.withRank() {
		h.ranks--
	}
	delete(h.byID, id)
}

// whole is how many of the halves are with a whole engine.
func (h *halves[T]) whole() int { return len(h.byID) - h.ranks }

// finishState: doc.go has the table of transitions.
type finishState uint8

const (
	finishNone finishState = iota // before its begin and after its end
	finishKept                    // P is being looked up, to be told
)

func (s finishState) String() string { return [...]string{"-", "kept"}[s] }

// keepFinish keeps the Finish that P must still be sent: the claim or load, half says which, has ended while D was looking P's agent up.
// It is kept until P is found. A new claim or load of the id voids it, since P then hears of the id by the new one.
func (h *Set) keepFinish(half string, a asked, end Ending) {
	h.taken.word(half, a.id, "KeepFinish")
	a.end = end
	h.pendingFinishes.put(a.id, &a)
	h.taken.row("pending-finish", a.id, Always, finishNone, finishKept, nil)
}

// endPendingFinish performs one row of the table that ends a pending finish.
func (h *Set) endPendingFinish(f *asked, guard Guard, does ...core.Action) {
	h.pendingFinishes.drop(f.id)
	h.taken.row("pending-finish", f.id, guard, finishKept, finishNone, does)
	h.actions = append(h.actions, does...)
}

// voidPendingFinish ends the pending finish of a half that begins anew.
func (h *Set) voidPendingFinish(id ID) {
	if f := h.pendingFinishes.byID[id]; f != nil {
		h.endPendingFinish(f, Always)
	}
}

// voidPendingFinishes ends all pending finishes: no P that was being looked up is told any more.
func (h *Set) voidPendingFinishes() {
	for _, id := range sortedKeys(h.pendingFinishes.byID) {
		h.voidPendingFinish(id)
	}
}

func (f *asked) finish(peer core.AgentID, id core.TransferID) core.Action {
	return core.SendFinish{Peer: peer, ID: id, Code: f.end.Code, Reason: f.end.Reason}
}
