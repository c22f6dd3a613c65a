package natsbus

import (
	"testing"
	"time"
)

// TestPace: a burst is read at once, a flood at the pace, and a rest makes up for it.
func TestPace(t *testing.T) {
	now := time.Now()
	c := newPaced(nil)
	c.at = now
	for range paceBurst / pacePiece {
		if d := c.debt(pacePiece, now); d != 0 {
			t.Fatalf("within the burst it waits %v", d)
		}
	}
	var waited time.Duration
	for range paceBytes / pacePiece {
		d := c.debt(pacePiece, now)
		if d > 10*time.Millisecond {
			t.Fatalf("one piece waits %v", d)
		}
		waited += d
		now = now.Add(d)
	}
	if waited < 990*time.Millisecond || waited > 1010*time.Millisecond {
		t.Errorf("a second's bytes took %v", waited)
	}
	if d := c.debt(paceBurst, now.Add(time.Second)); d > time.Millisecond {
		t.Errorf("after a rest it waits %v", d)
	}
	if d := c.debt(paceBurst+pacePiece, now.Add(time.Hour)); d == 0 {
		t.Error("an hour's rest allows more than the burst")
	}
}
