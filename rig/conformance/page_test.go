package conformance

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/testdouble"
)

var rewrite = flag.Bool("rewrite", false, "write docs/gpu.md's table of facts, and what real hardware has confirmed, anew")

const page = "../../docs/gpu.md"

// transfers are the caches that kvconn carried between two processes.
type transfers struct {
	Torch string
	Cases []struct {
		Case, Reason string
		OK           bool
	}
}

// suite is what came of kvgpu-suite.
type suite struct {
	Runs []suiteRun
}

type suiteRun struct {
	Transport, Memory, Verdict, Reason string
	Cases                              []struct {
		Case, Reason string
		OK           bool
	}
}

// TestPage holds the table of docs/gpu.md to what the programs say.
func TestPage(t *testing.T) {
	double, err := check(t, testdouble.Library(t, testdouble.Newest))
	if err != nil {
		t.Fatal(err)
	}
	runs := realRuns(t)
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	const begin, end = "<!-- facts: written by go test ./rig/conformance -rewrite -->\n", "<!-- end of facts -->\n"
	head, rest, found := strings.Cut(string(text), begin)
	_, tail, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("%s has no place for the facts", page)
	}
	want := confirmed(t, head, len(double.Facts), runs) + begin + table(double, runs) + end + tail
	if want == string(text) {
		return
	}
	if !*rewrite {
		t.Fatalf("the facts of %s are not what the program says: go test ./rig/conformance -run TestPage -rewrite", page)
	}
	if err := os.WriteFile(page, []byte(want), 0o666); err != nil {
		t.Fatal(err)
	}
}

func realRuns(t *testing.T) []run {
	t.Helper()
	files, err := filepath.Glob("real/*.json")
	if err != nil {
		t.Fatal(err)
	}
	var runs []run
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		r, err := factsOf(text)
		if err != nil || r.Double || len(r.Facts) == 0 {
			t.Fatalf("%s is no run against a real driver: %v", file, err)
		}
		runs = append(runs, r)
	}
	return runs
}

// factsOf reads the facts of a run of the kit, or of the program alone. A part that was cut off is a string, and one that is missing null:
// then it has said nothing.
func factsOf(text []byte) (r run, err error) {
	var whole struct {
		Facts, Transfers, Suite json.RawMessage
		One                     json.RawMessage `json:"one_connection"`
	}
	if err := json.Unmarshal(text, &whole); err != nil {
		return r, err
	}
	is := func(part json.RawMessage) bool { return bytes.HasPrefix(part, []byte("{")) }
	if is(whole.Facts) {
		text = whole.Facts
	}
	if is(whole.Transfers) {
		err = json.Unmarshal(whole.Transfers, &r.transfers)
	}
	if is(whole.One) {
		err = errors.Join(err, json.Unmarshal(whole.One, &r.one))
	}
	if is(whole.Suite) {
		err = errors.Join(err, json.Unmarshal(whole.Suite, &r.suite))
	}
	return r, errors.Join(err, json.Unmarshal(text, &r))
}

// TestQuestions: each question that the kit's environment.py asks stands in the page's table of what other machines have to answer.
func TestQuestions(t *testing.T) {
	asks, err := os.ReadFile("kit/environment.py")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "## What other machines have to answer\n")
	section, _, _ = strings.Cut(section, "\n## ")
	questions := regexp.MustCompile(`(?m)^[A-Z_]+ = "([^":]+): (.+)"$`).FindAllSubmatch(asks, -1)
	if len(questions) < 7 {
		t.Errorf("environment.py has %d questions", len(questions))
	}
	for _, q := range questions {
		row := regexp.MustCompile(`(?m)^\| ` + regexp.QuoteMeta(string(q[1])) + `: .*` + regexp.QuoteMeta(string(q[2])) + `.*\? \|`)
		if !row.MatchString(section) {
			t.Errorf("the page does not ask: %s: %s", q[1], q[2])
		}
	}
}

func TestFactsOfTheKit(t *testing.T) {
	alone := `{"driver": 13000, "date": "2027-01-02", "device": "NVIDIA H100", "facts": [{"fact": 7, "verdict": "holds"}, {"fact": 8, "verdict": "differs"}]}`
	const on = " (NVIDIA H100, CUDA 13.0, 2027-01-02"
	whole := `{"kvconn": "abc", "doctor": null, "facts": ` + alone + `, "speed": null, "transfers": {"torch": "2.11", "cases": [{"case": "a to b", "ok": true},
		{"case": "c to d", "ok": false, "reason": "late\nvery"}]}, "one_connection": {"torch": "2.11", "cases": [{"case": "a to b", "ok": true}]}, "suite": {"runs": [
		{"transport": "tcp", "memory": "a to b", "verdict": "passed", "cases": [{"case": "x", "ok": true}, {"case": "y", "ok": true}]},
		{"transport": "tcp", "memory": "c to d", "verdict": "failed", "reason": "1 cases failed", "cases": [{"case": "x", "ok": true}, {"case": "y", "ok": false}]},
		{"transport": "tcp", "memory": "two", "verdict": "not run", "reason": "there is 1", "cases": []},
		{"transport": "rdma", "memory": "a to b", "verdict": "not run", "reason": "no card", "cases": []}]}}`
	cut := `{"facts": ` + alone + `, "suite": "{ \"runs\":", "transfers": null, "one_connection": "{"}`
	for text, want := range map[string][4]string{
		alone: {notYet, notYet, notYet, notYet},
		cut:   {notYet, notYet, notYet, notYet},
		whole: {"1 of 2 cases" + on + ", PyTorch 2.11); **c to d**: late",
			"3 of 4 cases" + on + "); **c to d**: 1 cases failed; **c to d, y**; not run: two (there is 1)", "not run" + on + "): no card", "1 of 1 cases" + on + ", PyTorch 2.11)"},
	} {
		r, err := factsOf([]byte(text))
		if err != nil || r.Driver != 13000 || len(r.Facts) != 2 || r.Facts[0].Fact != 7 {
			t.Errorf("%s: %+v, %v", text, r, err)
		}
		runs := []run{r}
		if got := [4]string{carried(runs, several), held(runs, "tcp"), held(runs, "rdma"), carried(runs, one)}; got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
		head := "| the driver's behaviour: a | all | x |\n| tcp: all that a transport promises, b | yes | x |\n| rdma: the same c | yes | x |\n| local: the same with memory | yes | x |\n| caches between two processes d | no | x |\n| the same with one connection e | no | x |\n"
		if got, told := confirmed(t, head, 2, runs), "| the driver's behaviour: a | all | 1 of 2"+on+") |\n"; !strings.Contains(got, told) || !strings.Contains(got, "promises, b | yes | "+want[1]+" |\n") {
			t.Errorf("%s: %s", text, got)
		}
	}
}

func cell(f said) string {
	switch f.Verdict {
	case "holds":
		return "holds"
	case "told":
		return f.Got
	case "not applicable":
		return "not applicable: " + f.Got
	}
	return "**" + f.Got + "**, not " + f.Expected
}

func (r run) hasDevice() bool { return !strings.HasPrefix(r.Device, "none") }

func where(r run) string {
	if r.hasDevice() {
		return r.Device
	}
	return "a driver without a GPU"
}

const notYet = "not yet"

// on says on what a run ran.
func (r run) on() string {
	return fmt.Sprintf("%s, CUDA %d.%d, %s", where(r), r.Driver/1000, r.Driver%1000/10, r.Date)
}

func several(r run) *transfers { return r.transfers }
func one(r run) *transfers     { return r.one }

// carried tells of the kit's transfers, with several connections or one.
func carried(runs []run, which func(run) *transfers) string {
	var told []string
	for _, r := range runs {
		of := which(r)
		if of == nil || !r.hasDevice() {
			continue
		}
		ok, bad := 0, ""
		for _, c := range of.Cases {
			if c.OK {
				ok++
			} else {
				bad += fmt.Sprintf("; **%s**: %s", c.Case, inCell(c.Reason))
			}
		}
		told = append(told, fmt.Sprintf("%d of %d cases (%s, PyTorch %s)%s", ok, len(of.Cases), r.on(), of.Torch, bad))
	}
	return orNotYet(told)
}

// held tells of the kit's transport suite with one transport.
func held(runs []run, transport string) string {
	var told []string
	for _, r := range runs {
		if r.suite == nil || !r.hasDevice() {
			continue
		}
		if !slices.ContainsFunc(r.suite.Runs, func(s suiteRun) bool { return s.Transport == transport }) {
			continue
		}
		ok, all, more, missing := 0, 0, "", ""
		for _, s := range r.suite.Runs {
			if s.Transport != transport {
				continue
			}
			if s.Verdict == "not run" {
				more += fmt.Sprintf("; not run: %s (%s)", s.Memory, inCell(s.Reason))
				missing = cmp.Or(missing, inCell(s.Reason))
			} else if s.Verdict != "passed" {
				more += fmt.Sprintf("; **%s**: %s", s.Memory, inCell(s.Reason))
			}
			for _, c := range s.Cases {
				all++
				if c.OK {
					ok++
				} else {
					more += fmt.Sprintf("; **%s, %s**", s.Memory, c.Case)
				}
			}
		}
		if all == 0 && missing != "" { // the first run's reason is that of all, if not of those with two GPUs
			told = append(told, fmt.Sprintf("not run (%s): %s", r.on(), missing))
		} else {
			told = append(told, fmt.Sprintf("%d of %d cases (%s)%s", ok, all, r.on(), more))
		}
	}
	return orNotYet(told)
}

func orNotYet(told []string) string {
	if len(told) == 0 {
		return notYet
	}
	return strings.Join(told, "; ")
}

// inCell is a text as a table's cell can hold it: one line, and not all of a long one.
func inCell(text string) string {
	text, _, _ = strings.Cut(text, "\n")
	if text = strings.ReplaceAll(text, "|", "/"); len(text) > 200 {
		text = strings.ToValidUTF8(text[:200], "") + "…"
	}
	return text
}

// confirmed writes the last cell of those lines of the page that the kit's runs tell about.
func confirmed(t *testing.T, head string, facts int, runs []run) string {
	t.Helper()
	var byFact []string
	for _, r := range runs {
		if holds := r.holding(); holds > 0 {
			byFact = append(byFact, fmt.Sprintf("%d of %d (%s)", holds, facts, r.on()))
		}
	}
	lines := strings.SplitAfter(head, "\n")
	for begin, cell := range map[string]string{
		"| the driver's behaviour: ":             orNotYet(byFact),
		"| tcp: all that a transport promises, ": held(runs, "tcp"),
		"| local: the same with memory ":         held(runs, "local"),
		"| rdma: the same ":                      held(runs, "rdma"),
		"| caches between two processes ":        carried(runs, several),
		"| the same with one connection ":        carried(runs, one),
	} {
		found := 0
		for i, line := range lines {
			if strings.HasPrefix(line, begin) {
				last := strings.LastIndex(strings.TrimSuffix(line, " |\n"), " | ")
				lines[i] = line[:last] + " | " + cell + " |\n"
				found++
			}
		}
		if found != 1 {
			t.Errorf("%s has %d lines that begin with %q", page, found, begin)
		}
	}
	return strings.Join(lines, "")
}

// holding is how many facts a real GPU's driver confirmed.
func (r run) holding() (n int) {
	for _, f := range r.Facts {
		if r.hasDevice() && (f.Verdict == "holds" || f.Verdict == "told") {
			n++
		}
	}
	return n
}

// table has a line a fact. A fact that no real driver was asked about says so.
func table(double run, runs []run) string {
	var out strings.Builder
	confirmed := 0
	var rows strings.Builder
	for _, f := range double.Facts {
		var real []string
		holds := false
		for _, r := range runs {
			for _, other := range r.Facts {
				if other.Fact == f.Fact {
					if other.Verdict == "not applicable" {
						continue
					}
					real = append(real, fmt.Sprintf("%s (%s)", cell(other), r.on()))
					holds = holds || r.hasDevice() && (other.Verdict == "holds" || other.Verdict == "told")
				}
			}
		}
		if len(real) == 0 {
			real = []string{notYet}
		}
		if holds {
			confirmed++
		}
		fmt.Fprintf(&rows, "| %d | %s | %s | %s | %s |\n", f.Fact, f.Says, f.Expected, cell(f), strings.Join(real, "; "))
	}
	fmt.Fprintf(&out, "\n%d facts; %d of them were confirmed on real hardware.\n\n| | fact | answer | double | real driver |\n|---|---|---|---|---|\n%s\n", len(double.Facts), confirmed, rows.String())
	return out.String()
}
