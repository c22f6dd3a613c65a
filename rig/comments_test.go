package rig

import (
	"go/ast"
	"go/parser"
	"go/token"
	"testing"
)

// TestFilesSayTheirIdea: the first comment of a file says the file's idea, and stands before all declarations: above the package
// clause, or at the type or function that comes first. A constant or a variable that comes first says no file's idea.
func TestFilesSayTheirIdea(t *testing.T) {
	for name, f := range goFiles(t, parser.ParseComments|parser.SkipObjectResolution) {
		if !ast.IsGenerated(f) && !saysIdea(f) {
			t.Errorf("%s: its first comment must say its idea, above the package clause: see CONTRIBUTING.md", name)
		}
	}
}

func saysIdea(f *ast.File) bool {
	for _, c := range f.Comments {
		if c.End() < f.Package && c.Text() != "" { // a directive has no text
			return true
		}
	}
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			return d.Doc.Text() != ""
		case *ast.GenDecl:
			if d.Tok != token.IMPORT {
				return d.Tok == token.TYPE && d.Doc.Text() != ""
			}
		}
	}
	return false
}
