package proxy

import (
	"fmt"
	"sync/atomic"
)

// Balance is how the servers of a request are chosen.
type Balance string

// The ways to choose.
const (
	// LeastLoaded takes the rank with the least work under way, and equal ranks in turn.
	LeastLoaded Balance = "least-loaded"
	// RoundRobin takes one rank after the other.
	RoundRobin Balance = "round-robin"
)

func parseBalance(s string) (Balance, error) {
	switch b := Balance(s); b {
	case LeastLoaded, RoundRobin:
		return b, nil
	}
	return "", fmt.Errorf("proxy: balance %q: want %s or %s", s, LeastLoaded, RoundRobin)
}

// balancer hands out servers, rank by rank.
type balancer struct {
	policy          Balance
	fallback        bool // decode servers can do without prefill servers
	prefill, decode side
}

// side are the servers of a role.
type side struct {
	servers []*server
	next    atomic.Uint64
}

// pick returns where a request goes, or false if there is nothing to choose from. A target
// that refuse names is never taken. A target that avoid names is taken only if no other is
// left. Servers that are down are passed over. If all are down, one is tried nevertheless:
// it may be back before the next probe, and its failure is a better answer than a guess.
func (s *side) pick(policy Balance, refuse, avoid func(target) bool) (target, bool) {
	var buf [4][8]target
	// From the best to the worst: up, up but to avoid, down, down and to avoid.
	classes := [4][]target{buf[0][:0], buf[1][:0], buf[2][:0], buf[3][:0]}
	for _, srv := range s.servers {
		seen, up, _, ranks := srv.state()
		if !seen {
			continue
		}
		for _, r := range ranks {
			candidate := target{srv, r}
			if refuse != nil && refuse(candidate) {
				continue
			}
			class := 0
			if avoid != nil && avoid(candidate) {
				class++
			}
			if !up {
				class += 2
			}
			classes[class] = append(classes[class], candidate)
		}
	}
	turn := s.next.Add(1) - 1
	for _, list := range classes {
		if len(list) == 0 {
			continue
		}
		best := int(turn % uint64(len(list)))
		if policy == LeastLoaded {
			first := best
			for i := range list {
				k := (first + i) % len(list)
				if list[k].load.n.Load() < list[best].load.n.Load() {
					best = k
				}
			}
		}
		return list[best], true
	}
	return target{}, false
}

// missing lists the servers that are not up, and why. A server that is given in both roles is up in one of them.
func (b *balancer) missing() []string {
	var all []string
	for _, s := range b.servers() {
		if _, up, reason, _ := s.state(); !up && !s.inOtherRole() {
			all = append(all, s.role+" server "+s.url+": "+reason)
		}
	}
	return all
}

func (b *balancer) servers() []*server {
	return append(append([]*server(nil), b.prefill.servers...), b.decode.servers...)
}

// ready reports whether a server of each needed role is up.
func (b *balancer) ready() bool {
	return (b.fallback || b.prefill.anyUp()) && b.decode.anyUp()
}

func (s *side) anyUp() bool {
	for _, srv := range s.servers {
		if _, up, _, ranks := srv.state(); up && len(ranks) > 0 {
			return true
		}
	}
	return false
}
