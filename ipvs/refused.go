package ipvs

import (
	"errors"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// mostRefused is the number of virtual servers that may be refused while none is accepted: if there are more, the fault is not
// theirs.
const mostRefused = 10

// refusedMember is an entry of a set that the kernel refuses, and the ServicePorts that ask for it.
type refusedMember struct {
	err  error
	keys []plan.Key
}

// results are those of changes of virtual servers that were tried.
type results struct {
	taken   int
	refused map[ipvs.ServerID]error
	// gone are virtual servers that changes have found to be removed by others. They are made again, unless others remove them again.
	gone set.Set[ipvs.ServerID]
}

// handleResults handles the results of changes of virtual servers. What has failed is undone in actual. A refusal is noted in tried, and a
// virtual server that is not there any more, as any change of it or of its real servers says, is made again; every other error is returned.
func (e *engine) handleResults(c changes, errs []error) error {
	refused, gone := map[ipvs.ServerID]error{}, set.Set[ipvs.ServerID]{}
	others := false
	e.tried.taken += len(c.ops) - len(errs)
	for i, err := range errs {
		id := c.ops[i].Server.ID
		switch {
		case err == nil:
			e.tried.taken++
		case refused[id] != nil && errors.Is(err, unix.ESRCH): // A consequence of the refusal.
		case c.undo[i] != nil && refusal(err):
			refused[id] = err
		case !e.tried.gone.Has(id) && errors.Is(err, unix.ESRCH):
			gone.Insert(id)
		default:
			others = true
		}
	}
	for i, err := range slices.Backward(errs) {
		if err != nil && c.undo[i] != nil {
			c.undo[i]()
		}
	}
	if others { // Whatever was refused is so again when the kernel has been read.
		return errors.Join(errs...)
	}
	if e.tried.refused == nil {
		e.tried.refused = refused
	}
	maps.Copy(e.tried.refused, refused)
	return e.remake(gone)
}

// remake makes virtual servers again that others have removed, as far as they are desired.
func (e *engine) remake(gone set.Set[ipvs.ServerID]) error {
	if len(gone) == 0 {
		return nil
	}
	list := slices.SortedFunc(maps.Keys(gone), e.order)
	e.log.Warn("other programs have removed virtual servers; those that are needed are made again", "family", e.family, "removed", len(list),
		"such-as", list[0].String())
	e.tried.gone = e.tried.gone.Union(gone)
	for _, id := range list {
		e.actual.servers.Delete(id)
		e.ensureServer(id)
	}
	return e.makeChanges()
}

// judge records the refused virtual servers of all changes that were tried, unless these are so many that the fault is not theirs.
func (e *engine) judge() error {
	tried := e.tried
	e.tried = results{}
	if tried.taken == 0 && len(tried.refused) > mostRefused {
		return errors.Join(slices.Collect(maps.Values(tried.refused))...)
	}
	if e.refused == nil {
		e.refused = map[ipvs.ServerID]error{}
	}
	maps.Copy(e.refused, tried.refused)
	return nil
}

// refusal reports whether an error says that the kernel will never accept an addition or change: a scheduler that it lacks, or a
// value that it does not know.
func refusal(err error) bool {
	return slices.ContainsFunc([]error{unix.EINVAL, unix.ENOENT, unix.EOPNOTSUPP, unix.ERANGE},
		func(e error) bool { return errors.Is(err, e) })
}

// refusedEntries returns the entries of a set that the kernel refuses, if err consists of their errors only and the fault is
// theirs: some others of the given number were accepted, or there are few.
func refusedEntries(err error, asked int) (map[ipset.Entry]error, bool) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return nil, false
	}
	refused := map[ipset.Entry]error{}
	for _, err := range joined.Unwrap() {
		entry := new(ipset.EntryError)
		if !errors.As(err, &entry) {
			return nil, false
		}
		refused[entry.Entry] = err
	}
	return refused, len(refused) < asked || len(refused) <= mostRefused
}

// refuseMembers records entries that the kernel refuses.
func (e *engine) refuseMembers(refused map[memberKey]error) {
	if len(refused) == 0 {
		return
	}
	if e.refusedMembers == nil {
		e.refusedMembers = map[memberKey]refusedMember{}
	}
	for m, keys := range e.desired.asking(refused) {
		e.refusedMembers[m] = refusedMember{refused[m], keys}
	}
}

// asking returns the ServicePorts that ask for entries that were refused. It looks at all, since few are.
func (s *state) asking(refused map[memberKey]error) map[memberKey][]plan.Key {
	keys := make(map[memberKey][]plan.Key, len(refused))
	for m := range refused {
		keys[m] = nil
	}
	note := func(m memberKey, k plan.Key) {
		if list, is := keys[m]; is && !slices.Contains(list, k) {
			keys[m] = append(list, k)
		}
	}
	for sp := range s.services.All() {
		o := s.build(sp)
		for _, m := range o.members {
			note(m.key(), sp.Key)
		}
		for _, a := range o.vips {
			note(vipMember(a), sp.Key)
		}
	}
	return keys
}

// asks reports whether an entry is still asked for.
func (s *state) asks(m memberKey) bool {
	return s.members[m].count > 0 || m.set == setVIPs && s.vips[m.addr.addr()] > 0
}

// served reports whether any virtual server of a ServicePort has endpoints.
func (e *engine) served(sp *plan.ServicePort) bool {
	return slices.ContainsFunc(e.desired.build(sp).servers, func(v serverClaim) bool {
		have := e.actual.servers.Get(v.id)
		return have != nil && len(have.realServers) > 0
	})
}

// reportRefused reports the refused ServicePorts if they have changed. What is refused is retried with each change of its Service
// and in each comparison of everything, which costs one message.
func (e *engine) reportRefused() {
	byKey := map[plan.Key]plan.Refusal{}
	for id, err := range e.refused {
		want, wanted := e.desired.servers[id]
		if !wanted {
			delete(e.refused, id)
			continue
		}
		have, key := e.actual.servers.Get(id), want.sp.Key
		r, seen := byKey[key]
		kept := have != nil && len(have.realServers) > 0
		byKey[key] = plan.Refusal{Key: key, Kept: kept && (!seen || r.Kept), Err: err}
	}
	for m, r := range e.refusedMembers {
		if !e.desired.asks(m) {
			delete(e.refusedMembers, m)
			continue
		}
		for _, k := range r.keys {
			if sp := e.desired.servicePort(k); sp != nil && byKey[k].Err == nil {
				byKey[k] = plan.Refusal{Key: k, Kept: e.served(sp), Err: r.err}
			}
		}
	}
	var list []plan.Refusal
	for _, k := range slices.SortedFunc(maps.Keys(byKey), plan.Key.Compare) {
		list = append(list, byKey[k])
	}
	same := slices.EqualFunc(list, e.reported, func(a, b plan.Refusal) bool { return a.Key == b.Key && a.Kept == b.Kept })
	if e.reported = list; !same && e.onRefused != nil {
		e.onRefused(e.family, list)
	}
}
