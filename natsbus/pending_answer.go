package natsbus

import (
	"fmt"
	"sync/atomic"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// pendingAnswer is what a requester waits for: the answer to a request of a session, or to an open.
type pendingAnswer struct {
	self       *Identity
	invalid    *atomic.Int64 // counts messages that are no answer
	to         core.AgentID
	requestTag requestTag
	session    *sealSession
	opening    *opening

	absent chan *nats.Msg // the word that nobody listens

	opened      *sealSession // the session that the opening has brought
	forgotten   bool         // the responder does not know the session
	invalidSeen atomic.Int32 // messages that were no answer
	attempt     *attempt     // the attempt that this is a part of, which is told too; nil: none
}

// attempt opens a session. All requests to that agent that have no session wait for it. It has a bound of its own: a request's
// time may be short, and with that as the bound each request would begin a new attempt.
type attempt struct {
	pendingAnswer
	noResponders atomic.Pointer[nats.Msg] // the word that nobody listens; nil if it has not come
	done         chan struct{}            // closed when session or err is set
	session      *sealSession
	err          error
	stale        *sealSession // the session that the agent does not know any more; nil: it knows the present one, or there is none
}

// right says whether a message is the answer, and opens it.
func (a *pendingAnswer) right(m *nats.Msg) bool {
	if noResponders(m) { // a server's word, which anybody can say
		select {
		case a.absent <- m:
		default: // it has been said already
		}
		if a.attempt != nil {
			a.attempt.noResponders.Store(m)
		}
		return false
	}
	switch kind := kindOfSealed(m.Data); {
	case kind == sealAnswer && a.session != nil:
		if plain, err := a.session.openAnswer(m.Data, &a.requestTag); err == nil {
			m.Data = plain
			return true
		}
	case kind == sealOpened && a.opening != nil:
		if s, err := a.opening.finish(m.Data); err == nil {
			a.opened = s
			return true
		}
	case kind == sealNotice:
		code, reason, err := a.self.readNotice(m.Data, a.to, &a.requestTag)
		if err != nil {
			break
		}
		if code == noticeAgain && a.session != nil {
			a.forgotten = true
			return true
		}
		if m.Data, err = refuse("%s", reason).MarshalMsg(nil); err == nil {
			return true
		}
	case kind == 0 && fault.On("seal-none"):
		return true
	}
	a.invalidSeen.Add(1)
	if a.attempt != nil {
		a.attempt.invalidSeen.Add(1)
	}
	a.invalid.Add(1)
	return false
}

// failed adds to an error what came in the answer's place.
func (a *pendingAnswer) failed(err error) error {
	if n := a.invalidSeen.Load(); n > 0 {
		return fmt.Errorf("%w (%d messages that it has not sealed came in the answer's place: its release of kvconn is another one, or a user of the NATS cluster answers for it)", err, n)
	}
	return err
}
