package proxy

import "sync"

// balancer hands out servers in turn: prefill servers rank by rank, decode
// servers one by one.
type balancer struct {
	prefill, decode []*server

	mu           sync.Mutex
	nextP, nextD uint64
}

// pick returns where the next request goes, or false while no prefill or no
// decode server has ever been up. Servers that are down are skipped; when all
// are, one is tried nevertheless, since it may be back before the next probe,
// and its failure is a better answer than a guess.
func (b *balancer) pick() (prefillRank, *server, bool) {
	var up, seen []prefillRank
	for _, s := range b.prefill {
		_, isUp, _, ranks := s.state()
		for _, r := range ranks {
			seen = append(seen, prefillRank{s, r})
			if isUp {
				up = append(up, prefillRank{s, r})
			}
		}
	}
	if len(up) == 0 {
		up = seen
	}
	d, ok := b.pickDecode()
	if len(up) == 0 || !ok {
		return prefillRank{}, nil, false
	}
	return up[b.turn(&b.nextP, len(up))], d, true
}

// pickDecode is pick for the decode servers alone.
func (b *balancer) pickDecode() (*server, bool) {
	var up, seen []*server
	for _, s := range b.decode {
		wasSeen, isUp, _, _ := s.state()
		if wasSeen {
			seen = append(seen, s)
		}
		if isUp {
			up = append(up, s)
		}
	}
	if len(up) == 0 {
		up = seen
	}
	if len(up) == 0 {
		return nil, false
	}
	return up[b.turn(&b.nextD, len(up))], true
}

func (b *balancer) turn(next *uint64, n int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := *next % uint64(n)
	*next++
	return int(i)
}

// missing lists the servers that have never been up, and why.
func (b *balancer) missing() []string {
	var all []string
	for _, list := range [][]*server{b.prefill, b.decode} {
		for _, s := range list {
			if seen, _, reason, _ := s.state(); !seen {
				all = append(all, s.role+" server "+s.url+": "+reason)
			}
		}
	}
	return all
}
