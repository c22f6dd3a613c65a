package machine_test

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
)

// fixedSeeds are the seeds that judge which rows of the tables the simulator takes. A seed is a run, so the rows
// that they take change with the code only.
const fixedSeeds = 2000

// untakenFile lists the rows that none of these seeds takes, each with the reason.
const untakenFile = "testdata/table/untaken.txt"

var untakenLine = regexp.MustCompile(`^(\S+(?: \S+)+?)(?: \((\w+)\))?: \S.{10,}$`)

// readUntaken reads the list: for each row, the transcript that takes it; "" if none does.
func readUntaken(t testing.TB, table transitionTable) map[string]string {
	t.Helper()
	text, err := os.ReadFile(untakenFile)
	if err != nil {
		t.Fatal(err)
	}
	rows, list := table.rows(func(*transitionRow) bool { return true }), map[string]string{}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		parts := untakenLine.FindStringSubmatch(line)
		switch {
		case parts == nil:
			t.Errorf("%s: no row and reason: %q", untakenFile, line)
			continue
		case !slices.Contains(rows, parts[1]):
			t.Errorf("%s: doc.go has no row %q", untakenFile, parts[1])
		}
		if _, twice := list[parts[1]]; twice {
			t.Errorf("%s: %q stands twice", untakenFile, parts[1])
		}
		list[parts[1]] = parts[2]
	}
	return list
}

// checkUntaken compares the list with what the fixed seeds have done. Further seeds may take more.
func checkUntaken(t *testing.T, first map[core.Transition]uint64) {
	t.Helper()
	table := readTransitions(t)
	for change, seed := range first {
		if seed < fixedSeeds {
			table.check(t, change)
		}
	}
	listed := slices.Collect(maps.Keys(readUntaken(t, table)))
	never := table.rows(func(r *transitionRow) bool { return !r.taken })
	for _, row := range never {
		if !slices.Contains(listed, row) {
			t.Errorf("of the first %d seeds none takes the row %q: %s is to say why", fixedSeeds, row, untakenFile)
		}
	}
	slices.Sort(listed)
	for _, row := range listed {
		if !slices.Contains(never, row) {
			t.Errorf("%s has the row %q, which one of the first %d seeds takes", untakenFile, row, fixedSeeds)
		}
	}
}

// checkUntakenBy compares the list with what a transcript has done. A row that no seed takes is
// taken by the transcript that its line names, and by none if it names none.
func (table transitionTable) checkUntakenBy(t *testing.T, transcript string) {
	t.Helper()
	taken := table.rows(func(r *transitionRow) bool { return r.taken })
	for row, by := range readUntaken(t, table) {
		switch does := slices.Contains(taken, row); {
		case by == transcript && !does:
			t.Errorf("%s: this transcript does not take the row %q", untakenFile, row)
		case by == "" && does:
			t.Errorf("%s: no transcript is said to take the row %q, and this one does", untakenFile, row)
		}
	}
}

// TestUntakenNames: the transcripts that the list names are there.
func TestUntakenNames(t *testing.T) {
	for row, by := range readUntaken(t, readTransitions(t)) {
		if _, err := os.Stat("testdata/" + by + ".txt"); by != "" && err != nil {
			t.Errorf("%s: %q is taken by no transcript: %v", untakenFile, row, err)
		}
	}
}
