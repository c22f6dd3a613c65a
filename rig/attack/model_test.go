package attack

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestThreatModel: the tests and mutants that docs/threat-model.md names are there, in the
// packages that it names.
func TestThreatModel(t *testing.T) {
	if named := namedTests(t, "../../docs/threat-model.md", false); named < 40 {
		t.Errorf("only %d tests and mutants were found on the page", named)
	}
}

// TestPromises: each promise of docs/security.md names what it needs and tests that are there.
func TestPromises(t *testing.T) {
	if named := namedTests(t, "../../docs/security.md", true); named < 40 {
		t.Errorf("only %d tests were found on the page", named)
	}
}

// namedTests are those in the last columns of a page's tables of attacks. each: no row is without one.
func namedTests(t *testing.T, file string, each bool) (named int) {
	t.Helper()
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	mutants, err := os.ReadFile("../mutants/list.go")
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{} // "package Test"
	defect := regexp.MustCompile(`\{"[\w-]+", "(?:Test|Fuzz)\w+"`)
	decl := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)`)
	err = filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if d != nil && d.IsDir() && strings.HasPrefix(d.Name(), ".venv") { // it may be being made
			return filepath.SkipDir
		}
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range defect.FindAllSubmatch(text, -1) { // a package's own list
			mutants = append(mutants, m[0]...)
		}
		for _, m := range decl.FindAllSubmatch(text, -1) {
			there[filepath.Base(filepath.Dir(path))+" "+string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	attacks, columns := false, 0
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(line), "| "), " |"), " | ")
		switch {
		case !strings.HasPrefix(line, "|"):
			attacks = false
			continue
		case cells[len(cells)-1] == "attacked by":
			attacks, columns = true, len(cells)
			continue
		case !attacks || strings.HasPrefix(line, "|-"):
			continue
		}
		if len(cells) < columns && !each { // no test: it can
			continue
		}
		tests, empty := cells[len(cells)-1], slices.Contains(cells, "")
		if len(cells) != columns || each && (empty || !strings.Contains(tests, "`Test")) {
			t.Errorf("%s: a row without a word on what it needs, or without a test: %s", file, line)
		}
		folder := ""
		for _, word := range regexp.MustCompile("\\w+ `[\\w-]+`|`[\\w-]+`").FindAllString(tests, -1) {
			before, name, found := strings.Cut(word, " ")
			if !found {
				name = before
			} else if before != "mutant" && before != "mutants" && before != "and" {
				folder = before
			}
			name = strings.Trim(name, "`")
			named++
			if isTest := strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Fuzz"); isTest && !there[folder+" "+name] {
				t.Errorf("package %s has no %s", folder, name)
			} else if !isTest && !strings.Contains(string(mutants), `{"`+name+`"`) {
				t.Errorf("there is no mutant %s", name)
			}
		}
	}
	return named
}
