package machine_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
)

// parsed is a file of Go.
func parsed(t testing.TB, name string) *ast.File {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// transitionTable is the transitions in doc.go.
type transitionTable map[transitionKey]*transitionRow

type transitionKey struct{ half, from, event, to string }

type transitionRow struct {
	always, maybe []string // actions
	taken         bool
}

// readTransitions reads the tables of the package's documentation.
func readTransitions(t testing.TB) transitionTable {
	t.Helper()
	columns := regexp.MustCompile(`\s{2,}`)
	heads := map[string]string{"Claims (D), of which claimPeerGone says what P's death makes of one:": "claim", "Loads (D):": "load", "Offers (P):": "offer"}
	table, half := transitionTable{}, ""
	for line := range strings.Lines(parsed(t, "../half/doc.go").Doc.Text()) {
		text := strings.TrimSpace(line)
		if h := heads[text]; h != "" {
			half = h
		}
		if half == "" || !strings.HasPrefix(line, "\t") || strings.HasPrefix(text, "from ") {
			continue
		}
		cells := columns.Split(text, -1)
		if len(cells) < 3 || len(cells) > 4 {
			t.Fatalf("doc.go: a row has %d columns: %q", len(cells), text)
		}
		row := &transitionRow{}
		if len(cells) == 4 {
			for _, name := range strings.Fields(cells[3]) {
				if bare, maybe := strings.CutSuffix(name, "?"); maybe {
					row.maybe = append(row.maybe, bare)
				} else {
					row.always = append(row.always, name)
				}
			}
		}
		for _, event := range strings.Fields(cells[1]) {
			key := transitionKey{half, cells[0], event, cells[2]}
			if table[key] != nil {
				t.Errorf("doc.go: %v stands twice", key)
			}
			one := *row
			table[key] = &one
		}
	}
	if len(table) < 100 {
		t.Fatalf("doc.go has %d transitions", len(table))
	}
	return table
}

// check fails for a transition that the tables do not have, or have with other actions.
func (table transitionTable) check(t testing.TB, c core.Transition) {
	t.Helper()
	if c.Event == "Abandon" && c.To == "-" && (c.Actions == "" || c.Actions == "Report") {
		return
	}
	row := table[transitionKey{c.Half, c.From, c.Event, c.To}]
	if row == nil {
		t.Errorf("doc.go has no transition of a %s from %s by %s to %s (%s)", c.Half, c.From, c.Event, c.To, c.Actions)
		return
	}
	row.taken = true
	did := strings.Fields(c.Actions)
	for _, name := range row.always {
		if !slices.Contains(did, name) {
			t.Errorf("a %s went from %s by %s to %s without %s, with %q", c.Half, c.From, c.Event, c.To, name, c.Actions)
		}
	}
	for _, name := range did {
		if !slices.Contains(row.always, name) && !slices.Contains(row.maybe, name) {
			t.Errorf("a %s went from %s by %s to %s with %s, which doc.go does not have", c.Half, c.From, c.Event, c.To, name)
		}
	}
}

// rows lists the rows for which want is true.
func (table transitionTable) rows(want func(*transitionRow) bool) (out []string) {
	for key, row := range table {
		if want(row) {
			out = append(out, strings.Join([]string{key.half, key.from, key.event, key.to}, " "))
		}
	}
	slices.Sort(out)
	return out
}

// eventTypes are the types of Event in event.go.
func eventTypes(t testing.TB) (names []string) {
	t.Helper()
	for _, d := range parsed(t, "../event.go").Decls {
		if m, ok := d.(*ast.FuncDecl); ok && m.Name.Name == "event" {
			names = append(names, m.Recv.List[0].Type.(*ast.Ident).Name)
		}
	}
	return names
}

// TestStepTakesEachEvent: each type of Event has a case in Step or stepRequest, once, and no other type has one.
func TestStepTakesEachEvent(t *testing.T) {
	var cases []string
	for _, d := range parsed(t, "machine.go").Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && (fn.Name.Name == "Step" || fn.Name.Name == "stepRequest") {
			ast.Inspect(fn, func(n ast.Node) bool {
				if c, ok := n.(*ast.CaseClause); ok {
					for _, of := range c.List {
						cases = append(cases, of.(*ast.SelectorExpr).Sel.Name)
					}
				}
				return true
			})
		}
	}
	events := eventTypes(t)
	slices.Sort(cases)
	slices.Sort(events)
	if !slices.Equal(cases, events) || len(events) < 20 {
		t.Errorf("the machine takes %v, and the events are %v", cases, events)
	}
}

// stateNames are what the states of a half are called, as their String has them.
func stateNames(t testing.TB, half string) (names []string) {
	t.Helper()
	for _, d := range parsed(t, "../half/"+half+".go").Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Name.Name == "String" {
			ast.Inspect(fn, func(n ast.Node) bool {
				if lit, ok := n.(*ast.BasicLit); ok && lit.Value != `"-"` {
					names = append(names, strings.Trim(lit.Value, `"`))
				}
				return true
			})
		}
	}
	if len(names) < 6 {
		t.Fatalf("a %s has the states %v", half, names)
	}
	return names
}

// TestTransitions: each state of the code is in the tables, and each state and event of the tables in
// the code. TestSim and TestTranscripts check what happens.
func TestTransitions(t *testing.T) {
	states := map[string]map[string]bool{"claim": {}, "load": {}, "offer": {}}
	for key := range readTransitions(t) {
		for _, s := range []string{key.from, key.to} {
			if s != "-" {
				states[key.half][s] = true
			}
		}
	}
	brought, known := []string{"FanOut", "PartFails", "PeerGone"}, eventTypes(t) // by an event
	for key := range readTransitions(t) {
		if !slices.Contains(brought, key.event) && !slices.Contains(known, key.event) {
			t.Errorf("the tables have the event %s, which is no type of Event", key.event)
		}
	}
	for half := range states {
		for _, s := range stateNames(t, half) {
			if !states[half][s] {
				t.Errorf("the tables have no state %s of a %s", s, half)
			}
			delete(states[half], s)
		}
		for s := range states[half] {
			t.Errorf("the code has no state %s of a %s", s, half)
		}
	}
}
