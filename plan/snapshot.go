package plan

import (
	"iter"
	"maps"
	"slices"
	"sync/atomic"
	"time"
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
	services index
}

// ServicePort returns the ServicePort with a key, or nil if there is none.
func (s *Snapshot) ServicePort(k Key) *ServicePort {
	sp, _ := s.Programmed(k)
	return sp
}

// Programmed returns the ServicePort with a key, or nil if there is none, and the time of the first snapshot in which its Service was
// as it is in this one.
func (s *Snapshot) Programmed(k Key) (*ServicePort, time.Time) {
	if e := s.services.find(k.Service); e != nil {
		if i, found := find(e.ports, k); found {
			return e.ports[i], e.since
		}
	}
	return nil, time.Time{}
}

// Serves reports whether a Service has any ServicePort.
func (s *Snapshot) Serves(svc Service) bool { return s.services.find(svc) != nil }

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
		if s == nil {
			return
		}
		for _, c := range s.services {
			for _, e := range c {
				if !yield(e.service(), e.ports) {
					return
				}
			}
		}
	}
}

// Publisher makes snapshots of a Plan. Its zero value has published nothing.
type Publisher struct {
	latest atomic.Pointer[Snapshot]
}

// Latest returns the last snapshot, or nil if there is none yet. It may be called from any goroutine.
func (p *Publisher) Latest() *Snapshot { return p.latest.Load() }

// Publish makes a snapshot of desired, which differs from the one before by change. They share what does not differ, so that the cost
// is that of what does. Only one goroutine may call it, which is the one that changes the Plan.
func (p *Publisher) Publish(desired *Plan, change Change) {
	s := &Snapshot{Generation: 1, Time: time.Now(), Node: desired.Node, Settings: desired.Settings, Partial: desired.Partial}
	var before index
	if last := p.latest.Load(); last != nil {
		s.Generation, before = last.Generation+1, last.services
	}
	touched := map[Service]struct{}{}
	for k := range change.Keys() {
		touched[k.Service] = struct{}{}
	}
	if change.All() {
		for svc := range desired.ports {
			touched[svc] = struct{}{}
		}
		for _, c := range before {
			for _, e := range c {
				touched[e.service()] = struct{}{}
			}
		}
	}
	s.services = before.update(desired, s.Time, slices.SortedFunc(maps.Keys(touched), Service.Compare))
	p.latest.Store(s)
}

// index is an immutable list of Services in order, cut into chunks, so that another one that differs in few Services shares all
// chunks but theirs. No chunk is empty or longer than twice chunkSize, and no two neighbours of which one is shorter than half of it
// would fit into one: so there are at most about four for each chunkSize Services, whatever had been there before.
type index []chunk

// chunkSize is a compromise: a change copies a chunk, and the list of chunks.
const chunkSize = 128

type chunk []*indexed

// indexed is a Service with its ServicePorts in order of key.
type indexed struct {
	ports []*ServicePort // one at least
	since time.Time      // of the first snapshot that has it
}

func (e *indexed) service() Service { return e.ports[0].Key.Service }

// find returns the entry of a Service; nil if there is none.
func (x index) find(svc Service) *indexed {
	if i := x.chunkOf(svc); i >= 0 {
		if j, found := x[i].find(svc); found {
			return x[i][j]
		}
	}
	return nil
}

// chunkOf returns the number of the chunk that a Service is in, if it is in any: the last one that does not begin behind it; -1 if
// all do.
func (x index) chunkOf(svc Service) int {
	i, found := slices.BinarySearchFunc(x, svc, func(c chunk, svc Service) int { return c[0].service().Compare(svc) })
	if found {
		return i
	}
	return i - 1
}

func (c chunk) find(svc Service) (int, bool) {
	return slices.BinarySearchFunc(c, svc, func(e *indexed, svc Service) int { return e.service().Compare(svc) })
}

// update returns the index in which the touched Services, which are in order, are as in p. now is the time of its snapshot.
func (x index) update(p *Plan, now time.Time, touched []Service) index {
	out := make(index, 0, len(x)+1)
	done := 0 // chunks of x that out has, as they are or changed
	for len(touched) > 0 {
		at := max(x.chunkOf(touched[0]), 0)
		out = out.join(x[done:min(at, len(x))])
		var c chunk
		n := len(touched) // those that belong into this chunk
		if at < len(x) {
			c = x[at]
		}
		if done = min(at+1, len(x)); done < len(x) {
			n, _ = slices.BinarySearchFunc(touched, x[done][0].service(), Service.Compare)
		}
		out = out.join(c.update(p, now, touched[:n]).cut())
		touched = touched[n:]
	}
	return out.join(x[done:])
}

// join appends chunks to x, which is being made, behind those that it has.
func (x index) join(more index) index {
	for len(more) > 0 && len(x) > 0 {
		last, next := x[len(x)-1], more[0]
		if min(len(last), len(next)) >= chunkSize/2 || len(last)+len(next) > 2*chunkSize {
			break
		}
		x[len(x)-1] = slices.Concat(last, next)
		more = more[1:]
	}
	return append(x, more...)
}

// update returns the chunk in which the touched Services, which are in order, are as in p.
func (c chunk) update(p *Plan, now time.Time, touched []Service) chunk {
	before, out := c, make(chunk, 0, len(c)+len(touched))
	for _, svc := range touched {
		i, found := c.find(svc)
		out = append(out, c[:i]...)
		c = c[i:]
		e := &indexed{slices.Clone(p.ports[svc]), now}
		if found {
			if slices.Equal(c[0].ports, e.ports) {
				e = c[0]
			}
			c = c[1:]
		}
		if len(e.ports) > 0 {
			out = append(out, e)
		}
	}
	out = append(out, c...)
	if slices.Equal(out, before) {
		return before
	}
	return out
}

// cut makes chunks of one that may be of any length. They share no memory, which would keep alive what others had.
func (c chunk) cut() index {
	if len(c) == 0 {
		return nil
	}
	if len(c) <= 2*chunkSize {
		return index{c}
	}
	out := make(index, (len(c)+chunkSize-1)/chunkSize)
	for i := range out {
		out[i] = slices.Clone(c[i*len(c)/len(out) : (i+1)*len(c)/len(out)])
	}
	return out
}
