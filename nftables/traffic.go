package nftables

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"sync"

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
	owner     map[counter]plan.Key
	frontends map[plan.Key][]counter
	replacing map[counter]bool   // in a transaction that is being carried out
	replaced  map[counter]uint64 // what elements had counted that have been replaced since the last reading
	reads     sync.Mutex         // held while elements are read, and for the rest
	last      map[counter]uint64
	total     map[plan.Key]uint64
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
	// list returns those with these keys, and maybe others.
	list func(ctx context.Context, keys []string) ([]nft.Element, error)
}

// counter identifies an element of map services. One with another comment is of another ServicePort.
type counter struct {
	family       plan.Family
	key, comment string
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

// counters returns the elements of map services: all of them, or if these are many, those with the given keys.
func (e *engine) counters(ctx context.Context, keys []string) ([]nft.Element, error) {
	k, err := e.reader() // Its own socket, as a sync may be using the other one.
	if err != nil {
		return nil, err
	}
	defer k.Close()
	var out []nft.Element
	note := func(el nft.Element) error {
		out = append(out, el)
		return ctx.Err()
	}
	set := e.sets[services]
	if len(keys) <= e.mostListed {
		err := k.Sample(e.family, names.NFTables, set, note)
		return out, err
	}
	for some := range slices.Chunk(keys, mostAsked) {
		if err := ctx.Err(); err != nil {
			return nil, err
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
			return nil, err
		}
	}
	return out, nil
}

func newTrafficReader(list []counters) *TrafficReader {
	return &TrafficReader{engines: list, owner: map[counter]plan.Key{}, frontends: map[plan.Key][]counter{}, replacing: map[counter]bool{}, replaced: map[counter]uint64{},
		last: map[counter]uint64{}, total: map[plan.Key]uint64{}}
}

// Update gives the reader the plan. change says which ServicePorts differ from the last call. It costs work for those only, and
// keeps nothing of p.
func (r *TrafficReader) Update(p *plan.Plan, change plan.Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if change.All() {
		clear(r.owner)
		clear(r.frontends)
		for _, sp := range p.Services {
			r.enter(sp)
		}
		maps.DeleteFunc(r.replaced, func(c counter, _ uint64) bool { _, is := r.owner[c]; return !is })
		return
	}
	for key := range change.Keys() {
		before := r.frontends[key]
		for _, c := range before {
			delete(r.owner, c)
		}
		delete(r.frontends, key)
		if sp := p.Services[key]; sp != nil {
			r.enter(sp)
		}
		for _, c := range before {
			if _, is := r.owner[c]; !is {
				delete(r.replaced, c)
			}
		}
	}
}

func (r *TrafficReader) enter(sp *plan.ServicePort) {
	list := []counter{}
	for _, fe := range sp.Frontends {
		if fe.Kind != plan.HealthCheckNodePort {
			c := counter{sp.Key.Family, nameOf(sp.Key.Family, fe), nft.Comment(sp.Key.PortName())}
			list = append(list, c)
			r.owner[c] = sp.Key
		}
	}
	r.frontends[sp.Key] = list
}

// Traffic implements metrics.TrafficReader.
func (r *TrafficReader) Traffic(ctx context.Context) iter.Seq2[plan.Traffic, error] {
	return func(yield func(plan.Traffic, error) bool) {
		r.reads.Lock()
		defer r.reads.Unlock()
		r.mu.Lock()
		owner := maps.Clone(r.owner)
		known := make(map[plan.Key]bool, len(r.frontends))
		for key := range r.frontends {
			known[key] = true
		}
		replaced := r.replaced
		r.replaced = map[counter]uint64{}
		r.mu.Unlock()
		for c, n := range replaced {
			if key, is := owner[c]; is && n > r.last[c] {
				r.total[key] += n - r.last[c]
			}
			delete(r.last, c)
		}
		maps.DeleteFunc(r.last, func(c counter, _ uint64) bool { _, is := owner[c]; return !is })
		maps.DeleteFunc(r.total, func(key plan.Key, _ uint64) bool { return !known[key] })
		for _, e := range r.engines {
			var keys []string
			for c := range owner {
				if c.family == e.family {
					keys = append(keys, c.key)
				}
			}
			list, err := e.list(ctx, keys)
			if err == nil {
				err = ctx.Err()
			}
			if err != nil {
				if !yield(plan.Traffic{}, fmt.Errorf("traffic of %s: %w", e.family, err)) {
					return
				}
				continue
			}
			r.mu.Lock()
			uncertain := maps.Clone(r.replacing) // The listing may have them as they were before or after.
			for c := range r.replaced {
				uncertain[c] = true
			}
			r.mu.Unlock()
			for _, el := range list {
				c := counter{e.family, el.Key, el.Comment}
				key, is := owner[c]
				if !is || uncertain[c] {
					continue
				}
				before := r.last[c]
				if before > el.Packets {
					before = 0 // The element is a new one.
				}
				r.total[key] += el.Packets - before
				r.last[c] = el.Packets
			}
		}
		for key := range known {
			t := plan.Traffic{
				Key: key, Connections: int64(min(r.total[key], math.MaxInt64)),
				PacketsIn: plan.NotCounted, BytesIn: plan.NotCounted,
				PacketsOut: plan.NotCounted, BytesOut: plan.NotCounted,
			}
			if !yield(t, nil) {
				return
			}
		}
	}
}
