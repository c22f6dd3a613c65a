package giveback

import (
	"testing"
	"time"
)

// TestMemoryIsGivenBack: what a burst has left goes back when nothing happens any more, and
// not before; a few times, as the rest comes free bit by bit. What is in use is not asked for again
// and again.
func TestMemoryIsGivenBack(t *testing.T) {
	const mib = 1 << 20
	k, now, given := &keeper{}, time.Now(), 0
	held, inUse, spent := uint64(30*mib), uint64(30*mib), uint64(0)
	look := func(want int, what string) {
		t.Helper()
		now = now.Add(memoryLook)
		k.look(now, func() (uint64, uint64) { return held, spent }, func() { given++; held = inUse })
		if given != want {
			t.Fatalf("%s: memory was given back %d times, want %d", what, given, want)
		}
	}
	look(0, "at the start")
	held, spent = 300*mib, spent+1000*mib
	look(0, "in the burst")
	inUse = 60 * mib
	look(1, "after it")
	inUse = 30 * mib
	look(2, "when more has come free since")
	look(2, "when it is all back")
	inUse, held, spent = 200*mib, 250*mib, spent+8*mib
	look(3, "when more is in use")
	look(4, "when that is all in use, and a burst was not long ago")
	look(4, "when that is all in use")
	held, spent = 230*mib, spent+8*mib
	look(5, "when something was left again")
	look(5, "when little was left since")
	inUse, held, spent = 30*mib, 33*mib, spent+8*mib
	look(5, "when little is held")
	held, spent = 300*mib, spent+1000*mib
	look(5, "in another burst")
	inUse = 200 * mib
	for i := range burstLooks {
		look(6+i, "after it")
	}
	look(5+burstLooks, "long after it, when what is held is in use")
	k.look(now.Add(time.Second), func() (uint64, uint64) { return 900 * mib, spent }, func() { t.Error("another agent looks at the same time") })
}
