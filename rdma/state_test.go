package rdma

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestTransitions: the table in the comment is the program's table.
func TestTransitions(t *testing.T) {
	text, err := os.ReadFile("state.go")
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile(`(?m)^//\t(\w+) +(.*)$`).FindAllStringSubmatch(string(text), -1)
	if len(rows) != len(transitions)-1 {
		t.Fatalf("%d states are in the comment, want %d", len(rows), len(transitions)-1)
	}
	for i, row := range rows {
		s := state(i + 1)
		var want []string
		for _, to := range transitions[s] {
			want = append(want, strings.Replace(to.String(), "none", "-", 1))
		}
		got := strings.Fields(row[2])
		if row[1] != s.String() || !slices.Equal(got[:min(len(got), int(events))], want) {
			t.Errorf("the comment has %s: %v, the program %v: %v", row[1], got, s, want)
		}
	}
}

// TestEnded: nothing leads out of the last state, and a second end is told from the first.
func TestEnded(t *testing.T) {
	cn := newTestConn(t, 1)
	cn.mu.Lock()
	defer cn.mu.Unlock()
	if before := cn.on(eventEnd); before != stateUp {
		t.Errorf("the state was %v, want up", before)
	}
	for _, e := range []event{eventHello, eventPorts, eventNoLanes, eventLost, eventEnd} {
		if before := cn.on(e); before != stateEnded || cn.state != stateEnded {
			t.Errorf("event %d leads from %v to %v", e, before, cn.state)
		}
	}
}
