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
	event  string // the name of its type, or what it has brought about
	halves []observed
	acts   []observedAct
}

type observed struct {
	core.Transition
	id   ID
	row  bool     // its table has guards
	does []string // of a row: its actions, and what it tells who stands above
}

type observedAct struct {
	id         ID
	name, half string // half "": of an offer, else of none
	of         bool   // one that has changed its state
}

// Because names what an event has brought about, for the halves that it reaches, until
// undo is called.
func (h *Set) Because(name string) (undo func()) {
	before := h.taken.event
	h.taken.event = name
	return func() { h.taken.event = before }
}

// moved notes that a half changes its state.
func (o *observer) moved(half string, id ID, before, after fmt.Stringer) {
	if o.tell == nil {
		return
	}
	from, to := before.String(), after.String()
	for i := range o.halves {
		if h := &o.halves[i]; h.Half == half && h.id == id && h.To == from && from != "-" {
			h.To = to
			return
		}
	}
	o.halves = append(o.halves, observed{core.Transition{Half: half, From: from, Event: o.event, To: to}, id, false, nil})
}

// row notes one row of a table that has guards.
func (o *observer) row(half string, id ID, guard Guard, before, after fmt.Stringer, does []core.Action) {
	if o.tell == nil {
		return
	}
	r := observed{core.Transition{Half: half, From: before.String(), Event: o.event, Guard: guard.String(), To: after.String()}, id, true, nil}
	for _, a := range does {
		r.does = append(r.does, reflect.TypeOf(a).Name())
	}
	o.halves = append(o.halves, r)
}

// word adds to the row that a half has just taken what the half says besides its actions.
func (o *observer) word(half string, id ID, name string) {
	if o.tell == nil {
		return
	}
	if n := len(o.halves); n > 0 && o.halves[n-1].row && o.halves[n-1].Half == half && o.halves[n-1].id == id {
		o.halves[n-1].does = append(o.halves[n-1].does, name)
		return
	}
	o.halves = append(o.halves, observed{core.Transition{Half: half, From: "?", Event: o.event, Guard: "?", To: "?"}, id, true, []string{name}})
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

// actors says, by an action's type, which half wants the action; "": an offer, if one changes its state. What claims, farewells and loads want stands in their rows. A Report itself says which half it is of.
var actors = map[string]string{"Resolve": "", "Expect": "", "SendLoad": "", "Revoke": "",
	"Write": "offer", "StopWrite": "offer", "SendRestart": "offer", "SendFinish": "", "Report": ""}

// note notes an action. An action of the fan-in or fan-out itself belongs to no half.
func (o *observer) note(a core.Action) {
	v := reflect.ValueOf(a)
	name := v.Type().Name()
	half, known := actors[name]
	if r, is := a.(core.Report); is {
		if half = r.Side.String(); r.Side == core.SideDemand {
			half = "offer"
		}
	}
	if known {
		o.acts = append(o.acts, observedAct{ID(v.FieldByName("ID").String()), name, half, false})
	}
}

// end tells the transitions that the event has brought about. An action that belongs to none is told as one of no half.
func (o *observer) end() {
	for i := range o.halves {
		h := &o.halves[i]
		names := h.does
		for i := range o.acts {
			if a := &o.acts[i]; !h.row && a.id == h.id && (a.half == h.Half || a.half == "") {
				if a.of = true; !slices.Contains(names, a.name) {
					names = append(names, a.name)
				}
			}
		}
		if !h.row && h.From == h.To {
			continue
		}
		slices.Sort(names)
		h.Actions = strings.Join(names, " ")
		o.tell(h.Transition)
	}
	for _, a := range o.acts {
		if a.half == "" && !a.of {
			o.tell(core.Transition{Half: "none", From: "?", Event: o.event, To: "?", Actions: a.name})
		}
	}
	o.halves, o.acts = o.halves[:0], o.acts[:0]
}
