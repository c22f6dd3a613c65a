package half

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/kvconn/kvconn/core"
)

// observer collects each half's transitions of a step. Without tell it does
// nothing.
type observer struct {
	tell   func(core.Transition)
	event  string
	halves []observed
	acts   []observedAct
}

type observed struct {
	core.Transition
	id ID
}

type observedAct struct {
	id         ID
	name, half string // half "": of any
}

// begin notes the event of a step: its name is its type's.
func (o *observer) begin(e core.Event) {
	if o.tell != nil {
		o.event = reflect.TypeOf(e).Name()
	}
}

// Because names what an event has brought about, for the halves that it reaches, until
// undo is called.
func (h *Set) Because(name string) (undo func()) {
	before := h.taken.event
	h.taken.event = name
	return func() { h.taken.event = before }
}

// moved notes that a half changes its state.
func (h *Set) moved(half string, id ID, before, after fmt.Stringer) {
	if h.taken.tell != nil {
		h.taken.moved(half, id, before, after)
	}
}

func (o *observer) moved(half string, id ID, before, after fmt.Stringer) {
	from, to := before.String(), after.String()
	for i := range o.halves {
		if h := &o.halves[i]; h.Half == half && h.id == id && h.To == from && from != "-" {
			h.To = to
			return
		}
	}
	o.halves = append(o.halves, observed{core.Transition{Half: half, From: from, Event: o.event, To: to}, id})
}

// Act wants actions done, in this order.
func (h *Set) Act(list ...core.Action) {
	for _, a := range list {
		h.actions = append(h.actions, a)
		if h.taken.tell != nil {
			h.taken.note(a)
		}
	}
}

// note notes an action. An action of the fan-in or fan-out itself belongs to no half.
func (o *observer) note(a core.Action) {
	add := func(id ID, name, half string) { o.acts = append(o.acts, observedAct{id, name, half}) }
	switch v := a.(type) {
	case core.Resolve:
		add(ID(v.ID), "Resolve", "")
	case core.Expect:
		add(ID(v.ID), "Expect", "load")
	case core.SendLoad:
		add(ID(v.ID), "SendLoad", "load")
	case core.Revoke:
		add(ID(v.ID), "Revoke", "load")
	case core.Write:
		add(ID(v.ID), "Write", "offer")
	case core.StopWrite:
		add(ID(v.ID), "StopWrite", "offer")
	case core.SendRestart:
		add(ID(v.ID), "SendRestart", "offer")
	case core.SendFinish:
		add(ID(v.ID), "SendFinish", "")
	case core.Report:
		half := v.Side.String()
		if v.Side == core.SideDemand {
			half = "offer"
		}
		add(ID(v.ID), "Report", half)
	}
}

// end tells the transitions that the event has brought about.
func (o *observer) end() {
	for i := range o.halves {
		h := &o.halves[i]
		if h.From == h.To {
			continue
		}
		var names []string
		for _, a := range o.acts {
			if a.id == h.id && (a.half == h.Half || a.half == "") && !slices.Contains(names, a.name) {
				names = append(names, a.name)
			}
		}
		slices.Sort(names)
		h.Actions = strings.Join(names, " ")
		o.tell(h.Transition)
	}
	o.halves, o.acts = o.halves[:0], o.acts[:0]
}
