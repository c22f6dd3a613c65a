package attack

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// honestID are the ids of the honest loads, which the attacker knows.
func honestID(i int) string { return fmt.Sprint("honest", i) }

// renewalOfOthers keeps 1,024 loads and as many claims of others.
func renewalOfOthers() *wire.Request {
	r := &wire.Renew{}
	for i := range 1024 {
		r.Loads, r.Claims = append(r.Loads, honestID(i)), append(r.Claims, honestID(i))
	}
	return &wire.Request{Kind: wire.KindRenew, Renew: r}
}

// endOfOthers says of 4,096 transfers of others that they have failed.
func endOfOthers() *wire.Request {
	req := &wire.Request{Kind: wire.KindFinish}
	for i := range 4096 {
		req.Finishes = append(req.Finishes, wire.Finish{TransferID: honestID(i), Code: int(core.Failed), Reason: strings.Repeat("A", 1024)})
	}
	return req
}

// longHello is as long as one may be.
func longHello() *wire.Request {
	req := aHello()
	req.Hello.Shapes = make([]wire.Shape, 60000)
	return req
}

// hugeAnswer is an answer for 2,048 transfers that nobody has asked for.
func hugeAnswer(t testing.TB) string {
	t.Helper()
	rep := &wire.Reply{Statuses: make([]uint8, 2048)}
	for i := range rep.Statuses {
		rep.Ends = append(rep.Ends, wire.End{Index: uint32(i), Code: int(core.Failed), Reason: strings.Repeat("A", 1024)})
	}
	data, err := rep.MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestPrefillThatWasMet: a host that decode has met as a prefill engine, and that knows the ids of
// others' loads. It floods decode by its messages, or by its answers. It never sends what decode
// loads from it. Others' loads go on, and decode has its blocks back when load_timeout_s is over.
func TestPrefillThatWasMet(t *testing.T) {
	for _, a := range []struct {
		name, role, before string
		attack             func(t *testing.T, e *hostilePrefill, l *hostileLink)
	}{
		{"renewals", "decode", "start_load 14.8 s, 6 of 8 honest loads failed, 870 MiB", func(t *testing.T, _ *hostilePrefill, l *hostileLink) {
			go l.flood(l.ask(t, renewalOfOthers()))
		}},
		{"renewals and loads after its own hello", "both", "start_load 14.8 s, 6 of 8 honest loads failed, 870 MiB", func(t *testing.T, _ *hostilePrefill, l *hostileLink) {
			_ = l.write(l.ask(t, aHello()))
			await(t, "answer to its hello", l.heard)
			all := []string{l.ask(t, renewalOfOthers())}
			for i := range 100 {
				load := &wire.Load{TransferID: honestID(i), Transport: "tcp", Grant: make([]byte, 16), Groups: []wire.Blocks{{IDs: wire.BlockIDs{1}}}}
				all = append(all, l.ask(t, &wire.Request{Kind: wire.KindLoad, Load: load}), all[0])
			}
			go l.flood(all...)
		}},
		{"messages of each kind", "decode", "not tried", func(t *testing.T, _ *hostilePrefill, l *hostileLink) {
			signal := &wire.Request{Kind: wire.KindSignal, Signal: &wire.Signal{Transport: "tcp", Data: make([]byte, wire.MaxSignal)}}
			go l.flood(l.ask(t, endOfOthers()), l.ask(t, signal), l.ask(t, longHello()))
		}},
		{"answers", "decode", "not tried", func(t *testing.T, _ *hostilePrefill, l *hostileLink) {
			huge := hugeAnswer(t)
			l.mu.Lock()
			wants := slices.Collect(maps.Values(l.wants)) // of the look-up, and of the agents
			l.mu.Unlock()
			if len(wants) < 2 {
				t.Fatalf("the agent wants answers at %v", wants)
			}
			var again []string
			for _, subject := range wants {
				again = append(again, l.to(subject, "", "", len(huge))+huge+"\r\n")
			}
			go l.flood(again...)
		}},
	} {
		t.Run(strings.ReplaceAll(a.name, " ", "-"), func(t *testing.T) {
			p := start(t, map[string]any{"role": "prefill"})
			d := start(t, map[string]any{"role": a.role, "engine_id": "d0", "load_timeout_s": 3})
			p.say("fill 170")
			calm := before(t, p, d)
			e := newHostilePrefill(t)
			if a.name == "answers" {
				huge := hugeAnswer(t)
				e.answer = func(l *hostileLink, reply string, req *wire.Request) bool {
					if req.Kind == wire.KindRenew {
						l.send(reply, "", []byte(huge))
					}
					return req.Kind == wire.KindRenew
				}
			}
			began := time.Now()
			d.say("load mine 10 2 %s", e.boot)
			l := await(t, "hello", e.met)
			e.load(t, "mine")
			a.attack(t, e, l)
			h := &honest{}
			loads := 100
			if raced {
				loads = loadsBefore // no figures are held to anything
			}
			for i := range loads {
				h.load(t, p, d, honestID(i))
			}
			mine := d.report("mine")
			back := mine.at.Sub(began)
			// Its own flood may keep its answers from decode, which then takes it for gone.
			if mine.Code == "ok" || a.name != "answers" && !raced && mine.Code != "peer-lost" && !strings.Contains(mine.Reason, "load_timeout_s") {
				t.Errorf("decode's load from it: %+v", mine)
			}
			if got := d.say("bytes 10 2").Bytes; got["0"] != 2*layers*blockBytes {
				t.Errorf("decode has %v in the load's blocks, though nothing was sent", got)
			}
			if got := d.say("bytes").Bytes; got["170"] != 4*layers*blockBytes {
				t.Errorf("decode has %v", got)
			}
			if a.name != "answers" && (l.answered.Load() == 0 || l.unmet.Load() > 0) {
				t.Errorf("of %d answers of decode %d want a hello first: the attack itself has failed", l.answered.Load(), l.unmet.Load())
			}
			if a.role == "decode" && l.told.Load() > 0 {
				t.Errorf("decode tells it something of %d transfers of others", l.told.Load())
			}
			got(t, a.before, "start_load at most %.2f ms, blocks back after at most %.1f s of load_timeout_s 3, %s, before the attack %s, %s", d.slowest, back.Seconds(), h.went(t), calm.went(t), d.growth(t))
			_ = l.conn.Close()
			settle(t, p)
			if a.name != "messages of each kind" { // decode still remembers 4,096 ends, with reasons of 1 KiB
				settle(t, d)
			}
		})
	}
}

// TestEnormousEntries: hosts answer the look-up by an entry of 60,000 regions. Each load from one ends with the reason, and
// others go on.
func TestEnormousEntries(t *testing.T) {
	p := start(t, map[string]any{"role": "prefill"})
	d := start(t, map[string]any{"role": "decode"})
	calm := before(t, p, d)
	e := newHostilePrefill(t)
	a := longHello().Hello
	a.ID, a.EngineID = e.id, "p0"
	for i := range a.Shapes {
		a.Shapes[i] = wire.Shape{Name: fmt.Sprintf("layer.%0100d", i), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks}
	}
	var err error
	if e.entry, err = a.MarshalMsg(nil); err != nil {
		t.Fatal(err)
	}
	h := &honest{}
	for i := range loadsBefore {
		d.say("load huge%d 10 2 %s", i, e.boot)
		h.load(t, p, d, honestID(i))
		if i%5 == 4 {
			for k := i - 4; k <= i; k++ {
				if l := d.report(fmt.Sprint("huge", k)); l.Code == "ok" || !strings.Contains(l.Reason, "refuses") {
					t.Errorf("a load from it: %+v", l)
				}
			}
		}
	}
	got(t, "not tried", "start_load at most %.2f ms, %s, %s", d.slowest, h.comparedWith(t, calm), d.growth(t))
	settle(t, p, d)
}
