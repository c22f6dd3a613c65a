package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestCollect(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, filepath.FromSlash(name)) }
	for _, name := range []string{"go/LICENSE", "go/README", "a/LICENSE", "a/NOTICE.txt", "a/license.go", "a/part/LICENCE-MIT", "a/part/deep/x.go", "a/other/LICENSE", "b/COPYING", "b/v2/unlicense", "c/README"} {
		if err := os.MkdirAll(filepath.Dir(in(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(in(name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	of := func(path, folder string) *module { return &module{Path: path, Dir: in(folder)} }
	packages := []linked{
		{Dir: in("go/src/fmt"), Standard: true},
		{Dir: in("own"), Module: &module{Path: "own", Dir: in("own"), Main: true}},
		{Dir: in("a"), Module: of("x.org/a", "a")},
		{Dir: in("a/part/deep"), Module: of("x.org/a", "a")},
		{Dir: in("b/v2"), Module: of("x.org/b/v2", "b/v2")},
	}
	into := in("into")
	if err := os.MkdirAll(filepath.Join(into, "stale"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := collect(into, in("go"), packages); err != nil {
		t.Fatal(err)
	}
	var got []string
	if err := filepath.WalkDir(into, func(path string, e os.DirEntry, err error) error {
		if err == nil && (e.Name() == "stale" || !e.IsDir()) {
			name, _ := filepath.Rel(into, path)
			got = append(got, filepath.ToSlash(name))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	// a/other is not linked.
	want := []string{"go/LICENSE", "x.org/a/LICENSE", "x.org/a/NOTICE.txt", "x.org/a/part/LICENCE-MIT", "x.org/b/v2/unlicense"}
	if !slices.Equal(got, want) {
		t.Errorf("collected %v, want %v", got, want)
	}
	text, err := os.ReadFile(filepath.Join(into, "x.org/a/part/LICENCE-MIT"))
	if err != nil || string(text) != "a/part/LICENCE-MIT" {
		t.Errorf("%q, %v", text, err)
	}
	packages = append(packages, linked{Dir: in("c"), Module: of("x.org/c", "c")})
	if err := collect(into, in("go"), packages); err == nil || !strings.Contains(err.Error(), "x.org/c has no licence") {
		t.Errorf("a module without a licence: %v", err)
	}
	if again, err := os.ReadDir(into); err != nil || len(again) == 0 {
		t.Errorf("a run that fails leaves %v, %v: want what was there", again, err)
	}

	// A Go whose package leaves its licence out.
	sys := in("go/src/cmd/vendor/golang.org/x/sys/LICENSE")
	if err := os.MkdirAll(filepath.Dir(sys), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(in("go/LICENSE"), sys); err != nil {
		t.Fatal(err)
	}
	if err := collect(into, in("go"), packages[:1]); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(filepath.Join(into, "go/LICENSE")); err != nil || string(text) != "go/LICENSE" {
		t.Errorf("Go's licence is %q, %v", text, err)
	}
}
