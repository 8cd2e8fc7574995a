package ipvs

import (
	"context"
	"fmt"
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
// it was last read is lost. Connections and packets from clients include those for which a scheduler found no endpoint.
type TrafficReader struct {
	engines []*engine
	stats   func() (map[ipvs.ServerID]ipvs.Traffic, error)

	mu    sync.Mutex
	last  map[ipvs.ServerID]ipvs.Traffic
	total map[plan.Key]plan.Traffic
}

// Traffic returns a reader of the backend's counters. It may be used beside Sync, and after Close.
func (b *Backend) Traffic() *TrafficReader { return newTrafficReader(b.Engines, b.node.Servers.Stats) }

func newTrafficReader(engines []*engine, stats func() (map[ipvs.ServerID]ipvs.Traffic, error)) *TrafficReader {
	return &TrafficReader{engines: engines, stats: stats, last: map[ipvs.ServerID]ipvs.Traffic{}, total: map[plan.Key]plan.Traffic{}}
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
		r.add(servers, now)
		if complete {
			maps.DeleteFunc(r.total, func(key plan.Key, _ plan.Traffic) bool { return servers[key] == nil })
		}
		for key := range servers {
			if !yield(r.total[key], nil) {
				return
			}
		}
	}
}

// add adds to the sum of each ServicePort what its servers have counted since the last time.
func (r *TrafficReader) add(servers map[plan.Key][]ipvs.ServerID, now map[ipvs.ServerID]ipvs.Traffic) {
	maps.DeleteFunc(r.last, func(id ipvs.ServerID, _ ipvs.Traffic) bool { _, exists := now[id]; return !exists })
	for key, ids := range servers {
		sum := r.total[key]
		sum.Key = key
		for _, id := range ids {
			if t, exists := now[id]; exists {
				add(&sum, r.last[id], t)
				r.last[id] = t
			}
		}
		r.total[key] = sum
	}
}

// add adds the increase of counters; if one has fallen, the server is a new one, and all of its count is new.
func add(sum *plan.Traffic, from, to ipvs.Traffic) {
	if to.Connections < from.Connections || to.PacketsIn < from.PacketsIn || to.PacketsOut < from.PacketsOut ||
		to.BytesIn < from.BytesIn || to.BytesOut < from.BytesOut {
		from = ipvs.Traffic{}
	}
	sum.Connections += int64(to.Connections - from.Connections)
	sum.PacketsIn += int64(to.PacketsIn - from.PacketsIn)
	sum.PacketsOut += int64(to.PacketsOut - from.PacketsOut)
	sum.BytesIn += int64(to.BytesIn - from.BytesIn)
	sum.BytesOut += int64(to.BytesOut - from.BytesOut)
}

// serversOf adds the virtual servers of each ServicePort.
func (e *engine) serversOf(ctx context.Context, into map[plan.Key][]ipvs.ServerID) error {
	if err := e.mu.LockContext(ctx); err != nil {
		return fmt.Errorf("reading traffic of %s: %w", e.family, err)
	}
	defer e.mu.Unlock()
	if e.desired == nil {
		return fmt.Errorf("reading traffic of %s: the virtual servers are not known until the next sync", e.family)
	}
	for sp := range e.desired.services.All() {
		into[sp.Key] = []ipvs.ServerID{} // Some ServicePorts have no virtual servers.
	}
	for id, w := range e.desired.servers {
		into[w.sp.Key] = append(into[w.sp.Key], id)
	}
	return nil
}
