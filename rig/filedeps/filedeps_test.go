package filedeps

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// TestReadFindsCycles: a method, a field and a type make dependencies, also of what an iterator or a sorted list gives; a test's
// use and a use of another package make none.
func TestReadFindsCycles(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"top.go":      "package p\nfunc top(a *A) { a.below() }",
		"a.go":        "package p\nimport \"example.org/other\"\ntype A struct{ n other.N }\nfunc (a *A) below() { _ = B{} }",
		"b.go":        "package p\ntype B struct{ m int }\nfunc (b B) use() { c(b.m) }",
		"c.go":        "package p\nfunc c(int) { _ = new(A).n }",
		"loops.go":    "package p\nimport \"slices\"\nfunc loops() { for l := range all() { l.seen() }\nfor _, l := range slices.Collect(all()) { l.collected() } }",
		"all.go":      "package p\nimport \"iter\"\ntype L struct{}\nfunc all() iter.Seq[L] { return nil }",
		"seen.go":     "package p\nfunc (L) seen() {}",
		"listed.go":   "package p\nfunc (L) collected() {}",
		"top_test.go": "package p\nfunc of(b B) { b.use(); top(nil) }",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	uses, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if want := (Uses{"top.go": {"a.go": true}, "a.go": {"b.go": true}, "b.go": {"c.go": true}, "c.go": {"a.go": true},
		"loops.go": {"all.go": true, "seen.go": true, "listed.go": true}, "seen.go": {"all.go": true}, "listed.go": {"all.go": true}}); !reflect.DeepEqual(uses, want) {
		t.Errorf("uses %v, want %v", uses, want)
	}
	if got, want := uses.Cycles(), [][]string{{"a.go", "b.go", "c.go", "a.go"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("cycles %v, want %v", got, want)
	}
	if _, err := Read(t.TempDir()); err == nil {
		t.Error("an empty folder has no error")
	}
}
