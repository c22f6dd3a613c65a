package proxy

import "sync"

// told is the last word of a server on its role. Two probes of one server may be under way, since it is given in both roles or a
// request has it asked between two probes, and a probe may take long after it has heard the role.
type told struct {
	mu    sync.Mutex
	asked uint64 // questions so far
	heard uint64 // the last question that has an answer
	role  string // that answer
	tells bool   // it has told a role at least once
}

// ask begins a question.
func (t *told) ask() (question uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.asked++
	return t.asked
}

// hear notes an answer, unless a later question has one.
func (t *told) hear(question uint64, role string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if question > t.heard {
		t.heard, t.role, t.tells = question, role, t.tells || role != ""
	}
}

// silent reports whether a server that has told its role before does so no more.
func (t *told) silent(role string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return role == "" && t.tells
}

// still does what follows from a role, and reports true, unless the server's last word is another role.
func (t *told) still(role string, do func()) bool {
	if t == nil { // by contracts without changes of role
		do()
		return true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.role != role {
		return false
	}
	do()
	return true
}
