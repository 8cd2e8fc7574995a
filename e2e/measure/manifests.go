package measure

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// perFile is how many services one manifest file describes.
const perFile = 100

// Cluster is a set of services in manifest files.
type Cluster struct {
	dir      string
	Services []*Service
}

// NewCluster makes services, each with as many endpoints as sizes tells, and writes their manifests.
func NewCluster(dir string, sizes ...int) (*Cluster, error) {
	c := &Cluster{dir: dir}
	used := 0
	for i, n := range sizes {
		s := &Service{
			Name: fmt.Sprintf("svc-%05d", i),
			Addr: ScatteredAddr(i),
		}
		for range n {
			used++
			s.Endpoints = append(s.Endpoints, Nth(EndpointRange, used))
		}
		c.Services = append(c.Services, s)
	}
	for first := 0; first < len(sizes); first += perFile {
		if err := c.Write(first); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Uniform is the sizes of n services of the same number of endpoints.
func Uniform(n, endpoints int) []int {
	sizes := make([]int, n)
	for i := range sizes {
		sizes[i] = endpoints
	}
	return sizes
}

// Last is the service with the highest address. A search in the order of addresses finds it last, and one in the order of names somewhere
// in between.
func (c *Cluster) Last() *Service { return slices.MaxFunc(c.Services, byAddress) }

// First is the service with the lowest address.
func (c *Cluster) First() *Service { return slices.MinFunc(c.Services, byAddress) }

func byAddress(a, b *Service) int { return a.Addr.Compare(b.Addr) }

// Write replaces the file that holds service i, as an editor that saves to a new file and renames it.
func (c *Cluster) Write(i int) error {
	replace, err := c.Prepare(i)
	if err != nil {
		return err
	}
	return replace()
}

// Prepare makes a new version of the file that holds service i; what it returns puts it in place.
func (c *Cluster) Prepare(i int) (replace func() error, err error) {
	first := i / perFile * perFile
	var items []any
	for _, s := range c.Services[first:min(first+perFile, len(c.Services))] {
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
