package core

import (
	"fmt"
	"strconv"
	"strings"
)

// Share says which part of a transfer goes between one P agent and one D agent of engines
// with unequal ranks. Below the engine's call each part is a transfer of its own: it has
// an id of its own (Part), and with it its own claim, lease, grant and fence. Fan-in (D)
// and fan-out (P) give the engine, which knows one id, one Report for all parts.
type Share struct {
	K, Of  int // it is share K, from 0, of as many D agents as load from this P agent
	Source int // number of the P agent among those of its engine, the same at all D agents: its rank
}

// Limits of a Share.
const (
	MaxShares = 64 // of one P agent's half, and P agents that one D loads from
	maxSource = 1 << 16
)

// partMark stands between a transfer's id and its share: no id holds a NUL.
const partMark = "\x00"

// MaxPartID is the longest id that Part gives.
const MaxPartID = MaxTransferID + 16

func (s Share) check() error {
	if s.Of < 1 || s.Of > MaxShares || s.K < 0 || s.K >= s.Of || s.Source < 0 || s.Source >= maxSource {
		return fmt.Errorf("share %d of %d from source %d: want 0 to %d of at most %d from a source below %d", s.K, s.Of, s.Source, s.Of-1, MaxShares, maxSource)
	}
	return nil
}

// Part is the id of a share of a transfer, on the wire and in the transports of
// both sides.
func (s Share) Part(id TransferID) TransferID {
	return TransferID(fmt.Sprintf("%s%s%d/%d@%d", id, partMark, s.K, s.Of, s.Source))
}

// splitPart is the reverse of Part; ok says that it is one, and well formed.
func splitPart(part TransferID) (id TransferID, s Share, ok bool) {
	base, text, found := strings.Cut(string(part), partMark)
	if !found || len(part) > MaxPartID {
		return "", Share{}, false
	}
	k, rest, _ := strings.Cut(text, "/")
	of, source, _ := strings.Cut(rest, "@")
	for _, f := range []struct {
		text string
		to   *int
	}{{k, &s.K}, {of, &s.Of}, {source, &s.Source}} {
		n, err := strconv.ParseUint(f.text, 10, 16)
		if err != nil {
			return "", Share{}, false
		}
		*f.to = int(n)
	}
	id = TransferID(base)
	return id, s, checkID(id) == nil && s.check() == nil && s.Part(id) == part
}

func isPart(id TransferID) bool { return strings.Contains(string(id), partMark) }

// checkWireID is checkID for what a peer names: an id, or a part of one.
func checkWireID(id TransferID) error {
	if _, _, ok := splitPart(id); ok {
		return nil
	}
	return checkID(id)
}

// nameOf is the id that the engine knows a half by, or a part of it.
func nameOf(id TransferID) TransferID {
	name, _, _ := strings.Cut(string(id), partMark)
	return TransferID(name)
}
