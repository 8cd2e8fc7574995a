package ipvs

import (
	"fmt"
	"math/rand/v2"
	"time"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// numbers are how many objects of each kind a family has.
type numbers struct {
	servers, realServers int
	members              [setCount]int
}

// numbers returns how many there should be. It counts again only after changes.
func (e *engine) numbers(r *reading) numbers {
	return e.numbered.get(e, r, func(pause func() bool) (n numbers) {
		for v := range r.known.servers.Clone().All() {
			n.servers++
			if n.realServers += len(v.realServers); !pause() {
				return n
			}
		}
		for m := range r.known.members {
			if n.members[m.set]++; !pause() {
				return n
			}
		}
		return n
	})
}

// counts reads how many virtual servers of IPv4 there are, and how many real servers each has. ipvs.Counts implements it.
type counts interface {
	Servers() (int, error)
	Read(each func(id ipvs.ServerID, realServers int)) error
}

// named are virtual servers and sets that another program seems to have changed.
type named struct {
	servers set.Set[ipvs.ServerID]
	sets    [setCount]bool
}

// count compares numbers of objects with those in the kernel, and returns where they differ. It sees what has been added or removed,
// unless sums stay the same: entries of sets, and virtual servers, for which c is nil for a family in which they can't be counted. With
// all, it also sees real servers and entries of sets that should have none, which takes longer. sizes are those of the sets, read since r began.
func (e *engine) count(r *reading, c counts, sizes map[string]int, all bool) (n named, err error) {
	want := e.numbers(r)
	var servers map[ipvs.ServerID]int // nil if as many are there as should be
	if c != nil {
		if servers, err = e.countServers(r, c, all, want); err != nil {
			return n, err
		}
	}
	for id := range setCount {
		size, there := sizes[setName(id, e.family)]
		n.sets[id] = (all || want.members[id] > 0) && (!there || size != want.members[id])
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.valid(r) || !r.changed.empty() { // The next look will do.
		return named{}, nil
	}
	if servers != nil {
		n.servers = e.miscounted(r, servers)
	}
	return n, nil
}

// countServers returns how many real servers each virtual server has, or nil if as many are there as should be. Unless it is to look at
// all, it looks at real servers only if there is another number of virtual servers than there should be beside those of other programs.
func (e *engine) countServers(r *reading, c counts, all bool, want numbers) (map[ipvs.ServerID]int, error) {
	if there, err := c.Servers(); err != nil || !all && there == want.servers+e.foreignServers {
		return nil, err
	}
	have, foreign := numbers{}, 0
	err := c.Read(func(id ipvs.ServerID, realServers int) {
		if r.marks.foreign(id, e.exclude) {
			foreign++
			return
		}
		have.servers++
		have.realServers += realServers
	})
	if e.foreignServers = foreign; err != nil || have.servers == want.servers && have.realServers == want.realServers || !e.current(r) {
		return nil, err
	}
	servers := map[ipvs.ServerID]int{}
	err = c.Read(func(id ipvs.ServerID, realServers int) { servers[id] = realServers })
	return servers, err
}

// current reports whether no sync has changed anything since a reading began.
func (e *engine) current(r *reading) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.valid(r) && r.changed.empty()
}

// samples is how many virtual servers of a family in which they can't be counted are looked at instead.
const samples = 4

// sampleDiffers looks at some virtual servers, others each time, and reports whether one is not as it was written. If another program has
// removed a part p of them, it sees that with a probability of 1-(1-p)^samples.
func (e *engine) sampleDiffers() (bool, error) {
	r := e.beginReading()
	if r == nil { // The next sync compares everything.
		return false, nil
	}
	defer e.endReading(r)
	for id := range e.sample(r) {
		is, err := e.machine.servers.Get(id)
		if err != nil {
			return false, err
		}
		e.mu.Lock()
		was := e.actual.servers.Get(id)
		differs := e.valid(r) && was != nil && !r.changed.servers.Has(id) &&
			(is == nil || is.Foreign || !was.isLike(is))
		e.mu.Unlock()
		if differs {
			return true, nil
		}
	}
	return false, nil
}

// sample draws virtual servers.
func (e *engine) sample(r *reading) set.Set[ipvs.ServerID] {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := set.Set[ipvs.ServerID]{}
	n := r.known.servers.Len()
	if n == 0 {
		return out
	}
	i := rand.IntN(n) // They come in an order that a seed decides, so those that follow each other are any.
	for v := range r.known.servers.All() {
		if i%n < samples {
			out.Insert(v.ID)
		}
		if i++; len(out) == min(samples, n) {
			break
		}
	}
	return out
}

// miscounted returns the virtual servers that have another number of real servers than is known, or are missing or unexpected.
func (e *engine) miscounted(r *reading, have map[ipvs.ServerID]int) set.Set[ipvs.ServerID] {
	out := set.Set[ipvs.ServerID]{}
	for v := range r.known.servers.All() {
		if n, is := have[v.ID]; !is || n != len(v.realServers) {
			out.Insert(v.ID)
		}
	}
	for id := range have {
		if r.known.servers.Get(id) == nil && !r.marks.foreign(id, e.exclude) {
			out.Insert(id)
		}
	}
	return out
}

// countAll counts what both families have, as count does, compares what seems to have been changed, and repairs what differs. It returns
// why everything has to be compared; "" if that is not so.
func (b *Backend) countAll(c counts, all bool) (why string) {
	begin := time.Now()
	var found drift.Found
	var failed error
	readings := map[*engine]*reading{}
	var sets, filled []string
	for _, e := range b.Engines {
		for id := range setCount {
			sets = append(sets, setName(id, e.family))
		}
		r := e.beginReading()
		if r == nil { // The next sync compares everything.
			continue
		}
		defer e.endReading(r)
		readings[e] = r
		for id, members := range e.numbers(r).members {
			if members > 0 {
				filled = append(filled, setName(setID(id), e.family))
			}
		}
	}
	if !all && len(filled) <= ipset.FewSets { // Otherwise all are asked for at once.
		sets = filled
	}
	if len(readings) == 0 {
		return ""
	}
	sizes, err := b.Engines[0].machine.sets.Sizes(sets)
	if err != nil {
		return err.Error()
	}
	for _, e := range b.Engines {
		if readings[e] == nil {
			continue
		}
		of, sampled := c, c == nil || e.family != plan.IPv4
		if sampled {
			of = nil
		}
		n, err := e.count(readings[e], of, sizes, all)
		var some drift.Found
		var again bool
		if err == nil && sampled {
			again, err = e.sampleDiffers()
		}
		if err == nil && !again && (len(n.servers) > 0 || n.sets != [setCount]bool{}) {
			some, again, err = e.compareNamed(n)
		}
		if found = append(found, some...); err != nil {
			failed, why = err, err.Error()
		} else if again {
			why = fmt.Sprintf("another program has changed virtual servers or sets (%s)", e.family)
		}
	}
	if len(found) > 0 {
		b.Report(drift.Report{Found: found, Took: time.Since(begin), Err: failed})
	}
	return why
}

// compareNamed compares some virtual servers and sets with the kernel, and repairs what differs. It reports whether everything has to be
// compared.
func (e *engine) compareNamed(n named) (found drift.Found, again bool, err error) {
	defer e.recovered(&again, &err)
	r := e.beginReading()
	if r == nil { // The next sync compares everything.
		return nil, false, nil
	}
	defer e.endReading(r)
	if r.partial || len(n.servers) > mostBeside || n.sets[setVIPs] { // The entries of this one follow the addresses.
		return nil, true, nil
	}
	now := newActual()
	if again, err := e.readNamed(n, now); again || err != nil {
		return nil, true, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	s := newTouched()
	e.suspectMembers(s, r.known, now, e.pausing(r))
	if !e.valid(r) {
		return nil, false, nil
	}
	if n.servers != nil {
		s.servers = n.servers
	}
	e.forgetChanged(s, r)
	if len(s.members) > mostBeside {
		return nil, true, nil
	}
	if found, err = e.recheck(s, now); err != nil {
		e.forget()
	}
	return found, false, err
}

// readNamed reads sets. It reports whether one was gone or had other properties.
func (e *engine) readNamed(n named, now *actual) (again bool, err error) {
	if n.sets == [setCount]bool{} {
		return false, nil
	}
	kernel, closeAll, err := e.beside()
	if err != nil {
		return true, err
	}
	defer closeAll()
	for id, is := range n.sets {
		if !is {
			continue
		}
		if made, err := e.machine.sets.Ensure(setOf(setID(id), e.family)); made || err != nil {
			return true, err
		}
		if err := now.readSet(kernel.sets, setID(id), e.family); err != nil {
			return true, err
		}
	}
	return false, nil
}
