package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"runtime/debug"
	"slices"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// syncAll reads the kernel's content, and changes it where it differs from the plan. Unless unknown is set, elements are what the syncs before
// have written, and are not read: that takes a second for some hundred thousand of them.
func (e *engine) syncAll(ctx context.Context, p *plan.Plan, unknown bool) error {
	s := e.fullSync(p)
	content, err := e.kernel.Read(e.family, names.NFTables, e.sets, s.layout.chains())
	if err != nil {
		return err
	}
	s.content = content
	s.rebuild = s.unusable()
	if s.before != nil {
		e.Found = s.before.structure(content, e.sets)
		if content != nil {
			e.Found = append(e.Found, intrudersIn(content, e.sets, s.before.names()).differences(e.family)...)
		}
		e.Compared = unknown || len(e.Found) > 0
	}
	if s.before == nil || e.Compared {
		e.full++
		e.unread = [setCount]bool{}
	}
	if s.rebuild && content != nil && len(content.Chains) > 0 && p.Partial && !e.Compared { // A table without chains does nothing.
		return fmt.Errorf("the table %s is another version's: %w", names.NFTables, plan.ErrPartial)
	}
	if !s.rebuild {
		err := s.mend(ctx)
		if !s.beyondRepair(err) || p.Partial { // What is not known yet is in this table alone.
			return err
		}
		e.log.Warn("creating the nftables table anew, as what is in it can't be mended", "family", e.family, "error", err)
		e.full++
		e.unread = [setCount]bool{}
		s = e.fullSync(p)
		s.content, s.rebuild = content, true
	}
	if err := s.write(ctx); err != nil {
		return err
	}
	e.leftover = map[string]bool{}
	return nil
}

// fullSync begins a sync of everything.
func (e *engine) fullSync(p *plan.Plan) *fullSync {
	return &fullSync{reading: e.reading(e.kernel, nil), layout: e.layoutOf(p), before: e.known(), plan: p, used: map[kind]bool{}}
}

// mend makes the table that is there equal to the plan.
func (s *fullSync) mend(ctx context.Context) (err error) {
	defer func() {
		if fault := recover(); fault != nil { // What is in the table is not only of this program's making.
			err = s.panicked(fault)
			s.Found = append(s.Found, drift.Difference{Kind: drift.Table, State: drift.Changed, Aspect: "it can't be compared", Object: tableName(s.family)})
		}
	}()
	if err := s.read(ctx); err != nil {
		return err
	}
	if err := s.write(ctx); err != nil {
		return err
	}
	return s.prune(ctx)
}

// read finds out which elements the kernel has: what syncs have written, but for the differences from that; or where others are not known,
// what there is.
func (s *fullSync) read(ctx context.Context) error {
	var unlike []write
	if s.Compared {
		var err error
		if unlike, _, err = s.engine.reading(s.kernel, s.content).compare(ctx, s.before, true); err != nil {
			return err
		}
		s.Found = append(s.Found, s.differences(unlike)...)
	}
	if s.before == nil || s.plan.Partial || s.before.layout.partial {
		return s.readElements(ctx)
	}
	s.have = s.remembered()
	for _, w := range unlike {
		if delete(s.have, w.id); w.had != nil {
			s.note(w.id, *w.had)
		}
	}
	return nil
}

// beyondRepair reports whether an error of mend is that something can't be compared, or can't be removed.
func (s *fullSync) beyondRepair(err error) bool {
	var r *nft.RefusedError
	if errors.As(err, &r) && r.Removes {
		return s.engine.blames(err) || errors.Is(err, unix.EBUSY)
	}
	return errors.Is(err, errPanic)
}

// errPanic is the error of a comparison that has panicked.
var errPanic = errors.New("a comparison with the kernel has panicked; this is a fault in nodeproxy")

// panicked logs a panic, and returns it as an error.
func (e *engine) panicked(with any) error {
	err := fmt.Errorf("%w: %v", errPanic, with)
	stack := debug.Stack()
	if elsewhere, is := with.(*fault); is {
		stack = elsewhere.stack
	}
	e.failed(e.family, false)
	e.log.Error("comparing the nftables table with what was written", "family", e.family, "error", err, "stack", string(stack))
	return err
}

// kindChains are the chains of kinds that are not of the layout, with those of their terms.
func (l *layout) kindChains(of map[kind]bool) []nft.Chain {
	return l.chainsBeside(nil, slices.SortedFunc(maps.Keys(of), compareKinds))
}

// chainsBeside are the chains of kinds where those of others are there already.
func (l *layout) chainsBeside(others map[kind]bool, more []kind) (out []nft.Chain) {
	there := map[term]bool{}
	for k := range others {
		there[k.term()] = true
	}
	for _, k := range more {
		if t := k.term(); t.seconds > 0 && !there[t] {
			there[t] = true
			out = append(out, t.chains(l.family)...)
		}
	}
	for _, k := range more {
		if k.treatment > drop { // The others have chains of the layout.
			out = append(out, l.chain(k))
		}
	}
	return out
}

// fullSync is one sync of everything.
type fullSync struct {
	*reading // without the elements that have been found in the plan so far
	layout   *layout
	before   *snapshot // what the syncs before have written; nil if that is not known
	plan     *plan.Plan
	rebuild  bool // whether the table is created anew
	// deferred are sets that are read some ServicePorts at a time, as these are compared: so only what differs of many elements is in have.
	deferred [setCount]bool
	used     map[kind]bool
	others   intruders // what else is in the table; its chains may be of kinds that are not used any more
}

// fewWords is how many things a log line names.
const fewWords = 5

// unusable reports whether the table must be created anew: there is none, it is dormant, lacks a set, or has a set or base chain in another
// form, as another version of this program may have written it.
func (s *fullSync) unusable() bool {
	if s.content == nil || s.content.Dormant {
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

// placesFound returns the endpoints of a ServicePort in the kernel.
func (r *reading) placesFound(sp *plan.ServicePort) written {
	var found numbering
	for _, fe := range sp.Frontends {
		name := nameOf(r.family, fe)
		for _, k := range r.kindsFound(name) {
			list := &found.cluster
			if k.local {
				list = &found.local
			}
			if *list == nil && k.count > 0 { // A frontend that drops has none; another may.
				*list = r.places(name, k)
			}
		}
	}
	return written{numbers: &found}
}

// write makes the kernel's content equal to the plan.
func (s *fullSync) write(ctx context.Context) error {
	t := &transactions{engine: s.engine, ctx: ctx, layout: s.layout, kinds: map[kind]bool{}, had: s.have}
	defer t.abandon()
	var groups []group
	emit := func(g group) error {
		groups = append(groups, g)
		return nil
	}
	if s.rebuild { // Then it does not depend on Services, and the kernel gets the first of them while the others are compared.
		if err := s.structure(t); err != nil {
			return err
		}
		emit = t.group
	}
	d, err := s.unmet(ctx, emit)
	if err != nil {
		return err
	}
	lead := s.leadingTo(d.users)
	if !s.rebuild {
		if err := s.structure(t); err != nil {
			return err
		}
	}
	for _, g := range groups {
		if err := t.group(g); err != nil {
			return err
		}
	}
	var rest remainder
	err = t.finish(func() []write {
		rest = s.remainder(t, d)
		return append(lead, rest.removals...)
	})
	if err != nil {
		return err
	}
	refused := map[plan.Key]*refusal{}
	for _, sp := range d.held {
		refused[sp.Key] = s.refused[sp.Key]
		refused[sp.Key].kept = rest.kept[sp.Key]
	}
	for _, r := range t.refused {
		refused[r.sp.Key] = s.newRefusal(r, rest.kept[r.sp.Key])
		d.next.remove(r.sp.Key)
	}
	s.updateRefused(refused)
	e := s.engine
	e.layout, e.current, e.users, e.kinds, e.spareKinds, e.unfinished = s.layout, d.next, d.users, t.kinds, rest.spareKinds, nil
	return nil
}

// remainder is what becomes of the elements in the kernel that no ServicePort of the plan has.
type remainder struct {
	kept       map[plan.Key]map[id]value // of refused ServicePorts
	spareKinds map[id]value              // those that lead to chains for what is kept
	removals   []write                   // of all others
}

func (s *fullSync) remainder(t *transactions, d *wanted) remainder {
	have := maps.Clone(s.have)
	for _, r := range t.refused { // What was as it should be is not among its writes.
		mine := map[id]value{}
		s.layout.fill(d.next.of(r.sp.Key), mine, map[kind]bool{})
		for _, w := range r.writes {
			delete(mine, w.id)
		}
		maps.DeleteFunc(mine, func(i id, _ value) bool { return i.set == clusterIPs })
		maps.Copy(have, mine)
	}
	out := remainder{spareKinds: map[id]value{}}
	_, out.kept = t.kept(have, d.held...)
	keep := fixed(s.used) // Those without a chain come with the groups that need them, and replace what is there.
	for _, list := range out.kept {
		maps.Copy(keep, list)
		for i, v := range list {
			if i.set != services && i.set != servicesWithin {
				continue
			}
			for _, set := range []setID{kinds, kindsWithin} {
				if leads, is := have[id{set: set, key: v.data}]; is {
					out.spareKinds[id{set: set, key: v.data}] = leads
				}
			}
		}
	}
	maps.Copy(keep, out.spareKinds)
	out.removals = s.unwanted(have, keep)
	return out
}

// wanted is what should be in the kernel according to the plan.
type wanted struct {
	next  *contents           // all ServicePorts but those in held
	held  []*plan.ServicePort // refused, and not to be tried yet
	users map[netip.Addr]int  // how many frontends there are by cluster IP
}

// unmet compares the ServicePorts of the plan with s.have, and leaves there what belongs to none of them. It passes to emit what the kernel
// does not have, and notes in s.used the kinds that they need.
func (s *fullSync) unmet(ctx context.Context, emit func(group) error) (*wanted, error) {
	list := s.plan.Sorted(s.family)
	slices.SortStableFunc(list, func(a, b *plan.ServicePort) int { return side(b.Critical) - side(a.Critical) })
	d := &wanted{next: newContents(), users: make(map[netip.Addr]int, len(list))}
	found := func(sp *plan.ServicePort) written { return s.current.of(sp.Key) }
	if s.current == nil {
		found = s.placesFound
	}
	reading, err := s.readAhead(list)
	if err != nil {
		return nil, err
	}
	defer reading.close()
	read := 0 // how many of the list have their endpoints in s.have
	stale := rangesByFrontend(s.family, s.have)
	leadsTo := map[kind]bool{}
	for n, sp := range list {
		if n == read {
			if read, err = reading.more(ctx); err != nil {
				return nil, err
			}
		}
		count(sp, d.users, 1)
		if s.stillRefused(sp) {
			d.held = append(d.held, sp)
			continue
		}
		w := place(found(sp), sp)
		s.asked.note(sp.Scheduler.Name)
		d.next.put(sp.Key, w)
		clear(leadsTo)
		mine := s.layout.elements(w, leadsTo)
		writes, err := s.writesTo(ctx, s.have, mine)
		if err != nil {
			return nil, err
		}
		g := group{sp: sp, writes: append(stale.without(mine, s.have), writes...)}
		for k := range leadsTo {
			if s.used[k] = true; !s.hasChain(k) {
				g.kinds = append(g.kinds, k)
			}
		}
		if len(g.writes)+len(g.kinds) > 0 {
			slices.SortFunc(g.kinds, compareKinds)
			if err := emit(g); err != nil {
				return nil, err
			}
		}
		if len(s.have) == 0 {
			continue
		}
		for _, el := range mine {
			if el.set != clusterIPs {
				delete(s.have, el.id)
			}
		}
	}
	return d, reading.rest(ctx)
}

// hasChain reports whether the kernel has the chain of a kind, or has it before anything of Services.
func (s *fullSync) hasChain(k kind) bool {
	if s.rebuild {
		return false
	}
	if k.treatment <= drop {
		return true
	}
	_, is := s.content.Chains[k.chain()]
	return is
}

// leadingTo returns the writes that add cluster IPs. What the kernel has of them is wanted.
func (s *fullSync) leadingTo(users map[netip.Addr]int) []write {
	var lead []write
	for _, a := range slices.SortedFunc(maps.Keys(users), netip.Addr.Compare) {
		i := id{set: clusterIPs, key: string(a.AsSlice())}
		if _, is := s.have[i]; !is {
			lead = append(lead, write{id: i, want: &value{}})
		}
		delete(s.have, i)
	}
	return lead
}

// structure puts everything except the elements of Services, and chains for kinds that have none yet, at the beginning of the first transaction: the table, sets, chains and rules.
func (s *fullSync) structure(t *transactions) error {
	b := nft.NewBatch(s.family, names.NFTables)
	t.first = b
	if s.rebuild {
		if s.content != nil { // Everything is in one transaction, so that the node is never without rules.
			t.engine.log.Info("creating the nftables table anew, as it has another form", "family", s.family)
			b.DeleteTable()
			t.unbounded = !t.engine.tight
		}
		b.AddTable()
		for _, set := range s.sets {
			b.AddSet(set)
		}
	}
	for k := range s.used {
		if s.hasChain(k) {
			t.kinds[k] = true
		}
	}
	there := map[string]nft.ChainContent{}
	if !s.rebuild {
		there = s.content.Chains
	}
	var changed []nft.Chain
	wanted := map[string]bool{}
	for _, c := range append(s.layout.chains(), s.layout.kindChains(t.kinds)...) {
		wanted[c.Name] = true
		is, there := there[c.Name]
		if there && is.Holds(c) {
			continue
		}
		if is.Other { // It has a hook, so nothing leads to it.
			b.FlushChain(c.Name)
			b.DeleteChain(c.Name)
		}
		changed = append(changed, c)
	}
	if !s.rebuild {
		s.others = intrudersIn(s.content, s.sets, wanted)
		intruders{bases: s.others.bases}.disarm(b) // They may do anything to any packet.
		if seen := s.others; !s.Compared {
			seen.chains = nil
			if found := seen.differences(s.family); len(found) > 0 {
				s.log.Warn("another program has put something into the nftables table, which is removed: "+found.Words(fewWords), "family", s.family)
			}
		}
	}
	if err := rewrite(b, changed); err != nil {
		return err
	}
	elements := removals(s.foreign, func(id) bool { return true })
	for i, v := range fixed(t.kinds) {
		has, is := s.have[i]
		if w, differs := (element{i, v}).unlike(has, is); differs {
			elements = append(elements, w)
		}
		delete(s.have, i)
	}
	slices.SortFunc(elements, func(a, b write) int { return compareIDs(a.id, b.id) })
	t.fixed = elements
	return nil
}

// unwanted returns the removals of elements that are in the kernel, and not to be kept.
func (s *fullSync) unwanted(have, keep map[id]value) []write {
	var known map[plan.Address]bool
	if s.plan.Partial {
		known = s.plan.Addresses(s.family)
	}
	return removals(have, func(i id) bool {
		if _, is := keep[i]; is {
			return false
		}
		// Else it may belong to a ServicePort that is not known yet.
		return !s.plan.Partial || i.set.ofServices() && known[i.frontendOf(s.family)]
	})
}

// prune removes what other programs have put into the table, and unused chains. Kernels before 6.2 may consider a chain in use for a while
// after the element that led to it was removed; then the next full sync tries again.
func (s *fullSync) prune(ctx context.Context) error {
	foreign, spare := intruders{sets: s.others.sets, objects: s.others.objects}, intruders{}
	used, known := namesOf(s.layout.kindChains(s.kinds), nil), map[string]bool{}
	if s.Compared {
		known = s.before.names()
	}
	s.leftover = map[string]bool{}
	for _, name := range s.others.chains {
		switch {
		case used[name]:
		case s.Compared && !known[name]:
			foreign.chains = append(foreign.chains, name)
		default: // It is of a kind that was used before.
			spare.chains = append(spare.chains, name)
			s.leftover[name] = true
		}
	}
	needed := s.plan.Partial || len(s.spareKinds) > 0 // by what is not known, or refused
	if !s.Compared && needed || ctx.Err() != nil {
		return nil
	}
	disarmed, removed := nft.NewBatch(s.family, names.NFTables), nft.NewBatch(s.family, names.NFTables)
	if !needed && len(foreign.sets)+len(foreign.objects) > 0 { // Rules of chains that are not known may use them.
		spare.disarm(disarmed)
	}
	foreign.disarm(disarmed)
	foreign.remove(removed)
	for _, b := range []*nft.Batch{disarmed, removed} {
		if err := s.kernel.Commit(b); err != nil && needed { // What leads there may have to stay for the time being.
			s.log.Warn("can't remove what another program has put into the nftables table until all Services are known, and none is refused",
				"family", s.family, "error", err)
			return nil
		} else if err != nil {
			return err
		}
	}
	if !needed && len(spare.chains) > 0 {
		return s.removeChains(spare.chains)
	}
	return nil
}

// removeChains removes chains that no kind uses any more. Those that the kernel considers in use are left over.
func (e *engine) removeChains(list []string) error {
	b := nft.NewBatch(e.family, names.NFTables)
	spare := intruders{chains: list}
	spare.disarm(b)
	spare.remove(b)
	err := e.kernel.Commit(b)
	for _, name := range list {
		if err == nil {
			delete(e.leftover, name)
		} else {
			e.leftover[name] = true
		}
	}
	if err == nil || errors.Is(err, unix.EBUSY) {
		return nil
	}
	e.failed(e.family, true)
	return fmt.Errorf("removing unused chains: %w", err)
}
