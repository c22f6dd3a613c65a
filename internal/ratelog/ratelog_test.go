package ratelog

import (
	"slices"
	"testing"
	"time"
)

func TestLimit(t *testing.T) {
	var l Limit
	var notes []string
	write := func(note string) { notes = append(notes, note) }
	now := time.Unix(1000, 0)
	for range 3 * burst {
		l.at(now, write)
	}
	if want := make([]string, burst); !slices.Equal(notes, want) {
		t.Fatalf("a burst wrote %q, want %d lines", notes, burst)
	}
	notes = nil
	l.at(now.Add(interval/2), write) // too early
	l.at(now.Add(interval), write)
	l.at(now.Add(interval), write)
	if want := []string{" (21 more were not written)"}; !slices.Equal(notes, want) {
		t.Fatalf("an interval later %q, want %q", notes, want)
	}
	notes = nil
	for range burst {
		l.at(now.Add(time.Hour), write)
	}
	if len(notes) != burst || notes[0] != " (1 more were not written)" || notes[1] != "" {
		t.Fatalf("after a pause %q", notes)
	}
}
