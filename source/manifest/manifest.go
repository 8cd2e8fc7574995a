// Package manifest reads the objects of a cluster that has no API server from files, watches these, and delivers what
// controlplane makes of the objects. It knows where each object is, and decides when a change of a file counts: a file may be
// half written.
//
// What it delivers is a pure function of the set of objects in force. Their distribution over files, the names of the files and
// the order of events make no difference, except that of an object defined twice the first by file name is used.
package manifest

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/source"
	"nodeproxy/source/controlplane"
)

// Config configures a Source.
type Config struct {
	// Path is a file or a directory of manifests: *.yaml, *.yml and *.json, also in directories below it. Names that
	// begin with a dot are left alone.
	Path string
	// Ranges are the ranges from which cluster IPs and node ports are allocated.
	controlplane.Ranges
	// Report receives each finding about the objects once while it holds; nil discards them. It is called from the goroutine that
	// runs the source.
	Report source.Report
	// Pod, if not nil, is called by Load and Read with each Pod in force, in no order.
	Pod func(*v1.Pod)
	// Log receives messages about the source itself, such as a watch that does not work; nil discards them.
	Log *slog.Logger
}

// open returns the config with its defaults, and an empty store. It fails if the config is invalid.
func (c Config) open() (Config, *store, error) {
	if c.Path == "" {
		return c, nil, errors.New("no path of manifests is given")
	}
	c.Path = filepath.Clean(c.Path)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	s, err := newStore(&c)
	return c, s, err
}

// Source watches manifests and delivers changes. What its store has to say may be asked at any time: ServiceFile, Pods, Findings.
type Source struct {
	*store
	cfg    Config
	faults atomic.Pointer[[]string]
}

// Faults returns the faults that keep manifests from being in force as they are, each with its file and line. For what can't be
// read, the version read last is in force. It may be called at any time.
func (s *Source) Faults() []string {
	if faults := s.faults.Load(); faults != nil {
		return *faults
	}
	return nil
}

var _ source.Source = (*Source)(nil)

// New returns a source of the manifests at cfg.Path, which need not exist yet. It fails if the config is invalid.
func New(cfg Config) (*Source, error) {
	cfg, store, err := cfg.open()
	if err != nil {
		return nil, err
	}
	return &Source{cfg: cfg, store: store}, nil
}

// Load reads the manifests once and returns everything that they hold. Broken objects are reported and left out; it fails
// only where nothing can be read at all.
func Load(cfg Config) (source.Batch, error) {
	cfg, s, err := cfg.open()
	if err != nil {
		return source.Batch{}, err
	}
	if _, err := os.Stat(cfg.Path); err != nil {
		return source.Batch{}, fmt.Errorf("manifests: %w", err)
	}
	tree := scan(cfg.Path)
	s.findings.setPlaces(tree.unreadable(), effectNothing)
	var readings []*reading
	for _, path := range slices.Sorted(maps.Keys(tree.files)) {
		r := tree.files[path]
		r.read()
		r.info = nil
		readings = append(readings, r)
	}
	return s.load(readings, cfg.Pod), nil
}

// Read is like Load, but reads the manifests from in, such as standard input; cfg.Path is its name.
func Read(cfg Config, in io.Reader) (source.Batch, error) {
	cfg, s, err := cfg.open()
	if err != nil {
		return source.Batch{}, err
	}
	data, err := io.ReadAll(io.LimitReader(in, maxFile))
	if err != nil {
		return source.Batch{}, fmt.Errorf("manifests: reading %s: %w", cfg.Path, err)
	}
	return s.load([]*reading{{path: cfg.Path, data: data}}, cfg.Pod), nil
}

func (s *store) load(readings []*reading, each func(*v1.Pod)) source.Batch {
	batch := s.update(readings, nil)
	if each != nil {
		for _, pod := range s.Pods() {
			each(pod)
		}
	}
	batch.Synced = true
	return batch
}
