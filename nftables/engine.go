package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// kernel carries out transactions and reads tables. Tests have one that is none.
type kernel interface {
	Commit(*nft.Batch) error
	Read(f plan.Family, table string, sets []nft.Set, chains []nft.ChainSpec) (*nft.Content, error)
	Elements(f plan.Family, table string, s nft.Set) ([]nft.Element, error)
	Close() error
}

// mostInTransaction is about how many elements one transaction changes: nothing else that uses nftables can write meanwhile.
const mostInTransaction = 10000

// engine programs one family.
type engine struct {
	family  plan.Family
	options Options
	log     *slog.Logger
	// dial opens a kernel, which is nil until the first use and after an error: answers to what has failed may still come.
	dial   func() (kernel, error)
	kernel kernel
	most   int // as mostInTransaction
	failed func(f plan.Family, cleanup bool)
	sets   []nft.Set

	mu sync.Mutex // held by sync
	// layout and current are what the kernel holds; current is nil where that is not known.
	layout  *layout
	current map[plan.Key]written
	users   map[netip.Addr]int // frontends by cluster IP
	kinds   map[kind]bool      // those that have a chain
	// compared says that the last sync knew what had been written before, and found is what it found to differ.
	compared bool
	found    drift.Found
}

func (e *engine) layoutOf(p *plan.Plan) *layout {
	return &layout{family: e.family, options: e.options, settings: p.Settings, node: p.Node, partial: p.Partial}
}

func (e *engine) sync(ctx context.Context, p *plan.Plan, change plan.Change) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.compared, e.found = false, nil
	err := e.open()
	if err == nil {
		if change.All() || e.current == nil || !reflect.DeepEqual(e.layout, e.layoutOf(p)) || e.meetsUnknown(p, change.Keys()) {
			err = e.syncAll(ctx, p)
		} else {
			err = e.syncChanged(ctx, p, change.Keys())
		}
	}
	if err != nil {
		e.current = nil
		if e.kernel != nil {
			_ = e.kernel.Close()
			e.kernel = nil
		}
		return fmt.Errorf("programming %s: %w", e.family, err)
	}
	return nil
}

func (e *engine) open() error {
	if e.kernel != nil {
		return nil
	}
	k, err := e.dial()
	if err == nil {
		e.kernel = k
	}
	return err
}

// meetsUnknown reports whether a change adds a ServicePort while the kernel may hold elements of some that are not known.
func (e *engine) meetsUnknown(p *plan.Plan, changed plan.Keys) bool {
	if !p.Partial {
		return false
	}
	for k := range changed {
		if _, known := e.current[k]; !known && k.Family == e.family && p.Services[k] != nil {
			return true
		}
	}
	return false
}

// write is the change of one element. had is what the kernel has, and want what it is to have; nil for nothing.
type write struct {
	id
	had, want *value
}

// transactions gathers writes. Those of one group are made at once.
type transactions struct {
	engine *engine
	ctx    context.Context
	first  *nft.Batch // begins the first of them
	writes []write
	// unbounded has everything done in a single transaction.
	unbounded bool
}

// group adds writes to the transaction that is being gathered, or to the next one if that is full.
func (t *transactions) group(writes []write) error {
	if !t.unbounded && len(t.writes) > 0 && len(t.writes)+len(writes) > t.engine.most {
		if err := t.commit(); err != nil {
			return err
		}
	}
	t.writes = append(t.writes, writes...)
	return nil
}

// commit carries out what has been gathered.
func (t *transactions) commit() error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	b := t.first
	if b == nil {
		b = nft.NewBatch(t.engine.family, names.NFTables)
	}
	gone, fresh := map[setID][]nft.Element{}, map[setID][]nft.Element{}
	for _, w := range t.writes {
		if w.had != nil {
			gone[w.set] = append(gone[w.set], w.element(value{}))
		}
		if w.want != nil {
			fresh[w.set] = append(fresh[w.set], w.element(*w.want))
		}
	}
	for s := range setCount {
		b.DeleteElements(t.engine.sets[s], gone[s])
	}
	for s := range setCount {
		b.AddElements(t.engine.sets[s], fresh[s])
	}
	t.first, t.writes = nil, t.writes[:0]
	err := t.engine.kernel.Commit(b)
	if err != nil {
		t.engine.failed(t.engine.family, false)
	}
	return err
}

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

// rest makes the last writes: what leads packets to others, and the removal of what is not wanted, which begins with what leads to it.
func (t *transactions) rest(lead, gone []write) error {
	slices.SortFunc(gone, func(a, b write) int { return compareIDs(a.id, b.id) })
	if err := t.group(lead); err != nil {
		return err
	}
	for some := range slices.Chunk(gone, max(t.engine.most, 1)) {
		if err := t.group(some); err != nil {
			return err
		}
	}
	return t.commit()
}

// differing are the writes that make what is had what is wanted, in order. Elements that are only had are left.
func differing(had, want map[id]value) []write {
	var out []write
	for i, v := range want {
		if i.set == clusterIPs {
			continue // They are shared.
		}
		was, is := had[i]
		switch {
		case is && was == v:
			continue
		case is:
			out = append(out, write{i, &was, &v})
		default:
			out = append(out, write{i, nil, &v})
		}
	}
	slices.SortFunc(out, func(a, b write) int { return compareIDs(a.id, b.id) })
	return out
}

// ranges are the elements of source-ranges by frontend.
type ranges map[string][]id

func rangesByFrontend(f plan.Family, of map[id]value) ranges {
	out := ranges{}
	for i := range of {
		if i.set == sourceRanges {
			frontend := i.key[:4*nameRegisters(f)]
			out[frontend] = append(out[frontend], i)
		}
	}
	return out
}

// without are the writes that remove what is had of the frontends in want and is not wanted; it takes that out of had. The kernel takes
// no ranges that overlap, so what is there goes in the same transaction.
func (r ranges) without(want, had map[id]value) []write {
	if len(r) == 0 {
		return nil
	}
	var out []write
	for i := range want {
		if i.set != limited {
			continue
		}
		for _, old := range r[i.key] {
			v, is := had[old]
			if _, wanted := want[old]; is && !wanted {
				delete(had, old)
				out = append(out, write{id: old, had: &v})
			}
		}
	}
	return out
}

// count adds to how many frontends there are by cluster IP.
func count(sp *plan.ServicePort, users map[netip.Addr]int, by int) {
	if sp == nil {
		return
	}
	for _, fe := range sp.Frontends {
		if fe.Kind == plan.ClusterIP {
			users[fe.Addr] += by
		}
	}
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
	if !s.rebuild {
		if err := s.readElements(); err != nil {
			return err
		}
	}
	if e.compared {
		s.differences(before)
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
// chain at another place.
func (s *fullSync) unusable() bool {
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
			t.engine.log.Info("the nftables table is made anew, as its sets are others", "family", s.family)
			b.DeleteTable()
			t.unbounded = true
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
