package iptables

import (
	"fmt"
	"slices"
)

// works reports whether iptables-restore does anything at all. Where it does not, as without a lock or memory, there is no use in
// a search for what it refuses, which takes two runs of it for each ServicePort.
func (f *fullSync) works() bool {
	f.proved = f.proved || f.tool.restore("*nat\nCOMMIT\n") == nil
	return f.proved
}

// refuse makes do without the chains that the kernel does not take. Where all to which dispatchers lead are there already,
// these go on leading to them, and what they were serves on: endpoints of before are better than none.
func (f *fullSync) refuse(o own, err error) {
	effect := "it keeps the endpoints that it had"
	frag := f.rules.fragment(o.sp)
	missing := func(c chain) bool { _, exists := f.nat[c.name]; return !exists }
	if slices.ContainsFunc(frag.entries, func(e entry) bool {
		return slices.ContainsFunc(frag.chains, func(c chain) bool { return missing(c) && c.name == jumpTarget(e.rule) })
	}) {
		f.rules.leave(o.sp)
		effect = "it is not proxied"
	}
	for _, c := range o.chains {
		delete(f.wanted[tableNAT], c.name)
	}
	for _, c := range o.chains {
		if !missing(c) {
			f.keep(c.name)
		}
	}
	f.refused = append(f.refused, fmt.Errorf("the kernel refuses the rules of Service %s, port %q, so %s: %w",
		o.sp.Key.Service, o.sp.Key.Port, effect, err))
}

// keep wants a chain of table nat as the kernel has it, with all that it leads to.
func (f *fullSync) keep(name string) {
	if f.wanted[tableNAT][name] {
		return
	}
	f.want(tableNAT, name)
	for _, r := range f.nat[name] {
		if to := jumpTarget(r); f.nat[to] != nil {
			f.keep(to)
		}
	}
}
