package attack

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/wire"
)

// ofHeads is a hello of who has a region of each head: decode cuts what it gets from there into as many pieces as can be.
func ofHeads() *wire.Request {
	req := aHello()
	req.Hello.Shapes = nil
	for i := range layers {
		for _, r := range ordered(kv.Region{NumBlocks: numBlocks}, "heads") {
			shape := wire.Shape{Name: fmt.Sprintf("layer.%d", i), BlockStride: r.BlockStride, BlockBytes: r.BlockBytes, NumBlocks: r.NumBlocks}
			shape.Tokens, shape.Heads, shape.FirstHead, shape.TotalHeads = r.Tokens, r.Heads, r.FirstHead, r.TotalHeads
			shape.TokenStride, shape.HeadStride = r.TokenStride, r.HeadStride
			req.Hello.Shapes = append(req.Hello.Shapes, shape)
		}
	}
	return req
}

// TestFramesThatLeaveHoles: a prefill engine sends frames of one byte, each before and not beside the one that it has sent last. What
// decode knows of them moved by each, under the lock of all loads. Now it has a lock of its own and a bound, with which the load ends:
// as many holes as the load has pieces. So long other loads go on.
func TestFramesThatLeaveHoles(t *testing.T) {
	atBoth(t, func(s *scenario) {
		plain := map[string]any{"tcp_encrypt": "never"} // frames are the same, and the attacker seals none
		p := s.startAs(exec.Command(os.Args[0]), "NHD", "prefill", plain)
		d := s.startAs(exec.Command(os.Args[0]), "NHD", "decode", plain)
		e := s.prefills(s.hostileEngine("evil"), ofHeads().Hello)
		const first, blocks = 24, 4
		const bytes = blocks * layers * blockBytes
		const most = bytes / kv.RegionAlign // pieces of the load, of one token of one head
		d.say("load holes %d %d %s %s", first, blocks, e.boot, s.hostileEngine("evil"))
		l := e.load(s, "holes")
		st := await(s, "stream of decode's", e.streams)
		at := uint64(bytes)
		leave := func() { // as many frames as there may be holes
			var frames [][]byte
			for range most {
				frames = append(frames, frame(frameData, l.Grant, at-1, 1, foreignBytes[:1]))
				at -= 2
			}
			_ = st.SetWriteDeadline(time.Now().Add(bound))
			_, _ = st.Write(slices.Concat(frames...)) // decode ends the stream at the first that is too many
		}
		leave()
		h := &honest{}
		for range loadsBefore {
			h.load(s, p, d, fmt.Sprint("beside", h.all))
		}
		if d.say("stats").Stats.LoadsUnderWay == 0 {
			s.Errorf("the load has ended after %d frames, with as many holes as there may be", most)
		}
		leave()
		if r := d.report("holes"); r.Code == "ok" || !strings.Contains(r.Reason, fmt.Sprintf("more than %d holes", most)) {
			s.Errorf("a load of frames that leave holes: %+v", r)
		}
		for _, others := range []struct{ first, n int }{{0, first}, {first + blocks, numBlocks - first - blocks}} {
			if in := d.say("bytes %d %d", others.first, others.n).Bytes; in["99"] != 0 {
				s.Errorf("of its bytes %d are in others' blocks", in["99"])
			}
		}
		got(s, "receiver's lock held for the move of 1 MiB by each frame (read at 1a5364a)",
			"at most %d holes of a load, start_load at most %.2f ms, %s", most, d.slowest, h.went(s))
	})
}
