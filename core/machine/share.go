// If several ranks of an engine have a share of a transfer, each part is a transfer of its
// own below the engine's call: it has an id of its own (PartID), and so its own claim,
// lease, grant and fence. The engine knows one id only. Fan-in (D) and fan-out (P) give it
// one Report for all parts.

package machine

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// MaxPartID is the longest id that PartID gives: [kv.MaxShares] has two digits, [kv.MaxSources] five.
const MaxPartID = core.MaxTransferID + 16

// PartID is the id of a share of a transfer, on the wire and in the transports of
// both sides.
func PartID(id core.TransferID, s kv.Share) core.TransferID {
	return core.TransferID(fmt.Sprintf("%s%s%d/%d@%d", id, core.PartSeparator, s.K, s.Of, s.Source))
}

// splitPart is the reverse of PartID; ok says that part is a well formed id of a part.
func splitPart[T ~string](part T) (id core.TransferID, s kv.Share, ok bool) {
	base, text, found := strings.Cut(string(part), core.PartSeparator)
	if !found || len(part) > MaxPartID {
		return "", kv.Share{}, false
	}
	k, rest, _ := strings.Cut(text, "/")
	of, source, _ := strings.Cut(rest, "@")
	s.K, _ = strconv.Atoi(k) // PartID does not write what is no number
	s.Of, _ = strconv.Atoi(of)
	s.Source, _ = strconv.Atoi(source)
	id = core.TransferID(base)
	return id, s, checkID(id) == nil && s.Check() == nil && string(PartID(id, s)) == string(part)
}

func isPart[T ~string](id T) bool { return strings.Contains(string(id), core.PartSeparator) }

// checkWireID is checkID for what a peer names: an id, or a part of one.
func checkWireID(id core.TransferID) error {
	if _, _, ok := splitPart(id); ok {
		return nil
	}
	return checkID(id)
}

// nameOf is the id that the engine knows a half by, or a part of it.
func nameOf[T ~string](id T) core.TransferID {
	return core.TransferID(core.TransferID(id).Name())
}
