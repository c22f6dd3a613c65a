package node

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// others stands in for the packages that this one imports: here only the uses within
// this package count.
type others struct{}

func (others) Import(path string) (*types.Package, error) {
	p := types.NewPackage(path, path[strings.LastIndexByte(path, '/')+1:])
	p.MarkComplete()
	return p, nil
}

// TestArrowsPointOneWay: files use each other without a cycle. agent.go puts the parts
// together, and only the engine's calls stand above it.
func TestArrowsPointOneWay(t *testing.T) {
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	set := token.NewFileSet()
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	info := types.Info{Uses: map[*ast.Ident]types.Object{}}
	conf := types.Config{Importer: others{}, Error: func(error) {}}
	pkg, _ := conf.Check("node", set, files, &info) // with errors about the other packages
	uses := map[string]map[string]bool{}
	for id, o := range info.Uses {
		from, to := set.Position(id.Pos()).Filename, set.Position(o.Pos()).Filename
		if _, name := o.(*types.PkgName); o.Pkg() != pkg || name || from == to {
			continue
		}
		if uses[from] == nil {
			uses[from] = map[string]bool{}
		}
		uses[from][to] = true
	}
	if len(uses["calls.go"]) == 0 || !uses["agent.go"]["halves.go"] {
		t.Fatalf("the files' uses are not known: %v", uses)
	}
	done, way := map[string]bool{}, []string(nil)
	var walk func(file string)
	walk = func(file string) {
		if i := slices.Index(way, file); i >= 0 {
			t.Errorf("a cycle: %v", append(slices.Clone(way[i:]), file))
			return
		}
		if done[file] {
			return
		}
		way = append(way, file)
		for _, to := range slices.Sorted(maps.Keys(uses[file])) {
			if walk(to); to == "agent.go" && file != "calls.go" {
				t.Errorf("%s knows the agent", file)
			}
		}
		way, done[file] = way[:len(way)-1], true
	}
	for _, file := range slices.Sorted(maps.Keys(uses)) {
		walk(file)
	}
}
