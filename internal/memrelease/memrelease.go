// Package memrelease returns memory to the system that Go keeps after a burst.
package memrelease

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
	checkInterval = 10 * time.Second
	memorySlack   = 2 << 20  // kept without a thought
	maxCalmBytes  = 16 << 20 // allocated between two checks: it is calm
	minAllocated  = 4 << 20  // allocated since memory was given back: it may be worth it again
	// burstChecks is how often memory is given back after a burst: what it has left comes free bit
	// by bit, the last of it when links to hosts that are gone are dropped.
	burstChecks = 4
	// If memory is free after some was given back, it has mostly come free meanwhile. If
	// this is more than keptFree, memory is given back again, mostTries times in all.
	keptFree  = 1 << 20
	mostTries = 3
)

// releaser gives the system back what a burst has left. Go alone keeps it for minutes: an idle
// process collects its garbage every two minutes, and returns memory slowly.
type releaser struct {
	mu    sync.Mutex
	least uint64    // of what was held at a check
	spent uint64    // bytes allocated since the process began, at the last check
	given uint64    // the same, when memory was given back
	last  time.Time // check
	owed  int       // checks after a burst that are to come
	holes uint64    // of the free memory, what compact does not take
}

// memory is one for all agents and routers of a process.
var memory releaser

// Run checks until ctx ends. All who run it in a process check as one.
func Run(ctx context.Context) {
	for {
		memory.check(time.Now(), heldMemory, memory.giveBack)
		if sleep.For(ctx, checkInterval) != nil {
			return
		}
	}
}

// check gives memory back if much more is held than once, and if little was allocated since
// the last check: a collection would take time from what is under way.
func (k *releaser) check(now time.Time, read func() (held, spent uint64), giveBack func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if now.Sub(k.last) < checkInterval/2 {
		return // another of this process has checked
	}
	k.last = now
	held, spent := read()
	if k.least == 0 || held < k.least {
		k.least = held
	}
	calm := spent-k.spent < maxCalmBytes
	if !calm {
		k.owed = burstChecks
	}
	if calm && (k.owed > 0 || spent-k.given >= minAllocated) && held > k.least+k.least/8+memorySlack {
		giveBack()
		_, spent = read()
		k.given = spent
		k.owed = max(0, k.owed-1)
	}
	k.spent = spent
}

func (k *releaser) giveBack() {
	runtime.GC() // pools keep what they have over one collection, stacks are halved by each
	runtime.GC()
	for range mostTries { // the scavenger works meanwhile
		k.compact()
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
