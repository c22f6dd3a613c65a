package bootstrap

import (
	"container/list"
	"net/netip"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
)

// Bounds of the rooms that /register_dp_rank keeps. A decode engine asks for a room
// when its request arrives, which is within seconds, so that nothing needs older rooms.
// If there are too many, the oldest go of whoever has the most.
const (
	MaxRooms = 1 << 17
	roomAge  = 2 * time.Minute
)

// rooms says which dp rank has the request of a room. The zero value is empty.
type rooms struct {
	dp     map[int64]*list.Element // of *room; the last that was entered
	order  list.List               // of *room, oldest first; a room that was entered again is there twice
	from   map[netip.Prefix]*entrant
	shares *quota.Ranking[string, *entrant]
	limit  int // 0 stands for MaxRooms; tests set less
}

// entrant is an address from which rooms were entered.
type entrant struct {
	from  netip.Prefix
	name  string
	rooms []*list.Element // oldest first
}

type room struct {
	id int64
	dp int
	at time.Time
	of *entrant
}

// set enters a room from an address. If there are too many, the oldest goes of the address that has the most, if that has more than
// this one would have; else this one's oldest.
func (r *rooms) set(id int64, dp int, from netip.Prefix, now time.Time) {
	limit := r.limit
	if limit == 0 {
		limit = MaxRooms
	}
	r.expire(now)
	if r.dp == nil {
		r.dp, r.from, r.shares = map[int64]*list.Element{}, map[netip.Prefix]*entrant{}, quota.NewRanking[string](func(*entrant, *entrant) int { return 0 })
	}
	from = fault.Pick("rooms-addresses-alike", from, netip.Prefix{})
	name, e := from.String(), r.from[from]
	if r.order.Len() >= limit {
		gives, ok := r.shares.Gives(name, e, 1)
		switch {
		case ok:
			r.drop(gives.rooms[0])
		case e != nil:
			r.drop(e.rooms[0])
		default: // each address has one
			r.drop(r.order.Front())
		}
		e = r.from[from]
	}
	if e == nil {
		e = &entrant{from: from, name: name}
		r.from[from] = e
	}
	at := r.order.PushBack(&room{id, dp, now, e})
	r.dp[id], e.rooms = at, append(e.rooms, at)
	r.shares.Add(name, e, 1)
}

func (r *rooms) get(id int64, now time.Time) (dp int, ok bool) {
	r.expire(now)
	at := r.dp[id]
	if at == nil {
		return 0, false
	}
	return at.Value.(*room).dp, true
}

func (r *rooms) expire(now time.Time) {
	for e := r.order.Front(); e != nil && now.Sub(e.Value.(*room).at) >= roomAge; e = r.order.Front() {
		r.drop(e)
	}
	if r.order.Len() == 0 { // give the memory of a burst back
		r.dp, r.from, r.shares = nil, nil, nil
	}
}

// drop forgets the oldest room of an address.
func (r *rooms) drop(at *list.Element) {
	old := r.order.Remove(at).(*room)
	if r.dp[old.id] == at {
		delete(r.dp, old.id)
	}
	e := old.of
	e.rooms = e.rooms[1:]
	if r.shares.Add(e.name, e, -1); len(e.rooms) == 0 {
		r.shares.Remove(e.name, e)
		delete(r.from, e.from)
	}
}
