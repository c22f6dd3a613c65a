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
	id ID
}

type observedAct struct {
	id         ID
	name, half string // half "": of any
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

// actors says, by an action's type, which half wants the action; "": any half may. A Report itself says which half it is of.
var actors = map[string]string{"Resolve": "", "Expect": "load", "SendLoad": "load", "Revoke": "load",
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
		o.acts = append(o.acts, observedAct{ID(v.FieldByName("ID").String()), name, half})
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
