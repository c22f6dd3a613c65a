// Package seed gives tests their random numbers.
package seed

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"
)

// Rand has the same seed in each run, so that a change fails by its own fault. KVCONN_SEED names another one, or is "random".
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	seed := uint64(1)
	switch s := os.Getenv("KVCONN_SEED"); s {
	case "":
	case "random":
		seed = uint64(time.Now().UnixNano())
	default:
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("KVCONN_SEED is %q: a number, or random", s)
		}
	}
	t.Logf("KVCONN_SEED=%d repeats it", seed) // at the start: a test that hangs or panics has said it too
	return rand.New(rand.NewPCG(seed, 0))
}
