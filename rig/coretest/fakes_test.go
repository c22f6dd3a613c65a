package coretest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

// TestOnChunk cuts a write of four chunks at the third one.
func TestOnChunk(t *testing.T) {
	for _, c := range []struct {
		name string
		cut  func(p, d *endpoint)
	}{
		{"revoke", func(p, d *endpoint) { d.revoke("t") }},
		{"stop", func(p, d *endpoint) { p.tr.Stop("t") }},
		{"receiver closes", func(p, d *endpoint) { d.close() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			leaktest.Check(t)
			n := NewNetwork()
			f := Fixture{Open: func(_ *testing.T, id core.AgentID, l *kv.Layout, sink core.Sink, _ core.Signal) core.Transport {
				return n.NewTransport(id, l, sink)
			}}
			p, d := pair(t, f, dense(chunk, 8), dense(chunk, 8))
			n.OnChunk(func(id core.TransferID, k int) {
				if id == "t" && k == 2 {
					c.cut(p, d)
				}
			})
			src, dst := [][]kv.BlockID{sequence(0, 4)}, [][]kv.BlockID{{6, 4, 2, 0}}
			p.paint(1, src)
			p.write("t", d, d.expect("t", p, dst), src, dst)
			if o := p.sink.Wait("written", "t", 1); o.Err == nil || o.Stats.Bytes != 2*chunk {
				t.Errorf("written %d bytes, %v; want two chunks and an error", o.Stats.Bytes, o.Err)
			}
			d.check(t, delivery{transfer: 1, blocks: [][]kv.BlockID{dst[0][:2]}})
			noReceived(t, d, "t", 0)
		})
	}
}

func newTestBuses(t *testing.T) (c *Cluster, d, p *Bus) {
	c = NewCluster()
	d, p = c.NewBus("d1", ""), c.NewBus("p1", "http://p:1")
	p.Serve(func(via core.Via, req *wire.Request) *wire.Reply {
		return &wire.Reply{Code: 7, Reason: string(via) + " " + req.From}
	})
	t.Cleanup(func() {
		for _, b := range []*Bus{d, p} {
			if err := b.Close(context.Background()); err != nil {
				t.Error(err)
			}
		}
	})
	return c, d, p
}

func finish(from string) *wire.Request {
	return &wire.Request{Kind: wire.KindFinish, From: from, Finishes: []wire.Finish{{TransferID: "t"}}}
}

func TestBusFindsAndAsks(t *testing.T) {
	leaktest.Check(t)
	_, d, p := newTestBuses(t)
	ctx := context.Background()
	target := core.Target{Bootstrap: "http://p:1", EngineID: "e", TPRank: 1}
	if _, _, err := d.Lookup(ctx, target); !errors.Is(err, core.ErrNotRegistered) {
		t.Errorf("before Register: %v", err)
	}
	for _, a := range []*wire.Agent{{ID: "old", EngineID: "e", TPRank: 1}, {ID: "p1", EngineID: "e", TPRank: 1}, {ID: "p0", EngineID: "e"}} {
		if err := p.Register(ctx, a); err != nil {
			t.Fatal(err)
		}
	}
	a, via, err := d.Lookup(ctx, target)
	if err != nil || a.ID != "p1" || via != "http://p:1" {
		t.Fatalf("Lookup: %+v, %q, %v", a, via, err)
	}
	if a, _, err := d.Lookup(ctx, core.Target{Bootstrap: "http://p:1", TPRank: 1}); err != nil || a.ID != "p1" {
		t.Errorf("Lookup of the only engine: %+v, %v", a, err)
	}
	if _, _, err := d.Lookup(ctx, core.Target{Bootstrap: "http://q:1", EngineID: "e"}); !errors.Is(err, core.ErrUnreachable) {
		t.Errorf("Lookup at an address that nobody serves: %v", err)
	}
	rep, err := d.Request(ctx, via, "p1", finish("d1"))
	if err != nil || rep.Code != 7 || rep.Reason != "http://p:1 d1" {
		t.Errorf("Request: %+v, %v", rep, err)
	}
	if _, err := d.Request(ctx, via, "p9", finish("d1")); !errors.Is(err, core.ErrAbsent) {
		t.Errorf("Request to nobody: %v", err)
	}
	if _, err := d.Request(ctx, via, "p1", &wire.Request{Kind: wire.KindLoad}); err == nil {
		t.Errorf("a request that does not fit on the wire was delivered")
	}
	p.Kill()
	if _, err := d.Request(ctx, via, "p1", finish("d1")); !errors.Is(err, core.ErrAbsent) {
		t.Errorf("Request to a killed agent: %v", err)
	}
	if err := d.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Request(ctx, via, "p1", finish("d1")); err == nil {
		t.Errorf("Request on a closed bus gave no error")
	}
}

func TestBusFaults(t *testing.T) {
	leaktest.Check(t)
	c, d, p := newTestBuses(t)
	calls := make(chan string, 10)
	p.Serve(func(_ core.Via, req *wire.Request) *wire.Reply {
		calls <- req.From
		return &wire.Reply{}
	})
	onChunk := make(chan struct{})
	boom := errors.New("boom")
	for _, f := range []struct {
		name  string
		fault Fault
		want  error
		calls int
	}{
		{"none", Fault{}, nil, 1},
		{"drop", Fault{Drop: true}, context.DeadlineExceeded, 0},
		{"drop reply", Fault{DropReply: true}, context.Canceled, 1},
		{"twice", Fault{Twice: true}, nil, 2},
		{"error", Fault{Err: boom}, boom, 0},
		{"wait", Fault{Wait: onChunk}, context.DeadlineExceeded, 0},
	} {
		t.Run(f.name, func(t *testing.T) {
			c.SetFault(func(Message) Fault { return f.fault })
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
			defer cancel()
			switch f.want {
			case nil, boom: // which come however long that takes
				ctx = context.Background()
			case context.Canceled: // when the handler was called, however long that takes
				ctx, cancel = context.WithCancel(context.Background())
				go func() {
					from := <-calls
					cancel()
					calls <- from
				}()
			}
			if _, err := d.Request(ctx, "", "p1", finish("d1")); !errors.Is(err, f.want) {
				t.Errorf("error %v, want %v", err, f.want)
			}
			for range f.calls {
				<-calls
			}
			if len(calls) > 0 {
				t.Errorf("the handler was called too often")
			}
		})
	}
	// Held back, then let go.
	done := make(chan error)
	go func() {
		_, err := d.Request(context.Background(), "", "p1", finish("d1"))
		done <- err
	}()
	close(onChunk)
	if err := <-done; err != nil {
		t.Errorf("after the fault was lifted: %v", err)
	}
	<-calls
}

func TestClock(t *testing.T) {
	leaktest.Check(t)
	c := NewClock()
	start := c.Now()
	var got []time.Duration
	note := func(now time.Time) { got = append(got, now.Sub(start)) }
	stop := c.NewTicker(30*time.Millisecond, note)
	stopOther := c.NewTicker(50*time.Millisecond, note)
	c.Advance(29 * time.Millisecond)
	if len(got) != 0 {
		t.Fatalf("fired at %v", got)
	}
	c.Advance(71 * time.Millisecond)
	stop()
	c.Advance(50 * time.Millisecond)
	stopOther()
	c.Advance(time.Hour)
	want := []time.Duration{30, 50, 60, 90, 100, 150}
	if len(got) != len(want) {
		t.Fatalf("fired at %v, want %v ms", got, want)
	}
	for i, d := range want {
		if got[i] != d*time.Millisecond {
			t.Errorf("fired at %v, want %v ms", got, want)
			break
		}
	}
	if c.Tickers() != 0 || c.Now().Sub(start) != time.Hour+150*time.Millisecond {
		t.Errorf("%d tickers left at %v", c.Tickers(), c.Now().Sub(start))
	}
}
