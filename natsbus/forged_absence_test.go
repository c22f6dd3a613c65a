package natsbus

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
)

// TestForgedAbsence: in a cluster anybody who hears a request can say that nobody listens. The word counts only if the
// agent itself does not answer within absentGrace. Where only the server can say it, it counts at once.
func TestForgedAbsence(t *testing.T) {
	asks, answers := established(t, NewIdentity(), NewIdentity())
	self := &Identity{}
	word := func(subj string) *nats.Msg {
		return &nats.Msg{Subject: subj, Header: nats.Header{"Status": []string{"503"}}}
	}
	begin := func() (subj string, to requestTag, list *answersOf) {
		data := sealedRequest(asks, "put it there")
		to = requestTagOf(data)
		a := newSeals(self).pending(answers.peer, to)
		a.session = asks
		list = &answersOf{answers: newAnswers(inboxOf("D")), ended: make(chan *nats.Msg, 1)}
		subj, answer := list.expect(a.right)
		go func() {
			m, _ := await(context.Background(), context.Background(), answer, a.absent)
			list.ended <- m
		}()
		return subj, to, list
	}
	synctest.Test(t, func(t *testing.T) {
		subj, to, list := begin()
		list.came(word(subj))
		list.came(word(subj)) // said again, it begins no other wait
		time.Sleep(absentGrace - 1)
		synctest.Wait()
		if len(list.ended) != 0 {
			t.Fatalf("the word is believed before %v", absentGrace)
		}
		list.came(&nats.Msg{Subject: subj, Data: sealedAnswer(answers.sealSession, "I do", &to)})
		if m := <-list.ended; m == nil || string(m.Data) != "I do" {
			t.Errorf("the answer is not taken after the word: %v", m)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		subj, _, list := begin()
		began := time.Now()
		list.came(word(subj))
		time.Sleep(absentGrace / 2)
		list.came(word(subj))
		if m := <-list.ended; m == nil || !noResponders(m) || time.Since(began) != absentGrace {
			t.Errorf("without an answer the word counts after %v: %v", time.Since(began), m)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		list := newAnswers(inboxOf("D"))
		subj, answer := list.expect(nil)
		began := time.Now()
		list.came(word(subj))
		if m, err := await(context.Background(), context.Background(), answer, nil); err != nil || !noResponders(m) || time.Since(began) != 0 {
			t.Errorf("of the agent's own server the word counts after %v: %v, %v", time.Since(began), m, err)
		}
	})
}

// TestForgedAbsenceAndAShortTimeout: who waits for less than absentGrace is told that nobody listens too, also if the word came in the
// place of a session. One who has given up is not.
func TestForgedAbsenceAndAShortTimeout(t *testing.T) {
	word := &nats.Msg{Header: nats.Header{"Status": []string{"503"}}}
	synctest.Test(t, func(t *testing.T) {
		absent := make(chan *nats.Msg, 1)
		absent <- word
		shortWait, cancel := context.WithTimeout(context.Background(), absentGrace/2)
		defer cancel()
		if m, err := await(shortWait, context.Background(), nil, absent); m != word {
			t.Errorf("%v, %v", m, err)
		}
		for range 100 { // whatever else has come, an answer that is there counts
			answer := make(chan *nats.Msg, 1)
			answer <- &nats.Msg{}
			if m, err := await(shortWait, context.Background(), answer, nil); m == nil || m == word {
				t.Fatalf("%v, %v", m, err)
			}
		}
		absent <- word
		gone, cancel := context.WithCancel(context.Background())
		time.AfterFunc(absentGrace/2, cancel)
		if m, err := await(gone, context.Background(), nil, absent); err != context.Canceled {
			t.Errorf("%v, %v", m, err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		l, b := &link{seals: newSeals(NewIdentity())}, &Bus{}
		_, a, _ := l.seals.requester.get("P", nil, time.Now()) // another request's attempt
		one := l.seals.pending("P", requestTag{})
		one.attempt = a
		for _, came := range []bool{false, true} {
			if came {
				one.right(word)
			}
			shortWait, cancel := context.WithTimeout(context.Background(), absentGrace/2)
			defer cancel()
			_, err := b.sessionWith(shortWait, context.Background(), l, "P", nil)
			if u := (*unopened)(nil); errors.As(err, &u) != came || came && u.m != word || !came && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the word has come: %v; %v", came, err)
			}
		}
	})
}

// answersOf are the answers to one request.
type answersOf struct {
	*answers
	ended chan *nats.Msg // what the request's requester is given
}
