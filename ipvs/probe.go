package ipvs

import (
	"context"
	"fmt"
	"time"

	"nodeproxy/ipvs/kernel"
	"nodeproxy/proxier/plan"
)

// The kernel does not tell of changes of virtual servers and sets. What can be read at little cost is looked at every
// probeInterval, or less often where even that takes long: it takes up no more than one part in probeShare of the time.
const (
	probeInterval = 3 * time.Second
	probeShare    = 50
)

// probe calls suspect when virtual servers or sets are not as they were written, until ctx ends.
func (b *Backend) probe(ctx context.Context, suspect func(why string)) {
	wait := probeInterval
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		begin := time.Now()
		if why := b.unlike(); why != "" {
			suspect(why)
		}
		wait = max(probeInterval, probeShare*time.Since(begin))
	}
}

// unlike says what is not as it was written; empty if nothing can be seen to be so.
func (b *Backend) unlike() string {
	for _, e := range b.engines {
		e.mu.Lock() // What one sync changes is in the kernel and in held at once.
		defer e.mu.Unlock()
		if e.desired == nil { // The next sync looks at everything.
			return ""
		}
	}
	var want kernel.Fingerprint
	families := map[plan.Family]bool{}
	for _, e := range b.engines {
		families[e.family] = true
		e.held.fingerprint(&want)
	}
	have, err := kernel.ReadFingerprint(func(id kernel.ServerID) bool {
		return id.Mark == 0 && !families[id.Family] || b.engines[0].foreign(id)
	})
	switch {
	case err != nil:
		return err.Error()
	case have != want:
		return "another program has changed virtual servers"
	}
	for _, e := range b.engines {
		if why := e.otherSizes(); why != "" {
			return why
		}
	}
	return ""
}

// fingerprint adds all virtual servers.
func (h *held) fingerprint(f *kernel.Fingerprint) {
	for _, v := range h.servers {
		f.Add(v.Server)
		for addr, d := range v.destinations {
			f.AddDestination(v.Server, kernel.Destination{Addr: addr, Weight: d.weight})
		}
	}
}

// otherSizes names a set that has more or fewer entries than were written; empty if none has.
func (e *engine) otherSizes() string {
	var want [setCount]int
	for m := range e.held.members {
		want[m.set]++
	}
	for id := range setCount {
		name := setName(id, e.family)
		n, err := e.machine.sets.Size(name)
		switch {
		case err != nil:
			return err.Error()
		case n != want[id]:
			return fmt.Sprintf("set %s has %d entries in place of %d", name, n, want[id])
		}
	}
	return ""
}
