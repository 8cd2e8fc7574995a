package ipvs

import (
	"context"
	"fmt"
	"iter"
	"math"
	"sync"

	"nodeproxy/backend"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// TrafficReader reads how much has gone through the virtual servers of each ServicePort. It implements
// metrics.TrafficReader.
//
// The kernel counts by virtual server, from zero whenever it makes one, and a ServicePort has several. The value of a ServicePort
// is the sum of the increases of its servers, so it does not fall when one of them is made again; only what that one counted after
// it was last read is lost. Connections and packets from clients include those for which a scheduler found no endpoint.
type TrafficReader struct {
	engines []*engine
	stats   func() (map[ipvs.ServerID]ipvs.Traffic, error)

	mu    sync.Mutex
	last  map[ipvs.ServerID]ipvs.Traffic
	total map[plan.Key]ipvs.Traffic
}

// Traffic returns a reader of the backend's counters. It may be used beside Sync, and after Close.
func (b *Backend) Traffic() *TrafficReader { return newTrafficReader(b.Engines, b.servers.Stats) }

func newTrafficReader(engines []*engine, stats func() (map[ipvs.ServerID]ipvs.Traffic, error)) *TrafficReader {
	return &TrafficReader{engines: engines, stats: stats, total: map[plan.Key]ipvs.Traffic{}}
}

// Traffic implements metrics.TrafficReader. It dumps all virtual servers, which takes less than 0.1 s for 10,000 of them, and
// waits for a sync of the family that is under way.
func (r *TrafficReader) Traffic(ctx context.Context) iter.Seq2[plan.Traffic, error] {
	return func(yield func(plan.Traffic, error) bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		servers := map[plan.Key][]ipvs.ServerID{}
		complete := true
		for _, e := range r.engines {
			if err := e.serversOf(ctx, servers); err != nil {
				complete = false
				if !yield(plan.Traffic{}, err) {
					return
				}
			}
		}
		now, err := r.stats()
		if err != nil {
			yield(plan.Traffic{}, err)
			return
		}
		r.add(servers, now, complete)
		for key := range servers {
			t := r.total[key]
			if !yield(plan.Traffic{
				Key: key, Connections: signed(t.Connections), PacketsIn: signed(t.PacketsIn), BytesIn: signed(t.BytesIn),
				PacketsOut: signed(t.PacketsOut), BytesOut: signed(t.BytesOut),
			}, nil) {
				return
			}
		}
	}
}

// add adds to the sum of each ServicePort what its servers have counted since the last time. If complete, servers lists all
// that there are, and what it does not list is forgotten.
func (r *TrafficReader) add(servers map[plan.Key][]ipvs.ServerID, now map[ipvs.ServerID]ipvs.Traffic, complete bool) {
	last := make(map[ipvs.ServerID]ipvs.Traffic, len(now))
	if !complete {
		for id, t := range r.last {
			if _, exists := now[id]; exists {
				last[id] = t
			}
		}
	}
	for key, ids := range servers {
		sum := r.total[key]
		for _, id := range ids {
			if t, exists := now[id]; exists {
				sum = plus(sum, grown(r.last[id], t))
				last[id] = t
			}
		}
		r.total[key] = sum
	}
	r.last = last
	for key := range r.total {
		if _, listed := servers[key]; complete && !listed {
			delete(r.total, key)
		}
	}
}

// grown returns the increase of counters; if one has fallen, the server is a new one, and all of its count is new.
func grown(from, to ipvs.Traffic) ipvs.Traffic {
	if to.Connections < from.Connections || to.PacketsIn < from.PacketsIn || to.PacketsOut < from.PacketsOut ||
		to.BytesIn < from.BytesIn || to.BytesOut < from.BytesOut {
		return to
	}
	return ipvs.Traffic{
		Connections: to.Connections - from.Connections,
		PacketsIn:   to.PacketsIn - from.PacketsIn, PacketsOut: to.PacketsOut - from.PacketsOut,
		BytesIn: to.BytesIn - from.BytesIn, BytesOut: to.BytesOut - from.BytesOut,
	}
}

func plus(a, b ipvs.Traffic) ipvs.Traffic {
	return ipvs.Traffic{
		Connections: a.Connections + b.Connections,
		PacketsIn:   a.PacketsIn + b.PacketsIn, PacketsOut: a.PacketsOut + b.PacketsOut,
		BytesIn: a.BytesIn + b.BytesIn, BytesOut: a.BytesOut + b.BytesOut,
	}
}

// signed is a counter as metrics have it.
func signed(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// serversOf adds the virtual servers of each ServicePort.
func (e *engine) serversOf(ctx context.Context, into map[plan.Key][]ipvs.ServerID) error {
	if err := backend.Lock(ctx, &e.mu); err != nil {
		return fmt.Errorf("reading traffic of %s: %w", e.family, err)
	}
	defer e.mu.Unlock()
	if e.desired == nil {
		return fmt.Errorf("reading traffic of %s: the virtual servers are not known until the next sync", e.family)
	}
	for key, o := range e.desired.objects {
		ids := make([]ipvs.ServerID, len(o.servers))
		for i := range o.servers {
			ids[i] = o.servers[i].ID
		}
		into[key] = ids
	}
	return nil
}
