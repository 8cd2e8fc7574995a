package plan

import (
	"iter"
	"slices"
	"sync/atomic"
	"time"

	"github.com/google/btree"
)

// Snapshot is a Plan as it was at one time. It never changes, so any number of goroutines may read it while the Plan changes and the
// kernel is written.
type Snapshot struct {
	// Generation counts the snapshots of a Publisher: the first one has 1.
	Generation uint64
	// Time is when it was published.
	Time     time.Time
	Node     Node
	Settings Settings
	// Partial is as in Plan.
	Partial  bool
	services btree.BTreeG[*programmed]
}

// programmed is a Service with its ServicePorts in order of key.
type programmed struct {
	service *Service       // in the key of the first one
	ports   []*ServicePort // one at least
	since   time.Time      // of the first snapshot that has it
}

func (a *programmed) before(b *programmed) bool { return a.service.Compare(*b.service) < 0 }

// ServicePort returns the ServicePort with a key, or nil if there is none.
func (s *Snapshot) ServicePort(k Key) *ServicePort {
	sp, _ := s.Programmed(k)
	return sp
}

// Programmed returns the ServicePort with a key, or nil if there is none, and the time of the first snapshot in which its Service was
// as it is in this one.
func (s *Snapshot) Programmed(k Key) (*ServicePort, time.Time) {
	if e, found := s.services.Get(&programmed{service: &k.Service}); found {
		if i, found := find(e.ports, k); found {
			return e.ports[i], e.since
		}
	}
	return nil, time.Time{}
}

// Serves reports whether a Service has any ServicePort.
func (s *Snapshot) Serves(svc Service) bool { return s.services.Has(&programmed{service: &svc}) }

// Plan returns a Plan that equals the one that was published. It is made anew, at the cost of a walk over all ServicePorts.
func (s *Snapshot) Plan() *Plan {
	p := New(s.Node, s.Settings)
	p.Partial = s.Partial
	for _, ports := range s.Services() {
		for _, sp := range ports {
			p.Set(sp)
		}
	}
	return p
}

// Services iterates over all Services in order, each with its ServicePorts in order of key. The slices must not be changed. A nil Snapshot, as before the first
// one is published, has none.
func (s *Snapshot) Services() iter.Seq2[Service, []*ServicePort] {
	return func(yield func(Service, []*ServicePort) bool) {
		if s != nil {
			s.services.Ascend(func(e *programmed) bool { return yield(*e.service, e.ports) })
		}
	}
}

// Publisher makes snapshots of a Plan. Its zero value has published nothing.
type Publisher struct {
	latest   atomic.Pointer[Snapshot]
	services *btree.BTreeG[*programmed] // of the latest; only Publish uses it, since a tree must not be read while it is cloned
}

// Latest returns the last snapshot, or nil if there is none yet. It may be called from any goroutine.
func (p *Publisher) Latest() *Snapshot { return p.latest.Load() }

// nodeDegree is a compromise: a change copies the nodes of the tree that lead to a Service, each of which has up to twice as many.
const nodeDegree = 32

// Publish makes a snapshot of desired, which differs from the one before by change. They share what does not differ, so that the cost
// is that of what does. Only one goroutine may call it, which is the one that changes the Plan.
func (p *Publisher) Publish(desired *Plan, change Change) {
	s := &Snapshot{Generation: 1, Time: time.Now(), Node: desired.Node, Settings: desired.Settings, Partial: desired.Partial}
	last := p.latest.Load()
	if last != nil {
		s.Generation = last.Generation + 1
	} else {
		p.services = btree.NewG(nodeDegree, (*programmed).before)
	}
	touched := map[Service]struct{}{}
	for k := range change.Keys() {
		touched[k.Service] = struct{}{}
	}
	if change.All() {
		for svc := range desired.ports {
			touched[svc] = struct{}{}
		}
		for svc := range last.Services() {
			touched[svc] = struct{}{}
		}
	}
	for svc := range touched {
		p.update(svc, desired.ports[svc], s.Time)
	}
	s.services = *p.services.Clone()
	p.latest.Store(s)
}

// update gives a Service its ServicePorts, in the snapshot of a time that is being made.
func (p *Publisher) update(svc Service, ports []*ServicePort, now time.Time) {
	if len(ports) == 0 {
		p.services.Delete(&programmed{service: &svc})
		return
	}
	e := &programmed{&ports[0].Key.Service, ports, now}
	if was, found := p.services.Get(e); !found || !slices.Equal(was.ports, ports) {
		e.ports = slices.Clone(ports)
		p.services.ReplaceOrInsert(e)
	}
}
