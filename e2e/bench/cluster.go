package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"nodeproxy/e2e/measure"
)

// perFile is how many services one manifest file describes.
const perFile = 100

// cluster is a set of services in manifest files.
type cluster struct {
	dir      string
	services []*measure.Service
}

// newCluster makes services, each with as many endpoints as sizes tells, and writes their manifests.
func newCluster(dir string, sizes ...int) (*cluster, error) {
	c := &cluster{dir: dir}
	used := 0
	for i, n := range sizes {
		s := &measure.Service{
			Name: fmt.Sprintf("svc-%05d", i),
			Addr: measure.ScatteredAddr(i),
		}
		for range n {
			used++
			s.Endpoints = append(s.Endpoints, measure.Nth(measure.EndpointRange, used))
		}
		c.services = append(c.services, s)
	}
	for first := 0; first < len(sizes); first += perFile {
		if err := c.write(first); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// uniform is the sizes of n services of the same number of endpoints.
func uniform(n, endpoints int) []int {
	sizes := make([]int, n)
	for i := range sizes {
		sizes[i] = endpoints
	}
	return sizes
}

// last is the service with the highest address, and first the one with the lowest: a search in the order of addresses
// finds last the last, and one in the order of names something in between.
func (c *cluster) last() *measure.Service { return slices.MaxFunc(c.services, byAddress) }

func (c *cluster) first() *measure.Service { return slices.MinFunc(c.services, byAddress) }

func byAddress(a, b *measure.Service) int { return a.Addr.Compare(b.Addr) }

// write replaces the file that holds service i, as an editor that saves to a new file and renames it.
func (c *cluster) write(i int) error {
	replace, err := c.prepare(i)
	if err != nil {
		return err
	}
	return replace()
}

// prepare makes a new version of the file that holds service i; what it returns puts it in place.
func (c *cluster) prepare(i int) (replace func() error, err error) {
	first := i / perFile * perFile
	var items []any
	for _, s := range c.services[first:min(first+perFile, len(c.services))] {
		items = append(items, s.Object())
		for _, slice := range s.Slices() {
			items = append(items, slice)
		}
	}
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
	if err != nil {
		return nil, err
	}
	file := filepath.Join(c.dir, fmt.Sprintf("services-%05d.json", first))
	// Away from the watched directory, so that only the rename is seen.
	drafts := filepath.Join(filepath.Dir(c.dir), "drafts")
	if err := os.MkdirAll(drafts, 0o755); err != nil {
		return nil, err
	}
	draft := filepath.Join(drafts, "services.json")
	if err := os.WriteFile(draft, text, 0o644); err != nil {
		return nil, err
	}
	return func() error { return os.Rename(draft, file) }, nil
}
