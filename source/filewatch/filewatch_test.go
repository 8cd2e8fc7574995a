package filewatch

import (
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestDirectories holds which directories matter for a file behind links, such as one in the volume of a ConfigMap.
func TestDirectories(t *testing.T) {
	t.Parallel()
	top := t.TempDir()
	for _, dir := range []string{"volume/..v1", "elsewhere"} {
		require.NoError(t, os.MkdirAll(filepath.Join(top, dir), 0o755))
	}
	for path, target := range map[string]string{
		"volume/..data": "..v1", "volume/file": "..data/file", "volume/gone": "../none/x/file",
		"link": "volume", "chain": "elsewhere/chain", "elsewhere/chain": filepath.Join(top, "volume/file"),
	} {
		require.NoError(t, os.Symlink(target, filepath.Join(top, path)))
	}
	require.NoError(t, os.WriteFile(filepath.Join(top, "volume/..v1/file"), nil, 0o644))
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
			require.NoError(t, err)
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
		require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o644))
	}
	select {
	case e := <-w.C:
		if e.Path != filepath.Join(second, "file") {
			t.Errorf("%q has changed", e.Path)
		}
	case <-time.After(time.Minute):
		t.Error("a new file is not reported")
	}
}

// TestWatchWhileEventsWait: a directory that is renamed and removed makes an error of fsnotify, which holds its lock until somebody receives it. What
// waits to be received from C must not keep it from that: Watch takes the same lock.
func TestWatchWhileEventsWait(t *testing.T) {
	t.Parallel()
	top := t.TempDir()
	dir, away := filepath.Join(top, "dir"), filepath.Join(top, "away")
	w := New(slog.New(slog.DiscardHandler))
	defer w.Close()
	require.NoError(t, os.Mkdir(dir, 0o755))
	w.Watch(map[string]bool{dir: true})
	for _, name := range []string{"a", "b", "c"} { // More than are received before C is.
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o644))
	}
	require.NoError(t, os.Rename(dir, away))
	require.NoError(t, os.RemoveAll(away))
	for range 20 {
		select {
		case <-w.C:
		case <-time.After(50 * time.Millisecond): // There need not be so many.
		}
		time.Sleep(20 * time.Millisecond) // fsnotify is to read its next event; there is no sign of that.
		watched := make(chan struct{})
		go func() {
			w.Watch(map[string]bool{dir: true, top: true})
			close(watched)
		}()
		select {
		case <-watched:
		case <-time.After(time.Minute):
			t.Fatal("Watch does not return")
		}
	}
}

// TestManyEvents: where more events wait than are kept, none is lost: anything may have changed.
func TestManyEvents(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWatcher(slog.New(slog.DiscardHandler), time.Hour)
	defer w.Close()
	w.Watch(map[string]bool{dir: true})
	for i := range 3 * mostWaiting {
		require.NoError(t, os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), nil, 0o644))
	}
	for end := time.After(time.Minute); ; {
		select {
		case e := <-w.C:
			if e.Path == "" || e.Path == filepath.Join(dir, strconv.Itoa(3*mostWaiting-1)) {
				return
			}
		case <-end:
			t.Fatal("the last file is not reported")
		}
	}
}
