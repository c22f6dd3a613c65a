// Package giveback returns memory to the system that Go keeps after a burst.
package giveback

import (
	"context"
	"runtime"
	"runtime/debug"
	gometrics "runtime/metrics"
	"sync"
	"time"

	"github.com/kvconn/kvconn/internal/sleep"
)

// Bounds of the memory that Go keeps in a process after a burst.
const (
	memoryLook  = 10 * time.Second
	memorySlack = 2 << 20  // kept without a thought
	calmBytes   = 16 << 20 // allocated between two looks: it is calm
	litterBytes = 4 << 20  // allocated since memory was given back: it may be worth it again
	// burstLooks is how often memory is given back after a burst: what it has left comes free bit
	// by bit, the last of it when links to hosts that are gone are dropped.
	burstLooks = 4
	// What is free after memory was given back has mostly come free just then. If more than
	// keptFree is, memory is given back again, mostTries times in all.
	keptFree  = 1 << 20
	mostTries = 3
)

// keeper gives the system back what a burst has left. Go alone keeps it for minutes: an idle
// process collects its garbage every two minutes, and returns memory slowly.
type keeper struct {
	mu    sync.Mutex
	least uint64    // of what was held at a look
	spent uint64    // bytes allocated since the process began, at the last look
	given uint64    // the same, when memory was given back
	last  time.Time // look
	owed  int       // looks after a burst that are to come
	holes uint64    // of the free memory, what stir does not take
}

// memory is one for all agents and routers of a process.
var memory keeper

// Run looks until ctx ends. All who run it in a process look as one.
func Run(ctx context.Context) {
	for {
		memory.look(time.Now(), heldMemory, memory.giveBack)
		if sleep.For(ctx, memoryLook) != nil {
			return
		}
	}
}

// look gives memory back if much more is held than once, and if little was allocated since
// the last look: a collection would take time from what is under way.
func (k *keeper) look(now time.Time, read func() (held, spent uint64), giveBack func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if now.Sub(k.last) < memoryLook/2 {
		return // another of this process has looked
	}
	k.last = now
	held, spent := read()
	if k.least == 0 || held < k.least {
		k.least = held
	}
	calm := spent-k.spent < calmBytes
	if !calm {
		k.owed = burstLooks
	}
	if calm && (k.owed > 0 || spent-k.given >= litterBytes) && held > k.least+k.least/8+memorySlack {
		giveBack()
		_, spent = read()
		k.given = spent
		k.owed = max(0, k.owed-1)
	}
	k.spent = spent
}

func (k *keeper) giveBack() {
	runtime.GC() // pools keep what they have over one collection, stacks are halved by each
	runtime.GC()
	for range mostTries { // the scavenger works meanwhile
		k.stir()
		debug.FreeOSMemory()
		if free, _ := freeMemory(); free < keptFree {
			return
		}
	}
}

// heldMemory is what Go holds of the system's memory, and has allocated in all.
func heldMemory() (held, spent uint64) {
	s := []gometrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/gc/heap/allocs:bytes"}}
	gometrics.Read(s)
	return s[0].Value.Uint64() - s[1].Value.Uint64(), s[2].Value.Uint64()
}
