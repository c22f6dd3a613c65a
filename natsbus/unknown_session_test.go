package natsbus

import (
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// forgetsSessions is an agent that knows no session at the first request.
func (s *sealedPair) forgetsSessions(t *testing.T) (id core.AgentID, opens, requests *atomic.Int32) {
	t.Helper()
	p := NewIdentity()
	opens, requests = new(atomic.Int32), new(atomic.Int32)
	if _, err := s.nc.Subscribe(subject(p.id, s.d), func(m *nats.Msg) {
		to := requestTagOf(m.Data)
		switch kindOfSealed(m.Data) {
		case sealOpen:
			_, opened, _ := p.accept(s.d, m.Data, uint64(opens.Add(1)))
			_ = m.Respond(opened)
		case sealRequest:
			requests.Add(1)
			_ = m.Respond(p.notice(s.d, &to, noticeAgain, ""))
		}
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.nc.FlushTimeout(within); err != nil {
		t.Fatal(err)
	}
	return p.id, opens, requests
}

// TestUnknownSession: an agent that forgets each session at once cannot be reached, to a caller. A request is repeated once.
func TestUnknownSession(t *testing.T) {
	s := newSealedPair(t)
	p, opens, requests := s.forgetsSessions(t)
	_, err := s.decode.Request(ctxOf(t, within), "", p, &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{}})
	mustBe(t, err, core.ErrUnreachable)
	if o, r := opens.Load(), requests.Load(); o < 2 || r != 2 {
		t.Errorf("%d opens and %d requests", o, r)
	}
}
