package attack

import (
	"context"
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

// endOfOthers says of so many transfers of others that they have failed.
func endOfOthers(n int) *wire.Request {
	req := &wire.Request{Kind: wire.KindFinish}
	for i := range n {
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

// hugeReply is an answer for so many transfers that nobody has asked for.
func hugeReply(n int) *wire.Reply {
	rep := &wire.Reply{Statuses: make([]uint8, n)}
	for i := range rep.Statuses {
		rep.Ends = append(rep.Ends, wire.End{Index: uint32(i), Code: int(core.Failed), Reason: strings.Repeat("A", 1024)})
	}
	return rep
}

func hugeAnswer(t testing.TB) string {
	t.Helper()
	data, err := hugeReply(2048).MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// floodsOfMet are what a prefill engine does that decode has met. A NATS server takes messages of a megabyte: there they are as many
// times shorter.
var floodsOfMet = []struct {
	name, role, before string
	hello              bool // it says hello to decode first
	words              func(cluster bool) []*wire.Request
}{
	{"renewals", "decode", "start_load 14.8 s, 6 of 8 honest loads failed, 870 MiB", false, func(bool) []*wire.Request {
		return []*wire.Request{renewalOfOthers()}
	}},
	{"renewals and loads after its own hello", "both", "start_load 14.8 s, 6 of 8 honest loads failed, 870 MiB", true, func(bool) []*wire.Request {
		all := []*wire.Request{renewalOfOthers()}
		for i := range 100 {
			load := &wire.Load{TransferID: honestID(i), Transport: "tcp", Grant: make([]byte, 16), Groups: []wire.Blocks{{IDs: wire.BlockIDs{1}}}}
			all = append(all, &wire.Request{Kind: wire.KindLoad, Load: load}, all[0])
		}
		return all
	}},
	{"messages of each kind", "decode", "not tried", false, func(cluster bool) []*wire.Request {
		ends, size := 4096, wire.MaxSignal
		if cluster {
			ends, size = ends/8, size/8
		}
		signal := &wire.Request{Kind: wire.KindSignal, Signal: &wire.Signal{Transport: "tcp", Data: make([]byte, size)}}
		return []*wire.Request{endOfOthers(ends), signal, longHello()}
	}},
	{"answers", "decode", "not tried", false, nil},
}

// TestPrefillThatWasMet: a host that decode has met as a prefill engine, and that knows the ids of
// others' loads. It floods decode by its messages, or by its answers. It never sends what decode
// loads from it. Others' loads go on, and decode has its blocks back when load_timeout_s is over.
// In a cluster it is a prefill engine with a key of its own. There it can give no answer unasked: natsbus TestAnswersOfUsers.
func TestPrefillThatWasMet(t *testing.T) {
	for i := range floodsOfMet {
		t.Run(strings.ReplaceAll(floodsOfMet[i].name, " ", "-"), func(t *testing.T) {
			for _, m := range both() {
				if m.both = floodsOfMet[i].role == "both"; m.cluster && floodsOfMet[i].name == "renewals" {
					continue // TestHostThatRenews makes the same there
				}
				t.Run(m.name, func(t *testing.T) { prefillThatWasMet(newScenario(t, m), i) })
			}
		})
	}
}

func prefillThatWasMet(t *scenario, which int) {
	a := &floodsOfMet[which]
	timeout := map[string]any{"load_timeout_s": 3}
	if !t.cluster {
		timeout["engine_id"] = "d0"
	}
	p, d := t.startPlain("prefill", nil), t.startPlain(a.role, timeout)
	p.say("fill 170")
	calm := before(t, p, d)
	e := t.hostilePrefill("evil")
	if a.name == "answers" {
		e.answersHugely(t)
	}
	began := time.Now()
	d.say("load mine 10 2 %s", e.from())
	var heard *answers
	end := func() {}
	if t.cluster {
		e.load(t, "mine")
		heard = t.floodsByBus(e, d, a.hello, a.words)
	} else {
		l := await(t, "hello", e.met)
		e.load(t, "mine")
		heard, end = &l.answers, func() { _ = l.conn.Close() }
		l.floodsAsHost(t, a.hello, a.words)
	}
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
	if a.name != "answers" && (heard.answered.Load() == 0 || heard.unmet.Load() > 0) {
		t.Errorf("of %d answers of decode %d want a hello first: the attack itself has failed", heard.answered.Load(), heard.unmet.Load())
	}
	if a.role == "decode" && heard.told.Load() > 0 {
		t.Errorf("decode tells it something of %d transfers of others", heard.told.Load())
	}
	got(t, a.before, "start_load at most %.2f ms, blocks back after at most %.1f s of load_timeout_s 3, %s, before the attack %s, %s", d.slowest, back.Seconds(), h.went(t), calm.went(t), d.growth(t))
	end()
	if t.cluster {
		return // a NATS server ends with its test
	}
	settle(t, p)
	if a.name != "messages of each kind" { // decode still remembers 4,096 ends, with reasons of 1 KiB
		settle(t, d)
	}
}

// answersHugely has it answer each renewal for transfers that nobody has asked for.
func (e *hostilePrefill) answersHugely(t testing.TB) {
	if e.bus != nil {
		e.renewal.Store(hugeReply(512))
		return
	}
	huge := hugeAnswer(t)
	e.answer = func(l *hostileLink, reply string, req *wire.Request) bool {
		if req.Kind == wire.KindRenew {
			l.send(reply, "", []byte(huge))
		}
		return req.Kind == wire.KindRenew
	}
}

// floodsByBus floods decode by words, if there are any.
func (s *scenario) floodsByBus(e *hostilePrefill, d *victim, hello bool, words func(cluster bool) []*wire.Request) *answers {
	s.Helper()
	if hello {
		ctx, cancel := context.WithTimeout(s.Context(), bound)
		defer cancel()
		if rep, err := e.bus.Request(ctx, "", core.AgentID(d.id), aHello()); err != nil || rep.Code != 0 {
			s.Fatalf("its hello: %+v, %v", rep, err)
		}
	}
	if words == nil {
		return &answers{}
	}
	heard := s.floodBy(e.bus, d.id, words(true)...)
	underWay(s, "answers of decode's", heard.answered.Load, 1)
	return heard
}

// floodsAsHost floods the agent by words or, if there are none, by answers that nobody has asked for.
func (l *hostileLink) floodsAsHost(t testing.TB, hello bool, words func(cluster bool) []*wire.Request) {
	t.Helper()
	if hello {
		_ = l.write(l.ask(t, aHello()))
		await(t, "answer to its hello", l.heard)
	}
	var all []string
	if words != nil {
		asked := map[*wire.Request]string{}
		for _, req := range words(false) {
			if asked[req] == "" {
				asked[req] = l.ask(t, req)
			}
			all = append(all, asked[req])
		}
		go l.flood(all...)
		return
	}
	huge := hugeAnswer(t)
	l.mu.Lock()
	wants := slices.Collect(maps.Values(l.wants)) // of the look-up, and of the agents
	l.mu.Unlock()
	if len(wants) < 2 {
		t.Fatalf("the agent wants answers at %v", wants)
	}
	for _, subject := range wants {
		all = append(all, l.to(subject, "", "", len(huge))+huge+"\r\n")
	}
	go l.flood(all...)
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
