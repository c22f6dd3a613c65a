package node

import "strings"

// nearest is the known key that somebody meant who wrote another one; none if no key is like it. A unit that was left out,
// and large letters, count for nothing.
func nearest(key string, known []string) string {
	key = strings.TrimSuffix(strings.ToLower(key), "_s")
	best, least := "", len(key)/3+1
	for _, k := range known {
		if d := edits(key, strings.TrimSuffix(k, "_s")); d < least {
			best, least = k, d
		}
	}
	return best
}

// edits is how many letters to add, drop, change or swap with the next one make b of a.
func edits(a, b string) int {
	before, last, now := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		now[0] = i
		for j := 1; j <= len(b); j++ {
			differs := 1
			if a[i-1] == b[j-1] {
				differs = 0
			}
			now[j] = min(last[j]+1, now[j-1]+1, last[j-1]+differs)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				now[j] = min(now[j], before[j-2]+1)
			}
		}
		before, last, now = last, now, before
	}
	return last[len(b)]
}
