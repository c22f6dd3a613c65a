package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// What the JSON lists as the double's alone are the tests of these files, all of them.
func TestListIsOfTheSources(t *testing.T) {
	test := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	for _, d := range onTheDouble {
		text, err := os.ReadFile(filepath.Join("../../..", d.File))
		if err != nil {
			t.Error(err)
			continue
		}
		var have []string
		for _, m := range test.FindAllStringSubmatch(string(text), -1) {
			have = append(have, m[1])
		}
		for _, name := range d.Tests {
			name, part, _ := strings.Cut(name, "/")
			if !slices.Contains(have, name) || !strings.Contains(string(text), `"`+part) {
				t.Errorf("%s has no test %s with a part %q", d.File, name, part)
			}
		}
		for _, name := range have {
			if !slices.Contains(d.Tests, name) && name != "TestMain" && !strings.HasSuffix(name, "List") && !strings.HasPrefix(d.File, "tcp/") {
				t.Errorf("%s has %s, which the list has not", d.File, name)
			}
		}
		if d.Needs == "" {
			t.Errorf("%s: what it needs of the double is not said", d.File)
		}
	}
}

func TestKinds(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range kinds() {
		if seen[k.name()] || len(k.device.Memories) == 0 {
			t.Errorf("%s is there twice, or has no memory", k.name())
		}
		seen[k.name()] = true
	}
	if len(seen) != 16 {
		t.Errorf("%d runs", len(seen))
	}
}

func TestParse(t *testing.T) {
	text := strings.ReplaceAll(`warning before
^=== RUN   suite
^=== RUN   suite/ordered
^    --- PASS: suite/ordered (0.25s)
^=== RUN   suite/odd_sizes
^=== RUN   suite/odd_sizes/4
    transfers.go:11: memory differs
        in two lines
^        --- FAIL: suite/odd_sizes/4 (0.50s)
^=== RUN   suite/odd_sizes/12
^        --- PASS: suite/odd_sizes/12 (1.00s)
^=== NAME  suite/odd_sizes
    transfers.go:12: and more
^    --- FAIL: suite/odd_sizes (1.50s)
`, "^", mark)
	whole, rest := parse(strings.NewReader(text + mark + "=== NAME  suite\n" + mark + "--- FAIL: suite (2.00s)\n" + mark + "FAIL\nlast words\n"))
	want := []outcome{{Case: "ordered", OK: true, Seconds: 0.25},
		{Case: "odd sizes", Seconds: 1.5, Reason: "transfers.go:11: memory differs\n        in two lines\n    transfers.go:12: and more"}}
	if !slices.Equal(whole, want) || rest != "warning before\nlast words" {
		t.Errorf("%+v\n%q", whole, rest)
	}
	cut, _ := parse(strings.NewReader(text + mark + "=== RUN   suite/close\n    panic: this" + strings.Repeat("\nmany lines", 9999)))
	if len(cut) != 3 || cut[2].OK || cut[2].Case != "close" || !strings.HasPrefix(cut[2].Reason, "it did not end: panic: this\n") || len(cut[2].Reason) > maxKeptOutput+100 {
		t.Errorf("%+v", cut)
	}
}

func TestJudge(t *testing.T) {
	good, bad := outcome{Case: "a", OK: true}, outcome{Case: "b"}
	for _, c := range []struct {
		cases           []outcome
		status          int
		late            bool
		verdict, reason string
	}{
		{[]outcome{good}, 0, false, verdictPassed, ""},
		{[]outcome{good, bad}, 1, false, verdictFailed, "1 of 2 cases failed"},
		{[]outcome{good, bad}, 0, false, verdictFailed, "1 of 2 cases failed"},
		{[]outcome{good}, 2, false, verdictFailed, "it ended with status 2: words"},
		{[]outcome{good}, -1, true, verdictFailed, "it has not ended within 5m0s: words"},
		{nil, 0, false, verdictFailed, "no case was run"},
		{nil, notRun, false, verdictNotRun, "words"},
	} {
		r := result{}.judge(c.cases, "words", c.status, c.late)
		if r.Verdict != c.verdict || r.Reason != c.reason {
			t.Errorf("%+v: %s, %q", c, r.Verdict, r.Reason)
		}
	}
}

// What was cut off stands in the JSON as text, what is missing as null.
func TestJoin(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"whole": " {\"a\": [1]}\n", "cut": "{\"a\": \"b", "empty": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out, missed, err := join(dir, []string{"whole", "cut", "empty", "missing"}, strings.NewReader("abc\n"))
	var said map[string]any
	if err != nil || missed != nil || json.Unmarshal(out, &said) != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	again, _ := json.Marshal(said)
	if want := `{"cut":"{\"a\": \"b","empty":null,"kvconn":"abc","missing":null,"whole":{"a":[1]}}`; string(again) != want {
		t.Errorf("%s, want %s", again, want)
	}
}

// What was not run is listed, whichever part says it.
func TestMissedIn(t *testing.T) {
	for part, want := range map[string][]string{
		`null`:                      nil,
		`"cut off"`:                 nil,
		`{"rows": []}`:              nil,
		`{"not_run": "no PyTorch"}`: {"NOT RUN: a decode step beside loads: no PyTorch"},
		`{"not_run": {"two": "one GPU", "rates": "no speed"}, "cases": [{"case": "a", "ok": true}]}`:                                                            {"NOT RUN: rates: no speed", "NOT RUN: two: one GPU"},
		`{"mps": {"in_use": false}, "not_asked": {"b": "no", "a": "none"}}`:                                                                                     {"NOT ASKED: a: none", "NOT ASKED: b: no"},
		`{"runs": [{"transport": "tcp", "memory": "a", "verdict": "passed"}, {"transport": "rdma", "memory": "b", "verdict": "not run", "reason": "no card"}]}`: {"NOT RUN: rdma, b: no card"},
	} {
		if got := missedIn([]byte(part)); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", part, got, want)
		}
	}
}
