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
	chains   []nft.Chain
	owners   map[string]plan.Service // by the registers of a frontend, and of a cluster IP
	read     *fullSync               // what was read from the kernel; nil for a Table that was planned
}

// Planned returns the table of a plan. Where there are endpoints already, they keep their numbers; before may be nil.
func Planned(p *plan.Plan, f plan.Family, o Options, before *Table) *Table {
	e := &engine{family: f, options: o}
	t := &Table{family: f, options: o, elements: map[id]value{}, owners: map[string]plan.Service{}}
	l := e.layoutOf(p)
	s := &fullSync{engine: e, layout: l}
	if before != nil {
		s.have = before.elements
	}
	used := map[kind]bool{}
	for _, sp := range p.Sorted(f) {
		l.fill(place(s.placesFound(sp), sp), t.elements, used)
		for _, fe := range sp.Frontends {
			t.owners[nameOf(f, fe)] = sp.Key.Service
			if fe.Kind == plan.ClusterIP {
				t.owners[string(fe.Addr.AsSlice())] = sp.Key.Service
			}
		}
	}
	maps.Copy(t.elements, fixed(used))
	t.chains = append(l.kindChains(used), l.chains()...)
	return t
}

// Read returns the table that the kernel has in the network namespace of the calling thread; nil if it has none. It changes nothing.
func Read(f plan.Family, o Options) (*Table, error) {
	k, err := read()
	if err != nil {
		return nil, err
	}
	defer k.Close()
	e := newEngine(f, o, nil, nil)
	e.kernel = k
	s := e.fullSync(plan.New(plan.Node{}, plan.Settings{}))
	if s.content, err = k.Read(f, names.NFTables, e.sets, s.layout.chains()); err != nil || s.content == nil {
		return nil, err
	}
	if !s.unusable() {
		s.shown = true
		if err := s.readElements(context.Background(), true); err != nil {
			return nil, err
		}
	}
	return &Table{family: f, options: o, elements: s.have, read: s}, nil
}

// Diff returns what turns one table into another; nil stands for none. It leaves out what the kernel keeps for a
// kind that no Service uses any more: a later sync removes it.
func Diff(f plan.Family, have, want *Table) []drift.Hunk {
	d := &differ{family: f, file: fmt.Sprintf("%s table %s %s (nft list)", strings.ToLower(f.String()), nft.FamilyName(f), names.NFTables),
		have: cmp.Or(have, &Table{}), want: cmp.Or(want, &Table{})}
	if have != nil && have.read != nil && len(have.read.foreign) > 0 {
		all := *have
		all.elements = maps.Clone(have.elements)
		maps.Copy(all.elements, have.read.foreign)
		d.have = &all
	}
	switch {
	case have == nil && want == nil:
		return nil
	case have == nil:
		d.table(nil, []string{d.name()})
	case want == nil:
		d.table([]string{d.name()}, nil)
	case have.read != nil && have.read.unusable():
		d.table([]string{d.name() + " # in another form, or dormant: it is created anew"}, []string{d.name()})
		d.have = &Table{}
	}
	sets := max(len(d.have.options.sets(f)), len(d.want.options.sets(f)))
	changed := d.elements()
	for i := range sets {
		d.set(setID(i), changed[setID(i)])
	}
	d.chains()
	d.others()
	return d.out
}

// others makes a hunk for each thing in the kernel's table that is neither a chain nor a set of this program's.
func (d *differ) others() {
	if d.have.read == nil {
		return
	}
	in := intrudersIn(d.have.read.content, d.have.options.sets(d.family), nil)
	for _, name := range in.sets {
		d.out = append(d.out, drift.Hunk{Kind: drift.SetElement, File: d.file, Object: "set " + name, Have: []string{"set " + name + " # of another program"}})
	}
	for _, o := range in.objects {
		d.out = append(d.out, drift.Hunk{Kind: drift.Object, File: d.file, Object: o.String(), Have: []string{o.String() + " # of another program"}})
	}
}

// differ makes the hunks of one table.
type differ struct {
	family     plan.Family
	file       string
	have, want *Table
	out        []drift.Hunk
}

func (d *differ) name() string { return "table " + nft.FamilyName(d.family) + " " + names.NFTables }

func (d *differ) table(have, want []string) {
	d.out = append(d.out, drift.Hunk{Kind: drift.Table, File: d.file, Object: d.name(), Have: have, Want: want})
}

// elements returns the elements of each set that differ.
func (d *differ) elements() map[setID][]id {
	out := map[setID][]id{}
	for i, v := range d.have.elements {
		if is, wanted := d.want.elements[i]; wanted && is == v || !wanted && d.spare(i) {
			continue
		}
		out[i.set] = append(out[i.set], i)
	}
	for i := range d.want.elements {
		if _, is := d.have.elements[i]; !is {
			out[i.set] = append(out[i.set], i)
		}
	}
	return out
}

// spare reports whether an element of the kernel's is of a kind that no Service needs any more.
func (d *differ) spare(i id) bool {
	return (i.set == kinds || i.set == kindsWithin) && d.have.read != nil && len(d.want.elements) > 0
}

// set makes a hunk for the elements of each Service.
func (d *differ) set(i setID, changed []id) {
	set := sets(d.family)[i]
	word := "set "
	if set.Data != nil {
		word = "map "
	}
	byService := map[plan.Service][]id{}
	for _, x := range changed {
		svc := d.owner(x)
		byService[svc] = append(byService[svc], x)
	}
	for _, svc := range slices.SortedFunc(maps.Keys(byService), plan.Service.Compare) {
		h := drift.Hunk{Kind: drift.SetElement, File: d.file, Object: word + set.Name}
		if svc != (plan.Service{}) {
			h.Services = []string{svc.String()}
		}
		list := byService[svc]
		slices.SortFunc(list, compareIDs)
		for _, x := range list {
			if v, is := d.have.elements[x]; is {
				h.Have = append(h.Have, x.text(d.family)+v.text(set))
			}
			if v, is := d.want.elements[x]; is {
				h.Want = append(h.Want, x.text(d.family)+v.text(set))
			}
		}
		d.out = append(d.out, h)
	}
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
	for _, c := range d.want.chains {
		want[c.Name] = c
	}
	have := d.haveChains(want)
	all := map[string]bool{}
	for name := range have {
		all[name] = true
	}
	for name := range want {
		all[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		h := drift.Hunk{Kind: drift.Chain, File: d.file, Object: "chain " + name, Have: have[name]}
		if c, wanted := want[name]; wanted {
			h.Want = chainLines(c)
		}
		if !slices.Equal(h.Have, h.Want) {
			d.out = append(d.out, h)
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
		case wanted && is.Holds(c):
			out[name] = chainLines(c)
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
	for _, w := range ways {
		for _, prefix := range []string{w.chain(names.NFTKeep), w.chain(names.NFTChoose)} {
			var seconds int
			if n, err := fmt.Sscanf(strings.TrimPrefix(name, prefix), "-%ds", &seconds); n == 1 && err == nil {
				return true
			}
		}
	}
	return false
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
