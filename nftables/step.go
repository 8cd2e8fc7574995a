package nftables

import (
	"cmp"
	"iter"
	"maps"
	"slices"

	"nodeproxy/plan"
)

// mostAtOnce is about how many elements of ServicePorts with many frontends one sync compares and writes, which takes ten milliseconds or so.
// Such a ServicePort changes some frontends at a time, between which others change. Each frontend changes in one transaction.
const mostAtOnce = 5_000

// step is a part of the change of one ServicePort, or all of it.
type step struct {
	before, want written // what it changes
	next         written // what is in the kernel after it
}

// frontends yields the frontends that are in the kernel, each with the version of the ServicePort that it is as.
func (w written) frontends() iter.Seq2[plan.Frontend, *written] {
	return func(yield func(plan.Frontend, *written) bool) {
		whole := w
		whole.others = nil
		if w.sp != nil {
			for _, fe := range w.sp.Frontends {
				if _, is := w.others[fe]; !is && fe.Kind != plan.HealthCheckNodePort && !yield(fe, &whole) {
					return
				}
			}
		}
		for fe, v := range w.others {
			if v != nil && !yield(fe, v) {
				return
			}
		}
	}
}

// size is about how many elements a frontend has, apart from source ranges; 0 if w is nil.
func (w *written) size(fe plan.Frontend) int {
	if w == nil {
		return 0
	}
	of, inside := w.kindsOf(fe)
	n := 1 + of.size()
	if inside != nil {
		n += 1 + inside.size()
	}
	return n
}

// size is how many elements a frontend of the kind has for its endpoints.
func (k kind) size() int {
	if k.affinity > 0 {
		return 2 * k.count
	}
	return k.count
}

// large reports whether a change is made in steps.
func (e *engine) large(before, want written) bool {
	if before.others != nil {
		return true
	}
	n := 0
	for _, w := range []written{before, want} {
		if w.sp == nil || len(w.sp.Frontends) < 2 || len(w.sp.Frontends)*(2+2*w.numbered(false)+2*w.numbered(true)) <= e.mostAtOnce/2 {
			continue
		}
		for fe, v := range w.frontends() {
			n += v.size(fe)
		}
	}
	return n > e.mostAtOnce
}

// steps returns what a sync changes of each of some ServicePorts: all of it, but of large ones no more than mostAtOnce elements together, and
// in any case the cluster IP, and frontends that pass from one to another. What the kernel has refused is tried as a whole.
func (e *engine) steps(keys []plan.Key, p *plan.Plan) map[plan.Key]step {
	out := make(map[plan.Key]step, len(keys))
	var large []plan.Key
	for _, k := range keys {
		before, want := e.current.of(k), written{}
		switch sp := p.Services[k]; {
		case sp == nil:
		case sp == before.sp: // It goes on.
			want = before
			want.others = nil
		default:
			want = place(before, sp)
			e.asked.note(sp.Scheduler.Name)
		}
		if out[k] = (step{before, want, want}); e.refused[k] == nil && e.large(before, want) {
			large = append(large, k)
		}
	}
	if len(large) == 0 {
		return out
	}
	moves := e.moving(keys, large, out)
	// They take turns to be the first, so that none waits for another that changes all the time.
	if n := slices.IndexFunc(large, func(k plan.Key) bool { return k.Compare(e.lastStepped) > 0 }); n > 0 {
		large = append(large[n:], large[:n]...)
	}
	e.lastStepped = large[0]
	left := e.mostAtOnce
	for _, k := range large {
		var size int
		out[k], size = out[k].before.toward(out[k].want, left, func(fe plan.Frontend) bool { return moves(k, fe) })
		left = max(left-size, 0)
	}
	return out
}

// moving returns a function that reports whether a frontend that ServicePort k gives up or gets passes to or from another one.
func (e *engine) moving(keys, large []plan.Key, steps map[plan.Key]step) func(k plan.Key, fe plan.Frontend) bool {
	wanted, held := map[string]plan.Key{}, map[string]plan.Key{} // the names of frontends, by who wants them, and by who has them
	for _, k := range keys {
		if len(large) == 1 && k == large[0] { // Nobody asks for its own.
			continue
		}
		for fe := range steps[k].want.frontends() {
			wanted[nameOf(e.family, fe)] = k
		}
		before := steps[k].before
		if r := e.refused[k]; r != nil { // It may have kept them.
			before = written{sp: r.sp}
		}
		for fe := range before.frontends() {
			held[nameOf(e.family, fe)] = k
		}
	}
	return func(k plan.Key, fe plan.Frontend) bool {
		name := nameOf(e.family, fe)
		by, is := wanted[name]
		from, was := held[name]
		return is && by != k || was && from != k
	}
}

// frontendChange is what changes at one address, protocol and port of a ServicePort.
type frontendChange struct {
	fe, was   plan.Frontend // was is of another kind only where it takes the place of that
	had, want *written      // nil for none
	rank      int           // in which order; see toward
}

// changes lists what differs between what is in the kernel and want.
func (w written) changes(want *written) []frontendChange {
	had := maps.Collect(w.frontends())
	for fe := range want.frontends() {
		if _, is := had[fe]; !is {
			had[fe] = nil
		}
	}
	var list []frontendChange
	for fe, v := range had {
		c := frontendChange{fe: fe, was: fe, had: v}
		if want.sp != nil && want.sp.Has(fe) {
			c.want = want
		}
		if _, other := w.others[fe]; other || w.sp != want.sp {
			list = append(list, c)
		}
	}
	place := func(fe plan.Frontend) plan.Frontend {
		fe.Kind = 0
		return fe
	}
	gone := map[plan.Frontend]frontendChange{}
	for _, c := range list {
		if c.want == nil {
			gone[place(c.fe)] = c
		}
	}
	if len(gone) == 0 {
		return list
	}
	replaced := map[plan.Frontend]bool{}
	for i, c := range list {
		if of, is := gone[place(c.fe)]; is && c.had == nil {
			list[i].was, list[i].had = of.fe, of.had
			replaced[of.fe] = true
		}
	}
	return slices.DeleteFunc(list, func(c frontendChange) bool { return c.want == nil && replaced[c.fe] })
}

// toward returns the next step from w to want, and the size of what it changes. moves reports whether a frontend passes to or from another
// ServicePort.
func (w written) toward(want written, most int, moves func(plan.Frontend) bool) (s step, size int) {
	const atOnce, behind, again = 0, 1, 2
	whole := want
	list := w.changes(&whole)
	for i := range list {
		switch c := &list[i]; {
		case c.fe.Kind == plan.ClusterIP || c.was.Kind == plan.ClusterIP || (c.had == nil || c.want == nil) && moves(c.fe):
			c.rank = atOnce
		case w.upTo != nil && c.fe.Compare(*w.upTo) <= 0:
			c.rank = again
		default:
			c.rank = behind
		}
	}
	slices.SortFunc(list, func(a, b frontendChange) int {
		return cmp.Or(a.rank-b.rank, a.fe.Compare(b.fe))
	})
	s = step{before: written{others: map[plan.Frontend]*written{}}, want: written{others: map[plan.Frontend]*written{}}, next: want}
	s.next.upTo = w.upTo
	rest := make(map[plan.Frontend]*written, len(list))
	same := map[*written]*written{} // versions with the same source ranges as those wanted
	some, bare := false, want
	bare.withoutSources = true
	for _, c := range list {
		n := c.had.size(c.was) + c.want.size(c.fe)
		if c.rank != atOnce && (len(rest) > 0 || some && size+n > most) {
			if rest[c.was] = c.had; c.fe != c.was {
				rest[c.fe] = nil
			}
			continue
		}
		if size += n; c.rank != atOnce { // At least one of these changes, however large the cluster IP is.
			some, s.next.upTo = true, &c.fe
		}
		if c.had != nil && c.want != nil {
			v, known := same[c.had]
			if !known && sameSources(c.had.sp, want.sp) {
				without := *c.had
				without.withoutSources = true
				v = &without
			}
			if same[c.had] = v; v != nil {
				c.had, c.want = v, &bare
			}
		}
		if c.had != nil {
			s.before.others[c.was] = c.had
		}
		if c.want != nil {
			s.want.others[c.fe] = c.want
		}
	}
	if len(rest) > 0 {
		s.next.others = rest
	}
	return s, size
}
