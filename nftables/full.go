package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// syncAll reads what the kernel holds, and changes what differs.
func (e *engine) syncAll(ctx context.Context, p *plan.Plan) error {
	l := e.layoutOf(p)
	e.compared = e.current != nil
	known, before := l, e.layout
	if e.compared {
		known = before
	}
	content, err := e.kernel.Read(e.family, names.NFTables, e.sets, append(known.chains(), known.kindChains(e.kinds)...))
	if err != nil {
		return err
	}
	s := &fullSync{engine: e, layout: l, plan: p, content: content, have: map[id]value{}, used: map[kind]bool{}}
	s.rebuild = content == nil || s.unusable()
	if s.rebuild && content != nil && p.Partial && !e.compared {
		return fmt.Errorf("the table %s is another version's: %w", names.NFTables, plan.ErrPartial)
	}
	if !s.rebuild {
		if err := s.readElements(); err != nil {
			return err
		}
	}
	if e.compared {
		s.differences(before)
	}
	if !s.rebuild && (!e.compared || len(e.found) > 0) {
		if err := s.readAgain(); err != nil {
			return err
		}
		if e.found = nil; e.compared {
			s.differences(before)
		}
	}
	if err := s.write(ctx); err != nil {
		return err
	}
	s.prune(ctx)
	return nil
}

// kindChains are the chains of kinds that are not of the layout.
func (l *layout) kindChains(of map[kind]bool) []nft.ChainSpec {
	var out []nft.ChainSpec
	for _, k := range slices.SortedFunc(maps.Keys(of), compareKinds) {
		if k.treatment > drop {
			out = append(out, l.chain(k))
		}
	}
	return out
}

// fullSync is one sync of everything.
type fullSync struct {
	*engine
	layout  *layout
	plan    *plan.Plan
	content *nft.Content // nil where there is no table
	rebuild bool         // the table is to be made anew
	have    map[id]value // elements in the kernel, without those that were met in the plan
	used    map[kind]bool
	spare   []string // chains in the table that nothing needs
}

// unusable reports whether the table lacks a set, or has one of another kind, as another version of this program may have it, or a
// chain at another place, or has been put to sleep.
func (s *fullSync) unusable() bool {
	if s.content.Dormant {
		return true
	}
	for _, want := range s.sets {
		if !s.content.Sets[want.Name] {
			return true
		}
	}
	for _, c := range s.layout.chains() {
		if ch, is := s.content.Chains[c.Name]; is && ch.Other {
			return true
		}
	}
	return false
}

func (s *fullSync) readElements() error {
	for i, set := range s.sets {
		if setID(i) == affinity {
			continue
		}
		list, err := s.kernel.Elements(s.family, names.NFTables, set)
		if err != nil {
			return err
		}
		for _, el := range list {
			s.have[id{setID(i), el.Key, el.End}] = value{el.Data, el.Chain, el.Comment}
		}
	}
	return nil
}

// mostReads is how often elements are read at most.
const mostReads = 6

// readAgain reads elements until nothing comes to light that was not seen before. While the kernel spreads a set that has grown over a
// larger table, which it does beside everything else, a listing may leave elements out.
func (s *fullSync) readAgain() error {
	for range mostReads - 1 {
		seen := len(s.have)
		if err := s.readElements(); err != nil {
			return err
		}
		if len(s.have) == seen {
			return nil
		}
	}
	return nil
}

// places are the endpoints of frontends in the kernel by their numbers.
func (s *fullSync) places(plain, choice, stick setID) map[string][]netip.AddrPort {
	out := map[string][]netip.AddrPort{}
	n := 4 * nameRegisters(s.family)
	for i, v := range s.have {
		if i.set == choice {
			v = s.have[id{set: stick, key: i.key[:n] + v.data}]
		} else if i.set != plain {
			continue
		}
		index := int(nativeNumber(i.key[n:]))
		if v.data == "" || index >= maxCount {
			continue
		}
		list := out[i.key[:n]]
		for len(list) <= index {
			list = append(list, netip.AddrPort{})
		}
		a, _ := netip.AddrFromSlice([]byte(v.data[:s.family.Bits()/8]))
		list[index] = netip.AddrPortFrom(a, bigEndianNumber(v.data[s.family.Bits()/8:]))
		out[i.key[:n]] = list
	}
	return out
}

// write makes the kernel hold what the plan asks for.
func (s *fullSync) write(ctx context.Context) error {
	list := s.plan.Sorted(s.family)
	slices.SortStableFunc(list, func(a, b *plan.ServicePort) int { return rank(a) - rank(b) })
	next, users := make(map[plan.Key]written, len(list)), map[netip.Addr]int{}
	var cluster, local map[string][]netip.AddrPort
	if s.current == nil {
		cluster, local = s.places(endpoints, choices, stickyEndpoints), s.places(localEndpoints, localChoices, localStickyEndpoints)
	}
	groups, stale := make([][]write, 0, len(list)), rangesByFrontend(s.family, s.have)
	for _, sp := range list {
		before := s.current[sp.Key]
		if s.current == nil {
			for _, fe := range sp.Frontends {
				name := nameOf(s.family, fe)
				if before.cluster == nil {
					before.cluster = cluster[name]
				}
				if before.local == nil {
					before.local = local[name]
				}
			}
		}
		w := place(before, sp)
		next[sp.Key] = w
		count(sp, users, 1)
		mine := map[id]value{}
		s.layout.fill(w, mine, s.used)
		if g := append(stale.without(mine, s.have), differing(s.have, mine)...); len(g) > 0 {
			groups = append(groups, g)
		}
		for i := range mine {
			if i.set != clusterIPs {
				delete(s.have, i)
			}
		}
	}
	var lead []write
	for a := range users {
		i := id{set: clusterIPs, key: string(a.AsSlice())}
		if _, is := s.have[i]; !is {
			lead = append(lead, write{id: i, want: &value{}})
		}
		delete(s.have, i)
	}
	slices.SortFunc(lead, func(a, b write) int { return compareIDs(a.id, b.id) })
	t := &transactions{engine: s.engine, ctx: ctx}
	if err := s.structure(t); err != nil {
		return err
	}
	for _, g := range groups {
		if err := t.group(g); err != nil {
			return err
		}
	}
	if err := t.rest(lead, s.unwanted()); err != nil {
		return err
	}
	s.engine.layout, s.engine.current, s.engine.users, s.engine.kinds = s.layout, next, users, s.used
	return nil
}

// rank has ServicePorts first that nothing works without.
func rank(sp *plan.ServicePort) int {
	if sp.Critical {
		return 0
	}
	return 1
}

// structure begins the first transaction with all but the elements of Services: the table, sets, chains and rules.
func (s *fullSync) structure(t *transactions) error {
	b := nft.NewBatch(s.family, names.NFTables)
	t.first = b
	if s.rebuild {
		if s.content != nil { // All of it is one transaction, so that nobody is without rules meanwhile.
			t.engine.log.Info("the nftables table is made anew, as its form is another one", "family", s.family)
			b.DeleteTable()
			t.unbounded = !t.engine.tight
		}
		b.AddTable()
		for _, set := range s.sets {
			b.AddSet(set)
		}
	}
	chains := append(s.layout.chains(), s.layout.kindChains(s.used)...)
	var changed []nft.ChainSpec
	wanted := map[string]bool{}
	for _, c := range chains {
		wanted[c.Name] = true
		var is nft.ChainContent
		there := false
		if !s.rebuild {
			is, there = s.content.Chains[c.Name]
		}
		if there && is.Holds(c) {
			continue
		}
		if !there {
			b.AddChain(c)
		} else if len(is.Labels) > 0 {
			b.FlushChain(c.Name)
		}
		changed = append(changed, c)
	}
	for _, c := range changed {
		if err := b.AddRules(c); err != nil {
			return err
		}
	}
	if !s.rebuild {
		for _, name := range slices.Sorted(maps.Keys(s.content.Chains)) {
			if !wanted[name] {
				s.spare = append(s.spare, name)
			}
		}
	}
	var elements []write
	for i, v := range fixed(s.used) {
		if was, is := s.have[i]; !is {
			elements = append(elements, write{i, nil, &v})
		} else if was != v {
			elements = append(elements, write{i, &was, &v})
		}
		delete(s.have, i)
	}
	slices.SortFunc(elements, func(a, b write) int { return compareIDs(a.id, b.id) })
	t.writes = append(t.writes, elements...)
	return nil
}

// unwanted are the elements in the kernel that the plan does not ask for.
func (s *fullSync) unwanted() []write {
	var out []write
	var known map[plan.Address]bool
	if s.plan.Partial {
		known = s.plan.Addresses(s.family)
	}
	for i, v := range s.have {
		if s.plan.Partial && (!i.set.ofServices() || !known[i.frontendOf(s.family)]) {
			continue // It may be of a ServicePort that is not known yet.
		}
		out = append(out, write{id: i, had: &v})
	}
	return out
}

// prune removes chains that nothing needs any more. Kernels before 6.2 may find one in use for a while after the element that led to it
// is gone; the next sync of everything tries again.
func (s *fullSync) prune(ctx context.Context) {
	if len(s.spare) == 0 || s.plan.Partial || ctx.Err() != nil {
		return
	}
	b := nft.NewBatch(s.family, names.NFTables)
	for _, name := range s.spare {
		if len(s.content.Chains[name].Labels) > 0 {
			b.FlushChain(name)
		}
	}
	for _, name := range s.spare {
		b.DeleteChain(name)
	}
	if err := s.kernel.Commit(b); err != nil && !errors.Is(err, unix.EBUSY) {
		s.failed(s.family, true)
		s.log.Warn("chains that nothing uses stay for now", "family", s.family, "error", err)
	}
}
