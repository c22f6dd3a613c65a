package attack

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/wire"
)

// poll waits until a victim's counters are so.
func (v *victim) poll(what string, f func(said) bool) said {
	v.t.Helper()
	for deadline := time.Now().Add(bound); ; time.Sleep(time.Millisecond) { // a poll of another process's state
		if l := v.say("stats"); f(l) {
			return l
		}
		if time.Now().After(deadline) {
			v.t.Fatalf("%s: not within %v", what, bound)
		}
	}
}

// loadEarly has decode load what prefill's engine has not named yet. It is true if prefill keeps the load.
func loadEarly(p, d *victim, id string) (kept bool) {
	d.t.Helper()
	d.say("load %s 20 4 %s", id, p.from())
	l := d.poll("load of "+id, func(l said) bool { return l.Stats.LoadsWaiting > 0 || l.Stats.LoadsUnderWay == 0 })
	return l.Stats.LoadsWaiting > 0
}

// early makes a load that comes before prefill's engine offers what it is of.
func (h *honest) early(t testing.TB, p, d *victim, id string) {
	t.Helper()
	h.all++
	began := time.Now()
	kept := loadEarly(p, d, id)
	p.say("offer %s 4 4", id)
	l := d.report(id)
	h.times = append(h.times, time.Since(began))
	if kept && l.Code == "ok" {
		h.well++
	} else {
		t.Logf("honest early load %s: %+v", id, l)
	}
}

// sharedClaims claims transfers that nobody has named, each in 64 shares: one message takes as many places as there are.
func sharedClaims() *wire.Request {
	r := &wire.Renew{}
	for i := range core.Defaults.MaxTransfers / kv.MaxShares {
		r.Claims = append(r.Claims, string(machine.PartID(core.TransferID(fmt.Sprint("taken", i)), kv.Share{Of: kv.MaxShares})))
	}
	return &wire.Request{Kind: wire.KindRenew, Renew: r}
}

// TestPlacesOfEarlyLoads: a decode engine claims transfers that prefill's engine never names, and does so again and again. One
// message took all places of claims and loads that come before prefill's engine names theirs, and honest ones were refused. Now the
// account that has the most gives way, and in it the engine.
func TestPlacesOfEarlyLoads(t *testing.T) {
	inEachDeployment(t, func(s *scenario) {
		p, d := s.start("prefill", nil), s.start("decode", nil)
		h := &honest{}
		r, _ := s.met(p)
		claims := sharedClaims()
		s.answer(r, p, claims)
		taken := p.say("stats").Stats.OffersEarly
		if taken < core.Defaults.MaxTransfers {
			s.Errorf("%d places are taken: the attack itself has failed", taken)
		}
		ctx, over := context.WithCancel(s.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			for ctx.Err() == nil {
				_, _ = r.within(time.Second, p, claims)
			}
		})
		for i := range loadsBefore {
			h.early(s, p, d, fmt.Sprint("beside", i))
		}
		over()
		wg.Wait()
		got(s, "99 of 99 honest early loads refused for 30 s, by one message (at 1a5364a)", "%d places taken, and again; %s",
			taken, h.went(s))
	})
}

// claimOf claims one transfer that nobody has named.
func claimOf(id string) *wire.Request {
	return &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{Claims: []string{id}}}
}

// TestPlacesOfManyIdentities: identities cost nothing, so an attacker makes as many as there are places for early claims, and claims one
// transfer by each. All had as many as an honest decode engine would have, and honest loads were refused. Now they share what their
// address gets at a port, or their nkey in a cluster.
func TestPlacesOfManyIdentities(t *testing.T) {
	atBoth(t, func(s *scenario) {
		identities := 300
		if s.cluster || raced {
			identities = 64 // in a cluster each is an agent with all that it has; the race detector makes hellos slow
		}
		p, d := s.start("prefill", map[string]any{"max_transfers": identities, "early_load_s": 600}), s.start("decode", nil)
		before(s, p, d)
		if s.cluster {
			for i := range identities {
				r, _ := s.met(p)
				s.answer(r, p, claimOf(fmt.Sprint("taken", i)))
			}
		} else {
			var n atomic.Int64
			crowd(identities, func(a *attacker) {
				c, err := a.enter(p.boot, "ask", s.token)
				if err == nil {
					_, err = c.ask(p.id, c.id, aHello())
				}
				if err == nil {
					_, err = c.ask(p.id, c.id, claimOf(fmt.Sprint("taken", n.Add(1))))
				}
				if err != nil {
					s.Error(err)
				}
			}, s.T)
		}
		taken := p.say("stats").Stats.OffersEarly
		if taken < identities {
			s.Errorf("%d places are taken: the attack itself has failed", taken)
		}
		h := &honest{}
		for i := range 7 {
			h.early(s, p, d, fmt.Sprint("beside", i))
		}
		got(s, "7 of 7 honest early loads refused (at 1ada3a7)", "%d of %d places taken by %d identities; %s", taken, identities, identities, h.went(s))
	})
}

// unknownEnds says of 4,096 transfers that nobody has heard of that they have ended.
func unknownEnds(round int) *wire.Request {
	req := &wire.Request{Kind: wire.KindFinish}
	for i := range 4096 {
		req.Finishes = append(req.Finishes, wire.Finish{TransferID: fmt.Sprint("x", round, "-", i), Code: int(core.Cancelled)})
	}
	return req
}

// TestEndsOfUnknownTransfers: decode aborts what prefill's engine has not offered yet. Another decode engine tells the ends of
// transfers that nobody knows, as many as prefill remembers. Prefill forgot the honest ends, and kept the blocks of each until its
// lease was over. Now it remembers them.
func TestEndsOfUnknownTransfers(t *testing.T) {
	inEachDeployment(t, func(s *scenario) {
		const aborts, rounds = 8, 6
		p, d := s.start("prefill", map[string]any{"lease_s": 600}), s.start("decode", nil)
		r, _ := s.met(p)
		for i := range aborts {
			id := fmt.Sprint("aborted", i)
			if !loadEarly(p, d, id) {
				s.Fatalf("prefill does not keep %s", id)
			}
			d.say("cancel %s", id)
			d.report(id)
			p.poll("end of "+id, func(l said) bool { return l.Stats.OffersEarly == 0 })
		}
		for i := range rounds {
			if rep := s.answer(r, p, unknownEnds(i)); rep.Code != 0 {
				s.Fatalf("prefill refuses its words: %+v", rep)
			}
		}
		h := &honest{}
		for i := range aborts {
			id := fmt.Sprint("aborted", i)
			p.say("offer %s %d 4", id, 4*i)
			if l := p.report(id); l.Code == "ok" || strings.Contains(l.Reason, "lease") { // until waits no longer than bound
				s.Errorf("the offer of what decode has aborted: %+v", l)
			}
			h.load(s, p, d, fmt.Sprint("beside", i))
		}
		got(s, "blocks of aborted requests back after 30 s in place of 0.03 s, by one message (at 1a5364a)",
			"blocks of %d aborted requests back at once, after %d words of unknown ends, %s", aborts, 4096*rounds, h.went(s))
	})
}
