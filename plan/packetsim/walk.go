package packetsim

import (
	"cmp"
	"fmt"
)

// place is a position in a chain, and where to go on after its end.
type place struct {
	chain  *chain
	next   int
	caller *place
}

// walk takes a packet through a built-in chain. Every way that it may take comes out, ended or not.
func (rs *Ruleset) walk(start way, base *chain) ([]way, error) {
	type fork struct {
		way
		at place
	}
	var out []way
	todo := []fork{{start, place{chain: base}}}
	for len(todo) > 0 {
		f := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for walking := true; walking; {
			if f.at.next == len(f.at.chain.rules) {
				walking = f.way.back(&f.at, base)
				continue
			}
			r := f.at.chain.rules[f.at.next]
			f.at.next++
			chance, err := r.match(&f.packet)
			if err != nil {
				return nil, fmt.Errorf("chain %s, %s: %w", f.at.chain.name, r, err)
			}
			if chance == 0 {
				continue
			}
			if chance < 1 {
				other := f
				other.probability *= 1 - chance
				todo = append(todo, other)
				f.probability *= chance
			}
			f.rules = &step{base.table, f.at.chain, r, f.rules}
			if walking, err = rs.apply(r.target, &f.way, &f.at, base); err != nil {
				return nil, fmt.Errorf("chain %s, %s: %w", f.at.chain.name, r, err)
			}
		}
		out = append(out, f.way)
	}
	return out, nil
}

// match returns the probability that all of a rule's conditions hold. One that can't be judged does not matter where
// another does not hold.
func (r *rule) match(p *packet) (float64, error) {
	chance := 1.0
	var unknown error
	for _, m := range r.matches {
		c, err := m.match(p)
		if err != nil {
			unknown = cmp.Or(unknown, err)
			continue
		}
		if c == 0 {
			return 0, nil
		}
		chance *= c
	}
	return chance, unknown
}

// back leaves a chain: to behind the jump that led there, or, from a built-in chain, by its policy. A chain that was gone
// to, rather than jumped to, leaves by where the chain that went there would have left. It reports whether the walk of the
// table goes on.
func (w *way) back(at *place, base *chain) bool {
	if at.caller != nil {
		*at = *at.caller
		return true
	}
	if base.policy == "DROP" {
		w.end = Drop
	}
	return false
}

// apply does what a target says, and reports whether the walk of the table goes on.
func (rs *Ruleset) apply(t target, w *way, at *place, base *chain) (bool, error) {
	switch t := t.(type) {
	case jump:
		caller := at.caller
		if !t.goesTo {
			here := *at
			caller = &here
		}
		*at = place{chain: rs.tables[base.table][t.chain], caller: caller}
		return true, nil
	case leave:
		return w.back(at, base), nil
	case accept:
		return false, nil
	case drop:
		w.end = Drop
		return false, nil
	case reject:
		if w.hook == preRouting || w.hook == postRouting {
			return false, fmt.Errorf("REJECT is not possible at %s", w.hook)
		}
		w.end = Reject
		return false, nil
	case dnat:
		if w.hook != preRouting && w.hook != output {
			return false, fmt.Errorf("DNAT is not possible at %s", w.hook)
		}
		w.dnat, w.dst, w.port = true, t.addr, cmp.Or(t.port, w.port)
		return false, nil
	case masquerade:
		if w.hook != postRouting {
			return false, fmt.Errorf("MASQUERADE is not possible at %s", w.hook)
		}
		w.masquerade = true
		return false, nil
	case setMark:
		w.mark = w.mark&^t.clear ^ t.flip
	case mapMark:
		return true, t.apply(&w.packet)
	case unknownTarget:
		return false, t.error()
	}
	return true, nil
}
