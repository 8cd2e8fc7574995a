package nftables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"iter"
	"maps"
	"net/netip"
	"runtime/debug"
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// mostListed is how many elements of a map are listed. The kernel walks a map from its start for each part of a listing, so that the time
// grows with the square of their number: from about here on, it is faster to ask for each by its key.
const mostListed = 60_000

// mostReads bounds how often elements are listed.
const mostReads = 6

// mostAsked is how many elements are asked for at once.
const mostAsked = 1024

// reading is what has been read of a table.
type reading struct {
	*engine
	from    kernel
	content *nft.Content // nil if there is no table
	forms   []form       // of the sets
	have    map[id]value // elements that this program may have written
	foreign map[id]value // all others
}

func (e *engine) reading(from kernel, content *nft.Content) *reading {
	return &reading{engine: e, from: from, content: content, forms: formsOf(e.sets), have: map[id]value{}, foreign: map[id]value{}}
}

// endpointSets are where the endpoints of frontends are.
type endpointSets struct{ plain, choice, sticky setID }

var (
	clusterSets = endpointSets{endpoints, choices, stickyEndpoints}
	localSets   = endpointSets{localEndpoints, localChoices, localStickyEndpoints}
)

// ofEndpoints reports whether packets come to the elements of a set from a frontend alone.
func (s setID) ofEndpoints() bool { return s >= endpoints && s <= localStickyEndpoints }

// setsOf returns where the endpoints of a kind are.
func setsOf(k kind) endpointSets {
	if k.local {
		return localSets
	}
	return clusterSets
}

// numbers are the first count numbers of a frontend.
type numbers struct {
	name  string
	count int
}

// readElements reads the elements in the kernel. Of large maps of endpoints, it leaves those that frontends lead to for readAhead; what
// nothing leads to does no harm, and is left to comparisons beside syncs.
func (s *fullSync) readElements(ctx context.Context) error {
	listed := []setID{kinds, kindsWithin, sameByte}
	for share := range setID(affinityShares) {
		listed = append(listed, affinity+share)
	}
	for _, set := range []setID{services, servicesWithin, limited, sourceRanges, clusterIPs} {
		found := 0
		if s.counted(set) > s.mostListed {
			var err error
			if found, err = s.ask(ctx, set, s.frontends(set)); err != nil {
				return err
			}
		}
		if found == 0 || found < s.counted(set) {
			listed = append(listed, set)
		}
	}
	if err := s.list(ctx, true, listed); err != nil {
		return err
	}
	listed = nil
	led := s.led(s.frontendsFound())
	for _, of := range []endpointSets{clusterSets, localSets} {
		led[of.sticky] = led[of.choice] // or less
		for _, set := range []setID{of.plain, of.choice, of.sticky} {
			n, told := s.content.Counts[s.sets[set].Name]
			if !told {
				for _, l := range led[set] {
					n += l.count
				}
			}
			if n <= s.mostListed {
				listed = append(listed, set)
			} else {
				s.deferred[set], s.unread[set] = true, true
			}
		}
	}
	return s.list(ctx, true, listed)
}

// mostAhead is how many numbers of frontends are read at once, while those before are compared.
const mostAhead = 8 * mostAsked

// ahead reads the endpoints of ServicePorts in sets that are deferred, some ServicePorts at a time: the next of them while those before are compared.
type ahead struct {
	*fullSync
	list  []*plan.ServicePort
	q     *questions
	begun int // of the list
	// next are the batches that have been asked for; batch is the number of the last.
	next  []batch
	batch int
}

// batch are the ServicePorts of a list up to some index.
type batch struct {
	end int
	led [setCount][]numbers
}

// readAhead begins to read. What it returns must be closed.
func (s *fullSync) readAhead(list []*plan.ServicePort) (*ahead, error) {
	a := &ahead{fullSync: s, list: list}
	if s.deferred == ([setCount]bool{}) {
		return a, nil
	}
	a.q = &questions{engine: s.engine, visit: s.noteFound}
	for range 2 { // The sync's own socket may be needed beside them.
		k, err := s.reader()
		if err != nil {
			a.close()
			return nil, err
		}
		a.q.kernels = append(a.q.kernels, k)
	}
	a.q.work(4 * mostAhead / mostAsked)
	return a, nil
}

// more returns how many of the list have been read.
func (a *ahead) more(ctx context.Context) (int, error) {
	if a.q == nil {
		return len(a.list), nil
	}
	for len(a.next) < 2 && a.begun < len(a.list) {
		if err := a.begin(ctx, a.some); err != nil {
			return 0, err
		}
	}
	b := a.next[0]
	a.next = a.next[1:]
	if err := a.q.wait(a.batch - len(a.next)); err != nil {
		return 0, err
	}
	return b.end, a.readSticky(ctx, b.led)
}

// some are the frontends of the next ServicePorts.
func (a *ahead) some(yield func(string) bool) {
	for size := 0; a.begun < len(a.list) && size <= mostAhead; a.begun++ {
		for _, fe := range a.list[a.begun].Frontends {
			name := nameOf(a.family, fe)
			for _, k := range a.kindsFound(name) {
				size += k.count
			}
			yield(name)
		}
	}
}

// rest reads the endpoints of frontends that none of the ServicePorts has.
func (a *ahead) rest(ctx context.Context) error {
	if a.q == nil {
		return nil
	}
	rest := map[string]bool{}
	for name := range a.frontendsFound() {
		rest[name] = true
	}
	for _, sp := range a.list {
		for _, fe := range sp.Frontends {
			delete(rest, nameOf(a.family, fe))
		}
	}
	if err := a.begin(ctx, maps.Keys(rest)); err != nil {
		return err
	}
	_, err := a.more(ctx)
	return err
}

// begin asks for a batch of frontends.
func (a *ahead) begin(ctx context.Context, frontends iter.Seq[string]) error {
	led := a.led(frontends)
	a.batch++
	a.next = append(a.next, batch{a.begun, led})
	return inQuestions(func(yield func(element) bool) {
		for set := range setCount {
			if !a.deferred[set] || set == clusterSets.sticky || set == localSets.sticky {
				continue
			}
			if a.batch == 1 && !yield(element{id: id{set: set}}) { // the catch-all element
				return
			}
			for key := range indices(led[set]) {
				if !yield(element{id: id{set: set, key: key}}) {
					return
				}
			}
		}
	}, func(some *question) error {
		some.batch = a.batch
		return errors.Join(ctx.Err(), a.q.ask(some))
	})
}

func (a *ahead) close() {
	if a.q != nil {
		a.q.close()
	}
}

// readSticky reads the endpoints to which choices lead, where these have been read.
func (s *fullSync) readSticky(ctx context.Context, led [setCount][]numbers) error {
	for _, of := range []endpointSets{clusterSets, localSets} {
		if s.deferred[of.sticky] && len(led[of.choice]) > 0 {
			if _, err := s.ask(ctx, of.sticky, maps.Keys(s.chosen(of, led[of.choice]))); err != nil {
				return err
			}
		}
	}
	return nil
}

// counted is how many elements a set has; 0 where the kernel does not tell.
func (r *reading) counted(set setID) int { return r.content.Counts[r.sets[set].Name] }

// list reads all elements of sets into have and foreign.
func (r *reading) list(ctx context.Context, settled bool, sets []setID) error {
	return r.listTo(ctx, settled, sets, func(i id, v value) (fresh bool) {
		before := len(r.have) + len(r.foreign)
		r.note(i, v)
		return len(r.have)+len(r.foreign) > before
	})
}

// listTo calls visit with all elements of sets, which reports whether one is new. settled says to list a set until the kernel's number of
// its elements has been seen, or nothing new appears: while the kernel moves the elements of a grown set to a larger hash table, which it
// does in the background, a listing may omit some.
func (r *reading) listTo(ctx context.Context, settled bool, sets []setID, visit func(id, value) (fresh bool)) error {
	var seen [setCount]int
	note := func(i id, v value) error {
		if visit(i, v) {
			seen[i.set]++
		}
		return nil
	}
	for range mostReads {
		before := seen
		if err := r.each(ctx, r.from, sets, note); err != nil {
			return err
		}
		if !settled || seen == before {
			return nil
		}
		sets = slices.DeleteFunc(slices.Clone(sets), func(set setID) bool {
			n, told := r.content.Counts[r.sets[set].Name]
			return told && n == seen[set]
		})
	}
	return nil
}

func (r *reading) note(i id, v value) {
	if r.forms[i.set].has(i, v) {
		r.have[i] = v
	} else {
		r.foreign[i] = v
	}
}

// digests are of elements: those of their values by those of their ids. There may be very many, of which hardly any is not as it should be,
// and a digest takes a tenth of the memory of an element. Nobody outside this process knows the seed, and so elements with the same digest.
type digests map[uint64]uint64

var digestSeed = maphash.MakeSeed()

func digestOf(i id) uint64 { return maphash.Comparable(digestSeed, i) }

func (l digests) note(i id, v value) (fresh bool) {
	before := len(l)
	l[digestOf(i)] = maphash.Comparable(digestSeed, v)
	return len(l) > before
}

// take removes an element, and reports whether it was there, and as it should be.
func (l digests) take(want element) (is, same bool) {
	digest := digestOf(want.id)
	v, is := l[digest]
	delete(l, digest)
	return is, is && v == maphash.Comparable(digestSeed, want.value)
}

// digest lists sets, of which it notes in foreign what this program does not write.
func (r *reading) digest(ctx context.Context, settled bool, sets []setID) (digests, error) {
	n := 0
	for _, set := range sets {
		if !set.remembers() { // each does not list those, and there may be a million clients.
			n += r.counted(set)
		}
	}
	l := make(digests, n)
	return l, r.listTo(ctx, settled, sets, func(i id, v value) (fresh bool) {
		if r.forms[i.set].has(i, v) {
			return l.note(i, v)
		}
		_, known := r.foreign[i]
		r.foreign[i] = v
		return !known
	})
}

// identify reads what is left in a listing of sets into have, unless a sync has written it meanwhile, which is left to the next comparison.
// settled is as in list: then what has been listed once is there.
func (r *reading) identify(ctx context.Context, settled bool, l digests, sets []setID) error {
	reads := mostReads
	if !settled {
		reads = 1
		r.mu.Lock()
		for i := range r.touched {
			delete(l, digestOf(i))
		}
		r.mu.Unlock()
	}
	for ; reads > 0 && len(l) > 0; reads-- {
		err := r.each(ctx, r.from, sets, func(i id, v value) error {
			digest := digestOf(i)
			if _, is := l[digest]; is {
				delete(l, digest)
				r.note(i, v)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// ask reads elements of one set by their keys, and its catch-all element, and returns how many of the former there are.
func (s *fullSync) ask(ctx context.Context, set setID, keys iter.Seq[string]) (found int, err error) {
	err = s.find(ctx, s.kernel, func(yield func(element) bool) {
		if !yield(element{id: id{set: set}}) {
			return
		}
		for key := range keys {
			if !yield(element{id: id{set: set, key: key}}) {
				return
			}
		}
	}, func(at element, v value, is bool) error {
		if is && at.key != "" {
			found++
		}
		return s.noteFound(at, v, is)
	})
	return found, err
}

// frontends are the keys in a set of the plan's frontends and their source ranges.
func (s *fullSync) frontends(set setID) iter.Seq[string] {
	keys := map[string]bool{}
	for _, sp := range s.plan.Sorted(s.family) {
		for _, el := range s.layout.unsorted(written{sp: sp}, map[kind]bool{}) {
			if el.set == set {
				keys[el.key] = true
			}
		}
	}
	return maps.Keys(keys)
}

// frontendsFound are the frontends in the kernel.
func (s *fullSync) frontendsFound() iter.Seq[string] {
	return func(yield func(string) bool) {
		for i := range s.have {
			_, twice := s.have[id{services, i.key}]
			if (i.set == services || i.set == servicesWithin && !twice) && !yield(i.key) {
				return
			}
		}
	}
}

// kindsFound are the kinds that a frontend in the kernel has.
func (r *reading) kindsFound(name string) (out []kind) {
	for _, set := range []setID{services, servicesWithin} {
		if v, is := r.have[id{set, name}]; is {
			if k, known := kindOf(nativeNumber(v.data)); known {
				out = append(out, k)
			}
		}
	}
	return out
}

// led returns the numbers that frontends in the kernel have, by the map that these are in.
func (s *fullSync) led(names iter.Seq[string]) (out [setCount][]numbers) {
	for name := range names {
		for _, k := range s.kindsFound(name) {
			set := setsOf(k).plain
			if k.affinity > 0 {
				set = setsOf(k).choice
			}
			if k.count > 0 {
				out[set] = append(out[set], numbers{name, k.count})
			}
		}
	}
	return out
}

func indices(list []numbers) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, l := range list {
			for n := range l.count {
				if !yield(indexed(l.name, uint32(n))) {
					return
				}
			}
		}
	}
}

// chosen are the keys of the endpoints that choices in the kernel lead to.
func (s *fullSync) chosen(of endpointSets, led []numbers) map[string]bool {
	out := map[string]bool{}
	n := 4 * nameRegisters(s.family)
	for key := range indices(led) {
		if v, is := s.have[id{of.choice, key}]; is {
			out[key[:n]+v.data] = true
		}
	}
	return out
}

// noteFound notes what has been looked for, if it is there.
func (r *reading) noteFound(at element, v value, is bool) error {
	if is {
		r.note(at.id, v)
	}
	return nil
}

// writesTo returns the writes that turn had into want. It reads those of the elements to add which may be there already, as an interrupted sync
// has left them and nothing leads to them, and puts them into had. No transaction may be under way.
func (e *engine) writesTo(ctx context.Context, had map[id]value, want []element) ([]write, error) {
	writes := differing(had, want)
	var added []element
	for _, w := range writes {
		if w.had == nil && e.unread[w.set] {
			added = append(added, element{id: w.id})
		}
	}
	if len(added) == 0 {
		return writes, nil
	}
	err := e.find(ctx, e.kernel, slices.Values(added), func(at element, v value, is bool) error {
		if is {
			had[at.id] = v
		}
		return nil
	})
	return differing(had, want), err
}

// find looks for elements by their keys, and calls visit with each, in any order, with the value that it has, and whether it is there. Of many, it
// asks over a second socket as well, as most of the time goes to the kernel.
func (e *engine) find(ctx context.Context, k kernel, list iter.Seq[element], visit func(at element, has value, is bool) error) error {
	q := &questions{engine: e, kernels: []kernel{k}, others: 1, visit: visit}
	defer q.close()
	if err := inQuestions(list, func(some *question) error { return errors.Join(ctx.Err(), q.ask(some)) }); err != nil {
		return err
	}
	return q.wait(0)
}

// inQuestions asks for elements, some at a time. The last question may be for none.
func inQuestions(list iter.Seq[element], ask func(*question) error) error {
	some := &question{}
	for el := range list {
		if some.at = append(some.at, el); len(some.at) < mostAsked {
			continue
		}
		if err := ask(some); err != nil {
			return err
		}
		some = &question{}
	}
	return ask(some)
}

// question asks for some elements.
type question struct {
	at    []element
	has   []value
	is    []bool
	err   error
	fault *fault // unless it is nil, the answer has panicked
	batch int    // which of several it is a part of
	done  chan struct{}
}

// fault is what another goroutine has panicked with, and where.
type fault struct {
	with  any
	stack []byte
}

func (f *fault) String() string { return fmt.Sprint(f.with) }

func (q *question) answer(e *engine, k kernel) {
	defer close(q.done)
	defer func() {
		if with := recover(); with != nil {
			q.fault = &fault{with, debug.Stack()}
		}
	}()
	keys := make([]nft.ElementKey, len(q.at))
	for n, el := range q.at {
		keys[n] = nft.ElementKey{Set: e.sets[el.set].Name, Key: el.key}
	}
	q.has, q.is = make([]value, len(q.at)), make([]bool, len(q.at))
	q.err = k.Find(e.family, names.NFTables, keys, func(n int, el nft.Element, is bool) error {
		q.has[n], q.is[n] = valueOf(el), is
		return nil
	})
}

// questions are answered side by side, once there are two of them, and visited in order.
type questions struct {
	engine  *engine
	kernels []kernel
	others  int // how many of these are another's
	visit   func(element, value, bool) error
	asked   chan *question
	open    []*question // that have been asked, and not visited
}

// ask has a question answered, and may visit the answer to one before.
func (q *questions) ask(some *question) error {
	some.done = make(chan struct{})
	q.open = append(q.open, some)
	if q.asked == nil {
		if len(q.open) == 1 { // It may be the only one.
			return nil
		}
		if k, err := q.engine.reader(); err == nil { // Else one has to do.
			q.kernels = append(q.kernels, k)
		}
		q.work(0)
		q.asked <- q.open[0]
	}
	q.asked <- some
	if len(q.open) > len(q.kernels)+cap(q.asked) {
		return q.next()
	}
	return nil
}

// work begins to answer. more is how many questions may wait, beside those that are being answered.
func (q *questions) work(more int) {
	q.asked = make(chan *question, more)
	for _, k := range q.kernels {
		go func() {
			for some := range q.asked {
				some.answer(q.engine, k)
			}
		}()
	}
}

// next visits the answer to the first question that is open. It panics where whoever answered did, for its caller to handle.
func (q *questions) next() error {
	a := q.open[0]
	q.open = q.open[1:]
	<-a.done
	if a.fault != nil {
		panic(a.fault)
	}
	if a.err != nil {
		return a.err
	}
	for n, at := range a.at {
		if err := q.visit(at, a.has[n], a.is[n]); err != nil {
			return err
		}
	}
	return nil
}

// wait visits the answers to all questions up to a batch.
func (q *questions) wait(batch int) error {
	if q.asked == nil {
		q.open[0].answer(q.engine, q.kernels[0])
	}
	for len(q.open) > 0 && q.open[0].batch <= batch {
		if err := q.next(); err != nil {
			return err
		}
	}
	return nil
}

// close waits for questions that are being answered. Afterwards, nobody uses the kernels.
func (q *questions) close() {
	if q.asked != nil {
		close(q.asked)
		for _, a := range q.open {
			<-a.done
		}
	}
	for _, k := range q.kernels[q.others:] {
		_ = k.Close()
	}
}

// each calls visit with all elements of sets but those that rules add, of which a catch-all element is none. Some that are there may be missing.
func (e *engine) each(ctx context.Context, k kernel, sets []setID, visit func(id, value) error) error {
	for _, set := range sets {
		note := func(el nft.Element) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return visit(id{set, el.Key}, valueOf(el))
		}
		var err error
		if !set.remembers() {
			err = k.Sample(e.family, names.NFTables, e.sets[set], note)
		} else if el, is, asked := k.Element(e.family, names.NFTables, e.sets[set], nft.Element{}); is {
			err = note(el)
		} else {
			err = asked
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// remembered are the elements that syncs have written.
func (e *engine) remembered() map[id]value {
	out := map[id]value{}
	for el := range e.known().expected(map[kind]bool{}) {
		out[el.id] = el.value
	}
	return out
}

// places returns the endpoints of a frontend in the kernel that has a kind, indexed by their numbers.
func (r *reading) places(name string, k kind) []netip.AddrPort {
	of, n := setsOf(k), r.family.Bits()/8
	out := make([]netip.AddrPort, k.count)
	for i := range out {
		v, is := r.have[id{of.plain, indexed(name, uint32(i))}]
		if k.affinity > 0 {
			choice := r.have[id{of.choice, indexed(name, uint32(i))}]
			v, is = r.have[id{of.sticky, name + choice.data}]
		}
		if is {
			a, _ := netip.AddrFromSlice([]byte(v.data[:n]))
			out[i] = netip.AddrPortFrom(a, bigEndianNumber(v.data[n:]))
		}
	}
	return out
}
