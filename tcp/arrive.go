package tcp

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// arrival is a frame that comes in. It counts when its bytes are in the blocks: when it is read whole and
// its copies have ended. The next frames are read meanwhile.
type arrival struct {
	in       *inbound // nil: the bytes belong to no transfer that is expected, or not any more
	of       *inbound // the same when the frame began
	position uint64
	length   uint64
	got      uint64 // bytes that were read
	cuts     int    // runs that were cut off the transfer's plan
	slots    int    // whose copies are under way
	over     bool   // no more bytes are read
}

// takeArrival begins a frame.
func (l *landing) takeArrival(in *inbound, h *header) *arrival {
	n := len(l.rests)
	if n == 0 {
		l.rests, n = append(l.rests, new(arrival)), 1
	}
	f := l.rests[n-1]
	l.rests = l.rests[:n-1]
	*f = arrival{in: in, of: in, position: h.position, length: h.length}
	return f
}

// awaitHeader returns when the next frame's header is there, or when no copy is under way any more.
func (s *inStream) awaitHeader() error {
	for len(s.landing.slots) > 0 && (!s.headerIsThere() || fault.On("tcp-land-dry")) {
		if err := s.landStarted(len(s.landing.slots) - 1); err != nil {
			return err
		}
	}
	s.conn.SetReadDeadline(time.Time{})
	return s.waitsForAny()
}

// headerIsThere says whether a header can be read without a wait.
func (s *inStream) headerIsThere() (is bool) {
	want := headerSize
	if s.sealed != nil {
		want = sealedHeader
	}
	err := s.raw.Control(func(fd uintptr) {
		n, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
		is = err == nil && (n >= want || fault.On("tcp-land-part"))
	})
	return is && err == nil
}

// arrived says that no more of a frame is read: it is whole, or err ends the stream, and all its copies with it. A frame without
// bytes does not push out the copies of the frames before it, so that they are ended here.
func (s *inStream) arrived(f *arrival, err error) error {
	s.landing.now, f.over = nil, true
	alone := f.slots == 0
	if alone && !fault.On("tcp-land-late") {
		err = cmp.Or(err, s.landStarted(0))
	}
	if alone || fault.On("tcp-land-early") {
		err = cmp.Or(err, s.say(s.landed(f, nil)...))
	}
	return err
}

// lostCopy is a transfer of which a copy has failed.
type lostCopy struct {
	in  *inbound
	err error
}

// landStarted waits until at most so many slots are under way. Frames of which all has landed count then. A transfer of
// which a copy has failed ends, when this stream copies nothing any more: its end waits for copies of other streams, as theirs do
// for this one's.
func (s *inStream) landStarted(most int) error {
	l := &s.landing
	l.unready()
	var few [window]*arrival
	over := few[:0]
	var lost []lostCopy
	for len(l.slots) > most {
		slot := l.slots[0]
		l.slots = append(l.slots[:0], l.slots[1:]...)
		var err error
		if !fault.On("tcp-report-early") {
			err = slot.Wait()
		}
		if err != nil {
			lost = append(lost, lostCopy{slot.in, &copyError{"copy into device memory", err}})
			if !fault.On("tcp-land-fails-first") {
				most = 0
			}
		}
		if errors.Is(err, ErrMayCopy) { // Revoke waits for it
			s.r.stuck(slot.to)
			slot.in.copies.stays()
		} else {
			slot.Release()
			l.spare = append(l.spare, slot.to)
			slot.in.copies.done()
		}
		if slot.frame.slots--; slot.frame.slots == 0 && slot.frame.over {
			over = append(over, slot.frame)
		}
	}
	var room [window]reply
	replies := s.lose(lost, over, room[:0])
	for _, f := range over {
		replies = s.landed(f, replies)
		if fault.On("tcp-answer-each") {
			_ = s.say(replies...)
		}
	}
	return s.say(replies...) // P may not read it: whatever has ended is told before
}

// lose ends the transfers of which a copy has failed. Their frames count no more.
func (s *inStream) lose(lost []lostCopy, over []*arrival, replies []reply) []reply {
	if !fault.On("tcp-land-goes-on") {
		over = append(over, s.landing.now)
	}
	for i, c := range lost {
		same := func(o lostCopy) bool { return o.in == c.in }
		if slices.ContainsFunc(lost[:i], same) {
			continue
		}
		for _, o := range lost[i:] {
			if same(o) && errors.Is(o.err, ErrMayCopy) { // this matters more than another error
				c.err = o.err
			}
		}
		for _, f := range over {
			if f != nil && f.in == c.in {
				f.in = nil
			}
		}
		s.r.copyFailed(c.in, c.err)
		replies = append(replies, s.r.ended(c.in.grant))
	}
	return replies
}

// fails ends the transfer of the frame that is read for its memory's fault, when this stream copies nothing any more.
func (s *inStream) fails(f *arrival, err error) error {
	if e := s.landStarted(0); e != nil || f.in == nil { // it has failed for a copy
		return e
	}
	in := f.in
	f.in = nil
	s.r.copyFailed(in, err)
	return s.say(s.r.ended(in.grant))
}

// landed counts a frame's bytes, once. With the last ones it ends the transfer. It appends what is to be answered.
func (s *inStream) landed(f *arrival, replies []reply) []reply {
	in, n, whole, cuts := f.in, f.got, f.got == f.length, f.cuts
	if in != nil && !whole { // P may send the rest again
		in.claimed.mu.Lock()
		in.claimed.spans.Remove(f.position+n, f.position+f.length)
		in.claimed.mu.Unlock()
	}
	s.r.mu.Lock()
	if f.of != nil {
		s.peer.reads(-1, time.Now())
	}
	s.landing.rests = append(s.landing.rests, f)
	if in == nil {
		s.r.mu.Unlock()
		return replies
	}
	in.got += n
	in.cuts += cuts
	gone := s.r.byID[in.id] != in
	var end *outcome
	if in.got == in.total && (whole || !fault.On("tcp-part-last")) { // another stream may have brought the rest of a part
		if end = s.r.ends(in); end != nil {
			s.r.done.add(doneTransfer{grant: in.grant, total: in.total})
		}
	}
	stats := core.TransferStats{Bytes: in.got, Segments: len(in.runs) + in.cuts, Nanos: in.took().Nanoseconds()}
	s.r.mu.Unlock()
	switch {
	case end != nil:
		s.r.tell(in, end, stats, nil)
		replies = append(replies, reply{header: header{kind: frameAck, key: in.grant, length: stats.Bytes}})
	case gone && whole: // another stream's frame was the last, or the transfer has failed, or was revoked and the sender may stop
		replies = append(replies, s.r.ended(in.grant))
	}
	return replies
}

// holdsNothing returns when a write need not wait for the peer, or no copy of this stream is under way: a slow peer must not hold up
// their end.
func (s *inStream) holdsNothing() error {
	if len(s.landing.slots) == 0 || fault.On("tcp-answer-holds") {
		return nil
	}
	free := false
	err := s.raw.Control(func(fd uintptr) { free = polled(fd, unix.POLLOUT) })
	if free && err == nil {
		return nil
	}
	return s.landStarted(0)
}
