package ipvs

import (
	"context"
	"fmt"
	"iter"
	"math"
	"sync"
	"time"

	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// TrafficReader reads how much has gone through the virtual servers of each ServicePort. It implements
// metrics.TrafficReader.
//
// The kernel counts by virtual server, from zero whenever it makes one, and a ServicePort has several. What is told of a
// ServicePort is the sum of how much each of its servers has grown by, so it does not fall when one of them is made anew;
// only what that one counted after the last time that it was read is lost. Connections and packets from clients include
// those that a scheduler found no endpoint for.
type TrafficReader struct {
	engines []*engine
	stats   func() (map[ipvs.ServerID]ipvs.Traffic, error)

	mu    sync.Mutex
	last  map[ipvs.ServerID]ipvs.Traffic
	total map[plan.Key]ipvs.Traffic
}

// Traffic returns a reader of the backend's counters. It may be used beside Sync, and after Close.
func (b *Backend) Traffic() *TrafficReader { return newTrafficReader(b.engines, b.servers.Stats) }

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

// grown is by how much counters have grown; if one has fallen, the server is another one, and all of it is new.
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

// lockTry is how often it is tried to get hold of what an engine knows, while a sync is under way.
const lockTry = 5 * time.Millisecond

// serversOf adds which virtual servers each ServicePort has.
func (e *engine) serversOf(ctx context.Context, into map[plan.Key][]ipvs.ServerID) error {
	for !e.mu.TryLock() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("reading traffic of %s: a sync has been under way all the time: %w", e.family, ctx.Err())
		case <-time.After(lockTry):
		}
	}
	defer e.mu.Unlock()
	if e.desired == nil {
		return fmt.Errorf("reading traffic of %s: which virtual servers there are is known again after the next sync", e.family)
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
