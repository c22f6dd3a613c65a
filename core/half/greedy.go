// If room is short that all peers share, the account that holds the most gives way.

package half

import (
	"cmp"
	"container/list"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
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
type greedy struct {
	held *quota.Ranking[core.Account, Party]
	by   map[Party]*stakes
}

func newGreedy() greedy {
	byAgent := func(a, b Party) int { return cmp.Compare(a.agent, b.agent) }
	return greedy{quota.NewRanking[core.Account](byAgent), map[Party]*stakes{}}
}

// stakes are an agent's: those that are not firm, and those that are, each in the order in which they came.
type stakes struct{ soft, firm list.List }

// stake is what an agent holds for one transfer, for all shares of the transfer together.
type stake struct {
	id     ID
	who    Party
	weight int
	firm   bool // it gives way only after the agent's stakes that are not firm
	el     *list.Element
}

// add counts a transfer that weighs so much. Its weight is positive.
func (g *greedy) add(who Party, id ID, weight int) *stake {
	of := g.by[who]
	if of == nil {
		of = &stakes{}
		g.by[who] = of
	}
	s := &stake{id: id, who: who, weight: weight}
	s.el = of.soft.PushBack(s)
	g.held.Add(who.account, who, int64(weight))
	return s
}

// change adds to the weight of a stake, which keeps its place in the order. A stake without weight is removed, and an agent without
// stakes is forgotten.
func (g *greedy) change(s *stake, more int) {
	g.held.Add(s.who.account, s.who, int64(more))
	if s.weight += more; s.weight > 0 {
		return
	}
	of := g.by[s.who]
	if s.firm {
		of.firm.Remove(s.el)
	} else {
		of.soft.Remove(s.el)
	}
	if of.soft.Len()+of.firm.Len() == 0 {
		delete(g.by, s.who)
		g.held.Remove(s.who.account, s.who)
	}
}

func (g *greedy) harden(s *stake) {
	if !s.firm {
		of := g.by[s.who]
		of.soft.Remove(s.el)
		s.firm, s.el = true, of.firm.PushBack(s)
	}
}

// gives returns the stake that must give way if a party is to hold so much more. It is the newest stake of the agent that holds the
// most, within the account that holds the most. If the party's account would then hold at least as much as that account, a stake of
// the party's own account gives way, provided that another of its agents holds more than the party's agent would then hold. nil: the
// party gets nothing more.
func (g *greedy) gives(who Party, more int) *stake {
	if victim, ok := g.held.Gives(who.account, who, int64(more)); ok {
		return g.by[victim].outermost((*list.List).Back)
	}
	return nil
}

// most are the stakes of the agent that holds the most, within the account that holds the most. Somebody holds something.
func (g *greedy) most() *stakes {
	who, _ := g.held.Most()
	return g.by[who]
}

// outermost is the newest (Back) or oldest (Front) stake. If there are stakes that are not firm, it is one of these.
func (of *stakes) outermost(end func(*list.List) *list.Element) *stake {
	return cmp.Or(end(&of.soft), end(&of.firm)).Value.(*stake)
}
