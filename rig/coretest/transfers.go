// Cases of transfers that end well, of many shapes and many at a time.

package coretest

import (
	"fmt"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

func ordered(t *testing.T, f Fixture) {
	transferOnce(t, f, dense(16<<10, 64), dense(16<<10, 80), [][]kv.BlockID{sequence(3, 40)}, [][]kv.BlockID{sequence(21, 40)})
}

func scattered(t *testing.T, f Fixture) {
	src, dst := shuffled(1, 200, 300), shuffled(2, 200, 256)
	copy(src[20:40], sequence(300, 20)) // runs that merge on one side only, on the other, on both
	copy(dst[60:80], sequence(256, 20))
	copy(src[100:120], sequence(320, 20))
	copy(dst[100:120], sequence(276, 20))
	transferOnce(t, f, dense(4<<10, 340), dense(4<<10, 296), [][]kv.BlockID{src}, [][]kv.BlockID{dst})
}

func oddSizes(t *testing.T, f Fixture) {
	for i, size := range []uint64{4, 12, 516, 4100, 65532, 65540, 1<<20 + 4, 3<<20 - 4} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			seed := uint64(i)
			transferOnce(t, f, dense(size, 9), dense(size, 7), [][]kv.BlockID{shuffled(seed, 5, 9)}, [][]kv.BlockID{shuffled(seed+50, 5, 7)})
		})
	}
}

func nothing(t *testing.T, f Fixture) {
	transferOnce(t, f, dense(4096, 4), dense(4096, 4), [][]kv.BlockID{{}}, [][]kv.BlockID{{}})
}

func tenThousand(t *testing.T, f Fixture) {
	const n = 10_000
	transferOnce(t, f, []regionSpec{{bytes: 516, stride: 1024, blocks: n}}, dense(516, n+50),
		[][]kv.BlockID{shuffled(1, n, n)}, [][]kv.BlockID{shuffled(2, n, n+50)})
}

func strides(t *testing.T, f Fixture) {
	src := []regionSpec{
		{group: 0, bytes: 2048, stride: 4096, blocks: 40}, {group: 0, bytes: 1028, blocks: 40}, {group: 1, bytes: 256, stride: 260, blocks: 90},
		{group: 0, bytes: 64, stride: 128, blocks: 50}, {group: 1, bytes: 8192, blocks: 90}, {group: 2, bytes: 40, blocks: 5},
	}
	dst := []regionSpec{
		{group: 0, bytes: 2048, blocks: 60}, {group: 0, bytes: 1028, stride: 4096, blocks: 60}, {group: 1, bytes: 256, stride: 512, blocks: 70},
		{group: 0, bytes: 64, stride: 128, blocks: 60}, {group: 1, bytes: 8192, blocks: 70}, {group: 2, bytes: 40, blocks: 5},
	}
	t.Run("all groups", func(t *testing.T) {
		transferOnce(t, f, src, dst,
			[][]kv.BlockID{shuffled(1, 30, 40), sequence(10, 60), {4}},
			[][]kv.BlockID{sequence(5, 30), shuffled(2, 60, 70), {0}})
	})
	t.Run("one group empty, one left out", func(t *testing.T) {
		transferOnce(t, f, src, dst, [][]kv.BlockID{{}, sequence(10, 9)}, [][]kv.BlockID{{}, shuffled(3, 9, 70)})
	})
}

// manyAtOnce has n transfers under way at a time, of different sizes.
func manyAtOnce(t *testing.T, f Fixture, n int) {
	const most = 24
	specs := []regionSpec{{bytes: 4100, blocks: uint32(n * most)}, {bytes: 512, stride: 1024, blocks: uint32(n * most)}}
	p, d := pair(t, f, specs, specs)
	src, dst := shuffled(1, n*most, n*most), shuffled(2, n*most, n*most)
	var want []delivery
	grants := make([][]byte, n)
	part := func(i int) (s, d [][]kv.BlockID) {
		from, to := i*most, i*most+1+i*7%most
		return [][]kv.BlockID{src[from:to]}, [][]kv.BlockID{dst[from:to]}
	}
	name := func(i int) core.TransferID { return core.TransferID(fmt.Sprint("t", i)) }
	for i := range n {
		s, to := part(i)
		p.paint(i, s)
		grants[i] = d.expect(name(i), p, to)
		want = append(want, delivery{transfer: i, blocks: to})
	}
	for i := range n {
		s, to := part(i)
		p.write(name(i), d, grants[i], s, to)
	}
	for i := range n {
		well(t, name(i), p, d, d.layout.Bytes(want[i].blocks))
	}
	d.check(t, want...)
}

func bothDirections(t *testing.T, f Fixture) {
	a, b := open(t, f, "a", dense(8192, 200)), open(t, f, "b", dense(8192, 200))
	connect(t, a, b)
	connect(t, b, a)
	out, in := [][]kv.BlockID{shuffled(1, 100, 200)}, [][]kv.BlockID{nil}
	used := map[kv.BlockID]bool{}
	for _, id := range out[0] {
		used[id] = true
	}
	for i := range kv.BlockID(200) {
		if !used[i] {
			in[0] = append(in[0], i)
		}
	}
	a.paint(1, out)
	b.paint(2, out)
	// The same id both ways: an agent may be the sender and the receiver of one.
	ga, gb := a.expect("t", b, in), b.expect("t", a, in)
	a.write("t", b, gb, out, in)
	b.write("t", a, ga, out, in)
	well(t, "t", a, b, a.layout.Bytes(in))
	well(t, "t", b, a, a.layout.Bytes(in))
	a.check(t, delivery{transfer: 1, blocks: out}, delivery{transfer: 2, blocks: in})
	b.check(t, delivery{transfer: 2, blocks: out}, delivery{transfer: 1, blocks: in})
}

// severalPeers: two senders, three receivers, all pairs at once.
func severalPeers(t *testing.T, f Fixture) {
	spec := dense(4096, 100)
	var senders, receivers []*endpoint
	for i := range 2 {
		senders = append(senders, open(t, f, core.AgentID(fmt.Sprint("sender", i)), spec))
	}
	for i := range 3 {
		receivers = append(receivers, open(t, f, core.AgentID(fmt.Sprint("receiver", i)), spec))
	}
	type move struct {
		id       core.TransferID
		n        int
		p, d     *endpoint
		src, dst [][]kv.BlockID
	}
	var moves []move
	want := make([][]delivery, len(receivers))
	for i, p := range senders {
		for k, d := range receivers {
			connect(t, d, p)
			m := move{id: core.TransferID(fmt.Sprint(i, "-", k)), n: 1 + i*3 + k, p: p, d: d,
				src: [][]kv.BlockID{sequence(k*30, 30)}, dst: [][]kv.BlockID{sequence(i*50, 30)}}
			p.paint(m.n, m.src)
			want[k] = append(want[k], delivery{transfer: m.n, blocks: m.dst})
			moves = append(moves, m)
		}
	}
	for _, m := range moves {
		m.p.write(m.id, m.d, m.d.expect(m.id, m.p, m.dst), m.src, m.dst)
	}
	for _, m := range moves {
		well(t, m.id, m.p, m.d, m.d.layout.Bytes(m.dst))
	}
	for k, d := range receivers {
		d.check(t, want[k]...)
	}
}
