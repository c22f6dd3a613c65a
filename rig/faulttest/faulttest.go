// Package faulttest holds a package's list of deliberate defects to its source and its tests.
package faulttest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// Defect is the name of a place of internal/fault, and a test that finds it.
type Defect = struct{ Name, Test string }

var place = regexp.MustCompile(`fault\.(?:On|Pick)\("([^"]+)"`)

// Run builds the tests of the package in the working directory with the tag "faults". Each defect must fail its test.
// Each place in the package must be in the list, and each of the list must have a place, unless elsewhere
// says that another package has the place or the list. A nil elsewhere says so of none. Up to atOnce run at once: more than
// there are processors where many defects are found by a hang, so that their tests only wait.
func Run(t *testing.T, atOnce int, defects []Defect, elsewhere func(name string) bool) {
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
	var runs sync.WaitGroup
	defer runs.Wait()
	for _, d := range defects {
		listed[d.Name] = true
		if has[d.Name] == "" && (elsewhere == nil || !elsewhere(d.Name)) {
			t.Errorf("%s is in the list and has no place", d.Name)
		}
		runs.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			t.Run(d.Name+" "+d.Test, func(t *testing.T) {
				c := exec.CommandContext(t.Context(), program, "-test.run", "^"+d.Test+"$", "-test.timeout", "240s")
				c.Env = append(os.Environ(), "KVCONN_FAULT="+d.Name)
				c.WaitDelay = time.Minute // a process that the test has left behind may hold its output
				if out, err := c.CombinedOutput(); err == nil || !strings.Contains(string(out), "--- FAIL: "+d.Test) {
					t.Errorf("%s does not find %s: %v\n%s", d.Test, d.Name, err, out)
				}
			})
		})
	}
	for name, file := range has {
		if !listed[name] && (elsewhere == nil || !elsewhere(name)) {
			t.Errorf("%s has a place for %q, which is not in the list", file, name)
		}
	}
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
