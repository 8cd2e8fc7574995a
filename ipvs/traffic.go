package ipvs

import (
	"context"
	"fmt"
	"hash/maphash"
	"iter"
	"maps"
	"sync"

	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// TrafficReader reads how much has gone through the virtual servers of each ServicePort. It implements
// metrics.TrafficReader.
//
// The kernel counts by virtual server, from zero whenever it makes one, and a ServicePort has several. The value of a ServicePort
// is the sum of the increases of its servers, so it does not fall when one of them is made again; only what that one counted after
// it was last read is lost, and, where all of its counters are higher again when it is read next, as much as they were. Connections and packets
// from clients include those for which a scheduler found no endpoint.
//
// There may be tens of thousands of virtual servers, and each scrape reads them all. So the maps have hashes for keys, and counters are added
// as they are read, without a list of them.
type TrafficReader struct {
	engines []*engine
	stats   func(each func(ipvs.ServerID, ipvs.Traffic)) error
	seed    maphash.Seed

	mu      sync.Mutex
	reading uint32              // the number of the last reading
	servers map[uint64]*counted // by the hash of the ID
	sums    map[uint64]*sum     // by the hash of the key
}

// counted is what is known of a virtual server.
type counted struct {
	of           *sum
	last         ipvs.Traffic
	wanted, read uint32 // the last reading in which a ServicePort had it, and the last in which the kernel had it
}

// sum is what has gone through a ServicePort.
type sum struct {
	ipvs.Traffic
	wanted uint32 // the last reading in which it was there
}

// Traffic returns a reader of the backend's counters. It may be used beside Sync, and after Close.
func (b *Backend) Traffic() *TrafficReader { return newTrafficReader(b.Engines, b.node.Servers.Stats) }

func newTrafficReader(engines []*engine, stats func(func(ipvs.ServerID, ipvs.Traffic)) error) *TrafficReader {
	return &TrafficReader{engines: engines, stats: stats, seed: maphash.MakeSeed(), servers: map[uint64]*counted{}, sums: map[uint64]*sum{}}
}

// Traffic implements metrics.TrafficReader. It dumps all virtual servers once, and waits for a sync of the family that is under way.
func (r *TrafficReader) Traffic(ctx context.Context) iter.Seq2[plan.Traffic, error] {
	return func(yield func(plan.Traffic, error) bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.reading++
		var ports []*plan.ServicePort
		complete := true
		for _, e := range r.engines {
			if err := e.expect(ctx, r, &ports); err != nil {
				complete = false
				if !yield(plan.Traffic{}, err) {
					return
				}
			}
		}
		if err := r.stats(r.add); err != nil {
			yield(plan.Traffic{}, err)
			return
		}
		if complete {
			// A server that nothing wants may be left to its connections, and be wanted again later: all that it has counted is no increase then.
			maps.DeleteFunc(r.servers, func(_ uint64, c *counted) bool { return c.wanted != r.reading && c.read != r.reading })
			maps.DeleteFunc(r.sums, func(_ uint64, s *sum) bool { return s.wanted != r.reading })
		}
		for _, sp := range ports {
			t := r.sumOf(sp.Key).Traffic
			if !yield(plan.Traffic{
				Key: sp.Key, Connections: int64(t.Connections),
				PacketsIn: int64(t.PacketsIn), PacketsOut: int64(t.PacketsOut), BytesIn: int64(t.BytesIn), BytesOut: int64(t.BytesOut),
			}, nil) {
				return
			}
		}
	}
}

// expect notes the virtual servers of each ServicePort, and appends the ServicePorts, some of which have none.
func (e *engine) expect(ctx context.Context, r *TrafficReader, ports *[]*plan.ServicePort) error {
	if err := e.mu.LockContext(ctx); err != nil {
		return fmt.Errorf("reading traffic of %s: %w", e.family, err)
	}
	defer e.mu.Unlock()
	if e.desired == nil {
		return fmt.Errorf("reading traffic of %s: the virtual servers are not known until the next sync", e.family)
	}
	for sp := range e.desired.services.All() {
		*ports = append(*ports, sp)
		r.sumOf(sp.Key).wanted = r.reading
	}
	for id, w := range e.desired.servers {
		hash := maphash.Comparable(r.seed, id)
		c := r.servers[hash]
		if c == nil {
			c = &counted{}
			r.servers[hash] = c
		}
		c.of, c.wanted = r.sumOf(w.sp.Key), r.reading
	}
	return nil
}

// sumOf returns the sum of a ServicePort.
func (r *TrafficReader) sumOf(k plan.Key) *sum {
	hash := maphash.Comparable(r.seed, k)
	s := r.sums[hash]
	if s == nil {
		s = &sum{}
		r.sums[hash] = s
	}
	return s
}

// add adds to the sum of a ServicePort what a server of it has counted since the last time. A dump may leave out servers that exist, so none
// is taken for gone: of one that is made again, increase sees that.
func (r *TrafficReader) add(id ipvs.ServerID, t ipvs.Traffic) {
	c := r.servers[maphash.Comparable(r.seed, id)]
	if c == nil {
		return
	}
	if c.read = r.reading; c.wanted == r.reading {
		c.of.increase(c.last, t)
		c.last = t
	}
}

// increase adds the increase of counters; if one has fallen, the server is a new one, and all of its count is new.
func (s *sum) increase(from, to ipvs.Traffic) {
	if to.Connections < from.Connections || to.PacketsIn < from.PacketsIn || to.PacketsOut < from.PacketsOut ||
		to.BytesIn < from.BytesIn || to.BytesOut < from.BytesOut {
		from = ipvs.Traffic{}
	}
	s.Connections += to.Connections - from.Connections
	s.PacketsIn += to.PacketsIn - from.PacketsIn
	s.PacketsOut += to.PacketsOut - from.PacketsOut
	s.BytesIn += to.BytesIn - from.BytesIn
	s.BytesOut += to.BytesOut - from.BytesOut
}
