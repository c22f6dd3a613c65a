package machine_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"os"
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

// transitionTable is the transitions in the doc.go of core/half and of this package.
type transitionTable map[transitionKey]*transitionRow

// transitionKey is what decides a row.
type transitionKey struct{ half, from, event, guard string }

type transitionRow struct {
	to    string
	does  []string // actions, sorted
	taken bool
}

// tableHeads stand above the tables.
var tableHeads = map[string]string{"Claims (D):": "claim", "Pending finishes (D), each of a claim or load that has ended while P was looked up:": "pending-finish", "Loads (D):": "load", "Offers (P):": "offer",
	"P agents (D), each of which has claims or loads waiting for it:": "peer", "D agents (P), each of which has offers and has lost its connections:": "probe",
	"Fan-ins of claims (D):": "claim-fan-in", "Fan-ins of loads (D):": "load-fan-in", "Fan-outs (P):": "fan-out"}

// isFan says whether a table is one of fans, which share their states and guards.
func isFan(half string) bool {
	return strings.HasPrefix(half, "fan-") || strings.HasSuffix(half, "-fan-in")
}

// isPeer says whether a table is one of peers.
func isPeer(half string) bool { return half == "peer" || half == "probe" }

// readTransitions reads the tables of both packages' documentation.
func readTransitions(t testing.TB) transitionTable {
	t.Helper()
	columns := regexp.MustCompile(`\s{2,}`)
	table, half := transitionTable{}, ""
	for line := range strings.Lines(parsed(t, "../half/doc.go").Doc.Text() + parsed(t, "doc.go").Doc.Text()) {
		text := strings.TrimSpace(line)
		if h := tableHeads[text]; h != "" {
			half = h
		}
		if half == "" || !strings.HasPrefix(line, "\t") || strings.HasPrefix(text, "from ") {
			continue
		}
		cells := columns.Split(text, -1)
		if len(cells) < 4 || len(cells) > 5 {
			t.Fatalf("doc.go: a row has %d columns: %q", len(cells), text)
		}
		row := transitionRow{to: cells[3]}
		if len(cells) == 5 {
			row.does = strings.Fields(cells[4])
		}
		if slices.Sort(row.does); strings.Contains(text, "?") {
			t.Errorf("doc.go: a row has an action that happens in some cases only: %q", text)
		}
		froms := strings.Fields(cells[0])
		if cells[0] == "any" {
			froms = stateNames(t, half)
		}
		for _, from := range froms {
			for _, event := range strings.Fields(cells[1]) {
				key := transitionKey{half, from, event, cells[2]}
				if table[key] != nil {
					t.Errorf("doc.go: %v stands twice", key)
				}
				one := row
				if one.to == "=" {
					one.to = from
				}
				table[key] = &one
			}
		}
	}
	if len(table) < 100 {
		t.Fatalf("doc.go has %d transitions", len(table))
	}
	return table
}

// take says what is wrong with a transition that the tables do not have, or have with another next state or other actions, each as
// often as there; "": nothing is.
func (table transitionTable) take(c core.Transition) string {
	row := table[transitionKey{c.Half, c.From, c.Event, c.Guard}]
	if row == nil {
		return fmt.Sprintf("doc.go has no row of a %s in %s by %s, guard %s (to %s with %q)", c.Half, c.From, c.Event, c.Guard, c.To, c.Actions)
	}
	row.taken = true
	did := strings.Fields(c.Actions)
	if len(row.does) == 1 && len(did) > 0 {
		if one, some := strings.CutSuffix(row.does[0], "+"); some && one == did[0] {
			did = append(slices.Compact(did)[1:], row.does[0])
		}
	}
	if row.to != c.To || !slices.Equal(row.does, did) {
		return fmt.Sprintf("a %s went from %s by %s, guard %s, to %s with %q, and by doc.go it goes to %s with %q",
			c.Half, c.From, c.Event, c.Guard, c.To, c.Actions, row.to, strings.Join(row.does, " "))
	}
	return ""
}

// check fails for a transition that the tables do not have.
func (table transitionTable) check(t testing.TB, c core.Transition) {
	t.Helper()
	if wrong := table.take(c); wrong != "" {
		t.Error(wrong)
	}
}

// rows lists the rows for which want is true.
func (table transitionTable) rows(want func(*transitionRow) bool) (out []string) {
	for key, row := range table {
		if want(row) {
			out = append(out, strings.Join([]string{key.half, key.from, key.event, key.guard, row.to}, " "))
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

// stateNames are what the states of a half are called; "fan": those of all fans.
func stateNames(t testing.TB, half string) []string {
	t.Helper()
	file, of, least := "../half/"+half, half+"State", 6
	switch half {
	case "pending-finish":
		file, of, least = "../half/asked", "finishState", 1
	case "peer":
		file, least = "../half/renew", 4
	case "probe":
		least = 5
	case "fan":
		file, least = "fans", 4
	}
	names := stringsOf(t, file, of)
	if len(names) < least {
		t.Fatalf("a %s has the states %v", half, names)
	}
	return names
}

// stringsOf are the string literals in the method String of a type in a file, except "-".
func stringsOf(t testing.TB, file, of string) (names []string) {
	t.Helper()
	for _, d := range parsed(t, file+".go").Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Name.Name == "String" && types.ExprString(fn.Recv.List[0].Type) == of {
			ast.Inspect(fn, func(n ast.Node) bool {
				if lit, ok := n.(*ast.BasicLit); ok && lit.Value != `"-"` {
					names = append(names, strings.Trim(lit.Value, `"`))
				}
				return true
			})
		}
	}
	return names
}

// TestGuards: each guard of the code is in the tables, and each of the tables in the code.
func TestGuards(t *testing.T) {
	ofHalves, ofFans := stringsOf(t, "../half/guard", "Guard"), append(stringsOf(t, "fans", "fanGuard"), "other") // half.WhenOther
	for _, want := range []struct {
		guards []string
		fans   bool
		least  int
	}{{ofHalves, false, 10}, {ofFans, true, 5}} {
		inRows := map[string]bool{}
		for key := range readTransitions(t) {
			if key.guard != "-" && isFan(key.half) == want.fans {
				inRows[key.guard] = true
			}
		}
		rows := slices.Sorted(maps.Keys(inRows))
		if slices.Sort(want.guards); !slices.Equal(want.guards, rows) || len(rows) < want.least {
			t.Errorf("the guards of the code are %v, and those of the tables are %v", want.guards, rows)
		}
	}
}

// rowText is a row as transcripts print it.
func rowText(c core.Transition) string {
	return strings.TrimSpace(fmt.Sprintf("row %s: %s %s %s %s %s", c.Half, c.From, c.Event, c.Guard, c.To, c.Actions))
}

// TestGuardsAlone: a transcript prints each row that nothing but its guard tells from another one. The tables would not show that the
// code has taken one guard for the other.
func TestGuardsAlone(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	ofOthers, ofPeers := read("testdata/guards.txt"), read("testdata/peer_guards.txt")
	alike := map[core.Transition][]core.Transition{}
	for key, row := range readTransitions(t) {
		c := core.Transition{Half: key.half, From: key.from, Event: key.event, To: row.to, Actions: strings.Join(row.does, " ")}
		with := c
		with.Guard = key.guard
		alike[c] = append(alike[c], with)
	}
	n := 0
	for _, rows := range alike {
		if len(rows) == 1 {
			continue
		}
		for _, c := range rows {
			name, text := "guards.txt", ofOthers
			if isPeer(c.Half) {
				name, text = "peer_guards.txt", ofPeers
			}
			if n++; !strings.Contains(text, "\n"+rowText(c)+"\n") {
				t.Errorf("testdata/%s does not print %q", name, rowText(c))
			}
		}
	}
	if n < 10 {
		t.Errorf("guards alone tell %d rows apart", n)
	}
}

// TestTransitions: each state of the code is in the tables, and each state and event of the tables in
// the code. TestSim and TestTranscripts check what happens.
func TestTransitions(t *testing.T) {
	states := map[string]map[string]bool{"claim": {}, "pending-finish": {}, "load": {}, "offer": {}, "peer": {}, "probe": {}, "fan": {}}
	for key, row := range readTransitions(t) {
		of := key.half
		if isFan(of) {
			of = "fan"
		}
		for _, s := range []string{key.from, row.to} {
			if s != "-" {
				states[of][s] = true
			}
		}
	}
	brought, known := []string{"Divided", "FanOut", "Idle", "Lost", "PartFails", "PeerGone", "Turn"}, eventTypes(t) // by an event
	told := []string{"Ended", "Forgotten"}                                                                          // by a part
	for key := range readTransitions(t) {
		if !slices.Contains(brought, key.event) && !slices.Contains(known, key.event) && !(isFan(key.half) && slices.Contains(told, key.event)) {
			t.Errorf("the tables have the event %s, which is no type of Event", key.event)
		}
	}
	for of := range states {
		for _, s := range stateNames(t, of) {
			if !states[of][s] {
				t.Errorf("the tables have no state %s of a %s", s, of)
			}
			delete(states[of], s)
		}
		for s := range states[of] {
			t.Errorf("the code has no state %s of a %s", s, of)
		}
	}
}
