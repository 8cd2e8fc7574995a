package main

import (
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/config"
	"nodeproxy/metrics"
)

// TestModes: each entry of the table of modes is complete, and packages config and metrics have an entry for the same modes.
func TestModes(t *testing.T) {
	var names []string
	for _, m := range modes {
		names = append(names, m.name)
		if m.check == nil || m.prepare == nil || m.open == nil || m.render == nil || m.machine == nil {
			t.Errorf("the entry of mode %s is incomplete: %+v", m.name, m)
		}
		if modeNamed(m.name) != m {
			t.Errorf("modeNamed does not find mode %s", m.name)
		}
	}
	slices.Sort(names)
	for pkg, has := range map[string][]string{"config": slices.Sorted(slices.Values(config.Modes())), "metrics": metrics.Modes()} {
		if !slices.Equal(has, names) {
			t.Errorf("package %s has modes %q, want %q", pkg, has, names)
		}
	}
}

// TestOnlyEntriesKnowModes: no file but that of a mode's entry imports the mode's backend.
func TestOnlyEntriesKnowModes(t *testing.T) {
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	entries := map[string]bool{}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		require.NoError(t, err)
		for _, i := range parsed.Imports {
			path, err := strconv.Unquote(i.Path.Value)
			require.NoError(t, err)
			for _, name := range config.Modes() {
				switch {
				case path != "nodeproxy/"+name:
				case file == "mode_"+name+".go":
					entries[name] = true
				case !strings.HasSuffix(file, "_test.go"):
					t.Errorf("%s imports the backend of mode %s, which only mode_%s.go should", file, name, name)
				}
			}
		}
	}
	if len(entries) != len(modes) {
		t.Errorf("files of modes' entries: %v, want one for each of %q", entries, config.Modes())
	}
}
