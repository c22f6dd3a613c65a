package node

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// TestNoPartKnowsTheAgent: agent.go puts the parts together and calls.go has the
// engine's calls; every other file gets what it needs as a value or an interface.
func TestNoPartKnowsTheAgent(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") || name == "agent.go" || name == "calls.go" {
			continue
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if p, ok := n.(*ast.StarExpr); ok {
				if id, ok := p.X.(*ast.Ident); ok && id.Name == "Agent" {
					t.Errorf("%v: a part that holds the agent", set.Position(p.Pos()))
				}
			}
			return true
		})
	}
}
