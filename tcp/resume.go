// A transfer goes on when a stream that had frames of it breaks. D's next stream of that
// number says how far D has read them, and the bytes beyond are sent again, on any stream.
// Nothing is sent again before D has said so: D may still be reading.

package tcp

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/internal/safe"
)

// piece is a part of a transfer, in its linear order.
type piece struct{ position, length uint64 }

// sentFrame is a frame that a stream has taken. Only the end of the transfer says that it
// has arrived.
type sentFrame struct {
	number int    // of the stream
	offset uint64 // of its header, as D counts what it has received of that number
	piece
}

// rest is the part of a frame that is lost if D has received so many bytes of the frame's number.
func (f *sentFrame) rest(received uint64) (lost piece) {
	begin := f.offset + headerSize
	if received <= begin {
		return f.piece
	}
	n := min(received-begin, f.length)
	return piece{f.position + n, f.length - n}
}

// resume is called when D has opened a stream anew. received is how many bytes D says that it has
// received of that stream's number; s.mu is held.
func (s *sender) resume(out *outbound, number int, received uint64) {
	if out.err == nil && !out.acked {
		queued := out.due()
		out.lose(number, received)
		out.enqueue(queued)
	}
	if !out.stuck() {
		s.stopWaiting(out)
	}
	if w, most := out.wait, s.t.cfg.DialTimeout; w != nil && !w.lives && w.bound < most { // D lives, so it dials the streams that are missing
		w.lives, w.left, w.bound = true, w.left+most-w.bound, most
	}
}

// lose has the bytes of a number's frames which D has not received sent again. If D has all
// bytes, and only its acknowledgement was lost, P asks D.
func (out *outbound) lose(number int, received uint64) {
	touched := false
	kept := out.sent[:0]
	for _, f := range out.sent {
		if f.number != number {
			kept = append(kept, f)
			continue
		}
		touched = true
		lost := f.rest(received)
		out.todo.Add(lost.position, lost.position+lost.length)
		out.left += lost.length
	}
	out.sent = kept
	out.paces()
	out.ask = out.ask || touched && out.left == 0 && out.ranges.bytes == out.total
}

// cut puts the next frame's bytes, at most limit, into a stream's vector. The bytes of a frame
// follow each other in the transfer, whether the engine gave them at once or not.
func (out *outbound) cut(v []iovec, limit uint64) (_ []iovec, position, n uint64) {
	if out.left == 0 {
		return v, out.total, 0 // the frame asks D
	}
	next := out.todo[0]
	v, n = out.ranges.fill(v, next.From, min(limit, next.To-next.From))
	out.todo.Drop(n)
	out.left -= n
	return v, next.From, n
}

// due says whether P has a frame of the transfer to send, that is, whether the transfer belongs in the queue.
func (out *outbound) due() bool { return out.left > 0 || out.ask }

// enqueue puts the transfer into the queue if it has become due.
func (out *outbound) enqueue(queued bool) {
	if !queued && out.due() {
		out.peer.queue = append(out.peer.queue, out)
		out.peer.wake.Broadcast()
	}
}

// rests says whether P has sent all bytes that it was given, and will be given more, perhaps only
// after minutes. D gives up a transfer whose connections bring nothing. So if D's connections break
// meanwhile, P says by a frame without bytes on each new one that the transfer lives.
func (out *outbound) rests() bool {
	return out.err == nil && out.left == 0 && out.ranges.bytes > 0 && out.ranges.bytes < out.total
}

// sentOn says whether a frame may be lost with a stream of that number.
func (out *outbound) sentOn(number int) bool {
	for i := range out.sent {
		if out.sent[i].number == number {
			return true
		}
	}
	return false
}

// stuck says whether a transfer waits for a stream that is not there.
func (out *outbound) stuck() bool {
	if out.peer.open == 0 {
		return true
	}
	for i := range out.sent {
		if out.peer.slots[out.sent[i].number].stream == nil {
			return true
		}
	}
	return false
}

// wait bounds how long a transfer waits for a stream of D's.
type wait struct {
	timer *time.Timer
	bound time.Duration
	left  time.Duration // of bound
	lives bool          // bound was raised, since D has come back by another stream: once, since D's streams may break without an end
	cause error
}

// await gives D so long to open a stream. It waits in steps, so that the time in which
// this process is stopped counts as one step; s.mu is held.
func (s *sender) await(out *outbound, bound time.Duration, cause error) {
	if w := out.wait; w != nil {
		w.bound, w.left = min(w.bound, bound), min(w.left, bound)
		return
	}
	w := &wait{bound: bound, left: bound, cause: cause}
	out.wait = w
	s.t.wg.Add(1)
	w.timer = time.AfterFunc(min(step, bound), func() {
		defer safe.Recover("tcp wait for a stream")
		s.mu.Lock()
		over := out.wait != w
		if !over {
			w.left -= step
			if w.left > 0 {
				w.timer.Reset(min(step, w.left))
				s.mu.Unlock()
				return
			}
			out.wait = nil
		}
		s.mu.Unlock()
		defer s.t.wg.Done()
		if !over {
			s.end(out, fmt.Errorf("%w; no stream came within %v", w.cause, w.bound))
		}
	})
}

// stopWaiting is called when a transfer can go on, or has ended; s.mu is held.
func (s *sender) stopWaiting(out *outbound) {
	if out.wait != nil && out.wait.timer.Stop() {
		s.t.wg.Done()
	}
	out.wait = nil
}
