package half

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/kvconn/kvconn/core"
)

// observer collects the rows of the tables that the halves and the agents at their other ends take in a step. Without tell it does nothing.
type observer struct {
	tell  func(core.Transition)
	event string // the name of its type, or what it has brought about
	taken []takenRow
}

type takenRow struct {
	core.Transition
	id   ID
	does []string // its actions, and what it tells who stands above
}

// Because names what an event has brought about, for the halves that it reaches, until
// undo is called.
func (h *Set) Because(name string) (undo func()) {
	before := h.taken.event
	h.taken.event = name
	return func() { h.taken.event = before }
}

// row notes one row of a table.
func (o *observer) row(half string, id ID, guard, before, after fmt.Stringer, does []core.Action) {
	if o.tell == nil {
		return
	}
	r := takenRow{core.Transition{Half: half, From: before.String(), Event: o.event, Guard: guard.String(), To: after.String()}, id, nil}
	for _, a := range does {
		r.does = append(r.does, reflect.TypeOf(a).Name())
	}
	o.taken = append(o.taken, r)
}

// word adds to the row that a half has just taken what the half says besides its actions.
func (o *observer) word(half string, id ID, name string) {
	if o.tell == nil {
		return
	}
	if n := len(o.taken); n > 0 && o.taken[n-1].Half == half && o.taken[n-1].id == id {
		o.taken[n-1].does = append(o.taken[n-1].does, name)
		return
	}
	o.stray(half, name)
}

// stray notes a word or an action that should be a row's and is of none. No table has such a row.
func (o *observer) stray(half, name string) {
	o.taken = append(o.taken, takenRow{core.Transition{Half: half, From: "?", Event: o.event, Guard: "?", To: "?"}, "", []string{name}})
}

// Row performs one row of a table of who stands above: it wants the row's actions. The event is what a half has told; if it is "", the
// row is of the step's own event.
func (h *Set) Row(table string, id ID, event string, guard, before, after fmt.Stringer, does ...core.Action) {
	if event != "" {
		defer h.Because(event)()
	}
	h.taken.row(table, id, guard, before, after, does)
	h.actions = append(h.actions, does...)
}

// Word adds to the row that who stands above has just taken what halves are to hear by it.
func (h *Set) Word(table string, id ID, name string) { h.taken.word(table, id, name) }

// Act wants actions done, in this order, that stand in no row.
func (h *Set) Act(list ...core.Action) {
	h.actions = append(h.actions, list...)
	if h.taken.tell == nil {
		return
	}
	for _, a := range list {
		switch a.(type) {
		case core.Await, core.Yield, core.Report:
		default:
			h.taken.stray("half", reflect.TypeOf(a).Name())
		}
	}
}

// end tells the rows that the event has had the halves take.
func (o *observer) end() {
	for _, r := range o.taken {
		slices.Sort(r.does)
		r.Actions = strings.Join(r.does, " ")
		o.tell(r.Transition)
	}
	o.taken = o.taken[:0]
}
