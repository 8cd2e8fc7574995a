package proxier

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// Objects is a Sink that reads objects until there is a Proxier for them: until this program may write rules. It keeps what a Proxier needs
// of those that there are, in a third of the memory of the objects, so it does not grow however long that takes.
type Objects struct {
	mu     sync.Mutex
	state  *State
	input  Input // what has come, without what is gone
	next   *Proxier
	synced chan struct{} // closed once everything has been delivered
}

// NewObjects returns Objects without any. The arguments are as in Config.
func NewObjects(nodeName string, nodeIP netip.Addr, settings plan.Settings, families []plan.Family) *Objects {
	o := &Objects{state: NewState(nodeName, settings, families, nil), synced: make(chan struct{})}
	o.state.setNodeIP(nodeIP)
	return o
}

// Synced returns a channel that is closed once the source has delivered everything that existed when it started.
func (o *Objects) Synced() <-chan struct{} { return o.synced }

// Apply implements source.Sink.
func (o *Objects) Apply(b source.Batch) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if b.Synced {
		select {
		case <-o.synced:
		default:
			close(o.synced)
		}
	}
	if o.next != nil {
		o.next.Apply(b)
		return
	}
	o.state.applyFirst(b)
	o.input.Add(arrived(b))
}

// PassTo passes what has been read to next, which must not run yet, and from then on each batch as it arrives.
func (o *Objects) PassTo(next *Proxier) {
	o.mu.Lock()
	defer o.mu.Unlock()
	next.takeOver(o.state, o.input)
	o.next, o.state = next, nil
}

// arrived counts the objects of a batch that are not gone.
func arrived(b source.Batch) Input {
	in := countInput(b)
	in.Services, in.EndpointSlices = in.Services-gone(b.Services), in.EndpointSlices-gone(b.EndpointSlices)
	in.Nodes, in.ServiceCIDRs = in.Nodes-gone(b.Nodes), in.ServiceCIDRs-gone(b.ServiceCIDRs)
	in.Gone = 0
	return in
}

// applyFirst is Apply before the first Update, which looks at all Services anyway, and says nothing of how long anything took.
func (s *State) applyFirst(b source.Batch) {
	s.Apply(b)
	clear(s.dirty)
	s.triggers = nil
}

// takeOver makes a state that has been read before Run that of the Proxier.
func (p *Proxier) takeOver(s *State, in Input) {
	s.keepOnly(p.cfg.Families)
	if p.cfg.Report != nil {
		s.report = p.cfg.Report
		for _, f := range s.Findings() {
			s.report(f)
		}
	}
	p.stateMu.Lock()
	p.state = s
	p.stateMu.Unlock()
	if in == (Input{}) && !s.synced {
		return
	}
	p.mu.Lock()
	p.since, p.first, p.synced = time.Now(), in, s.synced
	if p.cfg.Observer != nil {
		p.cfg.Observer.Queued(in, p.synced)
	}
	p.mu.Unlock()
	signal(p.wake)
}

// keepOnly leaves out what Services ask for in other families than these.
func (s *State) keepOnly(families []plan.Family) {
	if slices.Equal(families, s.families) {
		return
	}
	s.families = families
	for _, svc := range s.services {
		for i := range svc.specs {
			s.unclaim(&svc.specs[i])
		}
		svc.specs = slices.DeleteFunc(svc.specs, func(spec portSpec) bool { return !slices.Contains(families, spec.key.Family) })
		for i := range svc.specs {
			s.claim(&svc.specs[i])
		}
	}
	s.limitNodePorts()
	s.reportNode() // Some of it depends on families.
}
