package main

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var place = regexp.MustCompile(`\bfault\.(?:On|Pick)\(([^,)]*)`)

// places are the names in the source's calls of fault, each with a file that has it.
func places(t *testing.T, root string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, folder := range []string{"core", "kv", "rig/coretest"} {
		err := filepath.WalkDir(filepath.Join(root, folder), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || filepath.Ext(path) != ".go" {
				return err
			}
			text, err := os.ReadFile(path)
			for _, call := range place.FindAllSubmatch(text, -1) {
				found[strings.Trim(string(call[1]), `"`)] = path
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
}

// TestList: each mutant has a place in the source, and each place is a mutant's. make
// mutants shows whether each mutant is found.
func TestList(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	found, names := places(t, root), map[string]bool{}
	for _, m := range mutants {
		if names[m.name] || m.name == "" || m.breaks == "" {
			t.Errorf("mutant %q has no name of its own, or does not say what it breaks", m.name)
		}
		if found[m.name] == "" {
			t.Errorf("mutant %q has no place in the source of core, of kv and of the simulator", m.name)
		}
		names[m.name] = true
	}
	for name, path := range found {
		if !names[name] {
			t.Errorf("%s has a place for %q, which is no mutant", path, name)
		}
	}
}

// TestNoTrace: a program that is built without the tag has none of the names in it, so no
// product has. With the tag the same program has them, so that the test can see them.
func TestNoTrace(t *testing.T) {
	for _, tags := range []string{"", "faults"} {
		s, err := build(t.TempDir(), tags)
		if err != nil {
			t.Fatal(err)
		}
		program, err := os.ReadFile(s.program)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range append(mutants, mutant{name: "KVCONN_FAULT"}) {
			if has := bytes.Contains(program, []byte(m.name)); has != (tags != "") {
				t.Errorf("built with the tags %q, a program has %q in it: %v", tags, m.name, has)
			}
		}
	}
}
