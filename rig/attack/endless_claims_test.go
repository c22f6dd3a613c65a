package attack

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// TestClaimsThatNeverEnd: a decode agent claims what a prefill engine has computed for it, renews its claims for ever, and loads
// nothing; or it loads by a grant at which nobody listens, with a lease of an hour. It kept all of prefill's blocks for as long as it
// liked. Now an offer ends when offer_timeout_s is over.
func TestClaimsThatNeverEnd(t *testing.T) { atBoth(t, claimsThatNeverEnd) }

func claimsThatNeverEnd(s *scenario) {
	p, d := s.start("prefill", map[string]any{"offer_timeout_s": 3}), s.start("decode", nil)
	before(s, p, d)
	r, _ := s.met(p)
	const hoarded = 16 // of four blocks each, all that there are
	renew := &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{}}
	for i := range hoarded {
		id := fmt.Sprint("hoarded", i)
		p.say("offer %s %d 4", id, 4*i)
		renew.Renew.Claims = append(renew.Renew.Claims, id)
		if i%2 == 1 {
			load := &wire.Load{TransferID: id, Transport: "tcp", Grant: make([]byte, 16), LeaseMS: time.Hour.Milliseconds()}
			load.Groups = []wire.Blocks{{IDs: wire.BlockIDs{1, 2, 3, 4}}}
			load.Grant[0] = byte(i)
			s.answer(r, p, &wire.Request{Kind: wire.KindLoad, Load: load})
		}
	}
	began := time.Now()
	h := &honest{}
	kept := 0
	for time.Since(began) < 4*time.Second {
		rep, now := s.answer(r, p, renew), 0
		for _, st := range rep.Statuses {
			if st := core.Status(st); st == core.StatusOffered || st == core.StatusSending {
				now++
			}
		}
		kept = max(kept, now)
		h.load(s, p, d, honestID(h.all))
	}
	for i := range hoarded {
		l := p.report(fmt.Sprint("hoarded", i))
		if i%2 == 0 && (l.Code != "expired" || !strings.Contains(l.Reason, "offer_timeout_s")) || l.Code == "ok" {
			s.Errorf("%+v", l)
		}
	}
	if kept < hoarded/2 {
		s.Errorf("%d of its offers were kept at a time: the attack itself has failed", kept)
	}
	got(s, "64 of 64 of prefill's blocks for all of 45 s (at 1a5364a)", "%d of %d blocks for offer_timeout_s 3, %s",
		4*kept, numBlocks, h.went(s))
	if s.server == nil { // a NATS server ends with its test, and victims that miss it are at work
		settle(s, p, d)
	}
}
