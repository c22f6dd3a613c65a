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

// answer notes an answer, unless a later question has one.
func (t *roleProbe) answer(question uint64, role string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if question > t.answered {
		t.answered, t.role, t.reports = question, role, t.reports || role != ""
	}
}

// stoppedReporting reports whether a server that has told its role before does so no more.
func (t *roleProbe) stoppedReporting(role string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return role == "" && t.reports
}

// doIfCurrent does what follows from a role, and reports true, unless the server's last word is another role.
func (t *roleProbe) doIfCurrent(role string, do func()) bool {
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
