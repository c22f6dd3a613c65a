package attack

import (
	"fmt"
	"testing"
	"time"
)

// goKeeps is room for a victim that began smaller than others, in MiB: what Go keeps to describe a heap that was large
// once, and its stacks, is 3 to 5 of 24 to 31, 1.13 to 1.19 times.
const goKeeps = 2

// TestMemoryComesBack runs last: after each attack its victims have at most 1.2 times the memory that they had before. After the
// largest floods goKeeps comes on top. When Go's scavenger gives back what is free, the clock and the machine decide: it takes one
// hundredth of a processor. So a victim that has more after a minute gives back all that is free. What it holds itself, it has still.
// The table has what it had after the minute.
func TestMemoryComesBack(t *testing.T) {
	if raced {
		return // the race detector keeps memory of its own
	}
	if len(settling) == 0 {
		t.Fatal("no attack was made before it: run it with them")
	}
	worst := 0.0
	for _, v := range settling {
		time.Sleep(time.Until(v.over.Add(time.Minute))) // what is measured is a minute without the attack
		now := v.mib("VmRSS")
		worst = max(worst, now/v.calm)
		said := fmt.Sprintf("%.0f of %.0f MiB", now, v.calm)
		for i := range table {
			if r := &table[i]; r.attack == v.attack && r.after == "" {
				r.after = said
			} else if r.attack == v.attack {
				r.after += ", " + said
			}
		}
		t.Logf("%s: %.1f MiB before, %.1f at the most, %.1f a minute after: %.2f times", v.attack, v.calm, v.peak, now, now/v.calm)
		most := 1.2*v.calm + v.keeps
		if v.peak > 2*v.calm {
			most += goKeeps
		}
		for end := time.Now().Add(bound); now > most && time.Now().Before(end); now = v.mib("VmRSS") {
			v.t = t
			v.say("free") // goroutines that were let go a moment ago may end yet
		}
		if now > most {
			t.Errorf("%v after %s a victim has %.1f MiB; before it had %.1f, at the most %.1f", time.Since(v.over).Round(time.Second), v.attack, now, v.calm, v.peak)
		}
	}
	got(t, "5.4 GiB kept", "at most %.2f times the memory before, a minute after", worst)
}
