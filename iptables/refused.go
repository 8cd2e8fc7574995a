package iptables

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"nodeproxy/proxier/plan"
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
	f.rewrites = slices.DeleteFunc(f.rewrites, func(other own) bool { return other.sp == o.sp })
	effect := "it keeps the endpoints that it had"
	frag := f.rules.fragment(o.sp)
	missing := func(c chain) bool { _, exists := f.nat[c.name]; return !exists }
	leaves := slices.ContainsFunc(frag.entries, func(e entry) bool {
		return slices.ContainsFunc(frag.chains, func(c chain) bool { return missing(c) && c.name == jumpTarget(e.rules) })
	})
	if leaves {
		f.rules.leave(o.sp)
		effect = "it is not proxied"
	}
	for _, c := range frag.chains {
		delete(f.wanted[tableNAT], c.name)
	}
	for _, e := range frag.entries {
		if to := jumpTarget(e.rules); !leaves && f.nat[to] != nil {
			f.keep(to)
		}
	}
	f.tellRefused(o.sp, effect, err)
}

func (f *fullSync) tellRefused(sp *plan.ServicePort, effect string, err error) {
	f.refused = append(f.refused, fmt.Errorf("the kernel refuses the rules of Service %s, port %q, so %s: %w",
		sp.Key.Service, sp.Key.Port, effect, err))
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

// chainTrial is where it is tried whether the kernel takes the entries of dispatchers. Packets get to it, since some things an
// nft kernel looks at only in rules that they can get to; but its first rule sends them back.
const chainTrial = prefixCluster + "TRIAL"

// refuseEntries looks for the ServicePorts of which the kernel does not take the entries in dispatchers, and leaves them out. It
// reports whether there are any.
func (f *fullSync) refuseEntries() (bool, error) {
	var all []*plan.ServicePort
	for _, sp := range f.rules.services {
		all = append(all, sp)
	}
	slices.SortFunc(all, func(a, b *plan.ServicePort) int { return a.Key.Compare(b.Key) })
	before := len(f.refused)
	err := f.tryEntries(all)
	return len(f.refused) > before, err
}

// tryEntries tries the entries of ServicePorts all together, and if that fails of either half.
func (f *fullSync) tryEntries(services []*plan.ServicePort) error {
	if len(services) == 0 {
		return nil
	}
	if err := f.ctx.Err(); err != nil {
		return err
	}
	err := f.trial(services)
	switch half := len(services) / 2; {
	case !errRefused(err):
		return err
	case half > 0:
		if err := f.tryEntries(services[:half]); err != nil {
			return err
		}
		return f.tryEntries(services[half:])
	}
	sp := services[0]
	for _, c := range f.rules.fragment(sp).chains {
		delete(f.wanted[tableNAT], c.name)
	}
	f.rules.leave(sp)
	f.tellRefused(sp, "it is not proxied", err)
	return nil
}

// trial writes the entries of ServicePorts where they do nothing, and removes them.
func (f *fullSync) trial(services []*plan.ServicePort) error {
	rules := map[table][]string{}
	for _, sp := range services {
		for _, e := range f.rules.fragment(sp).entries {
			t := places[e.dispatcher].table
			rules[t] = append(rules[t], strings.Split(e.rules, "\n")...)
		}
	}
	var errs []error
	for _, t := range []table{tableNAT, tableFilter} {
		if len(rules[t]) > 0 {
			errs = append(errs, f.trialIn(t, rules[t]))
		}
	}
	return errors.Join(errs...)
}

func (f *fullSync) trialIn(t table, rules []string) error {
	declare, lead := ":"+chainTrial+" - [0:0]\n", chainServices+" "+newRule().jump(chainTrial)+"\n"
	var try, end strings.Builder
	try.WriteString("*" + string(t) + "\n" + declare)
	end.WriteString("*" + string(t) + "\n" + declare)
	chain{chainTrial, append([]string{newRule().jump("RETURN")}, rules...)}.appendTo(&try, "")
	if _, held := f.held(t)[chainServices]; held {
		try.WriteString("-A " + lead)
		end.WriteString("-D " + lead)
	}
	try.WriteString("COMMIT\n")
	end.WriteString("-X " + chainTrial + "\nCOMMIT\n")
	if err := f.restore(try.String()); err != nil {
		return err
	}
	return f.restore(end.String())
}
