// Package leaktest fails a test that leaves goroutines behind.
package leaktest

import (
	"runtime"
	"sort"
	"strings"
	"testing"
	"time"
)

// limit is how long goroutines may take to end after the test: closing a
// socket ends its reader soon, but not at once.
const limit = 15 * time.Second

// Check notes which goroutines run now and, when the test and all its later
// cleanups are done, waits up to limit until the others have ended. If
// some have not, the test fails and prints their stacks.
//
// It must be the first line of the test, since cleanups run last in, first
// out. It cannot tell the goroutines of parallel tests apart: do not use it
// with t.Parallel.
func Check(t testing.TB) {
	t.Helper()
	before := map[string]bool{}
	for id := range stacks() {
		before[id] = true
	}
	t.Cleanup(func() {
		t.Helper()
		if left := wait(before, limit); len(left) > 0 {
			t.Errorf("leaktest: %d goroutines are left %v after the test:\n\n%s",
				len(left), limit, strings.Join(left, "\n\n"))
		}
	})
}

// wait polls until no goroutine beyond those in before is left, or until the
// limit; it returns the stacks of those left.
func wait(before map[string]bool, limit time.Duration) []string {
	deadline := time.Now().Add(limit)
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		var left []string
		for id, stack := range stacks() {
			if !before[id] {
				left = append(left, stack)
			}
		}
		if len(left) == 0 || time.Now().After(deadline) {
			sort.Strings(left)
			return left
		}
		time.Sleep(pause)
	}
}

// stacks returns the stacks of all goroutines that a test answers for, by
// goroutine id. Ids are never used twice, so that comparing ids is exact where
// comparing counts would let one goroutine stand in for another.
func stacks() map[string]string {
	buf := make([]byte, 64<<10)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	all := map[string]string{}
	for _, stack := range strings.Split(string(buf), "\n\n") {
		stack = strings.TrimSpace(stack)
		rest, ok := strings.CutPrefix(stack, "goroutine ")
		if !ok || runtimeOwned(stack) {
			continue
		}
		id, _, _ := strings.Cut(rest, " ")
		all[id] = stack
	}
	return all
}

// runtimeOwned reports whether a goroutine belongs to the runtime or to the
// testing package, which start some on first use and keep them for ever.
func runtimeOwned(stack string) bool {
	for _, mark := range []string{
		"created by runtime.",
		"created by testing.",
		"runtime.ensureSigM",
		"os/signal.loop",
		"os/signal.signal_recv",
	} {
		if strings.Contains(stack, mark) {
			return true
		}
	}
	return false
}
