// P's half of the fake transport: it copies within this process.

package coretest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
)

func (t *transport) Write(op core.WriteOp) {
	w := &write{peer: op.Peer, wake: make(chan struct{}, 1)}
	w.stop, w.end = context.WithCancelCause(context.Background())
	t.mu.Lock()
	t.writes[op.ID] = w
	t.mu.Unlock()
	t.spawn(func() {
		defer w.end(nil)
		start := time.Now()
		n, segments, err := t.run(op, w)
		t.mu.Lock()
		delete(t.writes, op.ID)
		t.mu.Unlock()
		t.sink.Written(op.ID, core.TransferStats{Bytes: n, Segments: segments, Nanos: time.Since(start).Nanoseconds()}, err)
	})
}

func (t *transport) Extend(op core.WriteOp) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if w := t.writes[op.ID]; w != nil {
		w.more = append(w.more, op)
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

// extended waits for more of a write.
func (t *transport) extended(w *write) (core.WriteOp, error) {
	for {
		t.mu.Lock()
		if len(w.more) > 0 {
			op := w.more[0]
			w.more = w.more[1:]
			t.mu.Unlock()
			return op, nil
		}
		t.mu.Unlock()
		select {
		case <-w.wake:
		case <-w.stop.Done():
			return core.WriteOp{}, context.Cause(w.stop)
		case <-t.done:
			return core.WriteOp{}, errFakeClosed
		}
	}
}

// run copies a transfer, and returns how many bytes it wrote and of how many pairs of pieces these were.
func (t *transport) run(op core.WriteOp, w *write) (n uint64, segments int, err error) {
	start := time.Now()
	if t.prepare != nil {
		if err := t.prepare(w.stop, op.Peer); err != nil {
			return 0, 0, err
		}
	}
	t.net.mu.Lock()
	peer, linked, onChunk := t.net.open[op.Peer], t.net.links[link{t.id, op.Peer}], t.net.onChunk
	t.net.mu.Unlock()
	if peer == nil || !linked {
		return 0, 0, fmt.Errorf("mem: agent %s has not connected", op.Peer)
	}
	peer.mu.Lock()
	e := peer.expected[op.ID]
	peer.mu.Unlock()
	if e == nil || e.peer != t.id || !bytes.Equal(e.grant, op.Grant) {
		return 0, 0, fmt.Errorf("mem: agent %s refuses the grant of transfer %q", op.Peer, string(op.ID))
	}
	e.fence.Lock()
	again := e.taken
	e.taken = true
	e.fence.Unlock()
	if again {
		return 0, 0, fmt.Errorf("mem: transfer %q is written twice", op.ID.Name())
	}
	part := part{t: t, w: w, peer: peer, e: e, onChunk: onChunk}
	given, total := uint64(0), op.Total()
	for {
		if given += op.Payload(); given > total {
			return part.n, segments, fmt.Errorf("mem: transfer %q was given %d bytes of %d", string(op.ID), given, total)
		}
		segments += len(op.Pairs)
		if err := part.copy(&op); err != nil {
			return part.n, segments, err
		}
		if given == total {
			break
		}
		if op, err = t.extended(w); err != nil {
			if errors.Is(err, errFakeClosed) {
				peer.end(e, core.TransferStats{Bytes: part.n, Segments: e.segments}, err)
			}
			return part.n, segments, err
		}
	}
	n = part.n
	if n != e.total {
		err := fmt.Errorf("mem: transfer %q has %d bytes at its sender, %d at its receiver", string(op.ID), n, e.total)
		peer.end(e, core.TransferStats{Bytes: n, Segments: e.segments}, err)
		return n, segments, err
	}
	if !peer.end(e, core.TransferStats{Bytes: n, Segments: e.segments, Nanos: time.Since(start).Nanoseconds()}, nil) {
		return n, segments, fmt.Errorf("mem: agent %s has revoked transfer %q", op.Peer, string(op.ID))
	}
	return n, segments, nil
}

// part is a write that goes on.
type part struct {
	t       *transport
	w       *write
	peer    *transport
	e       *expect
	onChunk func(id core.TransferID, chunk int)
	chunks  int
	n       uint64 // bytes written
}

func (c *part) copy(op *core.WriteOp) error {
	t, e := c.t, c.e
	for i := range op.Pairs {
		p := &op.Pairs[i]
		if err := inside(t.layout, p.SrcRegion, p.SrcOffset, p.Length); err != nil {
			return fmt.Errorf("mem: source: %w", err)
		}
		if err := inside(c.peer.layout, p.DstRegion, p.DstOffset, p.Length); err != nil {
			return fmt.Errorf("mem: destination: %w", err)
		}
	}
	for i := range op.Pairs {
		p := &op.Pairs[i]
		src := t.layout.Regions[p.SrcRegion].Base + p.SrcOffset
		dst := c.peer.layout.Regions[p.DstRegion].Base + p.DstOffset
		for off := uint64(0); off < p.Length; off += chunk {
			if c.onChunk != nil {
				c.onChunk(op.ID, c.chunks)
			}
			c.chunks++
			select {
			case <-c.w.stop.Done():
				return context.Cause(c.w.stop)
			case <-t.done:
				err := fmt.Errorf("mem: agent %s was closed in the middle of a write", t.id)
				c.peer.end(e, core.TransferStats{Bytes: c.n, Segments: e.segments}, err)
				return err
			default:
			}
			size := min(chunk, p.Length-off)
			e.fence.Lock()
			if e.over {
				e.fence.Unlock()
				return fmt.Errorf("mem: agent %s has revoked transfer %q", op.Peer, string(op.ID))
			}
			copy(memory(dst+off, size), memory(src+off, size))
			e.fence.Unlock()
			c.n += size
		}
	}
	return nil
}

func (t *transport) Stop(id core.TransferID) {
	t.mu.Lock()
	w := t.writes[id]
	t.mu.Unlock()
	if w != nil {
		w.end(errStopped)
	}
}
