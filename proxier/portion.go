package proxier

import (
	"slices"

	"nodeproxy/proxier/plan"
)

// portions divides changes that arrive at once into portions of a bounded size, each a change from one plan to the next, so that
// a small change that arrives meanwhile does not wait for all of a large one.
type portions struct {
	most int // how much one portion may write: ServicePorts and endpoints; 0 for any number
	// plan is what the backend has been given so far. It is the same object at all times.
	plan *plan.Plan
	// waiting are the ServicePorts that differ from it, those that have waited longest first.
	waiting []plan.Key
	// late is whether what had just changed was too much for the last portion, and triggers are of changes that wait.
	late     bool
	triggers []Trigger
}

// next returns the plan to program next, and which ServicePorts differ in it from the one before: all that have just changed, if
// they are not too many for one portion, and as many of those that wait. changed is what Update says: nil gives everything.
func (x *portions) next(desired *plan.Plan, changed plan.Keys) (*plan.Plan, plan.Keys) {
	if x.most == 0 {
		return desired, changed
	}
	x.late = false
	if changed == nil {
		x.waiting = nil
		x.reset(desired)
		return x.plan, nil
	}
	now := plan.Keys{}
	fresh := make([]plan.Key, 0, len(changed))
	cost := 0
	for _, f := range plan.Families {
		fresh = append(fresh, changed.Sorted(f)...)
	}
	for _, k := range fresh {
		cost += x.cost(k, desired)
	}
	if x.late = cost > x.most; x.late {
		x.wait(fresh)
		fresh = nil
	}
	moves := x.moves(desired, fresh)
	for _, k := range fresh {
		x.take(k, desired, moves, now)
	}
	cost = 0
	for _, k := range x.waiting {
		if cost >= x.most {
			break
		}
		if _, taken := now[k]; !taken {
			cost += x.take(k, desired, moves, now)
		}
	}
	x.waiting = slices.DeleteFunc(x.waiting, func(k plan.Key) bool { _, taken := now[k]; return taken })
	for k := range now {
		if sp := desired.Services[k]; sp != nil {
			x.plan.Set(sp)
		} else {
			x.plan.Delete(k)
		}
	}
	return x.plan, now
}

// wait puts ServicePorts behind those that wait already.
func (x *portions) wait(fresh []plan.Key) {
	already := plan.Keys{}
	for _, k := range x.waiting {
		already.Add(k)
	}
	for _, k := range fresh {
		if _, is := already[k]; !is {
			x.waiting = append(x.waiting, k)
		}
	}
}

// triggered returns which triggers are of what next has returned last or before, given those of what had just changed. Those of
// a change that is too large for one portion come with its last one.
func (x *portions) triggered(fresh []Trigger) []Trigger {
	out := slices.Clone(fresh)
	if x.late {
		x.triggers, out = append(x.triggers, fresh...), nil
	}
	if len(x.waiting) == 0 {
		out, x.triggers = append(out, x.triggers...), nil
	}
	return out
}

// reset makes the plan that of all.
func (x *portions) reset(desired *plan.Plan) {
	if x.plan == nil {
		x.plan = plan.New(desired.Node, desired.Settings)
	}
	x.plan.Node, x.plan.Settings, x.plan.Partial = desired.Node, desired.Settings, desired.Partial
	for k := range x.plan.Services {
		if desired.Services[k] == nil {
			x.plan.Delete(k)
		}
	}
	for _, sp := range desired.Services {
		x.plan.Set(sp)
	}
}

// cost is about how many chains of rules a ServicePort's change writes or removes.
func (x *portions) cost(k plan.Key, desired *plan.Plan) int {
	most := 0
	for _, sp := range []*plan.ServicePort{x.plan.Services[k], desired.Services[k]} {
		if sp != nil {
			most = max(most, len(sp.All()))
		}
	}
	return 1 + most
}

// moves tells of each frontend that a ServicePort that waits, or has just changed, gets or loses, by which that is. A frontend
// that passes from one to another does so in one portion: it never has two owners, nor none.
func (x *portions) moves(desired *plan.Plan, fresh []plan.Key) map[claim][]plan.Key {
	out := map[claim][]plan.Key{}
	for _, keys := range [][]plan.Key{x.waiting, fresh} {
		for _, k := range keys {
			for _, c := range x.moved(k, desired) {
				out[c] = append(out[c], k)
			}
		}
	}
	return out
}

// moved are the frontends that a ServicePort gets or loses.
func (x *portions) moved(k plan.Key, desired *plan.Plan) []claim {
	var out []claim
	before, after := x.plan.Services[k], desired.Services[k]
	only := func(a, b *plan.ServicePort) {
		if a == nil {
			return
		}
		for _, f := range a.Frontends {
			if b == nil || !slices.Contains(b.Frontends, f) {
				out = append(out, claimOf(f, k.Family))
			}
		}
	}
	only(before, after)
	only(after, before)
	return out
}

// take adds a ServicePort to a portion, with all that frontends pass to or from, and returns what that costs.
func (x *portions) take(k plan.Key, desired *plan.Plan, moves map[claim][]plan.Key, into plan.Keys) int {
	if _, taken := into[k]; taken {
		return 0
	}
	into.Add(k)
	cost := x.cost(k, desired)
	for _, c := range x.moved(k, desired) {
		for _, other := range moves[c] {
			cost += x.take(other, desired, moves, into)
		}
	}
	return cost
}
