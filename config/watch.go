package config

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// settle is how long no further event must come before the file is read again: programs save in several steps.
	settle = 50 * time.Millisecond
	// lookAgain is how often the file is read in case no event told of a change, as on network file systems.
	lookAgain = 15 * time.Second
)

// Watch reads the configuration file again whenever it changes, until ctx ends. A good one that differs in anything that
// matters, or of which there is something else to say, or that comes after a wrong one, is handed to changed, with flags put over it as
// before; that one is gone or wrong in any way is told to rejected, once. Without a file it only waits. Config must have returned before.
// The error tells why the file can't be watched.
func (f *Flags) Watch(ctx context.Context, changed func(*Config), rejected func(error)) error {
	if f.values.own.configFile == "" {
		<-ctx.Done()
		return nil
	}
	w := &fileWatch{flags: f, path: f.values.own.configFile, seen: f.read, changed: changed, rejected: rejected}
	if e, err := f.over(f.read); err == nil {
		w.inForce, _ = e.Config()
	}
	events, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("--config: %s can't be watched: %w", w.path, err)
	}
	defer func() { _ = events.Close() }()
	timer := time.NewTimer(settle) // It may have changed since it was read.
	defer timer.Stop()
	poll := time.NewTicker(lookAgain)
	defer poll.Stop()
	for {
		for _, dir := range directories(w.path) {
			_ = events.Add(dir) // Where that fails there is the ticker.
		}
		select {
		case <-ctx.Done():
			return nil
		case <-events.Events:
			timer.Reset(settle)
		case <-events.Errors: // Events were lost.
			timer.Reset(settle)
		case <-timer.C:
			if w.look() {
				timer.Reset(settle)
			}
		case <-poll.C:
			timer.Reset(0)
		}
	}
}

// fileWatch is a watch of the configuration file.
type fileWatch struct {
	flags    *Flags
	path     string
	inForce  *Config
	seen     []byte // the last content that was looked at
	wrong    bool   // that was wrong
	suspect  bool   // it was wrong at the last look, of which nothing is said yet
	failure  string // what was said last of what is wrong
	changed  func(*Config)
	rejected func(error)
}

// look reads the file, and tells if it has changed. It returns true for a file that is newly wrong: somebody may be in the
// middle of writing it, so it is to be looked at again before anything is said.
func (w *fileWatch) look() (again bool) {
	data, err := os.ReadFile(w.path)
	if err != nil {
		err = fmt.Errorf("--config: %w", err)
	} else if bytes.Equal(data, w.seen) {
		w.failure, w.suspect = "", false
		return false
	}
	var c *Config
	if err == nil {
		c, err = w.flags.understand(data)
	}
	switch {
	case err != nil && !w.suspect:
		w.suspect = true
		return true
	case err != nil:
		w.suspect, w.seen, w.wrong = false, data, true
		if w.failure != err.Error() {
			w.failure = err.Error()
			w.rejected(err)
		}
		return false
	}
	w.failure, w.suspect, w.seen = "", false, data
	differs := w.inForce == nil || w.wrong || !c.SameEffect(w.inForce) || !slices.Equal(c.Findings, w.inForce.Findings)
	w.inForce, w.flags.read, w.wrong = c, data, false
	if differs {
		w.changed(c)
	}
	return false
}

// understand makes a Config of a new content of the file.
func (f *Flags) understand(data []byte) (*Config, error) {
	e, err := f.over(data)
	if err != nil {
		return nil, err
	}
	return e.understand(true)
}

// SameEffect reports whether two configurations differ in nothing but what there is to say about them.
func (c *Config) SameEffect(other *Config) bool {
	x, y := *c, *other
	x.Findings, y.Findings = nil, nil
	x.Configz, y.Configz = nil, nil
	return reflect.DeepEqual(x, y)
}

// directories are those in which a change can make a path lead to another content: its own, and those of the symbolic links
// that lead to it. The volume of a ConfigMap has two of them.
func directories(path string) []string {
	var out []string
	for range 40 { // As many links as the kernel follows.
		dir := filepath.Dir(path)
		if info, err := os.Lstat(dir); err == nil && info.Mode()&os.ModeSymlink != 0 {
			out = append(out, filepath.Dir(dir))
		}
		if target, err := filepath.EvalSymlinks(dir); err == nil {
			dir = target
		}
		out = append(out, dir)
		next, err := os.Readlink(path)
		if err != nil {
			break
		}
		if !filepath.IsAbs(next) {
			next = filepath.Join(filepath.Dir(path), next)
		}
		path = next
	}
	return out
}
