package coretest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
)

// Fixture is how the suite gets transports of one kind.
type Fixture struct {
	// Open makes a transport over the layout's memory, which is of this process
	// and stays mapped until the transport is closed. The suite closes it. Its
	// Endpoint must be usable as it is: a host must not be left out.
	Open func(t *testing.T, id core.AgentID, l *core.Layout, sink core.Sink) core.Transport

	// BigBytes is how large a transfer must be for the suite to catch it in the
	// middle; 64 MiB unless set.
	BigBytes int

	// Remote is for ProcessSuite: the name under which the package's TestMain has
	// given ServeRemote a transport that can reach those of Open.
	Remote string
}

func (f Fixture) withDefaults() Fixture {
	if f.BigBytes == 0 {
		f.BigBytes = 64 << 20
	}
	return f
}

// TransportSuite is the contract of core.Transport as a test.
func TransportSuite(t *testing.T, f Fixture) {
	runCases(t, f.withDefaults(), []suiteCase{
		{"ordered", ordered},
		{"scattered", scattered},
		{"odd sizes", oddSizes},
		{"nothing to send", nothing},
		{"ten thousand segments", tenThousand},
		{"strides and groups", strides},
		{"two at once", func(t *testing.T, f Fixture) { manyAtOnce(t, f, 2) }},
		{"many at once", func(t *testing.T, f Fixture) { manyAtOnce(t, f, 100) }},
		{"both directions", bothDirections},
		{"several peers", severalPeers},
		{"id again", idAgain},
		{"expect twice", expectTwice},
		{"unknown ids", unknownIDs},
		{"revoke before write", revokeBefore},
		{"revoke during write", revokeDuring},
		{"revoke after write", revokeAfter},
		{"revoke races the end", revokeRaces},
		{"revoke leaves others", revokeLeavesOthers},
		{"stop during write", stopDuring},
		{"sender gone during write", senderGone},
		{"receiver gone during write", receiverGone},
		{"wrong grants", wrongGrants},
		{"grant of another peer", stolenGrant},
		{"peer that never connected", neverConnected},
		{"nobody at the endpoint", nobodyThere},
		{"admit again", admitAgain},
		{"wrong tickets", wrongTickets},
		{"grant of one peer at another", crossedGrant},
		{"dismiss", dismiss},
		{"dismiss during write", dismissDuring},
		{"loss and return", lossAndReturn},
		{"close", closed},
	})
}

type suiteCase struct {
	name string
	run  func(*testing.T, Fixture)
}

func runCases(t *testing.T, f Fixture, cases []suiteCase) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			leaktest.Check(t)
			c.run(t, f)
		})
	}
}

// endpoint is an agent of the suite: memory, and a transport over it.
type endpoint struct {
	*arena
	t      *testing.T
	id     core.AgentID
	tr     core.Transport
	sink   *Recorder
	wrote  map[core.TransferID]int // calls of Write
	closed bool
}

func open(t *testing.T, f Fixture, id core.AgentID, specs []regionSpec) *endpoint {
	t.Helper()
	return openOn(t, id, newArena(t, specs, nil), func(a *arena, sink *Recorder) core.Transport {
		return f.Open(t, id, a.layout, sink)
	})
}

func openOn(t *testing.T, id core.AgentID, a *arena, start func(a *arena, sink *Recorder) core.Transport) *endpoint {
	t.Helper()
	e := &endpoint{arena: a, t: t, id: id, sink: NewRecorder(t, string(id)), wrote: map[core.TransferID]int{}}
	e.tr = start(a, e.sink)
	t.Cleanup(e.close)
	return e
}

// close closes the transport and checks what its sink was told in all.
func (e *endpoint) close() {
	if e.closed {
		return
	}
	e.closed = true
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := e.tr.Close(); err != nil {
			e.t.Errorf("%s: Close: %v", e.id, err)
		}
		e.sink.Shut()
	}()
	select {
	case <-done:
	case <-time.After(patience):
		e.t.Errorf("%s: Close has not returned within %v", e.id, patience)
	}
	for _, o := range e.sink.All("written", "") {
		if e.wrote[o.ID] == 0 {
			e.t.Errorf("%s: an outcome of %q, which was not written", e.id, o.ID)
		}
	}
	for id, wrote := range e.wrote {
		if n := len(e.sink.All("written", id)); n != wrote {
			e.t.Errorf("%s: %d outcomes of %d writes of %q", e.id, n, wrote, id)
		}
	}
}

// connect makes the way from sender to receiver, as D does when it has found P.
func connect(t *testing.T, receiver, sender *endpoint) {
	t.Helper()
	connectWith(t, receiver, sender, sender.admit(receiver.id))
}

func connectWith(t *testing.T, receiver, sender *endpoint, ticket []byte) {
	t.Helper()
	if err := receiver.tr.Connect(sender.id, sender.tr.Endpoint(), ticket); err != nil {
		t.Fatalf("%s: Connect(%s, %q): %v", receiver.id, sender.id, sender.tr.Endpoint(), err)
	}
}

func (e *endpoint) admit(peer core.AgentID) []byte {
	e.t.Helper()
	ticket, err := e.tr.Admit(peer)
	if err != nil || len(ticket) < 16 || len(ticket) > 64 {
		e.t.Fatalf("%s: Admit(%s): a ticket of %d bytes, %v; want 16 to 64", e.id, peer, len(ticket), err)
	}
	return ticket
}

// down waits for the n-th word (from 1) that the way to a peer broke.
func (e *endpoint) down(peer core.AgentID, n int) Outcome {
	e.t.Helper()
	o := e.sink.waitFor(fmt.Sprintf("PeerDown %d of %s", n, peer), func() (Outcome, bool) {
		k := 0
		for _, o := range e.sink.list {
			if o.Kind == "down" && o.Peer == peer {
				if k++; k == n {
					return o, true
				}
			}
		}
		return Outcome{}, false
	})
	if o.Err == nil {
		e.t.Errorf("%s: PeerDown(%s) without a cause", e.id, peer)
	}
	return o
}

// moves checks that a small transfer ends well between two agents.
func moves(t *testing.T, p, d *endpoint, id core.TransferID, blocks [][]core.BlockID) {
	t.Helper()
	p.write(id, d, d.expect(id, p, blocks), blocks, blocks)
	well(t, id, p, d, d.layout.Bytes(blocks))
}

func pair(t *testing.T, f Fixture, src, dst []regionSpec) (sender, receiver *endpoint) {
	t.Helper()
	sender, receiver = open(t, f, "sender", src), open(t, f, "receiver", dst)
	connect(t, receiver, sender)
	return sender, receiver
}

func (e *endpoint) expect(id core.TransferID, from *endpoint, dst [][]core.BlockID) []byte {
	e.t.Helper()
	grant, err := e.tr.Expect(id, from.id, e.layout.Segments(dst))
	if err != nil {
		e.t.Fatalf("%s: Expect(%q): %v", e.id, id, err)
	}
	return grant
}

func (e *endpoint) write(id core.TransferID, to *endpoint, grant []byte, src, dst [][]core.BlockID) {
	e.t.Helper()
	pairs, err := e.layout.Plan(src, to.layout.Shapes(), dst)
	if err != nil {
		e.t.Fatal(err)
	}
	e.wrote[id]++
	e.tr.Write(core.WriteOp{ID: id, Peer: to.id, Grant: grant, Pairs: pairs})
}

// well checks that a transfer ended well on both sides with so many bytes.
func well(t *testing.T, id core.TransferID, sender, receiver *endpoint, want uint64) {
	t.Helper()
	for _, o := range []Outcome{receiver.sink.Wait("received", id, 1), sender.sink.Wait("written", id, 1)} {
		if o.Err != nil || o.Stats.Bytes != want {
			t.Errorf("%s %q: %d bytes, %v; want %d bytes and no error", o.Kind, id, o.Stats.Bytes, o.Err, want)
		}
		if want > 0 && (o.Stats.Segments == 0 || o.Stats.Nanos < 0) {
			t.Errorf("%s %q: stats %+v", o.Kind, id, o.Stats)
		}
	}
}

// transferOnce moves one transfer and checks every byte on both sides.
func transferOnce(t *testing.T, f Fixture, srcSpec, dstSpec []regionSpec, src, dst [][]core.BlockID) {
	t.Helper()
	p, d := pair(t, f, srcSpec, dstSpec)
	p.paint(7, src)
	grant := d.expect("t", p, dst)
	p.write("t", d, grant, src, dst)
	well(t, "t", p, d, d.layout.Bytes(dst))
	d.check(t, delivery{transfer: 7, blocks: dst})
	p.check(t, delivery{transfer: 7, blocks: src})
	if n := len(d.sink.All("received", "t")); n != 1 {
		t.Errorf("received was told %d times", n)
	}
}

func sequence(from, n int) []core.BlockID {
	out := make([]core.BlockID, n)
	for i := range out {
		out[i] = core.BlockID(from + i)
	}
	return out
}

// shuffled is n different ids below limit, the same in each run.
func shuffled(seed uint64, n, limit int) []core.BlockID {
	out := make([]core.BlockID, n)
	for i, p := range rand.New(rand.NewPCG(seed, 0)).Perm(limit)[:n] {
		out[i] = core.BlockID(p)
	}
	return out
}

func dense(bytes uint64, blocks uint32) []regionSpec {
	return []regionSpec{{bytes: bytes, blocks: blocks}}
}

func ordered(t *testing.T, f Fixture) {
	transferOnce(t, f, dense(16<<10, 64), dense(16<<10, 80), [][]core.BlockID{sequence(3, 40)}, [][]core.BlockID{sequence(21, 40)})
}

func scattered(t *testing.T, f Fixture) {
	src, dst := shuffled(1, 200, 300), shuffled(2, 200, 256)
	copy(src[20:40], sequence(300, 20)) // runs that merge on one side only, on the other, on both
	copy(dst[60:80], sequence(256, 20))
	copy(src[100:120], sequence(320, 20))
	copy(dst[100:120], sequence(276, 20))
	transferOnce(t, f, dense(4<<10, 340), dense(4<<10, 296), [][]core.BlockID{src}, [][]core.BlockID{dst})
}

func oddSizes(t *testing.T, f Fixture) {
	for i, size := range []uint64{4, 12, 516, 4100, 65532, 65540, 1<<20 + 4, 3<<20 - 4} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			seed := uint64(i)
			transferOnce(t, f, dense(size, 9), dense(size, 7), [][]core.BlockID{shuffled(seed, 5, 9)}, [][]core.BlockID{shuffled(seed+50, 5, 7)})
		})
	}
}

func nothing(t *testing.T, f Fixture) {
	transferOnce(t, f, dense(4096, 4), dense(4096, 4), [][]core.BlockID{{}}, [][]core.BlockID{{}})
}

func tenThousand(t *testing.T, f Fixture) {
	const n = 10_000
	transferOnce(t, f, []regionSpec{{bytes: 516, stride: 1024, blocks: n}}, dense(516, n+50),
		[][]core.BlockID{shuffled(1, n, n)}, [][]core.BlockID{shuffled(2, n, n+50)})
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
			[][]core.BlockID{shuffled(1, 30, 40), sequence(10, 60), {4}},
			[][]core.BlockID{sequence(5, 30), shuffled(2, 60, 70), {0}})
	})
	t.Run("one group empty, one left out", func(t *testing.T) {
		transferOnce(t, f, src, dst, [][]core.BlockID{{}, sequence(10, 9)}, [][]core.BlockID{{}, shuffled(3, 9, 70)})
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
	part := func(i int) (s, d [][]core.BlockID) {
		from, to := i*most, i*most+1+i*7%most
		return [][]core.BlockID{src[from:to]}, [][]core.BlockID{dst[from:to]}
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
	out, in := [][]core.BlockID{shuffled(1, 100, 200)}, [][]core.BlockID{nil}
	used := map[core.BlockID]bool{}
	for _, id := range out[0] {
		used[id] = true
	}
	for i := range core.BlockID(200) {
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
		src, dst [][]core.BlockID
	}
	var moves []move
	want := make([][]delivery, len(receivers))
	for i, p := range senders {
		for k, d := range receivers {
			connect(t, d, p)
			m := move{id: core.TransferID(fmt.Sprint(i, "-", k)), n: 1 + i*3 + k, p: p, d: d,
				src: [][]core.BlockID{sequence(k*30, 30)}, dst: [][]core.BlockID{sequence(i*50, 30)}}
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

// idAgain: what a load does whose first agent was found to be gone.
func idAgain(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 20), dense(4096, 20))
	src, first, second := [][]core.BlockID{sequence(0, 5)}, [][]core.BlockID{sequence(1, 5)}, [][]core.BlockID{sequence(10, 5)}
	p.paint(1, src)
	old := d.expect("t", p, first)
	d.tr.Revoke("t")
	grant := d.expect("t", p, second)
	if bytes.Equal(old, grant) {
		t.Errorf("the second grant is the first one again")
	}
	p.write("t", d, grant, src, second)
	well(t, "t", p, d, d.layout.Bytes(second))
	d.check(t, delivery{transfer: 1, blocks: second})
}

func expectTwice(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 20), dense(4096, 20))
	src, dst := [][]core.BlockID{sequence(0, 5)}, [][]core.BlockID{sequence(1, 5)}
	p.paint(1, src)
	grant := d.expect("t", p, dst)
	if _, err := d.tr.Expect("t", p.id, d.layout.Segments([][]core.BlockID{sequence(10, 5)})); err == nil {
		t.Errorf("Expect of an id that is expected already gave no error")
	}
	p.write("t", d, grant, src, dst)
	well(t, "t", p, d, d.layout.Bytes(dst))
	d.check(t, delivery{transfer: 1, blocks: dst})
}

func unknownIDs(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 4), dense(4096, 4))
	d.tr.Revoke("never")
	p.tr.Revoke("never")
	p.tr.Stop("never")
	d.tr.Stop("never")
	src := [][]core.BlockID{sequence(0, 4)}
	p.paint(1, src)
	p.write("t", d, d.expect("t", p, src), src, src)
	well(t, "t", p, d, d.layout.Bytes(src))
}

func revokeBefore(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 100), dense(4096, 100))
	blocks := [][]core.BlockID{sequence(0, 100)}
	p.paint(1, blocks)
	grant := d.expect("t", p, blocks)
	d.tr.Revoke("t")
	d.tr.Revoke("t")
	p.write("t", d, grant, blocks, blocks)
	if o := p.sink.Wait("written", "t", 1); o.Err == nil {
		t.Errorf("a write to a revoked grant ended well: %+v", o)
	}
	d.check(t)
	noReceived(t, d, "t", 0)
}

func noReceived(t *testing.T, d *endpoint, id core.TransferID, want int) {
	t.Helper()
	if all := d.sink.All("received", id); len(all) != want {
		t.Errorf("received of %q was told %d times, want %d: %+v", id, len(all), want, all)
	}
}

// landed waits for the first byte in any of some blocks.
func (e *endpoint) landed(blocks [][]core.BlockID) {
	e.t.Helper()
	for deadline := time.Now().Add(patience); !e.touched(blocks); runtime.Gosched() {
		if time.Now().After(deadline) {
			e.t.Fatalf("%s: no byte has landed within %v", e.id, patience)
		}
	}
}

// inMidst has a big write under way, calls cut when its first bytes have
// landed, and then after. It tries anew, with more bytes, when the write ended
// well all the same.
func inMidst(t *testing.T, f Fixture, cut func(p, d *endpoint), after func(p, d *endpoint, blocks [][]core.BlockID)) {
	inMidstOf(t, f, open, open, cut, after)
}

// opener is open or openRemote.
type opener func(t *testing.T, f Fixture, id core.AgentID, specs []regionSpec) *endpoint

func inMidstOf(t *testing.T, f Fixture, openP, openD opener, cut func(p, d *endpoint), after func(p, d *endpoint, blocks [][]core.BlockID)) {
	const blockBytes = 256<<10 + 4
	size := f.BigBytes
	for try := range 8 {
		n := size / blockBytes
		caught := false
		t.Run(fmt.Sprintf("try%d", try), func(t *testing.T) {
			spec := dense(blockBytes, uint32(n))
			p, d := openP(t, f, "sender", spec), openD(t, f, "receiver", spec)
			connect(t, d, p)
			src, dst := [][]core.BlockID{sequence(0, n)}, [][]core.BlockID{shuffled(1, n, n)}
			p.paint(1, src)
			p.write("t", d, d.expect("t", p, dst), src, dst)
			d.landed(dst)
			cut(p, d)
			caught = !arrived(d)
			after(p, d, dst)
		})
		if caught || t.Failed() {
			return
		}
		size = min(2*size, 512<<20)
	}
	t.Errorf("no write was caught in the middle: raise Fixture.BigBytes from %d", f.BigBytes)
}

// arrived says whether the transfer of inMidst ended well at its receiver.
func arrived(d *endpoint) bool {
	for _, o := range d.sink.All("received", "t") {
		if o.Err == nil {
			return true
		}
	}
	return false
}

func revokeDuring(t *testing.T, f Fixture) {
	var frozen []byte
	told := 0
	inMidst(t, f,
		func(p, d *endpoint) {
			d.tr.Revoke("t")
			frozen = d.snapshot()
			told = len(d.sink.All("received", "t"))
		},
		func(p, d *endpoint, dst [][]core.BlockID) {
			o := p.sink.Wait("written", "t", 1)
			if told == 0 && o.Err == nil && o.Stats.Bytes != p.layout.Bytes(dst) {
				t.Errorf("written without an error after %d bytes", o.Stats.Bytes)
			}
			p.close()
			if i := differ(frozen, d.mem); i >= 0 {
				place, _ := d.place(i)
				t.Errorf("a byte changed after Revoke had returned: %d, %s", i, place)
			}
			d.check(t, delivery{transfer: 1, blocks: dst, part: told == 0})
			noReceived(t, d, "t", told)
		})
}

func revokeAfter(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 20), dense(4096, 20))
	src, dst := [][]core.BlockID{sequence(0, 9)}, [][]core.BlockID{shuffled(1, 9, 20)}
	p.paint(1, src)
	p.write("t", d, d.expect("t", p, dst), src, dst)
	well(t, "t", p, d, d.layout.Bytes(dst))
	d.tr.Revoke("t")
	d.check(t, delivery{transfer: 1, blocks: dst})
	noReceived(t, d, "t", 1)
}

// revokeRaces has Revoke meet the last bytes. The outcome was told before
// Revoke returned or never, and the blocks may be used again at once.
func revokeRaces(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 8), dense(4096, 8))
	src, dst := [][]core.BlockID{sequence(0, 4)}, [][]core.BlockID{sequence(2, 4)}
	p.paint(1, src)
	told, revoked := 0, 0
	var usual time.Duration // what a transfer takes, of the first ones
	const rounds = 400
	for i := range rounds {
		id := core.TransferID(fmt.Sprint("t", i))
		fill(d.mem, guardByte)
		grant := d.expect(id, p, dst)
		start := time.Now()
		p.write(id, d, grant, src, dst)
		if i < 10 {
			d.sink.Wait("received", id, 1)
			usual = time.Since(start)
		}
		for at := usual * time.Duration(i) * 3 / 2 / rounds; time.Since(start) < at; runtime.Gosched() {
		}
		d.tr.Revoke(id)
		n := len(d.sink.All("received", id))
		frozen := d.snapshot()
		p.sink.Wait("written", id, 1)
		noReceived(t, d, id, n)
		if i := differ(frozen, d.mem); i >= 0 {
			t.Fatalf("byte %d changed after Revoke had returned", i)
		}
		if n == 1 {
			d.check(t, delivery{transfer: 1, blocks: dst})
			told++
		} else {
			revoked++
		}
		if t.Failed() {
			return
		}
	}
	t.Logf("%d told, %d revoked before", told, revoked)
}

// revokeLeavesOthers: a revoke in the middle is daily business (a cancelled
// request) and must not end what else moves between the two agents.
func revokeLeavesOthers(t *testing.T, f Fixture) {
	const blockBytes = 64 << 10
	n := f.BigBytes / blockBytes / 4
	spec := dense(blockBytes, uint32(2*n))
	p, d := pair(t, f, spec, spec)
	one, two := [][]core.BlockID{sequence(0, n)}, [][]core.BlockID{sequence(n, n)}
	p.paint(1, one)
	p.paint(2, two)
	g1, g2 := d.expect("cut", p, one), d.expect("kept", p, two)
	p.write("cut", d, g1, one, one)
	p.write("kept", d, g2, two, two)
	d.landed(one)
	d.tr.Revoke("cut")
	p.sink.Wait("written", "cut", 1)
	well(t, "kept", p, d, d.layout.Bytes(two))
	d.check(t, delivery{transfer: 1, blocks: one, part: true}, delivery{transfer: 2, blocks: two})
	three := [][]core.BlockID{sequence(n, 1)}
	p.paint(3, three)
	p.write("later", d, d.expect("later", p, three), three, three)
	well(t, "later", p, d, d.layout.Bytes(three))
}

func stopDuring(t *testing.T, f Fixture) {
	inMidst(t, f,
		func(p, d *endpoint) { p.tr.Stop("t") },
		func(p, d *endpoint, dst [][]core.BlockID) {
			o := p.sink.Wait("written", "t", 1)
			p.paint(2, [][]core.BlockID{sequence(0, len(dst[0]))}) // the blocks are the engine's again
			if o.Err == nil {
				if r := d.sink.Wait("received", "t", 1); r.Err != nil {
					t.Errorf("written without an error, received with %v", r.Err)
				}
			}
			d.tr.Revoke("t")
			d.check(t, delivery{transfer: 1, blocks: dst, part: !arrived(d)})
		})
}

func senderGone(t *testing.T, f Fixture) {
	inMidst(t, f,
		func(p, d *endpoint) { p.close() },
		func(p, d *endpoint, dst [][]core.BlockID) {
			d.sink.waitFor("word that the sender is gone", func() (Outcome, bool) {
				for _, o := range d.sink.list {
					if o.Kind == "down" && o.Peer == p.id && o.Err != nil || o.Kind == "received" {
						return o, true
					}
				}
				return Outcome{}, false
			})
			d.tr.Revoke("t")
			d.check(t, delivery{transfer: 1, blocks: dst, part: !arrived(d)})
		})
}

func receiverGone(t *testing.T, f Fixture) {
	var frozen []byte
	inMidst(t, f,
		func(p, d *endpoint) {
			d.close()
			frozen = d.snapshot()
		},
		func(p, d *endpoint, dst [][]core.BlockID) {
			o := p.sink.Wait("written", "t", 1)
			if o.Err == nil && len(d.sink.All("received", "t")) == 0 {
				t.Errorf("written without an error, but the receiver was closed before the end")
			}
			if i := differ(frozen, d.mem); i >= 0 {
				t.Errorf("byte %d changed after Close had returned", i)
			}
		})
}

func wrongGrants(t *testing.T, f Fixture) {
	for name, forge := range map[string]func(grant []byte) []byte{
		"empty":       func(g []byte) []byte { return nil },
		"cut":         func(g []byte) []byte { return g[:len(g)-1] },
		"longer":      func(g []byte) []byte { return append(bytes.Clone(g), 0) },
		"one bit off": func(g []byte) []byte { g = bytes.Clone(g); g[len(g)-1] ^= 1; return g },
		"random":      func(g []byte) []byte { return bytes.Repeat([]byte{0x5a}, len(g)) },
	} {
		t.Run(name, func(t *testing.T) {
			p, d := pair(t, f, dense(4096, 100), dense(4096, 100))
			blocks := [][]core.BlockID{sequence(0, 50)}
			p.paint(1, blocks)
			grant := d.expect("t", p, blocks)
			p.write("t", d, forge(grant), blocks, blocks)
			if o := p.sink.Wait("written", "t", 1); o.Err == nil {
				t.Errorf("a write with a wrong grant ended well: %+v", o)
			}
			d.tr.Revoke("t")
			d.check(t)
			if arrived(d) {
				t.Errorf("received of a write with a wrong grant ended well")
			}
		})
	}
}

// stolenGrant: a grant is for one peer.
func stolenGrant(t *testing.T, f Fixture) {
	spec := dense(4096, 20)
	p, d := pair(t, f, spec, spec)
	thief := open(t, f, "thief", spec)
	connect(t, d, thief)
	blocks := [][]core.BlockID{sequence(0, 20)}
	p.paint(1, blocks)
	thief.paint(2, blocks)
	grant := d.expect("t", p, blocks)
	thief.write("t", d, grant, blocks, blocks)
	if o := thief.sink.Wait("written", "t", 1); o.Err == nil {
		t.Errorf("a write with another peer's grant ended well: %+v", o)
	}
	d.tr.Revoke("t")
	d.check(t)
}

func neverConnected(t *testing.T, f Fixture) {
	spec := dense(4096, 4)
	p, d := open(t, f, "sender", spec), open(t, f, "stranger", spec)
	blocks := [][]core.BlockID{sequence(0, 4)}
	p.paint(1, blocks)
	p.write("s", d, bytes.Repeat([]byte{1}, 16), blocks, blocks) // not even admitted
	p.admit(d.id)
	p.write("t", d, bytes.Repeat([]byte{1}, 16), blocks, blocks)
	p.write("u", d, nil, blocks, blocks)
	for _, id := range []core.TransferID{"s", "t", "u"} {
		if o := p.sink.Wait("written", id, 1); o.Err == nil {
			t.Errorf("a write to a peer that never connected ended well: %+v", o)
		}
	}
	d.check(t)
}

func nobodyThere(t *testing.T, f Fixture) {
	spec := dense(4096, 4)
	p, d := open(t, f, "sender", spec), open(t, f, "receiver", spec)
	address, ticket := p.tr.Endpoint(), p.admit(d.id)
	p.close()
	if err := d.tr.Connect(p.id, address, ticket); err != nil {
		return
	}
	d.down(p.id, 1)
}

// admitAgain: a second hello must not cut off what the first one has set up.
func admitAgain(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 4), dense(4096, 4))
	blocks := [][]core.BlockID{sequence(0, 4)}
	p.paint(1, blocks)
	ticket := p.admit(d.id)
	if again := p.admit(d.id); !bytes.Equal(ticket, again) {
		t.Errorf("the ticket of an admitted peer has changed")
	}
	if other := p.admit("other"); bytes.Equal(ticket, other) {
		t.Errorf("two peers have one ticket")
	}
	p.tr.Dismiss("nobody")
	clear(ticket) // it is the caller's
	moves(t, p, d, "t", blocks)
	connect(t, d, p)
	moves(t, p, d, "u", blocks)
	d.check(t, delivery{transfer: 1, blocks: blocks})
}

// wrongTickets: who shows none of P's tickets gets no connection and no byte,
// and does not disturb those who do.
func wrongTickets(t *testing.T, f Fixture) {
	spec := dense(4096, 40)
	p, d := pair(t, f, spec, spec)
	blocks, more := [][]core.BlockID{sequence(0, 20)}, [][]core.BlockID{sequence(20, 20)}
	p.paint(1, blocks)
	p.paint(2, more)
	moves(t, p, d, "before", blocks)
	good := p.admit("stranger")
	for name, ticket := range map[string][]byte{
		"empty":       nil,
		"cut":         good[:len(good)-1],
		"longer":      append(bytes.Clone(good), 0),
		"one bit off": append(bytes.Clone(good[:len(good)-1]), good[len(good)-1]^1),
		"zero":        make([]byte, len(good)),
	} {
		t.Run(name, func(t *testing.T) {
			stranger := open(t, f, "stranger", spec)
			if err := stranger.tr.Connect(p.id, p.tr.Endpoint(), ticket); err != nil {
				return // it can see that the ticket is none
			}
			stranger.down(p.id, 1)
			id := core.TransferID("t-" + name)
			p.write(id, stranger, bytes.Repeat([]byte{1}, 16), blocks, blocks)
			if o := p.sink.Wait("written", id, 1); o.Err == nil {
				t.Errorf("a write to a peer with a wrong ticket ended well: %+v", o)
			}
			stranger.check(t)
		})
	}
	moves(t, p, d, "after", more)
	d.check(t, delivery{transfer: 1, blocks: blocks}, delivery{transfer: 2, blocks: more})
	if down := p.sink.All("down", ""); len(down) != 0 {
		t.Errorf("the sender was told %+v", down)
	}
}

// crossedGrant: what one peer has granted is written to no other.
func crossedGrant(t *testing.T, f Fixture) {
	spec := dense(4096, 20)
	p, a := pair(t, f, spec, spec)
	b := open(t, f, "other", spec)
	connect(t, b, p)
	blocks := [][]core.BlockID{sequence(0, 20)}
	p.paint(1, blocks)
	ga, gb := a.expect("t", p, blocks), b.expect("u", p, blocks)
	p.write("u", a, gb, blocks, blocks)
	if o := p.sink.Wait("written", "u", 1); o.Err == nil {
		t.Errorf("a write with the grant of another peer ended well: %+v", o)
	}
	a.check(t)
	b.check(t)
	p.write("t", a, ga, blocks, blocks)
	well(t, "t", p, a, a.layout.Bytes(blocks))
	noReceived(t, b, "u", 0)
}

// dismiss: a peer that was dismissed gets nothing, until it is admitted anew.
func dismiss(t *testing.T, f Fixture) {
	spec := dense(4096, 20)
	p, d := pair(t, f, spec, spec)
	blocks := [][]core.BlockID{sequence(0, 20)}
	p.paint(1, blocks)
	old := p.admit(d.id)
	moves(t, p, d, "before", blocks)
	fill(d.mem, guardByte)
	grant := d.expect("t", p, blocks)
	p.tr.Dismiss(d.id)
	p.tr.Dismiss(d.id)
	d.down(p.id, 1)
	p.write("t", d, grant, blocks, blocks)
	if o := p.sink.Wait("written", "t", 1); o.Err == nil {
		t.Errorf("a write to a dismissed peer ended well: %+v", o)
	}
	d.tr.Revoke("t")
	connectWith(t, d, p, old)
	d.down(p.id, 2)
	d.check(t)
	if down := p.sink.All("down", ""); len(down) != 0 {
		t.Errorf("the sender was told %+v of a peer that it has dismissed", down)
	}
	if again := p.admit(d.id); bytes.Equal(old, again) {
		t.Errorf("the ticket of a dismissed peer lives again")
	}
	connect(t, d, p)
	moves(t, p, d, "after", blocks)
}

func dismissDuring(t *testing.T, f Fixture) {
	inMidst(t, f,
		func(p, d *endpoint) { p.tr.Dismiss(d.id) },
		func(p, d *endpoint, dst [][]core.BlockID) {
			o := p.sink.Wait("written", "t", 1)
			p.paint(2, [][]core.BlockID{sequence(0, len(dst[0]))}) // the blocks are the engine's again
			if o.Err == nil {
				if r := d.sink.Wait("received", "t", 1); r.Err != nil {
					t.Errorf("written without an error, received with %v", r.Err)
				}
			}
			d.down(p.id, 1)
			d.tr.Revoke("t")
			d.check(t, delivery{transfer: 1, blocks: dst, part: !arrived(d)})
		})
}

// lossAndReturn: P hears once of each loss, and the ticket outlives it.
func lossAndReturn(t *testing.T, f Fixture) {
	spec := dense(4096, 20)
	p := open(t, f, "sender", spec)
	blocks := [][]core.BlockID{sequence(0, 20)}
	p.paint(1, blocks)
	ticket := p.admit("receiver")
	for i := range 3 {
		d := open(t, f, "receiver", spec)
		connectWith(t, d, p, ticket)
		moves(t, p, d, core.TransferID(fmt.Sprint("t", i)), blocks)
		d.close()
		p.down(d.id, i+1)
		if i == 2 {
			p.write("late", d, bytes.Repeat([]byte{1}, 16), blocks, blocks)
			if o := p.sink.Wait("written", "late", 1); o.Err == nil {
				t.Errorf("a write to a peer that is gone ended well: %+v", o)
			}
		}
	}
	if n := len(p.sink.All("down", "")); n != 3 {
		t.Errorf("the sender was told %d times of 3 losses", n)
	}
}

// closed: an idle transport closes at once, from several goroutines too, and
// takes no more orders.
func closed(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 4), dense(4096, 4))
	blocks := [][]core.BlockID{sequence(0, 4)}
	p.paint(1, blocks)
	grant := d.expect("t", p, blocks)
	d.expect("u", p, blocks)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if err := d.tr.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
	}
	wg.Wait()
	d.sink.Shut()
	if _, err := d.tr.Expect("v", p.id, d.layout.Segments(blocks)); err == nil {
		t.Errorf("Expect after Close gave no error")
	}
	if _, err := d.tr.Admit(p.id); err == nil {
		t.Errorf("Admit after Close gave no error")
	}
	d.tr.Dismiss(p.id)
	d.tr.Revoke("t")
	p.write("t", d, grant, blocks, blocks)
	if o := p.sink.Wait("written", "t", 1); o.Err == nil {
		t.Errorf("a write to a closed agent ended well: %+v", o)
	}
	d.check(t)
	late := open(t, f, "late", dense(4096, 4))
	p.admit(late.id)
	p.write("w", late, grant, blocks, blocks)
	p.close() // checks that the write was told
}
