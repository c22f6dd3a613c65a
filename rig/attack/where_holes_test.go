package attack

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// ofHeads is a hello of who has a region of each head: decode cuts what it gets from there into as many pieces as can be.
func ofHeads() *wire.Request {
	req := aHello()
	req.Hello.Shapes = nil
	for i := range layers {
		for _, r := range ordered(core.Region{NumBlocks: numBlocks}, "heads") {
			req.Hello.Shapes = append(req.Hello.Shapes, wire.Shape{Name: fmt.Sprintf("layer.%d", i), BlockStride: r.BlockStride, BlockBytes: r.BlockBytes, NumBlocks: r.NumBlocks,
				Tokens: r.Tokens, Heads: r.Heads, FirstHead: r.FirstHead, TotalHeads: r.TotalHeads, TokenStride: r.TokenStride, HeadStride: r.HeadStride})
		}
	}
	return req
}

// TestFramesThatLeaveHoles: a prefill engine sends frames of one byte, each before and not beside the one that it has sent last. What
// decode knows of them moved by each, under the lock of all loads. Now it has a lock of its own and a bound, with which the load ends.
func TestFramesThatLeaveHoles(t *testing.T) {
	everywhere(t, func(s *scene) {
		plain := map[string]any{"tcp_encrypt": "never"} // frames are the same, and the attacker seals none
		p := s.startAs(exec.Command(os.Args[0]), "NHD", "prefill", plain)
		d := s.startAs(exec.Command(os.Args[0]), "NHD", "decode", plain)
		calm := before(s, p, d)
		e := s.prefills("evil", ofHeads().Hello)
		const loads, first, blocks = 2, 24, numBlocks - 24
		const bytes = blocks * layers * blockBytes
		const most = 1 << 16 // holes that decode keeps of one load
		h := &honest{}
		frames := 0
		for i := range loads {
			id := fmt.Sprint("holes", i)
			d.say("load %s %d %d %s evil", id, first, blocks, e.boot)
			l := e.load(s, id)
			st := await(s, "stream of decode's", e.streams)
			over := make(chan int)
			go func() {
				n := 0
				for at := bytes - 1; at > 0; at -= 2 {
					if _, err := st.Write(frame(frameData, l.Grant, uint64(at), 1, foreignBytes[:1])); err != nil {
						break
					}
					n++
				}
				over <- n
			}()
			for range loadsBefore / loads {
				h.load(s, p, d, fmt.Sprint("beside", h.all))
			}
			r := d.report(id)
			if r.Code == "ok" || !strings.Contains(r.Reason, fmt.Sprintf("more than %d holes", most)) {
				s.Errorf("a load of frames that leave holes: %+v", r)
			}
			_ = st.Close()
			frames += <-over
			if in := d.say("bytes %d %d", 0, first).Bytes; in["99"] != 0 {
				s.Errorf("of its bytes %d are in others' blocks", in["99"])
			}
		}
		if frames < loads*most {
			s.Errorf("it has sent %d frames: the attack itself has failed", frames)
		}
		got(s, "receiver's lock held for the move of 1 MiB by each frame (read at 1a5364a)", "%d frames, at most %d holes of a load, start_load at most %.2f ms, %s, %s", frames, most, d.slowest, h.beside(s, calm), d.growth(s))
	})
}
