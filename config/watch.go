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

// Watch reads the configuration file again whenever it changes, until ctx ends. It passes a good one to changed, with the flags put
// over it as before, if it differs in its effect or its findings from the last good one or follows a wrong one. A file that is
// gone or wrong it reports to rejected, once. Without a file it only waits. Config must have returned before.
func (f *Flags) Watch(ctx context.Context, changed func(*Config), rejected func(error)) {
	if f.values.own.configFile == "" {
		<-ctx.Done()
		return
	}
	w := &fileWatch{flags: f, path: f.values.own.configFile, seen: f.read, changed: changed, rejected: rejected}
	if e, err := f.over(f.read); err == nil {
		w.inForce, _ = e.Config()
	}
	files := filewatch.New(slog.Default())
	defer files.Close()
	timer := time.NewTimer(settle) // It may have changed since it was read.
	defer timer.Stop()
	for {
		if files.Watch(filewatch.Directories(w.path)) {
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
	flags    *Flags
	path     string
	inForce  *Config
	seen     []byte // the last content
	wrong    bool   // it was wrong
	suspect  bool   // it was wrong at the last look, which is not reported yet
	failure  string // the error that was reported last
	changed  func(*Config)
	rejected func(error)
}

// look reads the file and reports if it has changed. It returns true for a file that is newly wrong: somebody may be in the
// middle of writing it, so it is read again before an error is reported.
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
		c, err = w.flags.reload(data)
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
