package natsbus

import (
	"slices"
	"testing/synctest"
	"time"
)

// pass lets time pass, and delivers what is due.
func (w *simWorld) pass(d time.Duration) {
	end := time.Now().Add(d)
	for {
		synctest.Wait()
		next := w.deal()
		if next == nil || next.due.After(end) {
			if !time.Now().Before(end) {
				return
			}
			time.Sleep(min(time.Until(end), 10*time.Millisecond)) // by steps: a timer may have somebody send
			continue
		}
		time.Sleep(time.Until(next.due))
		w.net.mu.Lock()
		at := slices.Index(w.net.flying, next)
		w.net.flying = slices.Delete(w.net.flying, at, at+1)
		w.net.mu.Unlock()
		w.net.deliver(next)
	}
}

// deal gives each new message its fate, and returns the one that is due first. Behind a port nothing is lost or doubled, or
// overtakes what its own connection carries: connections break there.
func (w *simWorld) deal() (next *simMessage) {
	n := w.net
	n.mu.Lock()
	defer n.mu.Unlock()
	list := n.flying
	n.flying = nil
	for _, m := range list {
		if !m.due.IsZero() {
			n.flying = append(n.flying, m)
			continue
		}
		rnd := w.rnd
		if m.from != nil { // a message's fate is its own, whatever else is under way
			rnd = m.chance(w.seed, 0)
		}
		m.due = time.Now().Add(time.Duration(rnd.Int64N(int64(3 * time.Millisecond))))
		fate := rnd.IntN(100)
		switch {
		case w.calm || m.from == nil: // a hostile operator says what it says when it likes
		case fate < 5 && w.server == nil:
			w.count("lost")
			continue
		case fate < 10 && w.server == nil:
			w.count("doubled")
			again := *m
			again.due = m.due.Add(time.Duration(rnd.Int64N(int64(time.Second))))
			n.flying = append(n.flying, &again)
		case fate < 30:
			w.count("delayed")
			m.due = m.due.Add(time.Duration(rnd.Int64N(int64(2 * time.Second))))
		}
		if w.server != nil && m.from != nil {
			if m.due.Before(m.from.last) {
				m.due = m.from.last
			}
			m.from.last = m.due
		}
		n.flying = append(n.flying, m)
	}
	for _, m := range n.flying {
		if next == nil || m.due.Before(next.due) {
			next = m
		}
	}
	return next
}
