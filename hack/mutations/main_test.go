package main

import (
	"bufio"
	"go/format"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMutations: each fault can be planted in the code as it is now, and the result can be read as Go.
func TestMutations(t *testing.T) {
	all, err := parse(list)
	require.NoError(t, err)
	if len(all) < 20 {
		t.Errorf("there are %d", len(all))
	}
	known := map[string]bool{}
	for _, m := range all {
		text, err := os.ReadFile(filepath.Join("..", "..", m.file))
		require.NoError(t, err)
		changed, err := m.apply(string(text))
		if err == nil {
			_, err = format.Source([]byte(changed))
		}
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
		if known[m.name] || m.why == "" {
			t.Errorf("%s: there are two of that name, or nothing says why", m.name)
		}
		known[m.name] = true
	}
}

// TestParseRefused: a list that can't be read says where.
func TestParseRefused(t *testing.T) {
	for text, want := range map[string]string{
		"name\nwhy\n-a\n+b":        "want a name, a file",
		"name file.go\n-a\n+b":     "want a name, a file",
		"name file.go\nwhy\na\n+b": "begins neither with",
	} {
		if _, err := parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// TestRead: the table says what the test has said first.
func TestRead(t *testing.T) {
	for text, want := range map[string]struct {
		schedules int
		by        string
	}{
		"    a_test.go:1: schedule 0\n    a_test.go:1: schedule 1\nok\n":                                 {2, ""},
		"    a_test.go:1: schedule 0\n    a_test.go:1: schedule 0 fails: after 1.5s: a | b\n    again\n": {1, `a \| b`},
		"    a_test.go:1: schedule 0\npanic: test timed out after 1h0m0s\n":                              {1, ""},
		"    a_test.go:1: schedule 0\npanic: deadlock: all are blocked [recovered]\npanic: again\n":      {1, "the test ends: deadlock: all are blocked [recovered]"},
	} {
		if schedules, by := read(bufio.NewScanner(strings.NewReader(text))); schedules != want.schedules || by != want.by {
			t.Errorf("%q: %d, %q", text, schedules, by)
		}
	}
}
