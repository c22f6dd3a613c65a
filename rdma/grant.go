package rdma

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"

	"github.com/kvconn/kvconn/core"
)

// grant is D's permission for P to write one transfer. On the wire it is signed with a
// secret that D tells this P alone. So before P writes a byte it knows that this D gave
// the grant for this transfer.
type grant struct {
	seq        uint64 // rising within D's agent; a revoke names it
	bytes      uint64 // of the whole transfer
	slot       uint16 // the number by which an immediate names the transfer
	generation uint8  // of the slot
}

const (
	grantFields = 8 + 8 + 2 + 1
	grantMAC    = 16
	secretSize  = 32
)

var errWrongGrant = errors.New("rdma: the grant is not one that this decode agent has given for this transfer")

func (g grant) sign(secret []byte, id core.TransferID) []byte {
	b := make([]byte, grantFields, grantFields+sha256.Size)
	binary.LittleEndian.PutUint64(b, g.seq)
	binary.LittleEndian.PutUint64(b[8:], g.bytes)
	binary.LittleEndian.PutUint16(b[16:], g.slot)
	b[18] = g.generation
	return append(b, grantSum(b, secret, id)...)
}

func grantSum(fields, secret []byte, id core.TransferID) []byte {
	h := hmac.New(sha256.New, secret)
	h.Write(fields)
	h.Write([]byte(id))
	return h.Sum(nil)[:grantMAC]
}

func checkGrant(b, secret []byte, id core.TransferID) (grant, error) {
	if len(b) != grantFields+grantMAC || !hmac.Equal(b[grantFields:], grantSum(b[:grantFields], secret, id)) {
		return grant{}, errWrongGrant
	}
	return grant{
		seq: binary.LittleEndian.Uint64(b), bytes: binary.LittleEndian.Uint64(b[8:]),
		slot: binary.LittleEndian.Uint16(b[16:]), generation: b[18],
	}, nil
}

// mark is the immediate of a stripe's last write. D counts the stripes of a transfer by
// their marks, in any order. The mark of an impossible stripe says that the first byte is
// on its way.
type mark struct {
	slot       uint16
	generation uint8 // 4 bits
	index      uint8 // 6 bits
	total      uint8 // 1 to 64
}

const (
	maxSlots      = 1 << 16
	maxGeneration = 16
	beginIndex    = maxStripes - 1 // with total 1
)

func (m mark) encode() uint32 {
	return uint32(m.slot)<<16 | uint32(m.generation)<<12 | uint32(m.index)<<6 | uint32(m.total-1)
}

func decodeMark(imm uint32) mark {
	return mark{uint16(imm >> 16), uint8(imm >> 12 & 15), uint8(imm >> 6 & 63), uint8(imm&63) + 1}
}

func (m mark) begins() bool { return m.index == beginIndex && m.total == 1 }

// grants says which of D's grants are dead.
type grants struct {
	below uint64 // all grants below are dead
	next  uint64 // the number that D's next grant had when D told live
	live  map[uint64]bool
	dead  map[uint64]bool // grants that were revoked since then, or are used up
}

// maxDead is how many dead grants P remembers one by one. If there are more, P asks D.
const maxDead = 1 << 16

func (g *grants) alive(seq uint64) bool {
	return seq >= g.below && !g.dead[seq] && (seq >= g.next || g.live[seq])
}

// update takes over D's list of the grants that are alive. If two lists overtake each other on the way, the later one has
// the greater next.
func (g *grants) update(next uint64, live []uint64) {
	if next < g.next {
		return
	}
	g.next, g.live = next, make(map[uint64]bool, len(live))
	for _, seq := range live {
		g.live[seq] = true
	}
	for seq := range g.dead {
		if seq < next && !g.live[seq] {
			delete(g.dead, seq)
		}
	}
}

func (g *grants) drop(below uint64) {
	if below <= g.below {
		return
	}
	g.below = below
	for seq := range g.dead {
		if seq < below {
			delete(g.dead, seq)
		}
	}
}
