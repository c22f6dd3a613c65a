package proxy

import "sync"

// roleProbe is the last word of a server on its role. Two probes of one server may be under way, since it is given in both roles or a
// request has it asked between two probes, and a probe may take long after it has heard the role.
type roleProbe struct {
	mu       sync.Mutex
	started  uint64 // questions so far
	answered uint64 // the last question that has an answer
	role     string // that answer
	reports  bool   // it has told a role at least once
}

// begin begins a question.
func (t *roleProbe) begin() (question uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.started++
	return t.started
}

// answer notes the answer to a question, unless a later question has been answered already.
func (t *roleProbe) answer(question uint64, role string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if question > t.answered {
		t.answered, t.role, t.reports = question, role, t.reports || role != ""
	}
}

// stoppedReporting reports whether a server has told its role before and does not tell it any more.
func (t *roleProbe) stoppedReporting(role string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return role == "" && t.reports
}

// doIfCurrent calls do, which does what follows from a role, and reports true. If the server's last answer was another role, it
// does not call do, and reports false.
func (t *roleProbe) doIfCurrent(role string, do func()) bool {
	if t == nil { // the contract has no changes of role
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
