package ipvs

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
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
// There may be tens of thousands of virtual servers, and most have counted nothing on a node. So something is kept only for the others.
type TrafficReader struct {
	engines []*engine
	stats   func(each func(ipvs.ServerID, ipvs.Traffic)) error

	mu      sync.Mutex
	reading uint32 // the number of the last reading
	servers map[ipvs.ServerID]*counted
	sums    map[plan.Key]*ipvs.Traffic
}

// counted is what is known of a virtual server.
type counted struct {
	last ipvs.Traffic
	read uint32 // the last reading in which the kernel had it
}

// count is what the kernel has counted for a virtual server.
type count struct {
	id ipvs.ServerID
	ipvs.Traffic
}

// Traffic returns a reader of the backend's counters. It may be used beside Sync, and after Close.
func (b *Backend) Traffic() *TrafficReader { return newTrafficReader(b.Engines, b.node.Servers.Stats) }

func newTrafficReader(engines []*engine, stats func(func(ipvs.ServerID, ipvs.Traffic)) error) *TrafficReader {
	return &TrafficReader{engines: engines, stats: stats, servers: map[ipvs.ServerID]*counted{}, sums: map[plan.Key]*ipvs.Traffic{}}
}

// Traffic implements metrics.TrafficReader. It dumps all virtual servers once, and then waits for a sync of the family that is under way: where
// that passes a virtual server from one ServicePort to another, what it has counted since the last time becomes the latter's.
func (r *TrafficReader) Traffic(ctx context.Context) iter.Seq2[plan.Traffic, error] {
	return func(yield func(plan.Traffic, error) bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.reading++
		var counts []count
		if err := r.stats(func(id ipvs.ServerID, t ipvs.Traffic) {
			if t != (ipvs.Traffic{}) || r.servers[id] != nil {
				counts = append(counts, count{id, t})
			}
		}); err != nil {
			yield(plan.Traffic{}, err)
			return
		}
		for _, e := range r.engines {
			ports, err := e.attribute(ctx, r, counts)
			if err != nil && !yield(plan.Traffic{}, err) {
				return
			}
			for _, sp := range ports {
				out := plan.Traffic{Key: sp.Key}
				if t := r.sums[sp.Key]; t != nil {
					out.Connections, out.PacketsIn, out.PacketsOut = int64(t.Connections), int64(t.PacketsIn), int64(t.PacketsOut)
					out.BytesIn, out.BytesOut = int64(t.BytesIn), int64(t.BytesOut)
				}
				if !yield(out, nil) {
					return
				}
			}
		}
	}
}

// attribute adds to the sums of ServicePorts what their servers have counted since the last time, and returns all ServicePorts. A dump may
// leave out servers that exist, so none of these is forgotten: of one that is made again, increase sees that. Nor is one that nothing wants
// but that is left to its connections: it may be wanted again.
func (e *engine) attribute(ctx context.Context, r *TrafficReader, counts []count) ([]*plan.ServicePort, error) {
	if err := e.mu.LockContext(ctx); err != nil {
		return nil, fmt.Errorf("reading traffic of %s: %w", e.family, err)
	}
	defer e.mu.Unlock()
	if e.desired == nil {
		return nil, fmt.Errorf("reading traffic of %s: the virtual servers are not known until the next sync", e.family)
	}
	for _, c := range counts {
		w, wanted := e.desired.servers[c.id]
		was := r.servers[c.id]
		if was == nil && wanted {
			was = &counted{}
			r.servers[c.id] = was
		}
		if was != nil {
			was.read = r.reading
		}
		if wanted {
			sum := r.sums[w.sp.Key]
			if sum == nil {
				sum = &ipvs.Traffic{}
				r.sums[w.sp.Key] = sum
			}
			increase(sum, was.last, c.Traffic)
			was.last = c.Traffic
		}
	}
	maps.DeleteFunc(r.servers, func(id ipvs.ServerID, c *counted) bool {
		_, wanted := e.desired.servers[id]
		return id.Family == e.family && !wanted && c.read != r.reading
	})
	maps.DeleteFunc(r.sums, func(k plan.Key, _ *ipvs.Traffic) bool {
		return k.Family == e.family && e.desired.services.Get(k) == nil
	})
	return slices.AppendSeq(make([]*plan.ServicePort, 0, e.desired.services.Len()), e.desired.services.All()), nil
}

// increase adds the increase of counters to a sum; if one has fallen, the server is a new one, and all of its count is new.
func increase(sum *ipvs.Traffic, from, to ipvs.Traffic) {
	if to.Connections < from.Connections || to.PacketsIn < from.PacketsIn || to.PacketsOut < from.PacketsOut ||
		to.BytesIn < from.BytesIn || to.BytesOut < from.BytesOut {
		from = ipvs.Traffic{}
	}
	sum.Connections += to.Connections - from.Connections
	sum.PacketsIn += to.PacketsIn - from.PacketsIn
	sum.PacketsOut += to.PacketsOut - from.PacketsOut
	sum.BytesIn += to.BytesIn - from.BytesIn
	sum.BytesOut += to.BytesOut - from.BytesOut
}
