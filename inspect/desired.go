package inspect

import (
	"context"
	"errors"
	"maps"
	"slices"

	"nodeproxy/plan"
	"nodeproxy/proxier"
)

// Desired is what the kernel of a node is to hold, as a plan and everything else that each mode's rules depend on.
type Desired struct {
	// Options is the configuration, of which rules depend on some parts. This package knows nothing of it.
	Options  any
	Families []plan.Family
	Node     plan.Node
	Settings plan.Settings
	Services []*plan.ServicePort
	// Refused says what the kernel does not take.
	Refused []string
}

// Plan returns the plan.
func (d *Desired) Plan() *plan.Plan {
	p := plan.New(d.Node, d.Settings)
	for _, sp := range d.Services {
		p.Set(sp)
	}
	return p
}

// errPartial is why the daemon can't tell what it is to do to the kernel.
var errPartial = errors.New("not all objects could be read since nodeproxy started, so what the kernel holds for others stays, and is not known; see \"nodeproxy get findings\"")

// Desired returns what the kernel is to hold once all changes have been programmed.
func (n *Node) Desired() (*Desired, error) {
	var services map[plan.Key]*plan.ServicePort
	d := &Desired{Options: n.Options, Families: n.Families}
	partial := false
	n.View(func(s *proxier.State) {
		p := s.Plan()
		d.Node, d.Settings, partial, services = p.Node, p.Settings, p.Partial, maps.Clone(p.Services)
	})
	if partial {
		return nil, errPartial
	}
	keys := slices.SortedFunc(maps.Keys(services), plan.Key.Compare)
	for _, k := range keys {
		d.Services = append(d.Services, services[k])
	}
	for _, r := range n.refused() {
		d.Refused = append(d.Refused, r.String())
	}
	slices.Sort(d.Refused)
	return d, nil
}

// Desired asks for what Node.Desired returns. Its options become what options points at.
func (c *Client) Desired(ctx context.Context, options any) (*Desired, error) {
	out := &Desired{Options: options}
	return out, c.get(ctx, "desired", nil, out)
}
