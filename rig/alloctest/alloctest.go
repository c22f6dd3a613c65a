// Package alloctest bounds how much a call may allocate. A test gives a few bytes that
// claim a large size, and fails if the code believes them.
package alloctest

import (
	"runtime/metrics"
	"testing"
)

// Bound runs f and fails the test if the process has allocated more than most bytes
// meanwhile. It is exact for large objects, which a bound is about. Other goroutines count
// too, so it is for tests that run alone.
func Bound(t testing.TB, most uint64, f func()) {
	t.Helper()
	before := allocated()
	f()
	if n := allocated() - before; n > most {
		t.Errorf("%d bytes were allocated, at most %d should be", n, most)
	}
}

func allocated() uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}
