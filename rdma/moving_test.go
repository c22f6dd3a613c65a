package rdma_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// moving is a transfer that was begun.
type moving struct {
	p, d     *agent
	id       core.TransferID
	n        int // names its content
	src, dst []kv.BlockID
	began    time.Time
}

// begin has p write to d: so many blocks, scattered on both sides.
func begin(p, d *agent, n, blocks int) *moving {
	p.t.Helper()
	m, grant := prepare(p, d, n, blocks)
	m.write(grant)
	return m
}

// beginPartial is begin with the first of the blocks; extend gives others.
func beginPartial(p, d *agent, n, blocks, first int) (m *moving, extend func(from, to int)) {
	p.t.Helper()
	m, grant := prepare(p, d, n, blocks)
	op := core.WriteOp{ID: m.id, Peer: d.id, Grant: grant, Bytes: uint64(blocks) * blockBytes}
	of := func(from, to int) core.WriteOp {
		op.Pairs = m.pairs(from, to)
		op.At = []kv.Extent{{Position: uint64(from) * blockBytes, Pairs: len(op.Pairs)}}
		return op
	}
	p.tr.Write(of(0, first))
	return m, func(from, to int) { p.tr.Extend(of(from, to)) }
}

func prepare(p, d *agent, n, blocks int) (m *moving, grant []byte) {
	p.t.Helper()
	m = &moving{p: p, d: d, id: core.TransferID(fmt.Sprint("transfer-", n)), n: n, src: scattered(uint64(n), blocks), dst: scattered(uint64(n)+1000, blocks)}
	p.paint(n, m.src)
	d.paint(0, every())
	grant, err := d.tr.Expect(m.id, p.id, d.layout.Segments([][]kv.BlockID{m.dst}))
	if err != nil {
		p.t.Fatal(err)
	}
	m.began = time.Now()
	return m, grant
}

func (m *moving) write(grant []byte) {
	m.p.t.Helper()
	m.p.tr.Write(core.WriteOp{ID: m.id, Peer: m.d.id, Grant: grant, Pairs: m.pairs(0, len(m.src))})
}

func (m *moving) pairs(from, to int) []kv.Pair {
	m.p.t.Helper()
	pairs, err := m.p.layout.Plan([][]kv.BlockID{m.src[from:to]}, m.d.layout.Shapes(), [][]kv.BlockID{m.dst[from:to]})
	if err != nil {
		m.p.t.Fatal(err)
	}
	return pairs
}

// arrivals counts the blocks of which bytes have landed.
func (m *moving) arrivals() (n int) {
	for _, id := range m.dst {
		word := (*uint64)(unsafe.Pointer(&m.d.block(id)[0]))
		if atomic.LoadUint64(word) != binary.NativeEndian.Uint64(content(0, int(id))) {
			n++
		}
	}
	return n
}

// part waits until about so many parts of a hundred have landed. It returns false when
// the transfer has ended already.
func (m *moving) part(percent int) bool {
	m.p.t.Helper()
	for deadline := time.Now().Add(patience); m.arrivals()*100 < percent*len(m.dst); pause(time.Millisecond) {
		if m.over() {
			return false
		}
		if time.Now().After(deadline) {
			m.p.t.Fatalf("%d of %d blocks have begun to land after %v", m.arrivals(), len(m.dst), patience)
		}
	}
	return !m.over()
}

func (m *moving) over() bool {
	return len(m.d.sink.All("received", m.id)) > 0 || len(m.p.sink.All("written", m.id)) > 0
}

// ends waits for both outcomes and checks every byte of d's pool: a transfer that
// ended well is there, and nothing else was touched.
func (m *moving) ends() (took time.Duration, received, written error) {
	m.p.t.Helper()
	written = m.p.sink.Wait("written", m.id, 1).Err
	received = m.d.sink.Wait("received", m.id, 1).Err
	took = time.Since(m.began)
	if received == nil {
		m.check()
	}
	return took, received, written
}

func (m *moving) check() {
	m.p.t.Helper()
	m.d.check(m.n, m.dst)
	position := map[kv.BlockID]int{}
	for i, id := range m.src {
		position[id] = i
	}
	for _, id := range m.src {
		if !bytes.Equal(m.p.block(id), content(m.n, position[id])) {
			m.p.t.Fatalf("%s: block %d of the source has changed", m.id, id)
		}
	}
}

// check compares the whole pool: a transfer's blocks, and nobody's.
func (a *agent) check(transfer int, dst []kv.BlockID) {
	a.t.Helper()
	position := map[kv.BlockID]int{}
	for i, id := range dst {
		position[id] = i
	}
	for _, id := range every() {
		i, carried := position[id]
		want := content(0, int(id))
		if carried {
			want = content(transfer, i)
		}
		if got := a.block(id); !bytes.Equal(got, want) {
			at := 0
			for got[at] == want[at] {
				at++
			}
			a.t.Fatalf("%s: byte %d of block %d is wrong (carried: %v)", a.id, at, id, carried)
		}
	}
}

// well requires that a transfer ended well on both sides.
func (m *moving) well() time.Duration {
	m.p.t.Helper()
	took, received, written := m.ends()
	if received != nil || written != nil {
		m.p.t.Fatalf("%s: received: %v; written: %v", m.id, received, written)
	}
	return took
}

// failed requires that the transfer did not end well, with a lost connection as the cause.
func (m *moving) failed() time.Duration {
	m.p.t.Helper()
	written := m.p.sink.Wait("written", m.id, 1).Err
	received := m.d.sink.Wait("received", m.id, 1).Err
	for side, err := range map[string]error{"received": received, "written": written} {
		if !errors.Is(err, core.ErrConnectionLost) {
			m.p.t.Errorf("%s: %s: %v, want a lost connection", m.id, side, err)
		}
	}
	return time.Since(m.began)
}
