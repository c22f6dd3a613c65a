// The dp rank that has a request's room is kept for the seconds in which a decode engine asks for it.

package bootstrap

import (
	"hash/maphash"
	"net/netip"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
)

// Bounds of the rooms that /register_dp_rank keeps. A decode engine asks for a room
// when its request arrives, which is within seconds, so that nothing needs older rooms.
// If there are too many, those go first that have waited for too long already, and then the oldest of whoever has the most.
const (
	MaxRooms   = 1 << 17
	roomAge    = 2 * time.Minute
	roomNeeded = 20 * time.Second
)

// rooms says which dp rank has the request of a room. The zero value is empty.
type rooms struct {
	dp    map[int64]room
	order quota.Places[group, int64] // the oldest first
	limit int                        // 0 stands for MaxRooms; tests set less
}

type room struct {
	dp int
	at time.Time
}

// group has the addresses that count as one. Each address is in a group by chance, so that addresses take no memory and none can choose whose
// share it uses up.
type group uint16

const groups = 1 << 12

var groupSeed = maphash.MakeSeed()

func groupOf(from netip.Prefix) group {
	return group(maphash.Comparable(groupSeed, from) % groups)
}

// set enters a room from an address. If there are too many, another gives way.
func (r *rooms) set(id int64, dp int, from netip.Prefix, now time.Time) {
	limit := r.limit
	if limit == 0 {
		limit = MaxRooms
	}
	r.expire(now)
	if r.dp == nil {
		r.dp = map[int64]room{}
	}
	of := groupOf(fault.Pick("rooms-addresses-alike", from, netip.Prefix{}))
	r.drop(id)
	if r.order.Len() >= limit {
		r.drop(r.yields(of, now))
	}
	r.order.Put(of, id, 1)
	r.dp[id] = room{dp, now}
}

// yields is the room that gives way to one of a group of addresses: the oldest of all, if it was needed long ago. Else it is the oldest of the
// group that has the most, if that has more than this one's would have, or the oldest of this one's.
func (r *rooms) yields(of group, now time.Time) int64 {
	if id, _ := r.order.First(); now.Sub(r.dp[id].at) >= roomNeeded && !fault.On("rooms-old-stay") {
		return id
	}
	if id, has := r.order.OldestOf(of); has && r.order.Most() <= r.order.Of(of)+1 {
		return id
	}
	id, _ := r.order.Oldest()
	return id
}

func (r *rooms) get(id int64, now time.Time) (dp int, ok bool) {
	r.expire(now)
	e, ok := r.dp[id]
	return e.dp, ok
}

func (r *rooms) expire(now time.Time) {
	for id, ok := r.order.First(); ok && now.Sub(r.dp[id].at) >= roomAge; id, ok = r.order.First() {
		r.drop(id)
	}
	if r.order.Len() == 0 { // give the memory of a burst back
		r.dp, r.order = nil, quota.Places[group, int64]{}
	}
}

func (r *rooms) drop(id int64) {
	r.order.Remove(id)
	delete(r.dp, id)
}
