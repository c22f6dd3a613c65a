package rig

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// below says for each package what of ours it imports. Tests are left out, and so is the ground: all may import it.
// What describes caches knows nothing of transfers, what decides about transfers knows nobody who moves bytes or messages,
// these know no agent, and none of them knows the rig.
var below = map[string][]string{
	"kv": nil, "wire": nil, "bootstrap": nil, "cuda/internal/driver": nil, "rdma/internal/verbs": nil,
	"hostmem":      {"kv"},
	"core":         {"kv", "wire"},
	"core/half":    {"core", "kv"},
	"core/machine": {"core", "core/half", "kv"},
	"shmem":        {"core"},
	"natsbus":      {"core", "wire"},
	"cuda":         {"core", "cuda/internal/driver"},
	"tcp":          {"core", "hostmem", "kv"},
	"rdma":         {"core", "hostmem", "kv", "rdma/internal/verbs"},
	"local":        {"core", "cuda", "hostmem", "kv", "shmem"},
	"devices":      {"core", "cuda", "kv", "local", "rdma", "tcp"},
	"node": {"bootstrap", "core", "core/machine", "cuda", "devices", "hostmem", "kv", "local", "natsbus", "rdma", "shmem",
		"tcp", "wire"},
	"proxy": {"bootstrap"}, "launch": {"bootstrap", "proxy"},
	"cli/synthetic": {"core", "kv", "natsbus", "node", "shmem"}, "cli/gpuhost": {"cuda", "rdma"},
	"cli":        {"cli/gpuhost", "cli/synthetic", "core", "cuda", "kv", "launch", "local", "node", "proxy", "rdma"},
	"capi":       {"cli", "core", "devices", "kv", "node", "shmem"},
	"cmd/kvconn": {"cli"}, "cmd/kvconn-rig": {"rig"},
}

// ground is where all stand. Its packages import of ours each other alone.
const ground = "internal/"

// TestImportsPointOneWay: packages import what stands below them, whatever tags their files need.
func TestImportsPointOneWay(t *testing.T) {
	imports := map[string]map[string]bool{}
	for name, f := range productFiles(t, parser.ImportsOnly) {
		folder := path.Dir(name)
		if imports[folder] == nil {
			imports[folder] = map[string]bool{}
		}
		for _, spec := range f.Imports {
			if of, ours := strings.CutPrefix(importedBy(t, spec), module); ours {
				imports[folder][of] = true
			}
		}
	}
	for name, has := range imports {
		row, known := below[name]
		if known == strings.HasPrefix(name, ground) {
			t.Errorf("%s: a package of %s has no row in below, and any other has one", name, ground)
		}
		for of := range has {
			if !strings.HasPrefix(of, ground) && !slices.Contains(row, of) {
				t.Errorf("%s imports %s, but only %v stand below it", name, of, row)
			}
		}
	}
	for name, row := range below {
		for _, of := range row {
			if !imports[name][of] {
				t.Errorf("%s does not import %s: below knows of more than there is", name, of)
			}
		}
	}
}

// ofValues are the packages of which kv, core (with core/half and core/machine), wire and internal/quota are made, which compute with values only. What is not in the list is a decision: each
// further package may bring I/O, a goroutine, a lock or a clock into what decides.
var ofValues = []string{"cmp", "container/heap", "container/list", "context", "crypto/sha256", "errors", "fmt", "iter", "maps", "math", "math/bits",
	"net/netip", "reflect", "slices", "strconv", "strings", "time", "unsafe", "github.com/tinylib/msgp/msgp",
	module + "internal/fault", module + "internal/invariants", module + "internal/quota", module + "kv", module + "wire", module + "core", module + "core/half"}

// onlyOf says which of them may have one of them, if not all may.
var onlyOf = map[string][]string{
	"container/heap":               {"internal/quota"},
	"context":                      {"core"},                              // in the interfaces of who moves bytes and messages
	"crypto/sha256":                {"core/half"},                         // digests of grants
	"net/netip":                    {"internal/quota"},                    // an address that holds something
	"time":                         {"core", "core/half", "core/machine"}, // their user tells the time
	"github.com/tinylib/msgp/msgp": {"wire"},
	module + "core":                {"core/half", "core/machine"},
	module + "core/half":           {"core/machine"},
	module + "internal/quota":      {"core/half"}, // counts, without a lock
}

// TestDecidesWithoutTheWorld: kv, core, wire and internal/quota do no I/O, and have no goroutine, lock or clock. core has times: its user tells them.
func TestDecidesWithoutTheWorld(t *testing.T) {
	files, used := 0, map[string]bool{}
	for name, f := range productFiles(t, parser.SkipObjectResolution) {
		folder := path.Dir(name)
		if !slices.Contains([]string{"kv", "core", "core/half", "core/machine", "wire", "internal/quota"}, folder) {
			continue
		}
		files++
		for _, spec := range f.Imports {
			of := importedBy(t, spec)
			used[of] = true
			if only := onlyOf[of]; !slices.Contains(ofValues, of) || only != nil && !slices.Contains(only, folder) {
				t.Errorf("%s imports %s, which is not in ofValues, or not for %s", name, of, folder)
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s begins a goroutine", name)
			case *ast.SelectorExpr:
				of, isName := n.X.(*ast.Ident)
				if isName && of.Name == "time" && slices.Contains([]string{"After", "AfterFunc", "NewTicker", "NewTimer", "Now", "Since", "Sleep", "Tick", "Until"}, n.Sel.Name) {
					t.Errorf("%s asks a clock: time.%s", name, n.Sel.Name)
				}
			}
			return true
		})
	}
	if files < 50 {
		t.Errorf("kv, core, wire and internal/quota have %d files", files)
	}
	for _, of := range ofValues {
		if !used[of] {
			t.Errorf("none of them imports %s: ofValues knows of more than there is", of)
		}
	}
}

// TestImportsOfPython: the API in Python knows no engine, and no engine's room knows the other engine.
func TestImportsOfPython(t *testing.T) {
	imported := regexp.MustCompile(`(?m)^\s*(?:from|import)\s+(?:\.+|kvconn\.)?(vllm|sglang)\b`)
	for room, engine := range map[string]string{"": "", "vllm": "vllm", "sglang": "sglang"} {
		files, err := filepath.Glob(filepath.Join("..", "python", "kvconn", room, "*.py"))
		if err != nil || len(files) < 10 {
			t.Fatalf("%q has %d files: %v", room, len(files), err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range imported.FindAllSubmatch(text, -1) {
				if string(line[1]) != engine {
					t.Errorf("%s has %q", file, line[0])
				}
			}
		}
	}
}

// productFiles are the Go files of all packages but the rig's.
func productFiles(t *testing.T, mode parser.Mode) map[string]*ast.File {
	t.Helper()
	return goFiles(t, mode, "rig")
}

// goFiles are the Go files of all packages, by their names below the module's folder; tests and folders of a name that is left out are not among
// them. They are read here, not by the go command: go test then knows that its result depends on them.
func goFiles(t *testing.T, mode parser.Mode, leftOut ...string) map[string]*ast.File {
	t.Helper()
	leftOut = append(leftOut, "build", "dist", "testdata")
	files, set := map[string]*ast.File{}, token.NewFileSet()
	err := filepath.WalkDir("..", func(name string, e fs.DirEntry, err error) error {
		below, _ := filepath.Rel("..", name)
		switch {
		case err != nil:
			return err
		case e.IsDir() && below != "." && (strings.HasPrefix(e.Name(), ".") || slices.Contains(leftOut, e.Name())):
			return filepath.SkipDir
		case e.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		f, err := parser.ParseFile(set, name, nil, mode)
		files[filepath.ToSlash(below)] = f
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 200 {
		t.Fatalf("%d files of Go were found", len(files))
	}
	return files
}

func importedBy(t *testing.T, spec *ast.ImportSpec) string {
	t.Helper()
	of, err := strconv.Unquote(spec.Path.Value)
	if err != nil {
		t.Fatal(err)
	}
	return of
}
