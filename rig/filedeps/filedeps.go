// Package filedeps tells tests which files of a package use which. Files that use each
// other in one direction can be read from the bottom up.
package filedeps

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Uses holds for each file the files whose declarations it names, fields and methods
// included. Files are named without their folder.
type Uses map[string]map[string]bool

// generic are the packages whose results have types of who calls them: without these, what is
// used through a loop over an iterator would not be seen.
var generic = []string{"iter", "slices", "maps", "cmp", "sync/atomic"}

// others are the packages that the read one imports. All but the generic ones are empty:
// only uses within the read package count.
type others struct {
	source types.Importer
	failed error // why a generic one could not be read
}

func (o *others) Import(path string) (*types.Package, error) {
	if slices.Contains(generic, path) {
		p, err := o.source.Import(path)
		o.failed = cmp.Or(o.failed, err)
		return p, err
	}
	p := types.NewPackage(path, path[strings.LastIndexByte(path, '/')+1:])
	p.MarkComplete()
	return p, nil
}

// Read returns the uses of the package in dir, its tests left out.
func Read(dir string) (Uses, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	set := token.NewFileSet()
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	info := types.Info{Uses: map[*ast.Ident]types.Object{}}
	from := &others{source: importer.ForCompiler(set, "source", nil)}
	conf := types.Config{Importer: from, Error: func(error) {}}
	pkg, _ := conf.Check(dir, set, files, &info) // with errors about the other packages
	if from.failed != nil {
		return nil, fmt.Errorf("the package in %q: %w", dir, from.failed)
	}
	file := func(at token.Pos) string { return filepath.Base(set.Position(at).Filename) }
	uses := Uses{}
	for id, o := range info.Uses {
		from, to := file(id.Pos()), file(o.Pos())
		if _, name := o.(*types.PkgName); o.Pkg() != pkg || name || from == to {
			continue
		}
		if uses[from] == nil {
			uses[from] = map[string]bool{}
		}
		uses[from][to] = true
	}
	if len(uses) == 0 {
		return nil, fmt.Errorf("no file of the %d in %q uses another", len(files), dir)
	}
	return uses, nil
}

// Cycles returns the cycles that a walk over all files meets, each with its first file
// repeated at the end; none if no file uses another in a cycle.
func (u Uses) Cycles() (cycles [][]string) {
	done, way := map[string]bool{}, []string(nil)
	var walk func(file string)
	walk = func(file string) {
		if i := slices.Index(way, file); i >= 0 {
			cycles = append(cycles, append(slices.Clone(way[i:]), file))
			return
		}
		if done[file] {
			return
		}
		way = append(way, file)
		for _, to := range slices.Sorted(maps.Keys(u[file])) {
			walk(to)
		}
		way, done[file] = way[:len(way)-1], true
	}
	for _, file := range slices.Sorted(maps.Keys(u)) {
		walk(file)
	}
	return cycles
}

// NoCycles fails a test where files of the package in dir use each other in a circle. It returns the uses.
func NoCycles(t testing.TB, dir string) Uses {
	t.Helper()
	uses, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, cycle := range uses.Cycles() {
		t.Errorf("a cycle: %v", cycle)
	}
	return uses
}
