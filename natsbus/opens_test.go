package natsbus

import (
	"crypto/rand"
	"testing"

	"github.com/nats-io/nats.go"
)

// TestFloodOfOpens: strangers' opens wait in places of their own, take none of a request's, and are not held beyond a
// bound. When they are answered, honest agents open sessions as before.
func TestFloodOfOpens(t *testing.T) {
	s := newSealedPair(t)
	s.request(t, "answer 1 to D")
	s.prefill.openers <- struct{}{} // one open's answer takes long
	const excess = 10
	flood := func(n int) {
		for range n {
			open := make([]byte, openBytes)
			_, _ = rand.Read(open)
			open[0], open[1], open[2] = sealMark, sealVersion, byte(sealOpen)
			if err := s.nc.PublishMsg(&nats.Msg{Subject: subject(s.p, s.d), Reply: inboxOf(s.d) + ".1", Data: open}); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.nc.FlushTimeout(within); err != nil {
			t.Fatal(err)
		}
	}
	seals := s.prefill.seals
	flood(maxOpens + excess)
	counted(t, "opens beyond the bound", &seals.crowded, excess, func() bool { return false })
	if n := len(s.prefill.opens); n != maxOpens {
		t.Errorf("%d opens wait, want %d", n, maxOpens)
	}
	s.request(t, "answer 2 to D")
	<-s.prefill.openers
	s.prefill.answerOpens()
	other := newBus(t, Options{Identity: named("D2"), ClusterURL: s.url, Token: "right", ConnectTimeout: within})
	if r, err := other.Request(ctxOf(t, within), "", s.p, hello("D2")); err != nil || r.Reason != "answer 3 to D2" {
		t.Errorf("%+v, %v", r, err)
	}
	counted(t, "opens that are forged", &seals.forged, maxOpens, func() bool { return false })
}
