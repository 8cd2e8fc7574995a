package ipvs

import (
	"errors"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"nodeproxy/ipvs/kernel"
	"nodeproxy/proxier/plan"
)

// mostRefused is how many virtual servers may be refused where nothing else is taken: if there are more, the fault is not theirs.
const mostRefused = 10

// settle takes what became of changes of virtual servers. A virtual server, or real server, that the kernel does not take is noted,
// and not held; every other error is returned.
func (e *engine) settle(ops []kernel.Op, errs []error) error {
	if errs == nil {
		e.taken(ops, nil)
		return nil
	}
	refused := map[kernel.ServerID]error{}
	others, taken := false, 0
	for i, err := range errs {
		id := ops[i].Server.ID
		switch {
		case err == nil:
			taken++
		case refused[id] != nil && errors.Is(err, unix.ESRCH): // It follows from that.
		case refusal(ops[i], err):
			refused[id] = err
		default:
			others = true
		}
	}
	if others || taken == 0 && len(refused) > mostRefused {
		return errors.Join(errs...)
	}
	for i, err := range errs {
		have := e.held.servers[ops[i].Server.ID]
		switch {
		case err == nil || have == nil:
		case ops[i].Kind == kernel.AddServer:
			delete(e.held.servers, ops[i].Server.ID)
		default:
			delete(have.destinations, ops[i].Destination.Addr)
		}
	}
	e.taken(ops, refused)
	return nil
}

// taken forgets the refusals of virtual servers that were changed now, but for those that are refused.
func (e *engine) taken(ops []kernel.Op, refused map[kernel.ServerID]error) {
	for _, op := range ops {
		if op.Kind == kernel.AddServer || op.Kind == kernel.AddDestination {
			delete(e.refused, op.Server.ID)
		}
	}
	if e.refused == nil {
		e.refused = map[kernel.ServerID]error{}
	}
	maps.Copy(e.refused, refused)
}

// refusal reports whether an error says that the kernel does not take what is to be added, whenever it is tried: a scheduler that it
// lacks, or a value that it knows nothing of.
func refusal(op kernel.Op, err error) bool {
	return (op.Kind == kernel.AddServer || op.Kind == kernel.AddDestination) &&
		slices.ContainsFunc([]error{unix.EINVAL, unix.ENOENT, unix.EOPNOTSUPP, unix.ERANGE}, func(e error) bool { return errors.Is(err, e) })
}

// reportRefused tells of the ServicePorts that are refused, where these are others than before. What is refused is tried again with
// each change of its Service and by each comparison of everything, which costs a message.
func (e *engine) reportRefused() {
	byKey := map[plan.Key]plan.Refusal{}
	for id, err := range e.refused {
		want, wanted := e.desired.servers[id]
		if !wanted {
			delete(e.refused, id)
			continue
		}
		have := e.held.servers[id]
		r, seen := byKey[want.key]
		kept := have != nil && len(have.destinations) > 0
		byKey[want.key] = plan.Refusal{Key: want.key, Kept: kept && (!seen || r.Kept), Err: err}
	}
	var list []plan.Refusal
	for _, k := range slices.SortedFunc(maps.Keys(byKey), plan.Key.Compare) {
		list = append(list, byKey[k])
	}
	same := slices.EqualFunc(list, e.told, func(a, b plan.Refusal) bool { return a.Key == b.Key && a.Kept == b.Kept })
	if e.told = list; !same && e.tellRefused != nil {
		e.tellRefused(e.family, list)
	}
}
