package nftables

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"sync"

	"nodeproxy/internal/keyed"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// TrafficReader reads how many connections have gone to each ServicePort. It implements metrics.TrafficReader.
//
// The elements of map services count the packets that found them, and only the first packet of a connection is looked up there. So these are
// numbers of connections, and the packets and bytes after that are not known. A connection that is refused or dropped is counted too, again
// with each further try.
//
// An element that is replaced, as when its frontend has another number of endpoints, begins at zero. The value of a ServicePort is
// the sum of the increases of its elements, so it does not fall. Before an element is replaced, it is read once more; only where many are
// replaced at once, as after an error, what they have counted since they were last read is lost.
type TrafficReader struct {
	engines []counters

	mu        sync.Mutex // held for what is known of the plan only
	ports     *plan.Ports
	replacing map[counter]bool   // in a transaction that is being carried out
	replaced  map[counter]uint64 // what elements had counted that have been replaced since the last reading
	reads     sync.Mutex         // held while elements are read, and for the rest
	tallies   *keyed.Set[plan.Key, tally]
}

// tally is what has been counted of a ServicePort.
type tally struct {
	sp    *plan.ServicePort
	total uint64
	last  []uint64 // what the element of each frontend had counted when it was last read
}

// begin says that elements, which have counted so much, are about to be replaced. r may be nil.
func (r *TrafficReader) begin(list map[counter]uint64) {
	if r == nil || len(list) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range list {
		r.replacing[c] = true
	}
}

// end says whether they have been replaced.
func (r *TrafficReader) end(list map[counter]uint64, replaced bool) {
	if r == nil || len(list) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for c, n := range list {
		delete(r.replacing, c)
		if replaced {
			r.replaced[c] += n
		}
	}
}

// counters lists the elements of map services of one family.
type counters struct {
	family plan.Family
	// list calls visit with those that have these keys, and maybe with others.
	list func(ctx context.Context, keys []string, visit func(nft.Element)) error
}

// counter identifies an element of map services. One with another comment is of another ServicePort.
type counter struct {
	family       plan.Family
	key, comment string
}

// countersOf yields the elements of a ServicePort, each with the number of its frontend.
func countersOf(sp *plan.ServicePort) iter.Seq2[counter, int] {
	return func(yield func(counter, int) bool) {
		if sp == nil {
			return
		}
		comment := nft.Comment(sp.Key.PortName())
		for i, fe := range sp.Frontends {
			if fe.Kind != plan.HealthCheckNodePort && !yield(counter{sp.Key.Family, nameOf(sp.Key.Family, fe), comment}, i) {
				return
			}
		}
	}
}

// Traffic returns a reader of the backend's counters. It may be used beside Sync and after Close. Update gives it the plan.
func (b *Backend) Traffic() *TrafficReader {
	var list []counters
	for _, e := range b.Engines {
		list = append(list, counters{e.family, e.counters})
	}
	r := newTrafficReader(list)
	for _, e := range b.Engines {
		e.mu.Lock()
		e.traffic = r
		e.mu.Unlock()
	}
	return r
}

// counters calls visit with the elements of map services: all of them, or if these are many, those with the given keys.
func (e *engine) counters(ctx context.Context, keys []string, visit func(nft.Element)) error {
	k, err := e.reader() // Its own socket, as a sync may be using the other one.
	if err != nil {
		return err
	}
	defer k.Close()
	note := func(el nft.Element) error {
		visit(el)
		return ctx.Err()
	}
	set := e.sets[services]
	if len(keys) <= e.mostListed {
		return k.Sample(e.family, names.NFTables, set, note)
	}
	for some := range slices.Chunk(keys, mostAsked) {
		if err := ctx.Err(); err != nil {
			return err
		}
		asked := make([]nft.ElementKey, len(some))
		for i, key := range some {
			asked[i] = nft.ElementKey{Set: set.Name, Key: key}
		}
		err := k.Find(e.family, names.NFTables, asked, func(_ int, el nft.Element, is bool) error {
			if !is {
				return nil
			}
			return note(el)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func newTrafficReader(list []counters) *TrafficReader {
	return &TrafficReader{engines: list, ports: plan.NewPorts(), replacing: map[counter]bool{}, replaced: map[counter]uint64{}, tallies: newTallies()}
}

func newTallies() *keyed.Set[plan.Key, tally] {
	return keyed.New(func(t *tally) plan.Key { return t.sp.Key })
}

// Update gives the reader the plan. change says which ServicePorts differ from the last call. It costs work for those only, and
// keeps nothing of p that changes.
func (r *TrafficReader) Update(p *plan.Plan, change plan.Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if change.All() {
		r.ports = plan.NewPorts()
		still := map[counter]uint64{}
		for _, sp := range p.Services {
			r.ports.Put(sp)
			if len(r.replaced) == 0 {
				continue
			}
			for c := range countersOf(sp) {
				if n, is := r.replaced[c]; is {
					still[c] = n
				}
			}
		}
		r.replaced = still
		return
	}
	for key := range change.Keys() {
		before, now := r.ports.Get(key), p.Services[key]
		if now == nil {
			r.ports.Delete(key)
		} else {
			r.ports.Put(now)
		}
		if before == nil || now != nil && slices.Equal(before.Frontends, now.Frontends) {
			continue
		}
		still := maps.Collect(countersOf(now))
		for c := range countersOf(before) {
			if _, is := still[c]; !is {
				delete(r.replaced, c)
			}
		}
	}
}

// meter is one frontend of a ServicePort, which an element counts.
type meter struct {
	*tally
	frontend int
}

// note takes over that the element has counted up to n since it was made.
func (m meter) note(n uint64) {
	before := m.last[m.frontend]
	if before > n {
		before = 0 // The element is a new one.
	}
	m.total += n - before
	m.last[m.frontend] = n
}

// follow takes over which ServicePorts there are, and returns the frontends that elements count, by the keys of these. Tallies of other
// ServicePorts are dropped.
func (r *TrafficReader) follow(ports []*plan.ServicePort) map[string]meter {
	tallies, out := newTallies(), make(map[string]meter, len(ports))
	for _, sp := range ports {
		t := r.tallies.Get(sp.Key)
		if t == nil {
			t = &tally{sp: sp, last: make([]uint64, len(sp.Frontends))}
		} else if !slices.Equal(t.sp.Frontends, sp.Frontends) {
			was := maps.Collect(countersOf(t.sp))
			last := make([]uint64, len(sp.Frontends))
			for c, i := range countersOf(sp) {
				if before, is := was[c]; is {
					last[i] = t.last[before]
				}
			}
			t.last = last
		}
		t.sp = sp
		tallies.Put(t)
		for c, i := range countersOf(sp) {
			out[c.key] = meter{t, i}
		}
	}
	r.tallies = tallies
	return out
}

// Traffic implements metrics.TrafficReader.
func (r *TrafficReader) Traffic(ctx context.Context) iter.Seq2[plan.Traffic, error] {
	return func(yield func(plan.Traffic, error) bool) {
		r.reads.Lock()
		defer r.reads.Unlock()
		r.mu.Lock()
		ports, replaced := slices.AppendSeq(make([]*plan.ServicePort, 0, r.ports.Len()), r.ports.All()), r.replaced
		r.replaced = map[counter]uint64{}
		r.mu.Unlock()
		elements := r.follow(ports)
		for c, n := range replaced {
			at, is := elements[c.key]
			if is = is && at.comment() == c.comment; is && n > at.last[at.frontend] {
				at.note(n)
			}
			if is {
				at.last[at.frontend] = 0
			}
		}
		for _, e := range r.engines {
			if err := r.read(ctx, e, elements); err != nil && !yield(plan.Traffic{}, fmt.Errorf("traffic of %s: %w", e.family, err)) {
				return
			}
		}
		for t := range r.tallies.All() {
			if !yield(plan.Traffic{
				Key: t.sp.Key, Connections: int64(min(t.total, math.MaxInt64)),
				PacketsIn: plan.NotCounted, BytesIn: plan.NotCounted,
				PacketsOut: plan.NotCounted, BytesOut: plan.NotCounted,
			}, nil) {
				return
			}
		}
	}
}

// read reads the elements of one family.
func (r *TrafficReader) read(ctx context.Context, e counters, elements map[string]meter) error {
	keys := make([]string, 0, len(elements))
	for key, at := range elements {
		if at.sp.Key.Family == e.family {
			keys = append(keys, key)
		}
	}
	type reading struct {
		of meter
		n  uint64
	}
	list := make([]reading, 0, len(keys))
	err := e.list(ctx, keys, func(el nft.Element) {
		if at, is := elements[el.Key]; is && at.comment() == el.Comment {
			list = append(list, reading{at, el.Packets})
		}
	})
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	r.mu.Lock()
	uncertain := map[meter]bool{} // The listing may have them as they were before or after.
	for c := range r.replacing {
		uncertain[elements[c.key]] = true
	}
	for c := range r.replaced {
		uncertain[elements[c.key]] = true
	}
	r.mu.Unlock()
	for _, read := range list {
		if !uncertain[read.of] {
			read.of.note(read.n)
		}
	}
	return nil
}

func (t *tally) comment() string { return nft.Comment(t.sp.Key.PortName()) }
