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
