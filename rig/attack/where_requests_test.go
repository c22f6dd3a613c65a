package attack

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// TestRenewalsOfAnEnd: a decode engine of the attacker's ends a transfer with a long reason, and then asks for it, as often as a message
// can name it, without an end. A message could name it 131,072 times, and each answer had the reason as often: another's hello took 3.3 s,
// 604 MiB. Now a message names 1,024 loads and as many claims (the limits of Renew in wire/wire.go), and longer ones are refused.
func TestRenewalsOfAnEnd(t *testing.T) {
	atBoth(t, func(s *scenario) {
		p, d := s.startPlain("prefill", nil), s.startPlain("decode", nil)
		before(s, p, d)
		r, _ := s.met(p)
		end := wire.Finish{TransferID: "z", Code: int(core.Failed), Reason: strings.Repeat("A", 256)}
		s.answer(r, p, &wire.Request{Kind: wire.KindFinish, Finishes: []wire.Finish{end}})
		naming := func(n int) *wire.Request {
			all := make([]string, n)
			for i := range all {
				all[i] = end.TransferID
			}
			return &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{Loads: all, Claims: all}}
		}
		const most = 1024
		// The answer would be too long for the server, so the reason must be what is wrong with the message.
		if rep := s.answer(r, p, naming(65536)); rep.Code == 0 || !strings.Contains(rep.Reason, "malformed") {
			s.Errorf("a renewal of 131,072 transfers is read: %d statuses, %d reasons, %q", len(rep.Statuses), len(rep.Ends), rep.Reason)
		}
		if rep := s.answer(r, p, naming(most)); len(rep.Ends) != 2*most || rep.Ends[most].Reason != end.Reason {
			s.Fatalf("the answer to a renewal has %d reasons, want %d: the attack itself has failed", len(rep.Ends), 2*most)
		}
		flood := s.floodBy(r, p.id, naming(most))
		underWay(s, "answers", flood.answered.Load, 1)
		h := &honest{}
		for i := range loadsBefore {
			h.load(s, p, d, fmt.Sprint("beside", i))
		}
		n := s.newcomersPlain(p, "new", 3)
		underWay(s, "answers", flood.answered.Load, loadsBefore)
		p.peak = p.mib("VmHWM")
		got(s, "another's hello took 3.3 s, 604 MiB", "%d answers of %d reasons, %s, of newcomers %s, %s", flood.answered.Load(), 2*most, h.went(s), n.went(s), p.growth(s))
	})
}

// poured are connections that say requests without an end, and do not wait for answers.
type poured struct {
	sent atomic.Int64
	over context.CancelFunc
	wg   sync.WaitGroup
}

func (f *poured) end() {
	f.over()
	f.wg.Wait()
}

// pour says a request again and again on so many connections to a port. A connection that is ended comes again.
func (s *scenario) pour(p *victim, conns int, data []byte) *poured {
	s.Helper()
	f := &poured{}
	var ctx context.Context
	ctx, f.over = context.WithCancel(s.Context())
	for range conns {
		f.wg.Go(func() {
			for ctx.Err() == nil {
				if c, err := newAttacker(s).enter(p.boot, "ask", s.token); err == nil {
					stop := context.AfterFunc(ctx, func() { _ = c.conn.Close() })
					c.pour(p, math.MaxInt, data, &f.sent)
					stop()
				}
				select {
				case <-ctx.Done():
				case <-time.After(20 * time.Millisecond): // the attack's own pace
				}
			}
		})
	}
	return f
}

// pour says a request so many times, or until the connection ends, and reads what comes.
func (s *session) pour(p *victim, most int, data []byte, sent *atomic.Int64) {
	var read sync.WaitGroup
	read.Go(func() { pong(s.conn, s.br) })
	defer read.Wait()
	defer s.conn.Close()
	in := "_INBOX." + s.id + ".p"
	_, err := fmt.Fprintf(s.conn, "SUB %s.> 1\r\n", in)
	for n := 0; err == nil && n < most; n++ {
		if err = s.publish("kvconn.v1.agent."+p.id+"."+s.id, fmt.Sprint(in, ".", n), data); err == nil {
			sent.Add(1)
		}
	}
}

// pourPlain has a user of the cluster say long plain messages to prefill, as many bytes a second as a port would read of it. What comes
// faster is the NATS server's to bound.
func (s *scenario) pourPlain(p *victim) *poured {
	s.Helper()
	f := &poured{}
	var ctx context.Context
	ctx, f.over = context.WithCancel(s.Context())
	say := s.plain(p)
	f.wg.Go(func() {
		for ctx.Err() == nil && say() == nil {
			f.sent.Add(1)
			time.Sleep(time.Second / 16) // the attack's own pace
		}
	})
	return f
}

// plain says a plain message to prefill at a NATS server, as long as one may be.
func (s *scenario) plain(p *victim) (say func() error) {
	s.Helper()
	nc := s.user(s.hostile)
	mine := s.hostile.public + ".EVIL"
	n, data := 0, make([]byte, 1_000_000)
	return func() error {
		n++
		return nc.PublishRequest("kvconn.v1.agent."+spoken(p.id)+"."+mine, fmt.Sprint("_INBOX.", mine, ".", n), data)
	}
}

// TestRequestsWithoutPause: decode engines of the attacker's say short requests, or the longest that there are and that mean nothing, and
// do not wait for the answers. By short ones 19 of 20 honest loads failed. Now a client has 512 requests without an answer
// (maxUnanswered in natsbus/window.go), is read at a pace (natsbus/pace.go), and all have a budget (natsbus/budget.go).
func TestRequestsWithoutPause(t *testing.T) {
	short, err := (&wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{}}).MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []struct {
		name, before string
		data         []byte
	}{
		{"short", "19 of 20 honest loads failed", short},
		{"long", "not said", make([]byte, wire.MaxMessage)},
	} {
		t.Run(kind.name, func(t *testing.T) {
			atBoth(t, func(s *scenario) { requestsWithoutPause(s, kind.name, kind.before, kind.data) })
		})
	}
}

func requestsWithoutPause(s *scenario, name, was string, data []byte) {
	const conns = 4
	p, d := s.startPlain("prefill", nil), s.startPlain("decode", nil)
	before(s, p, d)
	var sent func() int64
	switch {
	case !s.cluster:
		f := s.pour(p, conns, data)
		defer f.end()
		sent = f.sent.Load
	case name == "long":
		f := s.pourPlain(p)
		defer f.end()
		sent = f.sent.Load
	default:
		var floods [conns]*answers
		for i := range floods {
			floods[i] = s.floodBy(s.open(s.options("decode")), p.id, &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{}})
		}
		sent = func() (n int64) {
			for _, f := range floods {
				n += f.answered.Load()
			}
			return n
		}
	}
	underWay(s, "requests", sent, 2*conns)
	h := &honest{}
	for i := range 2 * loadsBefore {
		h.load(s, p, d, fmt.Sprint("beside", i))
	}
	n := s.newcomersPlain(p, "new", 3)
	p.peak = p.mib("VmHWM")
	got(s, was, "%d requests, %s, of newcomers %s, %s", sent(), h.went(s), n.went(s), p.growth(s))
}

// longestHello is almost as long as a request may be, and takes long to be read.
func longestHello(t testing.TB) []byte {
	t.Helper()
	req := longHello()
	for i := range req.Hello.Shapes {
		req.Hello.Shapes[i] = wire.Shape{Name: fmt.Sprintf("%0110d", i), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks}
	}
	data, err := req.MarshalMsg(nil)
	if err != nil || len(data) > wire.MaxMessage || len(data) < wire.MaxMessage/2 {
		t.Fatalf("a hello of %d bytes, at most %d are read: %v", len(data), wire.MaxMessage, err)
	}
	return data
}

// TestBurstOfLongRequests: while loads wait for prefill's engine, a decode engine of the attacker's says 32 of the longest requests at
// once, 256 MiB. They broke the way between prefill's agent and its own server, and 20 of 50 loads that waited failed. Now a connection
// that has so much under way is ended (natsbus/budget.go), and the way has room for all that there may be (maxPending in
// natsbus/server.go).
func TestBurstOfLongRequests(t *testing.T) {
	atBoth(t, func(s *scenario) {
		const loads, burst = 10, 32
		p, d := s.startPlain("prefill", map[string]any{"early_load_s": 600}), s.startPlain("decode", nil)
		p.say("fill 170")
		before(s, p, d)
		for i := range loads {
			d.say("load waits%d %d 4 %s", i, 4*i, p.from())
		}
		p.poll("loads that wait", func(l said) bool { return l.Stats.OffersEarly == loads })
		var sent atomic.Int64
		if s.cluster {
			for say := s.plain(p); sent.Load() < burst && say() == nil; {
				sent.Add(1)
			}
		} else {
			c, err := newAttacker(s).enter(p.boot, "ask", s.token)
			if err != nil {
				s.Fatal(err)
			}
			_ = c.conn.SetWriteDeadline(time.Now().Add(4 * time.Second)) // it is read at a pace
			c.pour(p, burst, longestHello(s), &sent)
		}
		if sent.Load() < 2 {
			s.Errorf("%d requests were sent: the attack itself has failed", sent.Load())
		}
		h := &honest{}
		for i := range loads {
			p.say("offer waits%d %d 4", i, 4*i)
			began := time.Now()
			l := d.report(fmt.Sprint("waits", i))
			h.times = append(h.times, time.Since(began))
			if h.all++; l.Code == "ok" {
				h.well++
			} else {
				s.Logf("a load that waited: %+v", l)
			}
		}
		if bytes := d.say("bytes 0 %d", 4*loads).Bytes; bytes["170"] != loads*fourBlocks {
			s.Errorf("decode has %v", bytes)
		}
		n := s.newcomersPlain(p, "new", 2)
		p.peak = p.mib("VmHWM")
		got(s, "20 of 50 loads that waited failed", "%d long requests at once, of those that waited %s, of newcomers %s, %s", sent.Load(), h.went(s), n.went(s), p.growth(s))
	})
}
