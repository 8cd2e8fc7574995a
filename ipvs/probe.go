package ipvs

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// The kernel sends no notifications about virtual servers and sets. What can be read cheaply is checked every probeInterval, or
// less often if that takes long: it takes no more than one part in probeShare of the time.
const (
	probeInterval = 3 * time.Second
	probeShare    = 50
)

// prober remembers earlier checks.
//
// If other network namespaces have virtual servers too, kernels up to at least 6.12 leave some out of /proc/net/ip_vs or list them
// twice: between two parts of the file, they count those of all namespaces in one place and those of the reader's in another. So a
// difference that remains after a comparison of everything, which reads in another way and has found none, is not real.
type prober struct {
	artifact ipvs.Fingerprint // the difference that is not real
	last     ipvs.Fingerprint // the difference that was reported last
	alike    int              // the number of comparisons without a difference at that time
}

// differs reports whether a difference must be reported, given the number of comparisons that found none.
func (p *prober) differs(by ipvs.Fingerprint, alike int) bool {
	switch {
	case by == 0:
		p.artifact, p.last = 0, 0
	case by == p.last && alike > p.alike:
		p.artifact = by
	}
	if by == p.artifact {
		return false
	}
	p.last, p.alike = by, alike
	return true
}

// cpuTime is the processor time that the caller's thread has used.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// probe calls suspect when virtual servers or sets are not as they were written, until ctx ends.
func (b *Backend) probe(ctx context.Context, suspect func(why string)) {
	runtime.LockOSThread() // for cpuTime
	defer runtime.UnlockOSThread()
	wait := probeInterval
	p := &prober{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		begin := cpuTime()
		if why := b.differs(p); why != "" {
			suspect(why)
		} else if name := b.otherSysctl(); name != "" {
			suspect("sysctl " + name + " has another value")
		}
		wait = max(probeInterval, probeShare*(cpuTime()-begin))
	}
}

// otherSysctl returns the name of a kernel setting that has changed; "" for none.
func (b *Backend) otherSysctl() string {
	b.settings.Lock()
	defer b.settings.Unlock()
	return b.sysctls.differs()
}

// differs says what has changed; "" if no change can be seen.
func (b *Backend) differs(p *prober) string {
	var want ipvs.Fingerprint
	families := map[plan.Family]bool{}
	readings := make([]*reading, len(b.Engines))
	for i, e := range b.Engines {
		r := e.beginReading()
		if r == nil { // The next sync looks at everything.
			return ""
		}
		defer e.endReading(r)
		readings[i], families[e.family] = r, true
		e.fingerprint(r, &want)
	}
	skip := func(id ipvs.ServerID) bool {
		return id.Mark == 0 && !families[id.Family] || readings[0].marks.foreign(id, b.Engines[0].exclude)
	}
	have, err := ipvs.ReadFingerprint(skip)
	if err != nil {
		return err.Error()
	}
	alike := math.MaxInt // the number of comparisons that found no difference in virtual servers of any family
	for i, e := range b.Engines {
		e.mu.Lock()
		defer e.mu.Unlock()
		if !e.valid(readings[i]) || len(readings[i].changed.servers) > 0 { // The next look will do.
			return ""
		}
		alike = min(alike, e.alike)
	}
	if p.differs(have-want, alike) {
		return "another program has changed virtual servers"
	}
	for _, e := range b.Engines {
		if why := cmp.Or(e.otherSizes(), e.portsDiffer()); why != "" {
			return why
		}
	}
	return ""
}

// fingerprint adds all virtual servers.
func (e *engine) fingerprint(r *reading, f *ipvs.Fingerprint) {
	e.mu.Lock()
	defer e.mu.Unlock()
	pause := e.pausing(r)
	for _, v := range r.known.servers {
		f.Add(v.Server)
		for addr, d := range v.realServers {
			f.AddRealServer(v.Server, ipvs.RealServer{Addr: addr, Weight: d.weight})
		}
		if !pause() {
			return
		}
	}
}

// otherSizes says which set has another number of entries than were written; "" for none.
func (e *engine) otherSizes() string {
	var want [setCount]int
	for m := range e.actual.members {
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
