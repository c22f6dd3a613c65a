package node

import (
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime/debug"
	"strings"
	"testing"
)

// TestQuickstartCompiles: each piece of Go in docs/quickstart-go.md compiles as a part of a function
// that has a Config and regions. It may leave a variable unused.
func TestQuickstartCompiles(t *testing.T) {
	page, err := os.ReadFile("../docs/quickstart-go.md")
	if err != nil {
		t.Fatal(err)
	}
	compiler := compilerOfSnippets(t)
	pieces := regexp.MustCompile("(?ms)^```go\n(.*?)^```$").FindAllStringSubmatch(string(page), -1)
	if len(pieces) == 0 {
		t.Fatal("the page has no piece of Go")
	}
	for i, piece := range pieces {
		for _, err := range compiler(piece[1]) {
			t.Errorf("piece %d of docs/quickstart-go.md: %v", i+1, err)
		}
	}
	for _, wrong := range []string{
		`_ = core.LoadRequest{ID: "xfer-1", Blocks: [][]kv.BlockID{{7, 3, 12}}}`, // of the Selection in it
		`_ = cfg.NoSuchKey`,
		`agent.Open(`,
	} {
		if len(compiler(wrong)) == 0 {
			t.Errorf("%s counts as right", wrong)
		}
	}
}

// compilerOfSnippets compiles as the go command does, against the packages that this test was built with.
func compilerOfSnippets(t *testing.T) func(body string) []error {
	t.Helper()
	args := []string{"list", "-export", "-f", "{{.ImportPath}}={{.Export}}"}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		t.Fatal("the test does not know how it was built")
	}
	for _, s := range info.Settings {
		if s.Key == "-race" || s.Key == "-tags" {
			args = append(args, s.Key+"="+s.Value)
		}
	}
	out, err := exec.CommandContext(t.Context(), "go", append(args, "fmt", "github.com/kvconn/kvconn/core", "github.com/kvconn/kvconn/kv", "github.com/kvconn/kvconn/node")...).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		t.Fatalf("go list -export: %v", err)
	}
	exports, head := map[string]string{}, "package main\n"
	for line := range strings.Lines(string(out)) {
		name, file, _ := strings.Cut(strings.TrimSpace(line), "=")
		exports[name] = file
		head += fmt.Sprintf("import %q\n", name)
	}
	fset := token.NewFileSet()
	packages := importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	return func(body string) (errs []error) {
		text := head + "func calls(cfg node.Config, regions []kv.Region) {\n//line snippet:1\n" + body + "\n}\n"
		file, err := parser.ParseFile(fset, "snippet.go", text, parser.SkipObjectResolution)
		if err != nil {
			return []error{err}
		}
		config := types.Config{Importer: packages, Error: func(err error) {
			var wrong types.Error
			if !errors.As(err, &wrong) || !wrong.Soft { // soft: unused
				errs = append(errs, err)
			}
		}}
		_, _ = config.Check("main", fset, []*ast.File{file}, nil) // its error is the first of those that Error had
		return errs
	}
}
