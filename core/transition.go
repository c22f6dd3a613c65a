package core

import (
	"fmt"
	"strings"
)

// Transition is one change of a half's state, as doc.go's table has them.
type Transition struct {
	Half, From, Event, To string   // From "-": the half begins; To "-": it has ended
	Actions               []string // of this half that the event brought about
}

// observer collects, between two events, what becomes of each half. Without tell
// it does nothing.
type observer struct {
	tell   func(Transition)
	event  string
	halves []observed
	acts   []observedAct
}

type observed struct {
	id TransferID
	Transition
}

type observedAct struct {
	id         TransferID
	name, half string // half "": either
}

// event names the call of the machine's user that is going on.
func (m *Machine) event(name string) {
	m.taken.flush()
	m.taken.event = name
}

// moved notes that a half changes its state.
func (m *Machine) moved(half string, id TransferID, from, to string) {
	if m.taken.tell == nil {
		return
	}
	for i := range m.taken.halves {
		if o := &m.taken.halves[i]; o.Half == half && o.id == id && o.To == from && from != "-" {
			o.To = to
			return
		}
	}
	m.taken.halves = append(m.taken.halves, observed{id, Transition{Half: half, From: from, Event: m.taken.event, To: to}})
}

func (o *observer) act(a Action) {
	if o.tell == nil {
		return
	}
	name := strings.TrimPrefix(fmt.Sprintf("%T", a), "core.")
	switch v := a.(type) {
	case Resolve:
		o.acts = append(o.acts, observedAct{v.ID, name, "claim load"})
	case Expect:
		o.acts = append(o.acts, observedAct{v.ID, name, "load"})
	case SendLoad:
		o.acts = append(o.acts, observedAct{v.ID, name, "load"})
	case Revoke:
		o.acts = append(o.acts, observedAct{v.ID, name, "load"})
	case Write:
		o.acts = append(o.acts, observedAct{v.ID, name, "offer"})
	case StopWrite:
		o.acts = append(o.acts, observedAct{v.ID, name, "offer"})
	case SendRestart:
		o.acts = append(o.acts, observedAct{v.ID, name, "offer"})
	case SendFinish:
		o.acts = append(o.acts, observedAct{v.ID, name, ""})
	case Report:
		half := map[Side]string{SideLoad: "load", SideOffer: "offer", SideDemand: "offer", SideClaim: "claim"}[v.Side]
		o.acts = append(o.acts, observedAct{v.ID, name, half})
	}
}

// flush tells what has become of the halves of the last event.
func (o *observer) flush() {
	if o.tell == nil || len(o.halves) == 0 && len(o.acts) == 0 {
		return
	}
	for i := range o.halves {
		h := &o.halves[i]
		if h.From == h.To {
			continue
		}
		for _, a := range o.acts {
			if a.id == h.id && (strings.Contains(a.half, h.Half) || a.half == "") {
				h.Actions = append(h.Actions, a.name)
			}
		}
		o.tell(h.Transition)
	}
	o.halves, o.acts = o.halves[:0], o.acts[:0]
}
