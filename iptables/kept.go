package iptables

import (
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// kept is what the kernel holds for frontends that a plan.Partial does not have: entries of dispatchers, chains that those lead
// to, and what the common chains do for all Services in the form that the kernel has. It is read from rules, this program's or
// kube-proxy's, since whose they are is not known. A nil kept is empty.
type kept struct {
	entries []entry
	chains  map[string][]string
	forAll  map[tableChainName][]string
}

type tableChainName struct {
	table names.Table
	name  string
}

func (k *kept) any() bool { return k != nil && len(k.entries) > 0 }

// own are the chains that belong to the ServicePorts that are not known.
func (k *kept) own() []xtables.Chain {
	if k == nil {
		return nil
	}
	var out []xtables.Chain
	for _, name := range slices.Sorted(maps.Keys(k.chains)) {
		out = append(out, xtables.Chain{Table: names.NAT, Name: name, Rules: k.chains[name]})
	}
	return out
}

// around adds to a common chain what it does for all Services in the form that the kernel has: as in forAll, at the beginning in
// table nat, and at the end in table filter.
func (k *kept) around(c xtables.Chain) xtables.Chain {
	if k == nil {
		return c
	}
	rules := slices.DeleteFunc(slices.Clone(k.forAll[tableChainName{c.Table, c.Name}]), func(r string) bool {
		return slices.Contains(c.Rules, r)
	})
	if c.Table == names.NAT {
		c.Rules = slices.Concat(rules, c.Rules)
	} else {
		c.Rules = slices.Concat(c.Rules, rules)
	}
	return c
}

// findKept finds out what the kernel holds that a plan may not know. It is done once: what is written later is this program's own.
func (f *fullSync) findKept(p *plan.Plan) error {
	switch {
	case !p.Partial:
		f.engine.kept = nil
		return nil
	case f.otherModeHeld():
		return plan.ErrPartial
	case f.engine.kept == nil:
		f.engine.kept = readKept(f.actual)
		f.log.Info("not everything is known of what the kernel may hold rules for; those for unknown Services stay as they are",
			"family", f.family, "frontends", len(f.engine.kept.entries))
	}
	return nil
}

// readKept reads the entries of all dispatchers, and what belongs to them.
func readKept(actual map[names.Table]xtables.Content) *kept {
	k := &kept{chains: map[string][]string{}, forAll: map[tableChainName][]string{}}
	for id := range dispatchers {
		k.entries = append(k.entries, readEntries(id, actual)...)
	}
	for t, chains := range actual {
		for name, rules := range chains {
			for _, r := range rules {
				if strings.Contains(r, xtables.CTStateDNAT) && names.IsOurs(t, name) {
					k.forAll[tableChainName{t, name}] = append(k.forAll[tableChainName{t, name}], r)
				}
			}
		}
	}
	return k
}

// readEntries returns the entries of a dispatcher that the kernel holds, in order of their keys.
func readEntries(id dispatcherID, actual map[names.Table]xtables.Content) []entry {
	at := places[id]
	r := &entryReader{actual: actual[at.table], place: at, found: map[key][]string{}, seen: map[string]bool{}}
	r.chain(at.chain)
	if id == filterExternalNodePorts { // kube-proxy has them in the chain that leads there.
		r.chain(names.ExternalServices)
	}
	var out []entry
	for _, key := range slices.Sorted(maps.Keys(r.found)) {
		rules := r.found[key]
		out = append(out, entry{id, key, rules, strings.Join(rules, "\n")})
	}
	return out
}

// entryReader reads the entries of a dispatcher out of its chain and those below.
type entryReader struct {
	actual xtables.Content
	place  place
	found  map[key][]string
	seen   map[string]bool
}

func (r *entryReader) chain(name string) {
	if r.seen[name] {
		return
	}
	r.seen[name] = true
	for _, rule := range r.actual[name] {
		if f, ok := frontendOf(rule); ok && f.Addr.IsValid() == (r.place.addressed()) {
			r.found[keyOf(f)] = append(r.found[keyOf(f)], rule)
		} else if to := xtables.Target(rule); !ok && strings.HasPrefix(to, r.place.prefix) && !isDispatcher(to) {
			r.chain(to)
		}
	}
}

// isDispatcher reports whether a chain is a dispatcher's own.
func isDispatcher(name string) bool {
	return slices.ContainsFunc(places[:], func(p place) bool { return p.chain == name })
}

// frontendOf reads for which frontend a rule is: a protocol, a single port, and a single address or none.
func frontendOf(rule string) (f plan.Frontend, ok bool) {
	if before, rest, found := strings.Cut(rule, "\""); found { // A comment may hold anything.
		_, after, _ := strings.Cut(rest, "\"")
		rule = before + after
	}
	words := strings.Fields(rule)
	for i := 0; i+1 < len(words); i++ {
		value := words[i+1]
		if i > 0 && words[i-1] == "!" && slices.Contains([]string{"-d", "-p", "--dport"}, words[i]) {
			return f, false
		}
		switch words[i] {
		case "-d":
			at, err := netip.ParsePrefix(value)
			if err != nil || !at.IsSingleIP() {
				return f, false
			}
			f.Addr = at.Addr()
		case "-p":
			f.Protocol = plan.Protocol(strings.ToUpper(value))
		case "--dport":
			port, err := strconv.ParseUint(value, 10, 16)
			if err != nil {
				return f, false
			}
			f.Port = uint16(port)
		}
	}
	_, known := protocolDigit[f.Protocol]
	return f, known && f.Port != 0
}

// enterKept has what is kept stand beside what is known: of frontends that no known ServicePort has.
func (f *fullSync) enterKept() error {
	if f.engine.kept == nil {
		return nil
	}
	k := &kept{chains: map[string][]string{}, forAll: f.engine.kept.forAll}
	f.rules.kept = k
	own := map[key]bool{}
	for sp := range f.rules.services.All() {
		for _, front := range sp.Frontends {
			own[keyOf(front)] = true
		}
	}
	for _, e := range f.engine.kept.entries {
		if own[e.key] {
			continue
		}
		k.entries = append(k.entries, e)
		f.rules.tries[e.dispatcher] = f.rules.tries[e.dispatcher].with(e.key, e.from)
		if places[e.dispatcher].table == names.NAT {
			for _, rule := range e.rules {
				f.keepChains(k, xtables.Target(rule))
			}
		}
	}
	return f.write(f.differing(k.own()...))
}

// keepChains keeps a chain of a ServicePort that is not known, and those that it leads to, as they were at first.
func (f *fullSync) keepChains(k *kept, name string) {
	if !names.OfService(name) || f.wanted[tableChainName{names.NAT, name}] {
		return
	}
	first := f.engine.kept.chains
	if _, known := first[name]; !known {
		first[name] = f.actual[names.NAT][name]
	}
	f.wanted[tableChainName{names.NAT, name}] = true
	k.chains[name] = first[name]
	for _, r := range first[name] {
		f.keepChains(k, xtables.Target(r))
	}
}
