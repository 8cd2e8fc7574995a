package nftables

import (
	"errors"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// The wait until a refused ServicePort is tried again doubles from firstRefusal on, up to lastRefusal. After it, a comparison of
// everything tries it, or its next change. A change of more than its endpoints does not wait.
const firstRefusal, lastRefusal = 5 * time.Second, 10 * time.Minute

// mostRefused is how many ServicePorts may be refused where the kernel accepts no others: then the fault is hardly theirs.
const mostRefused = 8

// refusal is a ServicePort that the kernel has refused.
type refusal struct {
	plan.Refusal
	sp    *plan.ServicePort // as it was refused
	kept  map[id]value      // what the kernel has for it
	wait  time.Duration
	again time.Time // when it may be tried again
}

// notOfServices are errors that say nothing about what a transaction asks for: of the machine, of rights, or of a kernel that holds
// something else than was assumed.
var notOfServices = []error{unix.EPERM, unix.EACCES, unix.ENOMEM, unix.ENOBUFS, unix.ENOENT, unix.EBUSY, unix.EAGAIN, unix.EINTR,
	unix.EMSGSIZE, unix.ENODEV, unix.ERESTART, nft.ErrAbsent}

// blames reports whether the kernel has refused a transaction for what it asks for. That something exists already may be because
// another program has just added it, or a listing left it out; so for that, Services are to blame only when everything has been read
// again.
func (e *engine) blames(err error) bool {
	var r *nft.RefusedError
	if !errors.As(err, &r) || slices.ContainsFunc(notOfServices, func(no error) bool { return errors.Is(err, no) }) {
		return false
	}
	return e.certain || !errors.Is(err, unix.EEXIST)
}

// withhold takes the ServicePorts out of a change that were refused a short while ago, and differ from that in their endpoints alone.
// A later sync has them. What differs otherwise is tried at once: it may be the owner's mend.
func (e *engine) withhold(p *plan.Plan, changed plan.Keys) plan.Keys {
	if len(e.refused) == 0 {
		return changed
	}
	out := maps.Clone(changed)
	maps.DeleteFunc(out, func(k plan.Key, _ struct{}) bool {
		r, sp := e.refused[k], p.Services[k]
		if r == nil || sp == nil || !time.Now().Before(r.again) {
			return false
		}
		like := *sp
		like.Endpoints = r.sp.Endpoints
		return r.sp.Equal(&like)
	})
	return out
}

// stillRefused reports whether a ServicePort was refused, and should not be tried again yet.
func (e *engine) stillRefused(sp *plan.ServicePort) bool {
	r := e.refused[sp.Key]
	return r != nil && time.Now().Before(r.again) && r.sp.Equal(sp)
}

// keptFor returns, of what the kernel has, the elements of each of some ServicePorts: those of its frontends, if they are its own.
func (e *engine) keptFor(list []*plan.ServicePort, have map[id]value) map[plan.Key]map[id]value {
	if len(list) == 0 {
		return nil
	}
	out, owners := map[plan.Key]map[id]value{}, map[string]plan.Key{}
	for _, sp := range list {
		for _, fe := range sp.Frontends {
			if name := nameOf(e.family, fe); have[id{set: services, key: name}].comment == nft.Comment(sp.Key.PortName()) {
				owners[name] = sp.Key
			}
		}
	}
	n := 4 * nameRegisters(e.family)
	for i, v := range have {
		if !i.set.ofServices() || i.set == clusterIPs {
			continue
		}
		if k, is := owners[i.key[:n]]; is {
			if out[k] == nil {
				out[k] = map[id]value{}
			}
			out[k][i] = v
		}
	}
	return out
}

// updateRefused notes what is refused now, and reports it where it is not what it was before.
func (e *engine) updateRefused(now map[plan.Key]*refusal) {
	before := e.refused
	e.refused = now
	same := len(now) == len(before)
	var list []plan.Refusal
	for _, k := range slices.SortedFunc(maps.Keys(now), plan.Key.Compare) {
		was := before[k]
		same = same && was != nil && was.Kept == now[k].Kept
		list = append(list, now[k].Refusal)
	}
	if !same {
		e.onRefused(e.family, list)
	}
}

// newRefusal makes the record of a ServicePort that was refused just now.
func (e *engine) newRefusal(r refused, kept map[id]value) *refusal {
	out := &refusal{Refusal: plan.Refusal{Key: r.sp.Key, Kept: len(kept) > 0, Err: r.err}, sp: r.sp, kept: kept, wait: firstRefusal}
	if was := e.refused[r.sp.Key]; was != nil {
		out.wait = min(2*was.wait, lastRefusal)
	}
	out.again = time.Now().Add(out.wait)
	return out
}

// kept returns which ServicePorts the kernel has refused, and what it keeps for each and for others. had gets back what their writes
// would have removed, and what of them was carried out.
func (t *transactions) kept(had map[id]value, others ...*plan.ServicePort) (refused map[plan.Key]bool, kept map[plan.Key]map[id]value) {
	list := others
	refused = map[plan.Key]bool{}
	for _, r := range t.refused {
		list = append(list, r.sp)
		refused[r.sp.Key] = true
		for _, w := range r.writes {
			if w.had != nil {
				had[w.id] = *w.had
			}
		}
		for _, w := range r.ahead {
			had[w.id] = *w.want
		}
	}
	return refused, t.engine.keptFor(list, had)
}
