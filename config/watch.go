package config

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"time"

	"nodeproxy/source/filewatch"
)

// settle is the time without another event after which the file is read again: programs save in several steps.
const settle = 50 * time.Millisecond

// Watch reads the configuration file again whenever it changes, until ctx ends. It tells a good one, with the flags put over it as
// before, if it differs in its effect or its findings from the last good one or follows an error; and the error of a file that is
// gone or wrong, once. Without a file it only waits. Config must have returned before.
func (f *Flags) Watch(ctx context.Context, tell func(*Config, error)) {
	path := f.values.own.configFile
	if path == "" {
		<-ctx.Done()
		return
	}
	w := &fileWatch{flags: f, path: path, tell: tell}
	if e, err := f.over(f.read); err == nil {
		w.last, _ = e.Config()
	}
	files := filewatch.New(slog.Default())
	defer files.Close()
	timer := time.NewTimer(settle) // It may have changed since it was read.
	defer timer.Stop()
	for {
		if files.Watch(filewatch.Directories(path)) {
			timer.Reset(settle)
		}
		select {
		case <-ctx.Done():
			return
		case <-files.C:
			timer.Reset(settle)
		case <-timer.C:
			if w.look() {
				timer.Reset(settle)
			}
		}
	}
}

// fileWatch is a watch of the configuration file.
type fileWatch struct {
	flags   *Flags
	path    string
	tell    func(*Config, error)
	last    *Config // that was good; flags.read is its text
	failure string  // the error that was told after that
	suspect bool    // there was an error at the last look, which is not told yet
}

// look reads the file and tells what is new. It returns true for a file that is newly wrong: somebody may be in the middle of
// writing it, so it is read again before an error is told.
func (w *fileWatch) look() (again bool) {
	data, err := os.ReadFile(w.path)
	c := w.last
	switch {
	case err != nil:
		err = fmt.Errorf("--config: %w", err)
	case c == nil || !bytes.Equal(data, w.flags.read):
		c, err = w.flags.reload(data)
	}
	switch {
	case err == nil:
		differs := w.failure != "" || w.last == nil || !c.SameEffect(w.last) || !slices.Equal(c.Findings, w.last.Findings)
		w.last, w.flags.read, w.failure, w.suspect = c, data, "", false
		if differs {
			w.tell(c, nil)
		}
	case err.Error() == w.failure:
		w.suspect = false
	case !w.suspect:
		w.suspect = true
	default:
		w.suspect, w.failure = false, err.Error()
		w.tell(nil, err)
	}
	return w.suspect
}

// reload makes a Config from new content of the file.
func (f *Flags) reload(data []byte) (*Config, error) {
	e, err := f.over(data)
	if err != nil {
		return nil, err
	}
	return e.validate(true)
}

// SameEffect reports whether two configurations differ in nothing but their findings.
func (c *Config) SameEffect(other *Config) bool {
	x, y := *c, *other
	x.Findings, y.Findings = nil, nil
	x.Configz, y.Configz = nil, nil
	return reflect.DeepEqual(x, y)
}
