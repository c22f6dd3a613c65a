package attack

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/wire"
)

// What a load of four blocks takes, and what the attacker would put into them.
const (
	fourBlocks = 4 * layers * blockBytes
	foreign    = "99"
)

var foreignBytes = bytes.Repeat([]byte{99}, fourBlocks)

// holds checks what d's memory has: so many foreign bytes, all of them in blocks 10 to 13, and
// beside them what an engine has filled it with.
func (v *victim) holds(what string, foreignBytes int) {
	v.t.Helper()
	all, own := v.say("bytes").Bytes, v.say("bytes 10 4").Bytes
	if all[foreign] != foreignBytes || own[foreign] != foreignBytes || all["7"] != layers*numBlocks*blockBytes-foreignBytes {
		v.t.Errorf("after %s decode has %v, in the load's blocks %v; want %d foreign bytes, in these blocks", what, all, own, foreignBytes)
	}
}

// framesOfHosts are decode, an honest prefill engine, and two hosts that decode has met.
type framesOfHosts struct {
	t         *testing.T
	p, d      *victim
	e, other  *hostilePrefill
	calm, h   *honest
	s, others *evilStream // the hosts' streams
}

func newFramesOfHosts(t *testing.T) *framesOfHosts {
	f := &framesOfHosts{t: t, h: &honest{}}
	f.p = start(t, map[string]any{"role": "prefill"})
	f.d = start(t, map[string]any{"role": "decode", "tcp_streams": 1, "load_timeout_s": 3})
	f.p.say("fill 170")
	f.calm = before(t, f.p, f.d)
	f.e, f.other = newHostilePrefill(t), newHostilePrefill(t)
	return f
}

// begin has decode load four blocks from a host, which gets the grant and the newest stream.
func (f *framesOfHosts) begin(e *hostilePrefill, s **evilStream, id string, block int) *wire.Load {
	f.t.Helper()
	f.d.say("load %s %d 4 %s", id, block, e.boot)
	l := e.load(f.t, id)
	if *s == nil {
		*s = await(f.t, "stream of decode's", e.streams)
	}
	return l
}

// honestLoad makes an honest load, and looks whether it has brought what it should.
func (f *framesOfHosts) honestLoad() {
	f.t.Helper()
	f.h.load(f.t, f.p, f.d, honestID(f.h.all))
	if got := f.d.say("bytes 20 4").Bytes; got["170"] != fourBlocks {
		f.t.Errorf("after %d honest loads decode has %v", f.h.all, got)
	}
}

// TestFramesOfAMetPrefill: a host that decode has met sends frames that no prefill engine sends.
// Each ends the load with the reason. What it sent of that load before is in the load's own
// blocks and nowhere else.
func TestFramesOfAMetPrefill(t *testing.T) {
	f := newFramesOfHosts(t)
	const most = fourBlocks
	full := func(grant []byte) []byte { return frame(frameData, grant, 0, most/2, foreignBytes[:most/2]) }
	cases := []struct {
		name   string
		frames func(grant []byte) [][]byte
		lands  int
	}{
		{"longer than what is left", func(g []byte) [][]byte { return [][]byte{frame(frameData, g, most-4, 8, foreignBytes[:8])} }, 0},
		{"behind the end", func(g []byte) [][]byte { return [][]byte{frame(frameData, g, most, 4096, foreignBytes[:4096])} }, 0},
		{"round the end of 64 bits", func(g []byte) [][]byte { return [][]byte{frame(frameData, g, 1<<64-4, 4096, foreignBytes[:4096])} }, 0},
		{"a length of 2^62", func(g []byte) [][]byte { return [][]byte{frame(frameData, g, 0, 1<<62, foreignBytes)} }, 0},
		{"a length above the longest frame", func(g []byte) [][]byte { return [][]byte{frame(frameData, g, 0, 1<<30+1, foreignBytes)} }, 0},
		{"the same bytes twice", func(g []byte) [][]byte { return [][]byte{full(g), full(g)} }, most / 2},
		{"some bytes twice", func(g []byte) [][]byte {
			return [][]byte{full(g), frame(frameData, g, most/2-1, 2, foreignBytes[:2])}
		}, most / 2},
		{"of an unknown kind", func(g []byte) [][]byte { return [][]byte{full(g), frame(77, g, most/2, most/2, foreignBytes[:most/2])} }, most / 2},
		{"an acknowledgement", func(g []byte) [][]byte { return [][]byte{frame(frameAck, g, 0, most, nil)} }, 0},
		{"a leave frame", func(g []byte) [][]byte { return [][]byte{full(g), frame(frameLeave, g, 0, 0, nil)} }, most / 2},
		{"of another magic", func([]byte) [][]byte { return [][]byte{foreignBytes} }, 0},
	}
	const rounds = 3
	for i := range rounds * len(cases) {
		c := &cases[i%len(cases)]
		id := fmt.Sprint("bad", i)
		f.d.say("fill 7")
		l := f.begin(f.e, &f.s, id, 10)
		for _, b := range c.frames(l.Grant) {
			if _, err := f.s.Write(b); err != nil { // decode may have ended the stream by the header
				break
			}
		}
		if r := f.d.report(id); r.Code == "ok" {
			t.Errorf("a frame %s: %+v", c.name, r)
		}
		f.s = nil // the stream is over
		f.d.holds("a frame "+c.name, c.lands)
		f.honestLoad()
	}
	got(t, "0 foreign bytes taken for good", "0 bytes beside the load's blocks, 0 of %d loads taken for good, %s, %s", rounds*len(cases), f.h.comparedWith(t, f.calm), f.d.growth(t))
}

// TestForeignGrants: a host sends frames under the grant of a load from another host, as if both were
// of one attacker. They change no byte, and the other load ends well with what its own prefill sends.
func TestForeignGrants(t *testing.T) {
	f := newFramesOfHosts(t)
	unknown := bytes.Repeat([]byte{1}, 16)
	const rounds = loadsBefore
	for i := range rounds {
		f.d.say("fill 7")
		mine, theirs := f.begin(f.e, &f.s, fmt.Sprint("mine", i), 10), f.begin(f.other, &f.others, fmt.Sprint("theirs", i), 30)
		f.s.say(frame(frameData, theirs.Grant, 0, fourBlocks, foreignBytes), frame(frameData, unknown, 0, 4096, foreignBytes[:4096]))
		f.s.hears(frameNack, theirs.Grant)
		f.s.say(frame(frameData, unknown, 0, 0, nil)) // its answer says that all before was read
		f.s.hears(frameNack, unknown)
		f.s.hears(frameNack, unknown)
		f.d.holds("frames under a foreign grant", 0)
		f.others.say(frame(frameData, theirs.Grant, 0, fourBlocks, bytes.Repeat([]byte{171}, fourBlocks)))
		if r := f.d.report(fmt.Sprint("theirs", i)); r.Code != "ok" {
			t.Errorf("the load under that grant: %+v", r)
		}
		if all, own := f.d.say("bytes").Bytes, f.d.say("bytes 30 4").Bytes; own["171"] != fourBlocks || all[foreign] != 0 {
			t.Errorf("decode has %v, and %v in that load's blocks", all, own)
		}
		f.s.say(frame(frameData, mine.Grant, 0, fourBlocks, bytes.Repeat([]byte{172}, fourBlocks))) // what it may do
		if r := f.d.report(fmt.Sprint("mine", i)); r.Code != "ok" {
			t.Errorf("its own load: %+v", r)
		}
		f.honestLoad()
	}
	got(t, "0 foreign bytes taken for good", "0 bytes, %d loads under those grants well, %s, %s", rounds, f.h.comparedWith(t, f.calm), f.d.growth(t))
}

// TestFramesAfterTheEnd: a host that decode has met begins a frame. Decode's engine cancels the load,
// has its blocks back and uses them. Then the rest of the frame comes, and others of that load.
func TestFramesAfterTheEnd(t *testing.T) {
	f := newFramesOfHosts(t)
	unknown := bytes.Repeat([]byte{1}, 16)
	const rounds = loadsBefore
	for i := range rounds {
		id := fmt.Sprint("late", i)
		f.d.say("fill 7")
		l := f.begin(f.e, &f.s, id, 10)
		whole := frame(frameData, l.Grant, 0, 8192, foreignBytes[:8192])
		f.s.say(whole[:40+4096])
		for f.d.say("bytes 10 4").Bytes[foreign] < 4096 { // at the latest the load's end ends it
			if len(f.d.kept) > 0 {
				t.Fatalf("the first half does not land: %+v", f.d.kept)
			}
		}
		f.d.say("cancel %s", id)
		if r := f.d.report(id); r.Code == "ok" {
			t.Errorf("a load that was cancelled: %+v", r)
		}
		f.d.say("fill 7") // its engine uses the blocks
		f.s.say(whole[40+4096:], frame(frameData, l.Grant, 8192, 4096, foreignBytes[:4096]),
			frame(frameData, l.Grant, 0, fourBlocks, foreignBytes), frame(frameData, unknown, 0, 0, nil))
		f.s.hears(frameNack, unknown)
		f.d.holds("late frames", 0)
		f.honestLoad()
	}
	got(t, "0 bytes changed", "0 bytes changed after %d ends, %s, %s", rounds, f.h.comparedWith(t, f.calm), f.d.growth(t))
}

// TestFramesThatNeverEnd: a host that decode has met sends a byte on each stream that decode opens,
// and closes the stream. Decode has its blocks back when load_timeout_s is over.
func TestFramesThatNeverEnd(t *testing.T) {
	f := newFramesOfHosts(t)
	f.d.say("fill 7")
	l := f.begin(f.e, &f.s, "endless", 10)
	over, done := make(chan struct{}), make(chan int)
	go func() {
		for n, s := 0, f.s; ; n++ {
			_, _ = s.Write(frame(frameData, l.Grant, uint64(n), uint64(fourBlocks-n), foreignBytes[:1])) // behind what has landed
			_ = s.Close()
			select {
			case s = <-f.e.streams:
			case <-over:
				done <- n + 1
				return
			}
		}
	}()
	for f.h.all < loadsBefore {
		f.honestLoad()
	}
	r := f.d.report("endless")
	if r.Code == "ok" || !strings.Contains(r.Reason, "load_timeout_s") {
		t.Errorf("a load of which frames only begin: %+v", r)
	}
	f.d.say("fill 7") // its engine uses the blocks
	for range loadsBefore {
		f.d.holds("the load's end", 0)
	}
	close(over)
	got(t, "not tried", "blocks back when load_timeout_s is over, %d streams later, 0 bytes after it, %s, %s", <-done, f.h.comparedWith(t, f.calm), f.d.growth(t))
}
