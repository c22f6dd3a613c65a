package bootstrap

import "time"

// Bounds of the rooms that /register_dp_rank keeps. A decode engine asks for a room
// when its request arrives, which is within seconds, so that nothing needs older rooms.
// If there are too many, the oldest go.
const (
	MaxRooms = 1 << 17
	roomAge  = 2 * time.Minute
)

// rooms says which dp rank has the request of a room. The zero value is empty.
type rooms struct {
	dp    map[int64]room
	order []entered // oldest first; a room that was entered again is there twice
	next  uint64
	limit int // 0 stands for MaxRooms; tests set less
}

type room struct {
	dp  int
	seq uint64
}

type entered struct {
	room int64
	seq  uint64
	at   time.Time
}

func (r *rooms) set(id int64, dp int, now time.Time) {
	limit := r.limit
	if limit == 0 {
		limit = MaxRooms
	}
	r.expire(now)
	for len(r.order) >= limit {
		r.drop()
	}
	if r.dp == nil {
		r.dp = map[int64]room{}
	}
	r.next++
	r.dp[id] = room{dp, r.next}
	r.order = append(r.order, entered{id, r.next, now})
}

func (r *rooms) get(id int64, now time.Time) (dp int, ok bool) {
	r.expire(now)
	e, ok := r.dp[id]
	return e.dp, ok
}

func (r *rooms) expire(now time.Time) {
	for len(r.order) > 0 && now.Sub(r.order[0].at) >= roomAge {
		r.drop()
	}
	if len(r.order) == 0 { // give the memory of a burst back
		r.dp, r.order = nil, nil
	}
}

func (r *rooms) drop() {
	e := r.order[0]
	r.order = r.order[1:]
	if r.dp[e.room].seq == e.seq {
		delete(r.dp, e.room)
	}
}
