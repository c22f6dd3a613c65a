package memrelease

import (
	"testing"
	"time"
)

// TestMemoryIsGivenBack: what a burst has left goes back when nothing happens any more, and
// not before; a few times, as the rest comes free bit by bit. What is in use is not asked for again
// and again.
func TestMemoryIsGivenBack(t *testing.T) {
	const mib = 1 << 20
	k, now, given := &releaser{}, time.Now(), 0
	held, inUse, spent := uint64(30*mib), uint64(30*mib), uint64(0)
	check := func(want int, what string) {
		t.Helper()
		now = now.Add(checkInterval)
		k.check(now, func() (uint64, uint64) { return held, spent }, func() { given++; held = inUse })
		if given != want {
			t.Fatalf("%s: memory was given back %d times, want %d", what, given, want)
		}
	}
	check(0, "at the start")
	held, spent = 300*mib, spent+1000*mib
	check(0, "in the burst")
	inUse = 60 * mib
	check(1, "after it")
	inUse = 30 * mib
	check(2, "when more has come free since")
	check(2, "when it is all back")
	inUse, held, spent = 200*mib, 250*mib, spent+8*mib
	check(3, "when more is in use")
	check(4, "when that is all in use, and a burst was not long ago")
	check(4, "when that is all in use")
	held, spent = 230*mib, spent+8*mib
	check(5, "when something was left again")
	check(5, "when little was left since")
	inUse, held, spent = 30*mib, 33*mib, spent+8*mib
	check(5, "when little is held")
	held, spent = 300*mib, spent+1000*mib
	check(5, "in another burst")
	inUse = 200 * mib
	for i := range burstChecks {
		check(6+i, "after it")
	}
	check(5+burstChecks, "long after it, when what is held is in use")
	k.check(now.Add(time.Second), func() (uint64, uint64) { return 900 * mib, spent }, func() { t.Error("another agent releases at the same time") })
}
