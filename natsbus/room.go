package natsbus

import "sync"

// room is memory that a message is encoded in. nats.go copies what it is given to send.
type room struct{ bytes []byte }

var rooms = sync.Pool{New: func() any { return new(room) }}

// maxRoom is the most that is kept for the next message.
const maxRoom = 16 << 10

func takeRoom() *room { return rooms.Get().(*room) }

func (r *room) give() {
	if cap(r.bytes) <= maxRoom {
		r.bytes = r.bytes[:0]
		rooms.Put(r)
	}
}
