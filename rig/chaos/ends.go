// How the halves of one part of the overload have ended is waited for, told and demanded.

package chaos

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// await waits until all have ended, at most bound, and returns how many have not.
func await(ctx context.Context, entries []*entry, bound time.Duration) int {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	for i, e := range entries {
		select {
		case <-e.done:
		case <-ctx.Done():
			left := 0
			for _, e := range entries[i:] {
				select {
				case <-e.done:
				default:
					left++
				}
			}
			return left
		}
	}
	return 0
}

// tell says how entries ended, and how long after the time from the last of them ended.
func (l *ledger) tell(entries []*entry, from int64) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	outcomes := map[string]int{}
	var last int64
	for _, e := range entries {
		outcomes[e.outcome()]++
		last = max(last, e.reported)
	}
	var parts []string
	for _, o := range sortedKeys(outcomes) {
		parts = append(parts, fmt.Sprintf("%d %s", outcomes[o], o))
	}
	text := strings.Join(parts, ", ")
	if last > from {
		text += fmt.Sprintf(" after at most %s ms", milliseconds(time.Duration(last-from)))
	}
	return text
}

// require notes the entries that ended in none of these ways as missed.
func (l *ledger) require(what string, entries []*entry, outcomes ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	others := map[string]int{}
	example := ""
	for _, e := range entries {
		if got := e.outcome(); !slices.Contains(outcomes, got) {
			others[got]++
			example = fmt.Sprintf("%s: %s", e.id, e.reason)
		}
	}
	for _, got := range sortedKeys(others) {
		l.miss("%s: %d of %d: %s, want %s; one is %s", what, others[got], len(entries), got, strings.Join(outcomes, " or "), example)
	}
}

// longestCall is the longest time that one of these calls took.
func (l *ledger) longestCall(entries []*entry) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	var longest time.Duration
	for _, e := range entries {
		longest = max(longest, e.took)
	}
	return longest
}
