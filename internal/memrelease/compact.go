// Memory that Go's heap has free, and that its scavenger would pass over, is taken once and dropped.

package memrelease

import (
	"runtime"
	"runtime/debug"
	gometrics "runtime/metrics"
	"strings"
)

// Bounds of compact: bytes of a piece, pieces, and more.
const (
	leastPiece = 64 << 10
	mostPieces = 1 << 10
	mostGrowth = 8 << 20 // of addresses
)

// compact takes all that is free in Go's heap, piece by piece, and drops it. Go's scavenger works in
// the background. It may note of a part of the heap (4 MiB) that nothing is left there to give
// back, though it has looked at the part's lower pages only. FreeOSMemory believes that until a
// page of the part comes free again. This way up to 9 MiB stayed of 25 that a process began with.
func (k *releaser) compact() { runtime.KeepAlive(k.takeFree()) }

// takeFree allocates what is free. Nothing is written, so the system gives no memory for it. The
// heap's addresses grow where no piece fits into what is left, or where the scavenger is at work
// just then. By so much less is taken the next time, and more than mostGrowth ends it.
func (k *releaser) takeFree() []strings.Builder {
	free, released := freeMemory()
	// With a limit, what is taken counts as used.
	all := min(free+released, uint64(debug.SetMemoryLimit(-1))/4)
	all -= min(all, k.holes)
	size := max(leastPiece, all/mostPieces)
	pieces := make([]strings.Builder, 0, all/size)
	before, grew := mapped(), uint64(0)
	for len(pieces) < cap(pieces) && grew < mostGrowth {
		pieces = append(pieces, strings.Builder{})
		pieces[len(pieces)-1].Grow(int(size))
		grew = mapped() - before
	}
	if grew >= leastPiece {
		k.holes += grew + uint64(cap(pieces)-len(pieces))*size
	}
	return pieces
}

// mapped is how much memory Go has addresses of.
func mapped() uint64 {
	s := []gometrics.Sample{{Name: "/memory/classes/total:bytes"}}
	gometrics.Read(s)
	return s[0].Value.Uint64()
}

// freeMemory is what Go's heap has free: with the system's memory, and without.
func freeMemory() (free, released uint64) {
	s := []gometrics.Sample{{Name: "/memory/classes/heap/free:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	gometrics.Read(s)
	return s[0].Value.Uint64(), s[1].Value.Uint64()
}
