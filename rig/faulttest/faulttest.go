// Package faulttest holds a package's list of deliberate defects to its source and its tests.
package faulttest

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Defect is the name of a place of internal/fault, and a test that finds it.
type Defect = struct{ Name, Test string }

// atOnce is more than go test lets run on few processors: many defects are found by a hang, and their tests only wait.
const atOnce = 8

var place = regexp.MustCompile(`fault\.(?:On|Pick)\("([^"]+)"`)

// Run builds the tests of the package in the working directory with the tag "faults". Each defect must fail its test.
// Each place in the package must be in the list, and each of the list must have a place, unless elsewhere
// says that another package has the place or the list. A nil elsewhere says so of none. Up to atOnce run at once.
func Run(t *testing.T, defects []Defect, elsewhere func(name string) bool) {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), filepath.Base(dir)+".test")
	if out, err := exec.Command("go", "test", "-c", "-tags", "faults", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	has, listed, turns := places(t), map[string]bool{}, make(chan struct{}, atOnce)
	ctx, cancel := context.WithCancel(t.Context())
	var runs []*run
	defer func() {
		cancel()
		for _, r := range runs {
			<-r.over
		}
	}()
	for _, d := range defects {
		listed[d.Name] = true
		if has[d.Name] == "" && (elsewhere == nil || !elsewhere(d.Name)) {
			t.Errorf("%s is in the list and has no place", d.Name)
		}
		runs = append(runs, begin(ctx, turns, program, d))
	}
	for i, d := range defects {
		t.Run(d.Name+" "+d.Test, func(t *testing.T) {
			<-runs[i].over
			if out, err := runs[i].out, runs[i].err; err == nil || !strings.Contains(string(out), "--- FAIL: "+d.Test) {
				t.Errorf("%s does not find %s: %v\n%s", d.Test, d.Name, err, out)
			}
		})
	}
	for name, file := range has {
		if !listed[name] && (elsewhere == nil || !elsewhere(name)) {
			t.Errorf("%s has a place for %q, which is not in the list", file, name)
		}
	}
}

// run is a run of a defect's test. out and err are there when over is closed.
type run struct {
	out  []byte
	err  error
	over chan struct{}
}

// begin runs a defect's test when it has a turn, until ctx ends.
func begin(ctx context.Context, turns chan struct{}, program string, d Defect) *run {
	r := &run{over: make(chan struct{})}
	go func() {
		defer close(r.over)
		select {
		case turns <- struct{}{}:
			defer func() { <-turns }()
		case <-ctx.Done():
			r.err = ctx.Err()
			return
		}
		c := exec.CommandContext(ctx, program, "-test.run", "^"+d.Test+"$", "-test.timeout", "240s")
		c.Env = append(os.Environ(), "KVCONN_FAULT="+d.Name)
		r.out, r.err = c.CombinedOutput()
	}()
	return r
}

// places are the names in the package's calls of fault, each with a file that has it.
func places(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range place.FindAllSubmatch(text, -1) {
			found[string(m[1])] = f
		}
	}
	return found
}
