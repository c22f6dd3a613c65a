package natsbus

import "sync"

// buffer is memory that a message is encoded in. nats.go copies what it is given to send.
type buffer struct{ bytes []byte }

var buffers = sync.Pool{New: func() any { return new(buffer) }}

// maxBuffer is the capacity up to which a buffer is kept for the next message.
const maxBuffer = 16 << 10

func takeBuffer() *buffer { return buffers.Get().(*buffer) }

func (r *buffer) release() {
	if cap(r.bytes) <= maxBuffer {
		r.bytes = r.bytes[:0]
		buffers.Put(r)
	}
}
