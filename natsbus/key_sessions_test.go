package natsbus

import (
	"testing"

	"github.com/kvconn/kvconn/rig/seed"
)

// TestEvictedSession: of all keys that have the most sessions in use, the one gives way whose session was not used for
// longest, by that session. The heap says so after any uses, as a look at all sessions does.
func TestEvictedSession(t *testing.T) {
	rnd := seed.Rand(t)
	lookAtAll := func(s *responderSessions) (first *responderSession) {
		most := 0
		for e := s.used.Front(); e != nil; e = e.Next() {
			v := e.Value.(*responderSession)
			if n := s.each[v.key].sessions.Len(); n > most {
				first, most = v, n
			}
		}
		return first
	}
	for range 50 {
		s, keys := newResponderSessions(), 1+rnd.IntN(20)
		var all []*responderSession
		for n := range uint64(500) {
			switch v := stub(n, byte(rnd.IntN(keys))); {
			case rnd.IntN(3) == 0 || s.used.Len() == 0:
				if !s.add(v) || s.use(v, 0) != arrivalNew {
					t.Fatal("a session is not taken")
				}
				all = append(all, v)
			case rnd.IntN(4) == 0: // one that has ended
				s.drop(s.used.Front().Value.(*responderSession))
			default:
				s.use(all[rnd.IntN(len(all))], n) // perhaps one that is forgotten
			}
			if rnd.IntN(4) > 0 || s.used.Len() == 0 {
				continue
			}
			want := lookAtAll(s)
			if got := s.heap.evictable(); got != want {
				t.Fatalf("session %d of a key with %d makes room, want %d of one with %d", got.id, got.owner.sessions.Len(), want.id, want.owner.sessions.Len())
			}
			s.drop(want)
		}
		if len(s.heap) != len(s.each) {
			t.Fatalf("%d keys in the heap, want %d", len(s.heap), len(s.each))
		}
	}
}
