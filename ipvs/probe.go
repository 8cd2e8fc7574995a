package ipvs

import (
	"context"
	"math"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// The kernel sends no notifications about virtual servers and sets, so they are looked at now and then: see Backend.looks. Missing
// virtual servers of IPv4 and entries are there again within half a second, unless there are so many that to count them takes longer.
const (
	countInterval = 400 * time.Millisecond
	probeInterval = 3 * time.Second
)

// look is something to look at again and again.
type look struct {
	every time.Duration // or less often, if it takes more than one part in share of a processor's time
	share time.Duration
	do    func() (why string) // says why everything has to be compared; "" if that is not so
	// average is over how many looks their cost is averaged: some kernels measure it by ticks.
	average time.Duration

	cost time.Duration
	next time.Time
}

// once does it, and says when it is due again. It keeps the thread, whose time it measures, only meanwhile: a goroutine that waits with one
// of its own takes two more switches of threads whenever it goes on.
func (l *look) once(cpuTime func() time.Duration) (why string) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begin := cpuTime()
	why = l.do()
	// What a kernel counts as this thread's time may be somebody else's: one look alone must not put off the next one for minutes.
	l.cost += (min(cpuTime()-begin, 8*l.cost+4*time.Millisecond) - l.cost) / l.average
	l.next = time.Now().Add(max(l.every, l.share*l.cost))
	return why
}

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

// looks are what probe looks at. Numbers of virtual servers and entries are at hand, and some virtual servers of IPv6 take their place, so
// these come first. Real servers of IPv4 can be counted, in a time that grows with their number. What counting does not show, such as a
// weight, or one virtual server of IPv6, is looked for in the list of all, which takes longest.
func (b *Backend) looks(c counts) []*look {
	few := &look{every: countInterval, share: 600, average: 4, do: func() string { return b.countAll(c, false) }}
	all := &look{every: countInterval, share: 2000, average: 4, do: func() string {
		why := b.countAll(c, true)
		few.next = time.Now().Add(max(few.every, few.share*few.cost)) // They are among all.
		return why
	}}
	p := &prober{}
	return []*look{all, few,
		{every: probeInterval, share: 500, average: 4, do: b.othersDiffer},
		{every: probeInterval, share: 4000, average: 4, do: func() string { return b.differs(p) }}}
}

// probe repairs what it finds to be missing or unexpected of virtual servers and sets, and calls suspect when they are not as they were
// written in another way, until ctx ends.
func (b *Backend) probe(ctx context.Context, suspect func(why string)) {
	cpuTime := b.node.CPUTime
	if cpuTime == nil {
		cpuTime = func() time.Duration { return 0 }
	}
	var c counts
	if counter, err := b.node.Counts(); err == nil {
		defer counter.Close()
		c = counter
	} else {
		b.cfg.Log.Debug("virtual servers can't be counted, only listed", "error", err)
	}
	looks := b.looks(c)
	for _, l := range looks {
		l.next = time.Now().Add(l.every)
	}
	for {
		l := slices.MinFunc(looks, func(a, b *look) int { return a.next.Compare(b.next) })
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Until(l.next)):
		}
		if why := l.once(cpuTime); why != "" {
			suspect(why)
		}
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
		want += e.fingerprint(r)
	}
	skip := func(id ipvs.ServerID) bool {
		return id.Mark == 0 && !families[id.Family] || readings[0].marks.foreign(id, b.Engines[0].exclude)
	}
	have, err := b.node.Fingerprint(skip)
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
	return ""
}

// othersDiffer says which sysctl, or what of what diverts ports, has changed; "" for nothing.
func (b *Backend) othersDiffer() string {
	if name := b.otherSysctl(); name != "" {
		return "sysctl " + name + " has another value"
	}
	for _, e := range b.Engines {
		e.mu.Lock()
		why := ""
		if e.desired != nil {
			why = e.portsDiffer()
		}
		if e.mu.Unlock(); why != "" {
			return why
		}
	}
	return ""
}

// fingerprint returns that of all virtual servers that are known. It looks at them again only after changes.
func (e *engine) fingerprint(r *reading) ipvs.Fingerprint {
	return e.printed.get(e, r, func(pause func() bool) (f ipvs.Fingerprint) {
		for v := range r.known.servers.Clone().All() {
			f.Add(v.Server)
			for _, d := range v.realServers {
				f.AddRealServer(v.Server, d.RealServer)
			}
			if !pause() {
				return f
			}
		}
		return f
	})
}
