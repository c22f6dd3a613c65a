package core

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Transition is one change of a half's state in one event, as the tables of doc.go
// have them.
type Transition struct {
	Half, From, Event, To string // From "-": the half begins; To "-": it has ended
	Actions               string // those of this half that the event brought about, sorted, each once
}

// observer collects each half's transitions of a step. Without tell it does
// nothing.
type observer struct {
	tell   func(Transition)
	event  string
	halves []observed
	acts   []observedAct
}

type observed struct {
	Transition
	id TransferID
}

type observedAct struct {
	id         TransferID
	name, half string // half "": of any
}

// begin notes the event of a step: its name is its type's.
func (o *observer) begin(e Event) {
	if o.tell != nil {
		o.event = reflect.TypeOf(e).Name()
	}
}

// because names what an event has brought about, for the halves that it reaches, until
// undo is called.
func (m *Machine) because(name string) (undo func()) {
	before := m.taken.event
	m.taken.event = name
	return func() { m.taken.event = before }
}

// moved notes that a half changes its state.
func (m *Machine) moved(half string, id TransferID, before, after fmt.Stringer) {
	if m.taken.tell != nil {
		m.taken.moved(half, id, before, after)
	}
}

func (o *observer) moved(half string, id TransferID, before, after fmt.Stringer) {
	from, to := before.String(), after.String()
	for i := range o.halves {
		if h := &o.halves[i]; h.Half == half && h.id == id && h.To == from && from != "-" {
			h.To = to
			return
		}
	}
	o.halves = append(o.halves, observed{Transition{Half: half, From: from, Event: o.event, To: to}, id})
}

// act wants actions done, in this order.
func (m *Machine) act(list ...Action) {
	for _, a := range list {
		m.actions = append(m.actions, a)
		if m.taken.tell != nil {
			m.taken.note(a)
		}
	}
}

// note notes an action. An action of the fan-in or fan-out itself belongs to no half.
func (o *observer) note(a Action) {
	add := func(id TransferID, name, half string) { o.acts = append(o.acts, observedAct{id, name, half}) }
	switch v := a.(type) {
	case Resolve:
		add(v.ID, "Resolve", "")
	case Expect:
		add(v.ID, "Expect", "load")
	case SendLoad:
		add(v.ID, "SendLoad", "load")
	case Revoke:
		add(v.ID, "Revoke", "load")
	case Write:
		add(v.ID, "Write", "offer")
	case StopWrite:
		add(v.ID, "StopWrite", "offer")
	case SendRestart:
		add(v.ID, "SendRestart", "offer")
	case SendFinish:
		add(v.ID, "SendFinish", "")
	case Report:
		half := v.Side.String()
		if v.Side == SideDemand {
			half = "offer"
		}
		add(v.ID, "Report", half)
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
