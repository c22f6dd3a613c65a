// If engines have several ranks, this says which of them meet, and which share of a transfer goes between two.

package kv

import "fmt"

// Ranks are how many an engine has: TP tensor-parallel ranks, each with its heads
// of a layer, in each of PP pipeline stages, each with its layers. Every
// data-parallel rank is an engine of its own.
type Ranks struct{ TP, PP int }

// Rank is one rank of an engine.
type Rank struct{ TP, PP int }

// MaxRanks bounds TP and PP each: more than any engine has.
const MaxRanks = 1024

// One is an engine of a single rank.
var One = Ranks{1, 1}

func (n Ranks) String() string { return fmt.Sprintf("tp %d pp %d", n.TP, n.PP) }

func (r Rank) String() string { return fmt.Sprintf("tp %d pp %d", r.TP, r.PP) }

// Check says what is wrong with numbers that a configuration or a peer gives.
func (n Ranks) Check(r Rank) error {
	if n.TP < 1 || n.TP > MaxRanks || n.PP < 1 || n.PP > MaxRanks || n.TP*n.PP > MaxSources {
		return fmt.Errorf("an engine of tp_size %d and pp_size %d: want 1 to %d each and %d ranks at most", n.TP, n.PP, MaxRanks, MaxSources)
	}
	if r.TP < 0 || r.TP >= n.TP || r.PP < 0 || r.PP >= n.PP {
		return fmt.Errorf("rank %v of an engine of %v: want 0 to %d and 0 to %d", r, n, n.TP-1, n.PP-1)
	}
	return nil
}

// Share says which part of a transfer goes between one P rank and one D rank of engines with
// unequal ranks.
type Share struct {
	K, Of  int // it is share K, from 0, of as many D agents as load from this P agent
	Source int // number of the P agent among those of its engine, the same at all D agents: its rank
}

// Limits of a Share.
const (
	MaxShares  = 64      // of one P agent's half, and P agents that one D loads from
	MaxSources = 1 << 16 // P agents of an engine
)

// Check says what is wrong with a share that a peer names.
func (s Share) Check() error {
	if s.Of < 1 || s.Of > MaxShares || s.K < 0 || s.K >= s.Of || s.Source < 0 || s.Source >= MaxSources {
		return fmt.Errorf("share %d of %d from source %d: want 0 to %d of at most %d from a source below %d", s.K, s.Of, s.Source, s.Of-1, MaxShares, MaxSources)
	}
	return nil
}

// Meeting is a P rank that a D rank loads from, and the D rank's share of that rank's
// half.
type Meeting struct {
	Rank  Rank
	Share Share
}

// Meetings lists the P ranks that rank r of a decode engine loads from, by their Source.
// The tensor-parallel ranks of either side hold equal ranges of the heads, and two ranks
// meet if their ranges overlap. If several P ranks hold the same (latents, or heads when
// there are fewer than ranks), each D rank loads from the first that it meets, and tells
// the others that it needs nothing. Which stage holds a layer is not known before the
// agents meet, so each D rank meets all stages.
func Meetings(p, d Ranks, r Rank) ([]Meeting, error) {
	if err := p.Check(Rank{}); err != nil {
		return nil, err
	}
	if err := d.Check(r); err != nil {
		return nil, err
	}
	lo, hi := reach(r.TP, d.TP, p.TP)
	if n := (hi - lo) * p.PP; n > MaxShares {
		return nil, fmt.Errorf("rank %v of a decode engine of %v would load from %d ranks of a prefill engine of %v, at most %d are supported", r, d, n, p, MaxShares)
	}
	var out []Meeting
	for pp := range p.PP {
		for tp := lo; tp < hi; tp++ {
			first, end := reach(tp, p.TP, d.TP)
			m := Meeting{Rank{tp, pp}, Share{K: (r.TP-first)*d.PP + r.PP, Of: (end - first) * d.PP, Source: pp*p.TP + tp}}
			if m.Share.Of > MaxShares {
				return nil, fmt.Errorf("rank %v of a prefill engine of %v would be loaded from by %d ranks of a decode engine of %v, at most %d are supported", m.Rank, p, m.Share.Of, d, MaxShares)
			}
			out = append(out, m)
		}
	}
	return out, nil
}

// reach is the range of the other side's ranks, of others, whose heads have
// something in common with those of rank i of n.
func reach(i, n, others int) (first, end int) {
	return i * others / n, ((i+1)*others + n - 1) / n
}
