package attack

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/wire"
)

// grinding are hellos of very many regions: of one the regions take longest to be read, of the other to be looked at. NATS
// servers take messages of a megabyte.
func grinding() []*wire.Request {
	read, match := aHello(), aHello()
	read.Hello.Shapes = make([]wire.Shape, 65535)
	match.Hello.Shapes = nil
	for i := range 40000 {
		match.Hello.Shapes = append(match.Hello.Shapes, wire.Shape{Name: strconv.FormatInt(int64(i), 36), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks})
	}
	return []*wire.Request{read, match}
}

// TestHellosThatGrind: decode engines of the attacker's say hello with 65,535 regions, many at a time and without an end. Beside them
// loads took a hundred times as long. Now they are read one after the other, and newcomers get in.
func TestHellosThatGrind(t *testing.T) {
	everywhere(t, func(s *scene) {
		const each = 8
		p, d := s.start("prefill", nil), s.start("decode", nil)
		calm := before(s, p, d)
		hellos := grinding()
		ctx, over := context.WithCancel(s.Context())
		var said, answered atomic.Int64
		var wg sync.WaitGroup
		for _, r := range []*rogue{s.decoder(p), s.decoder(p), s.decoder(p), s.decoder(p)} {
			for i := range each {
				wg.Go(func() {
					for ctx.Err() == nil {
						said.Add(1)
						if _, err := r.within(time.Second, p, hellos[i%2]); err == nil {
							answered.Add(1)
						} else {
							time.Sleep(50 * time.Millisecond) // its connection has ended, and comes back
						}
					}
				})
			}
		}
		for deadline := time.Now().Add(bound); answered.Load() == 0 && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		h := &honest{}
		for i := range loadsBefore {
			h.load(s, p, d, fmt.Sprint("beside", i))
		}
		n := s.newcomers(p, "new", 3)
		over()
		wg.Wait()
		if answered.Load() == 0 {
			s.Error("prefill has answered no such hello: the attack itself has failed")
		}
		p.peak = p.mib("VmHWM")
		if n.well != n.all { // each asks several times, and each time waits for the hello that is being read if there is one processor
			s.Errorf("%d of %d newcomers got their load", n.well, n.all)
		}
		got(s, "honest median 2.6 to 270 ms (at 1a5364a)", "%d hellos, %d answered, %s, %d of %d newcomers well, %s", said.Load(), answered.Load(), h.beside(s, calm), n.well, n.all, p.growth(s))
	})
}
