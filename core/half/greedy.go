package half

import (
	"cmp"
	"container/heap"
	"container/list"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// Party is a D agent, with its account.
type Party struct {
	account core.Account
	agent   core.AgentID
}

func partyOf(account core.Account, agent core.AgentID) Party {
	return Party{fault.Pick("places-by-agent", account, core.Account(agent)), agent}
}

// greedy counts how much each peer holds of something that is limited for all peers together. If the limit is reached, the account
// that holds the most gives way, and within that account the agent that holds the most.
type greedy struct{ accounts ranking }

func newGreedy() greedy { return greedy{newRanking()} }

// ranking keeps the holders by name, and finds the one that holds the most.
type ranking struct {
	byName map[string]*holding
	order  holdings
}

func newRanking() ranking { return ranking{byName: map[string]*holding{}} }

// holding is what an account holds, or what one agent of an account holds.
type holding struct {
	name   string
	weight int
	at     int     // its index in the ranking's order
	agents ranking // if it is an account's: those of its agents
	// If it is an agent's: the agent's stakes that are not firm, and those that are, each in the order in which they came.
	soft, firm list.List
}

// stake is what an agent holds for one transfer, for all shares of the transfer together.
type stake struct {
	id     ID
	who    Party
	weight int
	firm   bool // it gives way only after the agent's stakes that are not firm
	el     *list.Element
}

func (r *ranking) of(name string) int {
	if h := r.byName[name]; h != nil {
		return h.weight
	}
	return 0
}

// most is the holder with the greatest weight; nil if there is no holder.
func (r *ranking) most() *holding {
	if len(r.order) == 0 {
		return nil
	}
	return r.order[0]
}

// weigh adds to a holder's weight; more may be negative. A holder without weight is forgotten.
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

// weigh adds to what a party holds, and returns the holding of its agent; more may be negative.
func (g *greedy) weigh(who Party, more int) *holding {
	return g.accounts.weigh(string(who.account), more).agents.weigh(string(who.agent), more)
}

// add counts a transfer that weighs so much. Its weight is positive.
func (g *greedy) add(who Party, id ID, weight int) *stake {
	s := &stake{id: id, who: who, weight: weight}
	s.el = g.weigh(who, weight).soft.PushBack(s)
	return s
}

// change adds to the weight of a stake, which keeps its place in the order. A stake without weight is removed.
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

// gives returns the stake that must give way if a party is to hold so much more. It is the newest stake of the agent that holds the
// most, within the account that holds the most. If the party's account would then hold at least as much as that account, a stake of
// the party's own account gives way, provided that another of its agents holds more than the party's agent would then hold. nil: the
// party gets nothing more.
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

// outermost is the newest (Back) or oldest (Front) stake of the agent that holds the most of an account. If the agent has stakes
// that are not firm, it is one of these.
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
