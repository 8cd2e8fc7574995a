package filewatch

import (
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestDirectories holds which directories matter for a file behind links, such as one in the volume of a ConfigMap.
func TestDirectories(t *testing.T) {
	t.Parallel()
	top := t.TempDir()
	for _, dir := range []string{"volume/..v1", "elsewhere"} {
		if err := os.MkdirAll(filepath.Join(top, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for path, target := range map[string]string{
		"volume/..data": "..v1", "volume/file": "..data/file", "volume/gone": "../none/x/file",
		"link": "volume", "chain": "elsewhere/chain", "elsewhere/chain": filepath.Join(top, "volume/file"),
	} {
		if err := os.Symlink(target, filepath.Join(top, path)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(top, "volume/..v1/file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"volume/..v1/file": "volume/..v1",
		"volume/file":      "volume volume/..data",
		"volume/gone":      ". volume",
		"link/file":        ". link link/..data",
		"chain":            ". elsewhere volume volume/..data",
	} {
		var got []string
		for _, dir := range slices.Sorted(maps.Keys(Directories(filepath.Join(top, path)))) {
			rel, err := filepath.Rel(top, dir)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, rel)
		}
		if text := strings.Join(got, " "); text != want {
			t.Errorf("%s: %s, want %s", path, text, want)
		}
	}
}

// TestWatcher holds that changes in the directories of the last call of Watch are reported, and others are not.
func TestWatcher(t *testing.T) {
	t.Parallel()
	first, second := t.TempDir(), t.TempDir()
	w := New(slog.New(slog.DiscardHandler))
	defer w.Close()
	if !w.Watch(map[string]bool{first: true}) || w.Watch(map[string]bool{first: true}) || !w.Watch(map[string]bool{second: true}) {
		t.Error("what Watch says of new directories is wrong")
	}
	for _, dir := range []string{first, second} {
		if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case path := <-w.C:
		if path != filepath.Join(second, "file") {
			t.Errorf("%q has changed", path)
		}
	case <-time.After(time.Minute):
		t.Error("a new file is not reported")
	}
}
