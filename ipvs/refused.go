package ipvs

import (
	"errors"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

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

// handleResults handles the results of changes of virtual servers. A refused one is recorded and undone in actual; every other error is
// returned.
func (e *engine) handleResults(changes []change, errs []error) error {
	refused := map[ipvs.ServerID]error{}
	others, taken := false, 0
	for i, err := range errs {
		id := changes[i].Server.ID
		switch {
		case err == nil:
			taken++
		case refused[id] != nil && errors.Is(err, unix.ESRCH): // A consequence of the refusal.
		case changes[i].undo != nil && refusal(err):
			refused[id] = err
		default:
			others = true
		}
	}
	if others || taken == 0 && len(refused) > mostRefused {
		return errors.Join(errs...)
	}
	for i, err := range slices.Backward(errs) {
		if err != nil && changes[i].undo != nil {
			changes[i].undo()
		}
	}
	if e.refused == nil {
		e.refused = map[ipvs.ServerID]error{}
	}
	maps.Copy(e.refused, refused)
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

// refuseMember records an entry that the kernel refuses.
func (e *engine) refuseMember(m member, err error) {
	if e.refusedMembers == nil {
		e.refusedMembers = map[member]refusedMember{}
	}
	e.refusedMembers[m.key()] = refusedMember{err, e.desired.asking(m.key())}
}

// asking returns the ServicePorts that ask for an entry. It looks at all, since only refused entries are traced back.
func (s *state) asking(wanted member) []plan.Key {
	var keys []plan.Key
	for k, o := range s.objects {
		if slices.ContainsFunc(o.members, func(m member) bool { return m.key() == wanted }) ||
			wanted.set == setVIPs && slices.Contains(o.vips, wanted.entry.Addr) {
			keys = append(keys, k)
		}
	}
	return keys
}

// asks reports whether an entry is still asked for.
func (s *state) asks(m member) bool {
	return s.members[m] != nil || m.set == setVIPs && s.vips[m.entry.Addr] > 0
}

// served reports whether any virtual server of a ServicePort has endpoints.
func (e *engine) served(k plan.Key) bool {
	return slices.ContainsFunc(e.desired.objects[k].servers, func(v server) bool {
		have := e.actual.servers[v.ID]
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
		have := e.actual.servers[id]
		r, seen := byKey[want.key]
		kept := have != nil && len(have.realServers) > 0
		byKey[want.key] = plan.Refusal{Key: want.key, Kept: kept && (!seen || r.Kept), Err: err}
	}
	for m, r := range e.refusedMembers {
		if !e.desired.asks(m) {
			delete(e.refusedMembers, m)
			continue
		}
		for _, k := range r.keys {
			if _, seen := byKey[k]; !seen && e.desired.services[k] != nil {
				byKey[k] = plan.Refusal{Key: k, Kept: e.served(k), Err: r.err}
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
