package nftables

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// syncChanged writes what differs between two plans of which the first is in the kernel. All that is new comes before what is not wanted
// any more goes, if one transaction is not enough for both; what one ServicePort gets, it gets at once.
func (e *engine) syncChanged(ctx context.Context, p *plan.Plan, changed plan.Keys) error {
	keys := changed.Sorted(e.family)
	had, wants, next := map[id]value{}, make([]map[id]value, 0, len(keys)), make(map[plan.Key]written, len(keys))
	all, used := map[id]bool{}, map[kind]bool{}
	users := map[netip.Addr]int{}
	for _, k := range keys {
		before, want := e.current[k], written{}
		if sp := p.Services[k]; sp != nil {
			want = place(before, sp)
		}
		next[k] = want
		e.layout.fill(before, had, map[kind]bool{})
		mine := map[id]value{}
		e.layout.fill(want, mine, used)
		wants = append(wants, mine)
		for i := range mine {
			all[i] = true
		}
		count(before.sp, users, -1)
		count(want.sp, users, 1)
	}
	t := &transactions{engine: e, ctx: ctx}
	if err := e.addKinds(t, used); err != nil {
		return err
	}
	stale := rangesByFrontend(e.family, had)
	for _, mine := range wants {
		if err := t.group(append(stale.without(mine, had), differing(had, mine)...)); err != nil {
			return err
		}
	}
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
	for i, v := range had {
		if !all[i] && i.set != clusterIPs {
			gone = append(gone, write{id: i, had: &v})
		}
	}
	if err := t.rest(lead, gone); err != nil {
		return err
	}
	for k, w := range next {
		if e.current[k] = w; w.sp == nil {
			delete(e.current, k)
		}
	}
	for a, n := range users {
		if e.users[a] += n; e.users[a] == 0 {
			delete(e.users, a)
		}
	}
	maps.Copy(e.kinds, used)
	return nil
}

// addKinds begins the first transaction with the chains of kinds that have none yet.
func (e *engine) addKinds(t *transactions, used map[kind]bool) error {
	var fresh []kind
	for k := range used {
		if !e.kinds[k] {
			fresh = append(fresh, k)
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	slices.SortFunc(fresh, compareKinds)
	t.first = nft.NewBatch(e.family, names.NFTables)
	var elements []write
	for _, k := range fresh {
		if k.treatment > drop { // The others have chains of the layout.
			c := e.layout.chain(k)
			t.first.AddChain(c)
			// It may be there: of a Service that is not known yet, or because the kernel did not let it go.
			t.first.FlushChain(c.Name)
			if err := t.first.AddRules(c); err != nil {
				return err
			}
		}
		for _, set := range k.sets() {
			elements = append(elements, write{id: id{set: set, key: string(native(k.number()))}, want: &value{chain: k.chain()}})
		}
	}
	t.writes = append(t.writes, elements...)
	return nil
}
