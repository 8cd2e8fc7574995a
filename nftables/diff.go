package nftables

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Table is what the table of a family holds, or should hold.
type Table struct {
	family   plan.Family
	options  Options
	elements map[id]value
	chains   []nft.Chain             // of a Table that was planned
	owners   map[string]plan.Service // by the registers of a frontend, and of a cluster IP
	read     *fullSync               // what was read from the kernel; nil for a Table that was planned
}

// Planned returns the table of a plan. Where there are endpoints already, they keep their numbers; before may be nil.
func Planned(p *plan.Plan, f plan.Family, o Options, before *Table) *Table {
	t := &Table{family: f, options: o, owners: map[string]plan.Service{}}
	r := &reading{engine: &engine{family: f}}
	if before != nil {
		r.have = before.elements
	}
	t.chains, t.elements, _ = layoutOf(p, f, o).desired(p, r.placesFound)
	for _, sp := range p.Sorted(f) {
		for _, fe := range sp.Frontends {
			t.owners[nameOf(f, fe)] = sp.Key.Service
			if fe.Kind == plan.ClusterIP {
				t.owners[string(fe.Addr.AsSlice())] = sp.Key.Service
			}
		}
	}
	return t
}

// Read returns the table that the kernel has, in the network namespace of the calling thread unless there are sockets; nil if it has none.
// It changes nothing.
func Read(sockets *Sockets, f plan.Family, o Options) (*Table, error) {
	k, err := sockets.read()
	if err != nil {
		return nil, err
	}
	defer k.Close()
	e := newEngine(f, o, nil, nil)
	e.kernel, e.reader = k, sockets.read
	s := e.fullSync(plan.New(plan.Node{}, plan.Settings{}))
	if s.content, err = k.Read(f, names.NFTables, e.sets, s.layout.chains()); err != nil || s.content == nil {
		return nil, err
	}
	t := &Table{family: f, options: o, elements: s.have, read: s}
	if s.unusable() {
		return t, nil
	}
	ctx := context.Background()
	if err := s.readElements(ctx); err != nil {
		return nil, err
	}
	ahead, err := s.readAhead(nil) // of no ServicePort, as there is no plan
	if err != nil {
		return nil, err
	}
	defer ahead.close()
	if err := ahead.rest(ctx); err != nil {
		return nil, err
	}
	if err := s.list(ctx, true, s.withMore()); err != nil {
		return nil, err
	}
	maps.Copy(s.have, s.foreign)
	return t, nil
}

// withMore are the sets that were read by what leads to their elements, and have others.
func (s *fullSync) withMore() (out []setID) {
	var found [setCount]int
	for i := range s.have {
		found[i.set]++
	}
	for set := range setCount {
		if s.deferred[set] && found[set] != s.counted(set) {
			out = append(out, set)
		}
	}
	return out
}

// Diff returns what turns one table into another; nil stands for none. It leaves out what the kernel keeps for a
// kind that no Service uses any more: a later sync removes it.
func Diff(f plan.Family, have, want *Table) []drift.Hunk {
	d := &differ{family: f, file: fmt.Sprintf("%s table %s %s (nft list)", strings.ToLower(f.String()), nft.FamilyName(f), names.NFTables),
		have: cmp.Or(have, &Table{}), want: cmp.Or(want, &Table{})}
	name := "table " + nft.FamilyName(f) + " " + names.NFTables
	switch {
	case have == nil && want == nil:
		return nil
	case have == nil:
		d.add(drift.Table, name, nil, []string{name})
	case want == nil:
		d.add(drift.Table, name, []string{name}, nil)
	case have.read != nil && have.read.unusable():
		d.add(drift.Table, name, []string{name + " # in another form, or dormant: it is created anew"}, []string{name})
		d.have = &Table{}
	}
	d.elements()
	d.chains()
	d.others()
	return d.out
}

// differ makes the hunks of one table.
type differ struct {
	family     plan.Family
	file       string
	have, want *Table
	out        []drift.Hunk
}

func (d *differ) add(k drift.Kind, object string, have, want []string) {
	d.out = append(d.out, drift.Hunk{Kind: k, File: d.file, Object: object, Have: have, Want: want})
}

// others makes a hunk for each thing in the kernel's table that is neither a chain nor a set of this program's.
func (d *differ) others() {
	if d.have.read == nil {
		return
	}
	in := intrudersIn(d.have.read.content, d.have.options.sets(d.family), nil)
	for _, name := range in.sets {
		d.add(drift.SetElement, "set "+name, []string{"set " + name + " # of another program"}, nil)
	}
	for _, o := range in.objects {
		d.add(drift.Object, o.String(), []string{o.String() + " # of another program"}, nil)
	}
}

// elements makes a hunk for the elements of each Service that differ, set by set.
func (d *differ) elements() {
	type group struct {
		set setID
		svc plan.Service
	}
	groups := map[group][]write{}
	writes := removals(d.have.elements, func(i id) bool {
		_, wanted := d.want.elements[i]
		return !wanted && !d.spare(i)
	})
	for i, v := range d.want.elements {
		has, is := d.have.elements[i]
		if w, differs := (element{i, v}).unlike(has, is); differs {
			writes = append(writes, w)
		}
	}
	slices.SortFunc(writes, func(a, b write) int { return compareIDs(a.id, b.id) })
	for _, w := range writes {
		g := group{w.set, d.owner(w.id)}
		groups[g] = append(groups[g], w)
	}
	all := sets(d.family)
	for _, g := range slices.SortedFunc(maps.Keys(groups), func(a, b group) int { return cmp.Or(cmp.Compare(a.set, b.set), a.svc.Compare(b.svc)) }) {
		set := all[g.set]
		h := drift.Hunk{Kind: drift.SetElement, File: d.file, Object: "set " + set.Name}
		if set.Data != nil {
			h.Object = "map " + set.Name
		}
		if g.svc != (plan.Service{}) {
			h.Services = []string{g.svc.String()}
		}
		for _, w := range groups[g] {
			if w.had != nil {
				h.Have = append(h.Have, w.text(d.family)+w.had.text(set))
			}
			if w.want != nil {
				h.Want = append(h.Want, w.text(d.family)+w.want.text(set))
			}
		}
		d.out = append(d.out, h)
	}
}

// spare reports whether an element of the kernel's is of a kind that no Service needs any more.
func (d *differ) spare(i id) bool {
	return (i.set == kinds || i.set == kindsWithin) && d.have.read != nil && len(d.want.elements) > 0
}

// owner returns the Service that an element belongs to.
func (d *differ) owner(i id) plan.Service {
	name := i.key
	if n := 4 * nameRegisters(d.family); i.set.ofServices() && i.set != clusterIPs {
		name = i.key[:min(n, len(i.key))]
	} else if i.set != clusterIPs {
		return plan.Service{}
	}
	for _, t := range []*Table{d.want, d.have} {
		if svc, known := t.owners[name]; known {
			return svc
		}
	}
	comment, _, _ := strings.Cut(d.have.elements[id{set: services, key: name}].comment, ":")
	namespace, name, _ := strings.Cut(comment, "/")
	return plan.Service{Namespace: namespace, Name: name}
}

// chains makes a hunk for each chain that differs.
func (d *differ) chains() {
	want := map[string]nft.Chain{}
	lines := map[string][]string{}
	for _, c := range d.want.chains {
		want[c.Name], lines[c.Name] = c, chainLines(c)
	}
	have := d.haveChains(want)
	all := maps.Clone(lines)
	maps.Copy(all, have)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if !slices.Equal(have[name], lines[name]) {
			d.add(drift.Chain, "chain "+name, have[name], lines[name])
		}
	}
}

// haveChains returns the text of the chains in the kernel. The kernel's rules are recognised, but can't be printed where they are not those
// that this chain should have.
func (d *differ) haveChains(want map[string]nft.Chain) map[string][]string {
	out := map[string][]string{}
	for _, c := range d.have.chains {
		out[c.Name] = chainLines(c)
	}
	if d.have.read == nil {
		return out
	}
	for name, is := range d.have.read.content.Chains {
		c, wanted := want[name]
		switch {
		case wanted:
			out[name] = knownLines(c, is)
		case len(d.want.chains) == 0 || !d.ofSpareKind(name):
			out[name] = []string{"chain " + name + " {", fmt.Sprintf("\t# rules: %d", len(is.Labels)), "}"}
		}
	}
	return out
}

// ofSpareKind reports whether a chain is that of a kind. As the plan does not have it, no Service leads to it any more.
func (d *differ) ofSpareKind(name string) bool {
	for i, v := range d.have.elements {
		if (i.set == kinds || i.set == kindsWithin) && v.chain == name {
			return true
		}
	}
	return slices.ContainsFunc(ways, func(w way) bool {
		return strings.HasPrefix(name, w.chain(names.NFTKeep)+"-") || strings.HasPrefix(name, w.chain(names.NFTChoose)+"-")
	})
}

// knownLines returns the lines of a chain in the kernel, which should be c.
func knownLines(c nft.Chain, is nft.ChainContent) []string {
	like := nft.Chain{Name: c.Name, Hook: c.Hook}
	for _, n := range is.Match(c) {
		rule := nft.Rule{Text: "# a rule that nodeproxy would not write here"}
		if n >= 0 {
			rule = c.Rules[n]
		}
		like.Rules = append(like.Rules, rule)
	}
	out := chainLines(like)
	if is.Other {
		out[0] += " # of another type, hook, priority or policy"
	}
	return out
}

func chainLines(c nft.Chain) []string {
	return strings.Split(strings.TrimSuffix(chainText(c, ""), "\n"), "\n")
}
