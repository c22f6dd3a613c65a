package cuda

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvconn/kvconn/cuda/internal/driver"
)

// TestLocatorKeeps: in whatever order mappings are found, each is known once, by its address. What lies over another is not.
func TestLocatorKeeps(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var l Locator
		var want []uint64
		for range 1 + rnd.IntN(6) {
			var found []driver.Memory
			for base, n := 100*rnd.Uint64N(20), rnd.IntN(4); n > 0; base, n = base+100*(1+rnd.Uint64N(2)), n-1 {
				if !slices.Contains(want, base) {
					found, want = append(found, driver.Memory{Base: base, Size: 100}), append(want, base)
				}
			}
			if over := len(found); over > 0 && rnd.IntN(3) == 0 {
				found = append(found, driver.Memory{Base: found[over-1].Base + 50, Size: 100})
			}
			l.keep(found)
		}
		slices.Sort(want)
		var known []uint64
		for _, m := range l.known {
			known = append(known, m.Base)
		}
		if !slices.Equal(known, want) {
			t.Fatalf("known are %d, want %d", known, want)
		}
	}
}
