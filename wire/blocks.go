package wire

import "github.com/tinylib/msgp/msgp"

//msgp:ignore BlockIDs

// BlockIDs are D's blocks of one group: as many as a long prompt has tokens, where a block has
// one. It is an array of numbers like any other, but read by hand: it never allocates
// more than the message has bytes for.
type BlockIDs []uint32

// MaxBlockIDs is the longest BlockIDs that is read.
const MaxBlockIDs = 1 << 18

// MarshalMsg implements msgp.Marshaler.
func (ids BlockIDs) MarshalMsg(b []byte) ([]byte, error) {
	b = msgp.AppendArrayHeader(b, uint32(len(ids)))
	for _, id := range ids {
		b = msgp.AppendUint32(b, id)
	}
	return b, nil
}

// UnmarshalMsg implements msgp.Unmarshaler.
func (ids *BlockIDs) UnmarshalMsg(b []byte) ([]byte, error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	switch {
	case err != nil:
		return b, msgp.WrapError(err)
	case n > MaxBlockIDs:
		return b, msgp.ErrLimitExceeded
	case int(n) > len(b): // each takes a byte at least
		return b, msgp.ErrShortBytes
	}
	*ids = make(BlockIDs, n)
	for i := range *ids {
		if (*ids)[i], b, err = msgp.ReadUint32Bytes(b); err != nil {
			return b, msgp.WrapError(err, i)
		}
	}
	return b, nil
}

// Msgsize is a bound on what MarshalMsg appends, in bytes.
func (ids BlockIDs) Msgsize() int { return msgp.ArrayHeaderSize + len(ids)*msgp.Uint32Size }
