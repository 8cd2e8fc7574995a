package nftables

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// syncChanged writes the difference between the plan in the kernel and p. If that takes more than one transaction, additions come
// before removals, and all additions for one frontend are in the same transaction. Of ServicePorts with many frontends, it writes some; the next
// call goes on.
func (e *engine) syncChanged(ctx context.Context, p *plan.Plan, changed plan.Keys) error {
	all := plan.Keys{}
	maps.Copy(all, e.unfinished)
	maps.Copy(all, changed)
	keys := e.withhold(p, all).Sorted(e.family)
	had, wants := map[id]value{}, make([][]element, 0, len(keys))
	steps := e.steps(keys, p)
	users := map[netip.Addr]int{}
	t := &transactions{engine: e, ctx: ctx, layout: e.layout, kinds: e.kinds}
	defer t.abandon()
	groups := make([]group, 0, len(keys))
	for _, k := range keys {
		before, want := steps[k].before, steps[k].want
		if r := e.refused[k]; r != nil {
			maps.Copy(had, r.kept)
			count(r.sp, users, -1)
		} else if sameSources(before.sp, want.sp) {
			before.withoutSources, want.withoutSources = true, true
		}
		e.layout.fill(before, had, map[kind]bool{})
		used := map[kind]bool{}
		wants = append(wants, e.layout.elements(want, used))
		groups = append(groups, group{sp: p.Services[k], kinds: slices.Collect(maps.Keys(used))})
		count(e.current.of(k).sp, users, -1)
		count(p.Services[k], users, 1)
	}
	stale := rangesByFrontend(e.family, had)
	for i := range groups {
		writes, err := e.writesTo(ctx, had, wants[i])
		if err != nil {
			return err
		}
		groups[i].writes = append(stale.without(wants[i], had), writes...)
	}
	for _, g := range groups {
		if len(g.writes) > 0 {
			if err := t.group(g); err != nil {
				return err
			}
		}
	}
	var kept map[plan.Key]map[id]value
	if err := t.finish(func() []write {
		wanted := map[id]bool{}
		for _, r := range t.refused { // What it keeps has its source ranges, and all of its frontends.
			e.layout.fill(e.current.of(r.sp.Key), had, map[kind]bool{})
		}
		var refused map[plan.Key]bool
		refused, kept = t.kept(had)
		for i, k := range keys {
			if refused[k] {
				for i := range kept[k] {
					wanted[i] = true
				}
				continue
			}
			for _, w := range wants[i] {
				wanted[w.id] = true
			}
		}
		return append(e.leading(users), removals(had, func(i id) bool { return !wanted[i] && i.set != clusterIPs })...)
	}); err != nil {
		return err
	}
	e.record(steps, t.refused, kept)
	for a, n := range users {
		if e.users[a] += n; e.users[a] == 0 {
			delete(e.users, a)
		}
	}
	return nil
}

// record notes what the kernel has after the steps of a sync, of which it has refused some, and what it keeps for these.
func (e *engine) record(steps map[plan.Key]step, refusals []refused, kept map[plan.Key]map[id]value) {
	refused := map[plan.Key]*refusal{}
	maps.Copy(refused, e.refused)
	unfinished := plan.Keys{}
	for k, s := range steps {
		delete(refused, k)
		switch {
		case s.next.others != nil:
			unfinished.Add(k)
			e.current.put(k, s.next)
		case s.next.sp == nil:
			e.current.remove(k)
		default:
			e.current.put(k, s.next)
		}
	}
	for _, r := range refusals {
		refused[r.sp.Key] = e.newRefusal(r, kept[r.sp.Key])
		e.current.remove(r.sp.Key)
		delete(unfinished, r.sp.Key)
	}
	e.unfinished = unfinished
	e.updateRefused(refused)
}

// leading returns the writes of cluster IPs, given by how many the number of the frontends of each changes.
func (e *engine) leading(users map[netip.Addr]int) []write {
	var lead, gone []write
	for a, n := range users {
		w := write{id: id{set: clusterIPs, key: string(a.AsSlice())}}
		switch was := e.users[a]; {
		case was == 0 && n > 0:
			w.want = &value{}
			lead = append(lead, w)
		case was > 0 && was+n == 0:
			w.had = &value{}
			gone = append(gone, w)
		}
	}
	return append(lead, gone...)
}
