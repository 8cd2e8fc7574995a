package nftables

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// write is the change of one element. had is the value in the kernel, and want the one that it should have; nil if there is
// none.
type write struct {
	id
	had, want *value
}

// group is the writes of one ServicePort, which are made at once.
type group struct {
	sp     *plan.ServicePort
	kinds  []kind // need a chain first, if they have none
	writes []write
	ahead  []write // were carried out before
}

// transactions gathers groups, and carries them out in transactions of a bounded size.
type transactions struct {
	engine *engine
	ctx    context.Context
	layout *layout
	first  *nft.Batch    // begins the first of them
	fixed  []write       // go with first
	kinds  map[kind]bool // have a chain in the kernel
	had    map[id]value  // may have elements of kinds that have no chain yet
	groups []group
	size   int
	flight *flight // the transaction that the kernel is carrying out meanwhile
	// gone and added are for batch alone, which uses their memory again.
	gone, added [setCount][]nft.Element
	// unbounded is set if everything has to be done in a single transaction.
	unbounded bool

	accepted int
	refused  []refused
	named    int // refused groups that the kernel has named
}

// flight is a transaction that is being carried out while the next one is prepared, and what has to be restored if it fails.
type flight struct {
	groups  []group
	first   *nft.Batch
	fixed   []write
	fresh   []kind
	written int // elements
	done    chan struct{}
	err     error // once done is closed
}

// refused is a group that the kernel refuses, though nothing else was in the transaction.
type refused struct {
	group
	err error
}

// group adds writes to the transaction that is being gathered, or to the next one if that is full.
func (t *transactions) group(g group) error {
	if t.full(len(g.writes)) {
		rest, err := t.ahead(g)
		if err != nil || rest == nil {
			return err
		}
		g = *rest
	}
	if t.full(len(g.writes)) && t.size+len(t.fixed) > 0 {
		groups := t.groups
		t.groups, t.size = nil, 0
		if err := t.start(groups, nil); err != nil {
			return err
		}
	}
	t.groups, t.size = append(t.groups, g), t.size+len(g.writes)
	return nil
}

// ahead carries out what can be written before the rest of a group without anybody noticing, in transactions of a bounded size, and returns
// that rest; nil if the kernel refuses some of it.
func (t *transactions) ahead(g group) (rest *group, err error) {
	early, writes := g.early()
	done := 0
	for some := range slices.Chunk(early, t.engine.most) {
		before := len(t.refused)
		if err := t.start([]group{{sp: g.sp, writes: some}}, nil); err != nil {
			return nil, err
		}
		if _, err := t.settle(); err != nil {
			return nil, err
		}
		for i := range t.refused[before:] {
			if r := &t.refused[before+i]; r.sp == g.sp {
				r.group = g
				r.group.ahead = early[:done]
				return nil, nil
			}
		}
		done += len(some)
	}
	return &group{sp: g.sp, kinds: g.kinds, writes: writes, ahead: early}, nil
}

// early returns the additions of source ranges, and the other writes. Nobody asks for the ranges of a frontend that is not limited to any yet,
// and whom they admit may reach one that is and stays the same ServicePort's.
func (g group) early() (early, rest []write) {
	moved := map[string]bool{} // frontends
	for _, w := range g.writes {
		if w.set == limited && w.had != nil {
			moved[w.key] = true
		}
	}
	for _, w := range g.writes {
		if w.set == sourceRanges && w.had == nil && !moved[w.key[:4*nameRegisters(g.sp.Key.Family)]] {
			early = append(early, w)
		} else {
			rest = append(rest, w)
		}
	}
	return early, rest
}

func (t *transactions) full(more int) bool {
	return !t.unbounded && t.size+len(t.fixed)+more > t.engine.most
}

// start begins a transaction of groups or other writes, after the one before has ended. The next call of start, or settle, returns its error.
func (t *transactions) start(groups []group, others []write) error {
	b, fresh, err := t.batch(groups, others)
	if err != nil {
		return err
	}
	if before := t.flight; before != nil {
		ended, err := t.settle()
		if err == nil && !ended { // What was expected to be in the kernel may not be there.
			b, fresh, err = t.batch(groups, others)
		}
		if err != nil {
			return err
		}
	}
	f := &flight{groups: groups, first: t.first, fixed: t.fixed, fresh: fresh, written: t.count(groups, others), done: make(chan struct{})}
	t.first, t.fixed, t.flight = nil, nil, f
	for _, k := range fresh {
		t.kinds[k] = true
	}
	k := t.engine.kernel
	go func() {
		defer close(f.done)
		f.err = k.Commit(b)
	}()
	return nil
}

// settle waits for the transaction that start has begun. If the kernel has refused it, ended is false, and all of it that the kernel takes
// is carried out.
func (t *transactions) settle() (ended bool, err error) {
	f := t.flight
	if f == nil {
		return true, nil
	}
	t.flight = nil
	<-f.done
	if f.err == nil {
		t.carriedOut(f.groups, f.written, f.fresh)
		return true, nil
	}
	t.engine.failed(t.engine.family, false)
	t.first, t.fixed = f.first, f.fixed
	for _, k := range f.fresh {
		delete(t.kinds, k)
	}
	return false, t.resolve(f.groups, f.err)
}

// abandon waits for the kernel, where a sync ends with an error.
func (t *transactions) abandon() {
	if t.flight != nil {
		<-t.flight.done
		t.flight = nil
	}
}

// try carries out groups and other writes in one transaction.
func (t *transactions) try(groups []group, others []write) error {
	b, fresh, err := t.batch(groups, others)
	if err != nil {
		return err
	}
	replaced := t.replaced(groups, others)
	t.engine.traffic.begin(replaced)
	err = t.engine.kernel.Commit(b)
	t.engine.traffic.end(replaced, err == nil)
	if err != nil {
		t.engine.failed(t.engine.family, false)
		return err
	}
	t.carriedOut(groups, t.count(groups, others), fresh)
	t.first, t.fixed = nil, nil
	for _, k := range fresh {
		t.kinds[k] = true
	}
	return nil
}

// count returns how many elements a transaction of groups and other writes changes.
func (t *transactions) count(groups []group, others []write) int {
	n := len(t.fixed) + len(others)
	for _, g := range groups {
		n += len(g.writes)
	}
	return n
}

// carriedOut counts a transaction that the kernel has carried out.
func (t *transactions) carriedOut(groups []group, elements int, fresh []kind) {
	t.engine.Wrote(drift.SetElement, elements)
	t.engine.Wrote(drift.Chain, len(fresh))
	t.accepted += len(groups)
}

// mostReplaced is how many elements are read because they are about to be replaced. A change of more loses what they counted.
const mostReplaced = 50

// replaced returns what the elements of map services have counted that a transaction replaces. What can't be read is left out: that
// must not keep the transaction from being carried out.
func (t *transactions) replaced(groups []group, others []write) map[counter]uint64 {
	if t.engine.traffic == nil || !t.engine.options.Count {
		return nil
	}
	var list []write
	for _, g := range append([]group{{writes: others}}, groups...) {
		for _, w := range g.writes {
			if w.set == services && w.had != nil && w.want != nil {
				list = append(list, w)
			}
		}
	}
	if len(list) > mostReplaced {
		return nil
	}
	out := map[counter]uint64{}
	for _, w := range list {
		el, is, err := t.engine.kernel.Element(t.engine.family, names.NFTables, t.engine.sets[services], w.element(value{}))
		if err != nil {
			t.engine.log.Debug("reading what an element has counted", "family", t.engine.family, "error", err)
			break
		}
		if is && el.Comment == w.had.comment {
			out[counter{t.engine.family, w.key, el.Comment}] = el.Packets
		}
	}
	return out
}

// rehearse returns the error with which the kernel refuses groups in one transaction, and changes nothing.
func (t *transactions) rehearse(groups []group) error {
	b, _, err := t.batch(groups, nil)
	if err != nil {
		return err
	}
	return rehearse(t.engine.kernel, b)
}

// rehearse has the kernel check a transaction and give it up at its last step.
func rehearse(k interface{ Commit(*nft.Batch) error }, b *nft.Batch) error {
	const absent = "absent"
	b.DeleteChain(absent)
	err := k.Commit(b)
	var refused *nft.RefusedError
	switch {
	case err == nil:
		return errors.New("the kernel took a transaction that it should not have taken")
	case errors.As(err, &refused) && refused.What == "removing chain "+absent && errors.Is(err, unix.ENOENT):
		return nil
	}
	return err
}

// batch makes one transaction of groups and other writes. It also returns the kinds for which it adds chains.
func (t *transactions) batch(groups []group, others []write) (*nft.Batch, []kind, error) {
	if err := t.ctx.Err(); err != nil {
		return nil, nil, err
	}
	b := nft.NewBatch(t.engine.family, names.NFTables)
	if t.first != nil {
		b = t.first.Clone()
	}
	gone, added := &t.gone, &t.added
	for s := range setCount {
		gone[s], added[s] = gone[s][:0], added[s][:0]
	}
	put := func(list []write) {
		for _, w := range list {
			if t.engine.touched != nil {
				t.engine.touched[w.id] = true
			}
			if w.had != nil {
				gone[w.set] = append(gone[w.set], w.element(value{}))
			}
			if w.want != nil {
				added[w.set] = append(added[w.set], w.element(*w.want))
			}
		}
	}
	put(t.fixed)
	fresh := t.withoutChain(groups)
	list, err := t.addKinds(b, fresh)
	if err != nil {
		return nil, nil, err
	}
	put(list)
	for _, g := range groups {
		put(g.writes)
	}
	put(others)
	for s := range setCount {
		b.DeleteElements(t.engine.sets[s], gone[s])
	}
	for s := range setCount {
		b.AddElements(t.engine.sets[s], added[s])
	}
	return b, fresh, nil
}

// withoutChain returns the kinds of groups that have no chain in the kernel yet.
func (t *transactions) withoutChain(groups []group) []kind {
	var out []kind
	seen := map[kind]bool{}
	for _, g := range groups {
		for _, k := range g.kinds {
			if !t.kinds[k] && !seen[k] {
				out, seen[k] = append(out, k), true
			}
		}
	}
	slices.SortFunc(out, compareKinds)
	return out
}

// addKinds adds the chains of kinds to a transaction, and returns the writes that lead to them.
func (t *transactions) addKinds(b *nft.Batch, fresh []kind) ([]write, error) {
	if len(fresh) == 0 {
		return nil, nil
	}
	// They may exist: a Service that is not known yet may use them, or the kernel refused to delete them.
	if err := rewrite(b, t.layout.chainsBeside(t.kinds, fresh)); err != nil {
		return nil, err
	}
	var leads []element
	for _, k := range fresh {
		leads = append(leads, k.leads()...)
	}
	return differing(t.had, leads), nil
}

// rewrite gives chains their rules, whether they are there or not.
func rewrite(b *nft.Batch, chains []nft.Chain) error {
	for _, c := range chains {
		b.AddChain(c)
		b.FlushChain(c.Name)
	}
	for _, c := range chains {
		if err := b.AddRules(c); err != nil {
			return err
		}
	}
	return nil
}

// flush carries out what has been gathered. Groups that the kernel refuses on their own are noted; all others are carried out.
func (t *transactions) flush() error {
	groups := t.groups
	t.groups, t.size = nil, 0
	return t.resolve(groups, t.try(groups, nil))
}

// resolve carries out groups whose transaction the kernel has refused with err, except those that it refuses on their own.
func (t *transactions) resolve(groups []group, err error) error {
	// A group that is too long on its own would also be too long at the next attempt.
	tooLong := len(groups) == 1 && t.engine.tight && errors.Is(err, unix.EMSGSIZE)
	if len(groups) == 0 || !tooLong && !t.engine.blames(err) {
		return err
	}
	if t.unbounded && t.first != nil {
		if groups, err = t.withoutRefused(groups, err); err != nil {
			return err
		}
		if err = t.try(groups, nil); !t.engine.blames(err) || len(groups) == 0 {
			return err
		}
	}
	if t.first != nil { // What is refused may have nothing to do with Services.
		if err := t.try(nil, nil); err != nil {
			return err
		}
		if tooLong {
			if err = t.try(groups, nil); !errors.Is(err, unix.EMSGSIZE) && !t.engine.blames(err) {
				return err
			}
		}
	}
	return t.search(groups, err, t.carryOut)
}

func (t *transactions) carryOut(groups []group) error { return t.try(groups, nil) }

// withoutRefused finds what is refused among groups, notes it, and returns the others. It changes nothing, as the table that is there has
// to stay in force until all of the new one is written.
func (t *transactions) withoutRefused(groups []group, err error) ([]group, error) {
	if err := t.rehearse(nil); err != nil {
		return nil, err
	}
	before := len(t.refused)
	if err := t.search(groups, err, t.rehearse); err != nil {
		return nil, err
	}
	no := map[*plan.ServicePort]bool{}
	for _, r := range t.refused[before:] {
		no[r.sp] = true
	}
	if len(no) > mostRefused && len(no) == len(groups) {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(groups), func(g group) bool { return no[g.sp] }), nil
}

// mostNamed is how many refused groups of those that the kernel has named are set aside one by one. Where more are refused, halving the
// list is faster.
const mostNamed = 8

// search looks for what is refused among groups whose transaction was refused, and tries all others.
func (t *transactions) search(groups []group, err error, try func([]group) error) error {
	if len(groups) == 1 {
		t.refused = append(t.refused, refused{group: groups[0], err: err})
		return nil
	}
	half := len(groups) / 2
	parts := [][]group{groups[:half], groups[half:]}
	if i := namedIn(groups, t.engine.sets, err); i >= 0 && t.named < mostNamed {
		t.named++
		parts = [][]group{slices.Concat(groups[:i], groups[i+1:]), {groups[i]}}
	}
	for _, part := range parts {
		err := try(part)
		if t.engine.blames(err) {
			err = t.search(part, err, try)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// namedIn is the index of the group with the element that the kernel says it refuses; -1 where it does not say.
func namedIn(groups []group, sets []nft.Set, err error) int {
	var r *nft.RefusedError
	if !errors.As(err, &r) || r.Set == "" {
		return -1
	}
	return slices.IndexFunc(groups, func(g group) bool {
		return slices.ContainsFunc(g.writes, func(w write) bool {
			return w.key == r.Element.Key && sets[w.set].Name == r.Set
		})
	})
}

// rangesGone is the index from which on the last writes remove source ranges. They come after all others, in a transaction of their own: a packet that
// has found its frontend to be limited, and looks for its range length by length, finds the old one or the new one.
func rangesGone(last []write) int {
	n := slices.IndexFunc(last, func(w write) bool { return w.set == sourceRanges && w.want == nil })
	if n < 0 {
		return len(last)
	}
	return n
}

// finish carries out what has been gathered and the last writes, which last returns: what leads packets to others, and the removal of
// what is not wanted. All of it is one transaction if that is not too large. If the kernel refuses any groups, last is called again, as
// what is wanted depends on them.
func (t *transactions) finish(last func() []write) error {
	if _, err := t.settle(); err != nil {
		return err
	}
	if len(t.refused) == 0 {
		if writes := last(); !t.full(len(writes)) && rangesGone(writes) == len(writes) {
			if err := t.try(t.groups, writes); !t.engine.blames(err) || len(t.groups) == 0 {
				return err
			}
		}
	}
	if err := t.flush(); err != nil {
		return err
	}
	writes := last()
	n := rangesGone(writes)
	for _, list := range [][]write{writes[:n], writes[n:]} {
		for some := range slices.Chunk(list, t.engine.most) {
			if err := t.start(nil, some); err != nil {
				return err
			}
		}
	}
	if _, err := t.settle(); err != nil {
		return err
	}
	if len(t.refused) > mostRefused && t.accepted == 0 {
		return t.refused[0].err
	}
	return nil
}

// differing returns the writes that turn had into want, in order. Elements that are only in had stay. The writes refer to want.
func differing(had map[id]value, want []element) []write {
	out := make([]write, 0, len(want))
	for n := range want {
		i, v := want[n].id, &want[n].value
		if i.set == clusterIPs {
			continue // They are shared.
		}
		var before *value
		if len(had) > 0 {
			if was, is := had[i]; is && was == *v {
				continue
			} else if is {
				before = &was
			}
		}
		out = append(out, write{i, before, v})
	}
	return out
}

// removals returns the writes that remove unwanted elements, beginning with those that lead to others.
func removals(had map[id]value, unwanted func(id) bool) []write {
	var out []write
	for i, v := range had {
		if unwanted(i) {
			out = append(out, write{id: i, had: &v})
		}
	}
	slices.SortFunc(out, func(a, b write) int { return compareIDs(a.id, b.id) })
	return out
}

// ranges has the elements of source-ranges by frontend.
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

// without returns the writes that remove the limits of frontends in want which are another ServicePort's in had, and deletes these from had: they
// have to go in the transaction that adds what is wanted. Those of a frontend that stays the same ServicePort's may go later.
func (r ranges) without(want []element, had map[id]value) []write {
	if len(r) == 0 {
		return nil
	}
	var out []write
	remove := func(old id, v value) {
		delete(had, old)
		out = append(out, write{id: old, had: &v})
	}
	wanted := func(i id) bool {
		_, is := slices.BinarySearchFunc(want, i, func(w element, i id) int { return compareIDs(w.id, i) })
		return is
	}
	for _, w := range want {
		limit := id{set: limited, key: w.key}
		was, is := had[limit]
		switch {
		case w.set == services && is && !wanted(limit): // It may be another ServicePort's, which nobody is kept from.
			remove(limit, was)
		case w.set == limited:
			if is && was == w.value {
				continue
			}
			for _, old := range r[w.key] {
				if v, is := had[old]; is && !wanted(old) {
					remove(old, v)
				}
			}
		}
	}
	return out
}

// count adds to the number of frontends of each cluster IP.
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
