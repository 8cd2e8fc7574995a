package drift

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestUnified: lines around a difference are printed, those far from one are not, and the header of a file is printed once.
func TestUnified(t *testing.T) {
	lines := strings.Fields("a b c d e f g h")
	var out strings.Builder
	u := &Unified{W: &out, From: "kernel", To: "nodeproxy"}
	for _, h := range []Hunk{
		{File: "one", Object: "x", Services: []string{"n/a", "n/b"}, Have: lines, Want: strings.Fields("a B c d e f g")},
		{File: "one", Object: "y", Want: lines[:1]},
		{File: "two", Object: "z", Have: lines[:2]},
	} {
		require.NoError(t, u.Print(h))
	}
	const want = `--- kernel one
+++ nodeproxy one
@@ -1,3 +1,3 @@ x: n/a, n/b
 a
-b
+B
 c
@@ -7,2 +7 @@ x: n/a, n/b
 g
-h
@@ -0,0 +1 @@ y
+a
--- kernel two
+++ nodeproxy two
@@ -1,2 +0,0 @@ z
-a
-b
`
	if out.String() != want {
		t.Errorf("got\n%s", out.String())
	}
	added, removed := Hunk{Have: lines, Want: strings.Fields("a B c d e f g")}.Lines()
	if added != 1 || removed != 2 {
		t.Errorf("%d lines added, %d removed", added, removed)
	}
	out.Reset()
	if err := (&Unified{W: &out, Color: true}).Print(Hunk{Have: lines[:1]}); err != nil || !strings.Contains(out.String(), "\x1b[31m-a\x1b[m\n") {
		t.Errorf("%v: %q", err, out.String())
	}
}
