package natsbus

import (
	"crypto/rand"
	"encoding/base32"
	mathrand "math/rand/v2"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"
)

// answers hands the answers that come over a link to the requests that wait for them. With nats.go's
// own requests each request would need a context that also ends with the link.
type answers struct {
	root string    // subjects of answers begin with it
	idle sync.Pool // channels that nobody waits at

	mu      sync.Mutex
	random  *mathrand.ChaCha8 // nobody can tell the next word from others
	waiting map[string]waiter // by the rest of the subject
}

// waiter is a request that waits for its answer.
type waiter struct {
	answer chan *nats.Msg
	// right says whether a message is the answer, and opens it. In a cluster others may send to the subject too: then right
	// says no, and the request goes on waiting. If nobody else can send there, right is nil.
	right func(m *nats.Msg) bool
}

// Bounds of the answers that have come and that nobody has handed to their requests yet: each is handed over at once.
const maxQueuedAnswers, maxQueuedAnswerBytes = 8192, 16 << 20

func newAnswers(inbox string) *answers {
	var seed [32]byte
	rand.Read(seed[:])
	return &answers{random: mathrand.NewChaCha8(seed), root: inbox + "." + randomName() + ".", waiting: map[string]waiter{}}
}

// listen hears answers until the connection is closed.
func (a *answers) listen(nc *nats.Conn) error {
	sub, err := nc.Subscribe(a.root+"*", a.came)
	if err != nil {
		return err
	}
	return sub.SetPendingLimits(maxQueuedAnswers, maxQueuedAnswerBytes)
}

// expect makes a subject for one answer. Only those who have got the request can know the subject.
// Nothing comes out of the channel after forget.
func (a *answers) expect(right func(m *nats.Msg) bool) (subj string, answer chan *nats.Msg) {
	answer, _ = a.idle.Get().(chan *nats.Msg)
	if answer == nil {
		answer = make(chan *nats.Msg, 1)
	}
	var token [20]byte
	a.mu.Lock()
	_, _ = a.random.Read(token[:])
	subj = string(base32.StdEncoding.AppendEncode(append(make([]byte, 0, 128), a.root...), token[:]))
	a.waiting[subj[len(a.root):]] = waiter{answer, right}
	a.mu.Unlock()
	return subj, answer
}

// forget ends the wait for an answer.
func (a *answers) forget(subj string, answer chan *nats.Msg) {
	a.mu.Lock()
	delete(a.waiting, subj[len(a.root):])
	a.mu.Unlock()
	select {
	case <-answer: // it came too late
	default:
	}
	a.idle.Put(answer)
}

// came gives a message to the request that it answers, once.
func (a *answers) came(m *nats.Msg) {
	token, ok := strings.CutPrefix(m.Subject, a.root)
	if !ok {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	w := a.waiting[token]
	if w.right != nil {
		a.mu.Unlock()
		right := w.right(m) // it may take a while
		a.mu.Lock()
		if w = a.waiting[token]; !right {
			return
		}
	}
	if w.answer != nil {
		delete(a.waiting, token)
		w.answer <- m // it has a place, which is the request's alone
	}
}

// noResponders says whether a server answers in the place of an agent that does not listen.
func noResponders(m *nats.Msg) bool {
	return len(m.Data) == 0 && m.Header.Get("Status") == "503"
}
