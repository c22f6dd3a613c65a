// Package docstest holds the generated parts of pages against the code.
package docstest

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var write = flag.Bool("docs", false, "write the generated parts of the pages anew")

// Check fails the test unless the page's part of that name has the text. The part begins
// with a line "<!-- NAME: written by go test ./PACKAGE -run TEST -docs -->" and ends with
// "<!-- /NAME -->". With the flag -docs, Hold writes it.
func Check(t *testing.T, path, name, text string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	page := string(b)
	begin := strings.Index(page, "<!-- "+name+": ")
	end := strings.Index(page, "<!-- /"+name+" -->")
	if begin < 0 || end < begin {
		t.Fatalf("%s has no part %q", path, name)
	}
	mark, _, _ := strings.Cut(page[begin:end], "\n")
	if command := "-run " + t.Name() + " -docs -->"; !strings.HasSuffix(mark, command) {
		t.Fatalf("%s: the part %q begins with %q, which does not name %q", path, name, mark, command)
	}
	held := page[:begin] + mark + "\n\n" + strings.TrimSpace(text) + "\n\n" + page[end:]
	if *write {
		if err := os.WriteFile(path, []byte(held), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if held != page {
		t.Errorf("%s: the part %q differs from what the code generates; to write it anew, run the command in its first line: %s", path, name, mark)
	}
}
