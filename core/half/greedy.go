package half

import (
	"cmp"
	"container/heap"
	"container/list"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// Party is a D agent, of an account.
type Party struct {
	account core.Account
	agent   core.AgentID
}

func partyOf(account core.Account, agent core.AgentID) Party {
	return Party{fault.Pick("places-by-agent", account, core.Account(agent)), agent}
}

// greedy counts what peers hold of something that has a limit for all together. The account that holds the most gives way, in
// it the agent that holds the most.
type greedy struct{ accounts ranking }

func newGreedy() greedy { return greedy{newRanking()} }

// ranking is holders by their names, and knows which holds the most.
type ranking struct {
	byName map[string]*holding
	order  holdings
}

func newRanking() ranking { return ranking{byName: map[string]*holding{}} }

// holding is what an account holds, or one agent of it.
type holding struct {
	name   string
	weight int
	at     int     // in the order
	agents ranking // of an account
	// Of an agent, in the order of their coming.
	soft, firm list.List
}

// stake is what an agent holds by one transfer, all shares of it together.
type stake struct {
	id     ID
	who    Party
	weight int
	firm   bool // it gives way after those that are not
	el     *list.Element
}

func (r *ranking) of(name string) int {
	if h := r.byName[name]; h != nil {
		return h.weight
	}
	return 0
}

// most is the holder with the greatest weight; nil if none has any.
func (r *ranking) most() *holding {
	if len(r.order) == 0 {
		return nil
	}
	return r.order[0]
}

// weigh gives a holder more weight, or takes some away. A holder that has none is forgotten.
func (r *ranking) weigh(name string, more int) *holding {
	h := r.byName[name]
	if h == nil {
		h = &holding{name: name, agents: newRanking()}
		r.byName[name] = h
		heap.Push(&r.order, h)
	}
	if h.weight += more; h.weight == 0 {
		delete(r.byName, name)
		heap.Remove(&r.order, h.at)
		return h
	}
	heap.Fix(&r.order, h.at)
	return h
}

// weigh counts more or less of a party, and returns what its agent holds.
func (g *greedy) weigh(who Party, more int) *holding {
	return g.accounts.weigh(string(who.account), more).agents.weigh(string(who.agent), more)
}

// add counts a transfer that weighs so much. Its weight is positive.
func (g *greedy) add(who Party, id ID, weight int) *stake {
	s := &stake{id: id, who: who, weight: weight}
	s.el = g.weigh(who, weight).soft.PushBack(s)
	return s
}

// change adds to the weight of a stake, which stays at its place. A stake without weight is gone.
func (g *greedy) change(s *stake, more int) {
	agent := g.weigh(s.who, more)
	if s.weight += more; s.weight == 0 {
		s.of(agent).Remove(s.el)
	}
}

func (g *greedy) harden(s *stake) {
	if s.firm {
		return
	}
	agent := g.accounts.byName[string(s.who.account)].agents.byName[string(s.who.agent)]
	agent.soft.Remove(s.el)
	s.firm, s.el = true, agent.firm.PushBack(s)
}

func (s *stake) of(agent *holding) *list.List {
	if s.firm {
		return &agent.firm
	}
	return &agent.soft
}

// gives is the stake that gives way to so much more of a party: the newest of the agent that holds the most, in the account that
// holds the most. If that account would not have more than the party's, it is the party's own account that gives, if an agent of it
// has more than the party's agent would have. nil: there is no room for the party.
func (g *greedy) gives(who Party, more int) *stake {
	most := g.accounts.most()
	if most == nil {
		return nil
	}
	if most.weight <= g.accounts.of(string(who.account))+more {
		most = g.accounts.byName[string(who.account)]
		if most == nil || most.agents.most().weight <= most.agents.of(string(who.agent))+more {
			return nil
		}
	}
	return most.outermost((*list.List).Back)
}

// outermost is the newest (Back) or oldest (Front) stake of the agent of an account that holds the most. Those that are not
// firm come first.
func (h *holding) outermost(of func(*list.List) *list.Element) *stake {
	agent := h.agents.most()
	return cmp.Or(of(&agent.soft), of(&agent.firm)).Value.(*stake)
}

// holdings are a heap with the greatest weight on top. Of equal ones the first by name is on top,
// so that a run can be repeated.
type holdings []*holding

func (o holdings) Len() int { return len(o) }
func (o holdings) Less(i, j int) bool {
	return o[i].weight > o[j].weight || o[i].weight == o[j].weight && o[i].name < o[j].name
}
func (o holdings) Swap(i, j int) {
	o[i], o[j] = o[j], o[i]
	o[i].at, o[j].at = i, j
}
func (o *holdings) Push(x any) {
	h := x.(*holding)
	h.at = len(*o)
	*o = append(*o, h)
}
func (o *holdings) Pop() any {
	last := (*o)[len(*o)-1]
	(*o)[len(*o)-1] = nil
	*o = (*o)[:len(*o)-1]
	return last
}
