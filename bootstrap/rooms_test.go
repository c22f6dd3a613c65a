package bootstrap

import (
	"testing"
	"time"
)

// TestRoomsEnd: rooms end with age. When there are too many, the oldest end.
func TestRoomsEnd(t *testing.T) {
	now := time.Unix(1000, 0)
	r := rooms{limit: 3}
	want := func(id int64, dp int, known bool) {
		t.Helper()
		if got, ok := r.get(id, now); ok != known || got != dp {
			t.Fatalf("room %d: %d %v, want %d %v", id, got, ok, dp, known)
		}
		if len(r.dp) > 3 || len(r.order) > 3 {
			t.Fatalf("%d rooms, %d entries, at most 3", len(r.dp), len(r.order))
		}
	}
	r.set(1, 10, now)
	now = now.Add(roomAge / 2)
	r.set(2, 20, now)
	r.set(1, 11, now) // again: it lives from now
	want(1, 11, true)
	now = now.Add(roomAge/2 + 1)
	want(1, 11, true)
	want(2, 20, true)
	r.set(3, 30, now)
	r.set(4, 40, now) // there is no room for 2, the oldest
	want(2, 0, false)
	want(1, 11, true)
	want(3, 30, true)
	now = now.Add(roomAge / 2)
	want(1, 0, false)
	want(4, 40, true)
	now = now.Add(roomAge / 2)
	want(3, 0, false)
	want(4, 0, false)
	if r.dp != nil || r.order != nil {
		t.Fatalf("nothing is left, but %d and %d", len(r.dp), len(r.order))
	}
}

// TestRoomsOfManyRequests: many rooms, of which nobody asks for one, stay within the limit.
func TestRoomsOfManyRequests(t *testing.T) {
	now := time.Unix(1000, 0)
	var r rooms
	for i := range int64(3 * MaxRooms) {
		r.set(i, 1, now)
		now = now.Add(time.Microsecond)
	}
	if len(r.dp) != MaxRooms || len(r.order) != MaxRooms {
		t.Fatalf("%d rooms, %d entries, want %d", len(r.dp), len(r.order), MaxRooms)
	}
	if cap(r.order) > 4*MaxRooms {
		t.Fatalf("the queue has a capacity of %d", cap(r.order))
	}
	if _, ok := r.get(3*MaxRooms-1, now); !ok {
		t.Fatal("the newest is not known")
	}
}
