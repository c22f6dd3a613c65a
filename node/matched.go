// How an agent's caches fit is kept once for all peers that have the same caches, within a bound.

package node

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/wire"
)

// Bounds of the matches that an agent keeps: how its caches fit those of its peers. A match is largest
// if a peer describes caches that only it has, with a region for each head that this agent has.
const (
	maxMatched  = 64 << 20 // bytes, for all peers; peers with equal caches share a match
	maxMatch    = 20 << 20 // bytes, for one peer; 65,536 regions on both sides take 16 MiB
	manyRegions = 1024     // a peer with more is refused while another such peer is being matched
)

// matched is how this agent's caches fit those of all peers that have one and the same caches.
type matched struct {
	of    cachesKey
	match *kv.Match
	peers int // how many peers of the table have it; the table's lock guards this
}

// cachesKey names the caches of this agent and those of a peer. A Match depends on
// nothing else.
type cachesKey struct {
	self     *wire.Agent
	prefills bool // this agent is the prefill agent
	sum      [sha256.Size]byte
}

// sumOf is a digest of regions. It leaves out the number of blocks, in which peers differ: except for
// rings, this number says nothing of how a block fits. If alike is true, it leaves out the strides of
// blocks too, and the number of blocks in any case.
func sumOf(shapes []wire.Shape, alike bool) (sum [sha256.Size]byte) {
	h := sha256.New()
	var b []byte
	for i := range shapes {
		s := shapes[i]
		if alike || kv.IndexKind(s.IndexKind) <= kv.IndexSlot {
			s.NumBlocks = 0
		}
		if alike {
			s.BlockStride = 0
		}
		b = binary.AppendUvarint(b[:0], uint64(len(s.Name)))
		b = append(b, s.Name...)
		for _, n := range [...]uint64{s.BlockStride, s.BlockBytes, uint64(s.NumBlocks), uint64(s.Group), uint64(s.Tokens), uint64(s.Heads),
			uint64(s.FirstHead), uint64(s.TotalHeads), s.TokenStride, s.HeadStride, uint64(s.IndexKind)} {
			b = binary.AppendUvarint(b, n)
		}
		_, _ = h.Write(b)
	}
	h.Sum(sum[:0])
	return sum
}

// matchStore has the matches that a peerTable keeps; the table's lock guards it.
type matchStore struct {
	by    map[cachesKey]*matched
	bytes int
}

// hold counts a peer that has these caches, and returns the match to keep for it.
func (s *matchStore) hold(m *matched) *matched {
	if m == nil {
		return nil
	}
	if known := s.by[m.of]; known != nil {
		m = known
	} else {
		s.by[m.of] = m
		s.bytes += m.match.Kept()
	}
	m.peers++
	return m
}

// release is the reverse of hold.
func (s *matchStore) release(m *matched) {
	if m == nil {
		return
	}
	if m.peers--; m.peers == 0 {
		delete(s.by, m.of)
		s.bytes -= m.match.Kept()
	}
}

// adds is how many bytes a peer would add that has such caches.
func (s *matchStore) adds(list ...*matched) (n int) {
	for _, m := range list {
		if m != nil && s.by[m.of] == nil {
			n += m.match.Kept()
		}
	}
	return n
}

// alone is how many bytes a single peer has, who has such caches.
func alone(list ...*matched) (n int) {
	for _, m := range list {
		if m != nil && m.peers == 1 {
			n += m.match.Kept()
		}
	}
	return n
}
