// Package portion divides changes that arrive at once into portions of a bounded size, each a change from one plan to the next.
package portion

import (
	"cmp"
	"maps"
	"slices"

	"nodeproxy/plan"
)

// Queue divides changes into portions, so that a small change that arrives meanwhile does not wait for all of a large one. It is
// not safe for concurrent use.
type Queue struct {
	most int
	// given is what the backend has been given so far. While that is not what is desired, it is also in plan, which is nil otherwise.
	given *plan.Ports
	plan  *plan.Plan
	// waiting are the ServicePorts that differ from given, the longest waiting first; within is the same as a set.
	waiting []plan.Key
	within  plan.Keys
	late    bool
}

// New returns a Queue whose portions write about most chains of rules per family; 0 for any number.
func New(most int) *Queue { return &Queue{most: most, given: plan.NewPorts(), within: plan.Keys{}} }

// Waiting returns the number of changed ServicePorts that are left to later portions.
func (q *Queue) Waiting() int { return len(q.waiting) }

// Late reports whether the latest change was too large for the last portion.
func (q *Queue) Late() bool { return q.late }

// Next returns the plan to program next, and which ServicePorts differ in it from the one before: all that have just changed, if
// they are not too many for one portion, and as many of those that wait. change is how desired differs from the call
// before; everything gives everything.
func (q *Queue) Next(desired *plan.Plan, change plan.Change) (*plan.Plan, plan.Change) {
	if q.most == 0 {
		return desired, change
	}
	q.late = false
	if change.All() {
		q.waiting, q.plan = nil, nil
		clear(q.within)
		q.given = plan.NewPorts()
		for _, sp := range desired.Services {
			q.given.Put(sp)
		}
		return desired, change
	}
	fresh := sorted(change.Keys(), desired)
	if q.late = q.tooMany(fresh, desired); q.late {
		q.wait(fresh)
		fresh = nil
	}
	now := q.choose(desired, fresh)
	q.waiting = slices.DeleteFunc(q.waiting, func(k plan.Key) bool { _, taken := now[k]; return taken })
	for k := range now {
		delete(q.within, k)
		q.give(k, desired.Services[k])
	}
	return q.planFor(desired), plan.Only(now)
}

// give notes that the backend is given a ServicePort; nil if it is to have none with the key.
func (q *Queue) give(k plan.Key, sp *plan.ServicePort) {
	if sp != nil {
		q.given.Put(sp)
	} else {
		q.given.Delete(k)
	}
	switch {
	case q.plan == nil:
	case sp != nil:
		q.plan.Set(sp)
	default:
		q.plan.Delete(k)
	}
}

// planFor returns what has been given as a plan: desired itself unless something waits.
func (q *Queue) planFor(desired *plan.Plan) *plan.Plan {
	if len(q.waiting) == 0 {
		q.plan = nil
		return desired
	}
	if q.plan == nil {
		q.plan = plan.New(desired.Node, desired.Settings)
		q.plan.Partial = desired.Partial
		for sp := range q.given.All() {
			q.plan.Set(sp)
		}
	}
	return q.plan
}

// sorted returns ServicePorts in the order in which they are programmed: first what a node needs before anything else works. The
// families of a Service stay together, since backends program both at the same time.
func sorted(changed plan.Keys, desired *plan.Plan) []plan.Key {
	rank := func(k plan.Key) int {
		if sp := desired.Services[k]; sp != nil && sp.Critical {
			return 0
		}
		return 1
	}
	return slices.SortedFunc(maps.Keys(changed), func(a, b plan.Key) int { return cmp.Or(rank(a)-rank(b), a.Compare(b)) })
}

// tooMany reports whether ServicePorts are too many for one portion.
func (q *Queue) tooMany(keys []plan.Key, desired *plan.Plan) bool {
	cost := map[plan.Family]int{}
	for _, k := range keys {
		if cost[k.Family] += q.cost(k, desired); cost[k.Family] > q.most {
			return true
		}
	}
	return false
}

// wait appends ServicePorts to those that wait already.
func (q *Queue) wait(fresh []plan.Key) {
	for _, k := range fresh {
		if _, already := q.within[k]; !already {
			q.within.Add(k)
			q.waiting = append(q.waiting, k)
		}
	}
}

// choose returns the next portion: everything fresh, and as much of the waiting ServicePorts as fits.
func (q *Queue) choose(desired *plan.Plan, fresh []plan.Key) plan.Keys {
	keys, cost, moves := plan.Keys{}, map[plan.Family]int{}, q.moves(desired, fresh)
	take := func(k plan.Key) { // with all others that exchange frontends with it
		for todo := []plan.Key{k}; len(todo) > 0; {
			k, todo = todo[len(todo)-1], todo[:len(todo)-1]
			if _, taken := keys[k]; taken {
				continue
			}
			keys.Add(k)
			cost[k.Family] += q.cost(k, desired)
			for _, f := range q.moved(k, desired) {
				todo = append(todo, moves[f]...)
			}
		}
	}
	for _, k := range fresh {
		take(k)
	}
	clear(cost)
	for _, k := range q.waiting {
		if cost[k.Family] < q.most {
			take(k)
		}
	}
	return keys
}

// cost is about the number of chains of rules that a ServicePort's change writes or removes.
func (q *Queue) cost(k plan.Key, desired *plan.Plan) int {
	most := 0
	for _, sp := range []*plan.ServicePort{q.given.Get(k), desired.Services[k]} {
		if sp != nil {
			most = max(most, len(sp.All()))
		}
	}
	return 1 + most
}

// frontend is the destination of a packet.
type frontend struct {
	family  plan.Family
	address plan.Address
}

// moves returns, for each frontend that a waiting or just changed ServicePort gains or loses, the ServicePorts involved. A frontend
// passes from one to another within one portion: it never has two owners, nor none.
func (q *Queue) moves(desired *plan.Plan, fresh []plan.Key) map[frontend][]plan.Key {
	out := map[frontend][]plan.Key{}
	for _, keys := range [][]plan.Key{q.waiting, fresh} {
		for _, k := range keys {
			for _, f := range q.moved(k, desired) {
				out[f] = append(out[f], k)
			}
		}
	}
	return out
}

// moved returns the frontends that a ServicePort gains or loses.
func (q *Queue) moved(k plan.Key, desired *plan.Plan) []frontend {
	var out []frontend
	before, after := q.given.Get(k), desired.Services[k]
	only := func(a, b *plan.ServicePort) {
		if a == nil {
			return
		}
		for _, f := range a.Frontends {
			if b == nil || !b.Has(f) {
				out = append(out, frontend{k.Family, plan.Address{Addr: f.Addr, Protocol: f.Protocol, Port: f.Port}})
			}
		}
	}
	only(before, after)
	only(after, before)
	return out
}
