package attack

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/wire"
)

// grinding are hellos of very many regions: of one the regions take longest to be read, of the other to be looked at. NATS
// servers take messages of a megabyte.
func grinding() []*wire.Request {
	read, match := aHello(), aHello()
	read.Hello.Shapes = make([]wire.Shape, 65535)
	match.Hello.Shapes = nil
	for i := range 40000 {
		shape := wire.Shape{Name: strconv.FormatInt(int64(i), 36), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks}
		match.Hello.Shapes = append(match.Hello.Shapes, shape)
	}
	return []*wire.Request{read, match}
}

// TestHellosThatGrind: decode engines of the attacker's say hello with 65,535 regions, many at a time and without an end. Beside them
// loads took a hundred times as long. Now one is read at a time, and newcomers get in. In a cluster more of them come than may wait, so
// some give way; if they did not wait, none would. At a port as many would end the attacker's connections, so fewer come, and natsbus
// TestLongRequestsWait decides whether they wait.
func TestHellosThatGrind(t *testing.T) {
	atBoth(t, func(s *scenario) {
		p, d := s.start("prefill", nil), s.start("decode", nil)
		before(s, p, d)
		hellos, each := grinding(), 2
		if s.cluster {
			each = 8
		}
		ctx, over := context.WithCancel(s.Context())
		var asked, answered atomic.Int64
		var wg sync.WaitGroup
		for _, r := range []*rogue{s.decoder(p), s.decoder(p), s.decoder(p), s.decoder(p)} {
			for i := range each {
				wg.Go(func() {
					for ctx.Err() == nil {
						asked.Add(1)
						if r.until(ctx, p, hellos[i%2]) == nil {
							answered.Add(1)
						} else {
							time.Sleep(50 * time.Millisecond) // its connection may have ended, and comes back
						}
					}
				})
			}
		}
		for deadline := time.Now().Add(bound); answered.Load() == 0 && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		if answered.Load() == 0 {
			s.Error("prefill has answered no such hello: the attack itself has failed")
		}
		if s.cluster {
			p.poll("a hello that gives way", func(l said) bool { return l.Stats.ClusterRefused["queue_full"] > 0 })
		}
		h := &honest{}
		for i := range loadsBefore {
			h.load(s, p, d, fmt.Sprint("beside", i))
		}
		n := s.newcomers(p, "new", 3)
		over()
		wg.Wait()
		p.peak = p.mib("VmHWM")
		got(s, "honest median 2.6 to 270 ms (at 1a5364a)", "%d hellos, %d answered, %d gave way, %s, of newcomers %s, %s",
			asked.Load(), answered.Load(), p.say("stats").Stats.ClusterRefused["queue_full"], h.went(s), n.went(s), p.growth(s))
	})
}

// until asks until the attack is over, or for so long that a request without an answer is said again.
func (r *rogue) until(over context.Context, p *victim, req *wire.Request) error {
	ctx, cancel := context.WithTimeout(over, 5*time.Second)
	defer cancel()
	_, err := r.Request(ctx, r.via, core.AgentID(p.id), req)
	return err
}

// ofOtherCaches is a hello of a decode engine whose blocks lie as nobody else's do: what prefill keeps of how its caches fit is of no
// use for another.
func ofOtherCaches(n int64) *wire.Request {
	req := aHello()
	req.Hello.Shapes = nil
	for i := range layers {
		for _, r := range ordered(kv.Region{Name: fmt.Sprintf("layer.%d", i), NumBlocks: numBlocks}, "many") {
			stride := r.BlockBytes * uint64(n+1)
			req.Hello.Shapes = append(req.Hello.Shapes, wire.Shape{Name: r.Name, BlockStride: stride, BlockBytes: r.BlockBytes, NumBlocks: numBlocks})
		}
	}
	return req
}

// TestHellosOfOtherCaches: decode engines of the attacker's say hello, each with other caches of very many regions. Of each prefill kept
// how its own fit: 1.8 GiB of 4,096. Now that has a bound (maxMatched in node/matched.go), and who has only said hello makes room.
func TestHellosOfOtherCaches(t *testing.T) {
	atBoth(t, func(s *scenario) {
		p, d := s.startOrdered("many", "prefill", nil), s.startOrdered("many", "decode", nil)
		before(s, p, d)
		ids := 1300 // without a bound they take 1,300 times 1,024 times 248 bytes
		if raced {
			ids = 100
		}
		met := s.hellosUnder(ids, p, ofOtherCaches)
		if met < int64(ids)*9/10 {
			s.Errorf("prefill has met %d of %d: the attack itself has failed", met, ids)
		}
		h := &honest{}
		for i := range loadsBefore {
			h.load(s, p, d, fmt.Sprint("beside", i))
		}
		n := &honest{}
		for i := range 3 {
			c := s.startOrdered("many", "decode", map[string]any{"engine_id": fmt.Sprint("new", i)})
			n.load(s, p, c, fmt.Sprint("new", i))
			c.end()
		}
		p.peak = p.mib("VmHWM")
		got(s, "1.8 GiB kept of 4,096 hellos", "%d decode engines met, %s, of newcomers %s, %s", met, h.went(s), n.went(s), p.growth(s))
	})
}
