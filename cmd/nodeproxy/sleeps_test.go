package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSleeps: a test waits for a condition. A time.Sleep in a test is the interval of a loop that looks for one, as its last step; runs on the
// simulated time of package synctest; or has a comment, on its line or the one above, that says why there is no condition to wait for.
func TestSleeps(t *testing.T) {
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return err
		}
		if path != root && strings.HasPrefix(entry.Name(), ".") {
			return filepath.SkipDir
		}
		names, err := filepath.Glob(filepath.Join(path, "*_test.go"))
		if err != nil {
			return err
		}
		files := token.NewFileSet()
		var tests []*ast.File
		for _, name := range names {
			file, err := parser.ParseFile(files, name, nil, parser.ParseComments)
			if err != nil {
				return err
			}
			tests = append(tests, file)
		}
		for _, at := range unexplainedSleeps(files, tests) {
			t.Errorf("%s: time.Sleep without a comment that says why there is no condition to wait for", at)
		}
		return nil
	})
	require.NoError(t, err)
}

// unexplainedSleeps returns where a package's tests call time.Sleep in a way that TestSleeps objects to.
func unexplainedSleeps(files *token.FileSet, tests []*ast.File) (at []token.Position) {
	// A bubble is a function that calls synctest.Test: what is given to it may run on simulated time.
	bubbles := map[string]bool{"synctest.Test": true}
	for found := 0; found < len(bubbles); {
		found = len(bubbles)
		for _, file := range tests {
			for _, d := range file.Decls {
				if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil && calls(f.Body, bubbles) {
					bubbles[f.Name.Name] = true
				}
			}
		}
	}
	for _, file := range tests {
		explained := map[int]bool{}
		for _, group := range file.Comments {
			for _, c := range group.List {
				line := files.Position(c.Pos()).Line
				explained[line], explained[line+1] = true, true
			}
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.ForStmt:
				if n.Post != nil && calls(n.Post, map[string]bool{"time.Sleep": true}) {
					explained[files.Position(n.Post.Pos()).Line] = true
				}
			case *ast.CallExpr:
				if bubbles[callee(n)] {
					return false
				}
				if p := files.Position(n.Pos()); callee(n) == "time.Sleep" && !explained[p.Line] {
					at = append(at, p)
				}
			}
			return true
		})
	}
	return at
}

// calls reports whether a call of one of the functions is anywhere in a node.
func calls(n ast.Node, functions map[string]bool) (found bool) {
	ast.Inspect(n, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		found = found || ok && functions[callee(call)]
		return !found
	})
	return found
}

// callee is the name of the function that is called, with its package; or nothing, for a method or an expression.
func callee(call *ast.CallExpr) string {
	switch f := call.Fun.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		if of, ok := f.X.(*ast.Ident); ok {
			return of.Name + "." + f.Sel.Name
		}
	}
	return ""
}

// TestUnexplainedSleeps: what TestSleeps objects to, and what it does not.
func TestUnexplainedSleeps(t *testing.T) {
	const source = `package p
func bubble(f func()) { synctest.Test(nil, func(*testing.T) { f() }) }
func f() {
	time.Sleep(1) // The kernel does not report it.
	// The kernel does not report it.
	time.Sleep(1)
	for ; ; time.Sleep(1) {
	}
	synctest.Test(t, func(*testing.T) { time.Sleep(1) })
	bubble(func() { time.Sleep(1) })
	time.Sleep(1)
	for {
		time.Sleep(1)
	}
}`
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "p.go", source, parser.ParseComments)
	require.NoError(t, err)
	if got := unexplainedSleeps(files, []*ast.File{file}); len(got) != 2 || got[0].Line != 11 || got[1].Line != 13 {
		t.Errorf("%v, want lines 11 and 13", got)
	}
}
