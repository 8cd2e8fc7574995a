// Package manifest turns a directory of manifests into the Services, EndpointSlices, ServiceCIDRs and Nodes of a cluster that
// has no API server: it checks objects and sets defaults as that would, allocates cluster IPs and node ports, and makes EndpointSlices
// out of Pods and Endpoints as the controllers would.
//
// What it delivers is a pure function of the set of objects in force: how they are spread over files, the names of these
// and the order of events make no difference, except that of an object defined twice the first by file name counts.
package manifest

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"nodeproxy/source"
)

// PortRange is a range of ports, both ends included.
type PortRange struct{ First, Last uint16 }

// Config says where the manifests are and what to allocate from.
type Config struct {
	// Path is a file or a directory of manifests: *.yaml, *.yml and *.json, also in directories below it. Names that
	// begin with a dot are left alone.
	Path string
	// ServiceCIDRs are the ranges of cluster IPs, at most one a family; the first is that of Services that ask for no
	// family. Default: 10.96.0.0/16. ServiceCIDR objects in the manifests are delivered, but nothing is allotted from them.
	ServiceCIDRs []netip.Prefix
	// NodePorts is the range of node ports. Default: 30000-32767.
	NodePorts PortRange
	// Report receives what the objects' owners should know, each finding once as long as it holds; nil discards it. It is
	// called from the goroutine that runs the source.
	Report source.Report
	// Log receives what concerns the source itself, such as a watch that does not work; nil discards it.
	Log *slog.Logger
}

// complete returns the config with its defaults, or says what is wrong with it.
func (c Config) complete() (Config, error) {
	if c.Path == "" {
		return c, errors.New("no path of manifests is given")
	}
	c.Path = filepath.Clean(c.Path)
	if len(c.ServiceCIDRs) == 0 {
		c.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	}
	for i, cidr := range c.ServiceCIDRs {
		if !cidr.IsValid() {
			return c, fmt.Errorf("service CIDR %d is no CIDR", i+1)
		}
		for _, other := range c.ServiceCIDRs[:i] {
			if familyOf(other.Addr()) == familyOf(cidr.Addr()) {
				return c, fmt.Errorf("service CIDRs %s and %s are of one family; only one each can be used", other, cidr)
			}
		}
	}
	if c.NodePorts == (PortRange{}) {
		c.NodePorts = PortRange{30000, 32767}
	}
	if c.NodePorts.First == 0 || c.NodePorts.First > c.NodePorts.Last {
		return c, fmt.Errorf("%d-%d is no range of node ports", c.NodePorts.First, c.NodePorts.Last)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// Source watches manifests and delivers what changes. See New.
type Source struct {
	cfg Config

	mu     sync.Mutex
	faults []string
}

// Faults are what keeps the manifests from being in force as they are, each with its file and line; none where all are. In
// place of what can't be read, what was read last is in force. It may be called at any time.
func (s *Source) Faults() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.faults
}

func (s *Source) setFaults(faults []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = faults
}

var _ source.Source = (*Source)(nil)

// New returns a source of the manifests at cfg.Path, which need not exist yet. It fails where the config makes no sense.
func New(cfg Config) (*Source, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	return &Source{cfg: cfg}, nil
}

// Load reads the manifests once and returns everything that they hold. Broken objects are reported and left out; it fails
// only where nothing can be read at all.
func Load(cfg Config) (source.Batch, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return source.Batch{}, err
	}
	if _, err := os.Stat(cfg.Path); err != nil {
		return source.Batch{}, fmt.Errorf("manifests: %w", err)
	}
	m := newModel(&cfg)
	tree := scan(cfg.Path)
	for path, err := range tree.errs {
		m.report.tell("scan "+path, []remark{{file: path, issue: issue{severity: source.Problem,
			detail: "can't be read: " + err.Error(), effect: "it is left out", leftOut: true}}})
	}
	return m.load(readAll(slices.Collect(maps.Keys(tree.files)))), nil
}

// Read is Load for manifests that come from elsewhere than a file with a name, as from standard input; cfg.Path names it.
func Read(cfg Config, in io.Reader) (source.Batch, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return source.Batch{}, err
	}
	data, err := io.ReadAll(io.LimitReader(in, maxFile))
	if err != nil {
		return source.Batch{}, fmt.Errorf("manifests: reading %s: %w", cfg.Path, err)
	}
	return newModel(&cfg).load([]*reading{{path: cfg.Path, text: &text{name: cfg.Path, data: data}}}), nil
}

func (m *model) load(readings []*reading) source.Batch {
	decodeAll(readings, m.files)
	batch := m.update(readings, nil)
	batch.Synced = true
	return batch
}
