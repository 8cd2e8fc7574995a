package iptables

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"

	"nodeproxy/iptables/common"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// rules is the desired content of one family's tables, as far as it is ours. It is kept between syncs, so that a change
// of one ServicePort costs no more than that: what a ServicePort contributed before is made again from the ServicePort
// itself, and dispatchers share what did not change.
type rules struct {
	family   plan.Family
	options  Options
	settings plan.Settings
	node     plan.Node
	services *plan.Ports
	// endpoints is how many there are in all, and compact the form that follows from it.
	endpoints int
	compact   bool
	// externals is how many external frontends lie within ranges of cluster IPs. Without any, in the compact form, ranges
	// are those of which one rule masquerades all that is to be masqueraded.
	externals int
	ranges    []netip.Prefix
	tries     tries
	// kept is what stays of ServicePorts that are not known; nil where all are.
	kept *kept
	// spared are the fragments that the kernel holds of ServicePorts whose own it does not take, and left the ServicePorts that it
	// does not take at all; what those have counts for the form all the same.
	spared map[plan.Key]fragment
	left   map[plan.Key]*plan.ServicePort
}

// tries are the entries of all dispatchers.
type tries [dispatchers]*trie

// newRules returns the rules for a plan in which no ServicePort has been entered yet.
func newRules(p *plan.Plan, f plan.Family, o Options) *rules {
	r := &rules{
		family: f, options: o, settings: p.Settings, node: p.Node, services: plan.NewPorts(),
		spared: map[plan.Key]fragment{}, left: map[plan.Key]*plan.ServicePort{},
	}
	for k, sp := range p.Services {
		if k.Family == f {
			r.endpoints += endpointCount(sp)
			r.externals += r.externalsOf(sp)
		}
	}
	r.compact = o.compact(r.endpoints)
	if r.byRange() {
		r.ranges = r.serviceCIDRs()
	}
	return r
}

// byRange reports whether one rule for each range of cluster IPs can masquerade, in place of one for each ServicePort. The
// rule stands where the interface that a packet came by is not known any more, and can't distinguish cluster IPs from others.
func (r *rules) byRange() bool {
	return r.options.compact(r.endpoints) && r.externals == 0 && len(r.serviceCIDRs()) > 0 &&
		(r.settings.MasqueradeAll || r.settings.DetectLocal.ByCIDR() && r.settings.DetectLocal.Implemented(r.family))
}

// serviceCIDRs are the known ranges of cluster IPs of this family.
func (r *rules) serviceCIDRs() []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(r.settings.ServiceCIDRs), func(c netip.Prefix) bool {
		return plan.FamilyOf(c.Addr()) != r.family
	})
}

// externalsOf counts a ServicePort's external frontends within ranges of cluster IPs.
func (r *rules) externalsOf(sp *plan.ServicePort) int {
	n := 0
	if sp == nil || len(r.settings.ServiceCIDRs) == 0 {
		return 0
	}
	for _, f := range sp.Frontends {
		if f.Kind != plan.ClusterIP && f.Addr.IsValid() && within(f.Addr, r.settings.ServiceCIDRs) {
			n++
		}
	}
	return n
}

func within(a netip.Addr, ranges []netip.Prefix) bool {
	return slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}

func (o Options) compact(endpoints int) bool { return o.CompactAbove > 0 && endpoints > o.CompactAbove }

func endpointCount(sp *plan.ServicePort) int {
	if sp == nil {
		return 0
	}
	return len(sp.All())
}

// outgrown follows the number of endpoints through a change, and reports whether the rules need another form after it.
func (r *rules) outgrown(p *plan.Plan, changed plan.Keys) bool {
	for k := range changed {
		if k.Family == r.family {
			before := cmp.Or(r.services.Get(k), r.left[k])
			r.endpoints += endpointCount(p.Services[k]) - endpointCount(before)
			r.externals += r.externalsOf(p.Services[k]) - r.externalsOf(before)
		}
	}
	return r.options.compact(r.endpoints) != r.compact || r.byRange() != (len(r.ranges) > 0)
}

// form is what the common chains depend on beside the options.
func (r *rules) form() common.Form {
	f := common.Form{Hairpin: r.compact, ClusterIPs: r.ranges}
	if d := r.settings.DetectLocal; !r.settings.MasqueradeAll && len(r.ranges) > 0 {
		f.Pods = d.CIDR(r.family)
	}
	return f
}

// rulesOf returns the rules for a plan.
func rulesOf(p *plan.Plan, f plan.Family, o Options) *rules {
	r := newRules(p, f, o)
	for k, sp := range p.Services {
		if k.Family == f {
			r.enter(sp)
		}
	}
	return r
}

// enter adds a ServicePort that was not there before.
func (r *rules) enter(sp *plan.ServicePort) {
	r.services.Put(sp)
	for _, e := range r.builder(sp).entries() {
		r.tries[e.dispatcher] = r.tries[e.dispatcher].with(e.key, e.from)
	}
}

// leave takes a ServicePort out again.
func (r *rules) leave(sp *plan.ServicePort) {
	r.services.Delete(sp.Key)
	r.left[sp.Key] = sp
	for _, e := range r.builder(sp).entries() {
		r.tries[e.dispatcher] = r.tries[e.dispatcher].without(e.key)
	}
}

// localnet reports whether node ports answer on loopback addresses, with all that this needs.
func (r *rules) localnet() bool { return r.settings.LocalhostReachable(r.family) }

// dispatcher is the content of a dispatcher, given the entries of all.
func (r *rules) dispatcher(id dispatcherID, t *tries) *dispatch {
	d := &dispatch{place: places[id], family: r.family, root: t[id]}
	b := r.newBuilder()
	d.made = func(k key, from origin) []string { return b.rulesAt(id, d.frontend(k), from) }
	// What leads nowhere is left out: these rules are asked for every new connection.
	refusals := t[filterExternal] != nil || t[filterExternalNodePorts] != nil
	switch {
	case id == natServices:
		d.tail = append(r.localhostNodePorts(), common.ToNodePorts(&r.settings, &r.node, r.family,
			"kubernetes service nodeports; NOTE: this must be the last rule in this chain", names.NodePorts)...)
	case id == filterServices && refusals:
		// KUBE-EXTERNAL-SERVICES is not called from OUTPUT, where this chain is.
		d.tail = []string{xtables.NewRule().SrcLocal().Jump(names.ExternalServices)}
	case id == filterExternal && refusals:
		d.head = []string{translated()}
		if t[filterExternalNodePorts] != nil {
			d.tail = common.ToNodePorts(&r.settings, &r.node, r.family, "kubernetes service nodeports", names.ExternalNodePorts)
		}
	case id == filterFirewall && d.root != nil:
		d.head = []string{translated()}
	}
	return d
}

// localhostNodePorts are rules that lead what is for loopback addresses to the node ports, apart from all else, so that
// their counters show how many connections are accepted there: those that enter less those that come back.
func (r *rules) localhostNodePorts() []string {
	if !r.localnet() {
		return nil
	}
	loopback := r.family.Loopback()
	ranges := []netip.Prefix{loopback}
	if !r.settings.NodePortAddresses.All(r.family) {
		ranges = nil
		for _, x := range r.settings.NodePortAddresses.Ranges(r.family, r.node) {
			switch {
			case !loopback.Overlaps(x):
			case x.Bits() < loopback.Bits():
				ranges = append(ranges, loopback)
			default:
				ranges = append(ranges, x)
			}
		}
	}
	var out []string
	for _, x := range ranges {
		out = append(out, xtables.NewRule().Dst(x).Comment("kubernetes service nodeports at localhost").DstLocal().Jump(names.NodePorts))
	}
	return append(out, xtables.NewRule().Dst(loopback).Jump("RETURN"))
}

// translated is the rule that lets packets pass whose destination DNAT has put there: it is an endpoint, and goes there
// even where the same address and port are refused to others, as those of an external IP that is a node's own may be.
func translated() string {
	return xtables.NewRule().Word("-m", "conntrack", "--ctstate", "DNAT").Jump("RETURN")
}

// dispatcherOrder has what leads nowhere else before what leads to it.
var dispatcherOrder = [dispatchers]dispatcherID{
	natNodePorts, natServices, filterExternalNodePorts, filterExternal, filterServices, filterFirewall, filterNodePorts,
}

// fixed are all chains that are not a ServicePort's own, those that others lead to first. The rules of each are made when it is its turn.
// Chains that are in bare may come without their rules.
func (r *rules) fixed(bare digests) iter.Seq[xtables.Chain] {
	return func(yield func(xtables.Chain) bool) {
		for _, c := range r.common() {
			if !yield(r.kept.around(c)) {
				return
			}
		}
		ended := false
		for _, id := range dispatcherOrder {
			r.dispatcher(id, &r.tries).chains(bare, func(c xtables.Chain) { ended = ended || !yield(c) })
		}
	}
}

// common are the chains that depend on no frontend.
func (r *rules) common() []xtables.Chain {
	return common.Chains(r.options.common(), r.family, r.form())
}

// update makes the rules those of p in what changed, and returns the steps that bring the kernel there, in order.
//
// Where a ServicePort loses its last endpoint, the filter rule that refuses its traffic comes before the nat rules go,
// and where it gets its first one, it goes after they came: there is no moment at which traffic is neither sent on nor
// refused, and left to travel to wherever the route for an address leads that no host has. Where it loses the last one for some
// frontends, and gets the first one for others, the filter rules that come do so first, and those that go at last. A frontend that passes
// from a ServicePort of those to another one does so in one step, after the filter rules of the one that takes it over.
func (r *rules) update(p *plan.Plan, changed plan.Keys) [][]xtables.Change {
	var refusing, gaining, others []*transition
	given := map[key]bool{}
	first := func(t *transition) {
		if gaining = append(gaining, t); t.getsFilter {
			refusing = append(refusing, &transition{new: t.new}) // Nothing goes yet.
		}
		for _, e := range t.old.entries {
			if places[e.dispatcher].table == names.NAT {
				given[e.key] = true
			}
		}
	}
	for _, k := range changed.Sorted(r.family) {
		t := r.transition(r.services.Get(k), p.Services[k])
		if t.losesFilter {
			first(t)
		} else {
			others = append(others, t)
		}
		delete(r.spared, k)
		delete(r.left, k)
		if sp := p.Services[k]; sp != nil {
			r.services.Put(sp)
		} else {
			r.services.Delete(k)
		}
	}
	for more := len(given) > 0; more; { // Who takes one over may give another one to somebody else.
		more = false
		others = slices.DeleteFunc(others, func(t *transition) bool {
			for _, e := range t.new.entries {
				if given[e.key] {
					first(t)
					more = true
					return true
				}
			}
			return false
		})
	}
	return [][]xtables.Change{
		r.step(names.Filter, refusing),
		r.step(names.NAT, gaining),
		r.step(names.Filter, append(gaining[:len(gaining):len(gaining)], others...)),
		r.step(names.NAT, others),
	}
}

// transition is the way from what one ServicePort contributed to what it does now.
type transition struct {
	old, new                fragment
	losesFilter, getsFilter bool
}

func (r *rules) transition(before, after *plan.ServicePort) *transition {
	t := &transition{old: r.inForce(before), new: r.fragment(after)}
	has := func(entries []entry, e entry) bool {
		for _, o := range entries {
			if o.dispatcher == e.dispatcher && o.key == e.key {
				return true
			}
		}
		return false
	}
	for _, e := range t.old.entries {
		t.losesFilter = t.losesFilter || places[e.dispatcher].table == names.Filter && !has(t.new.entries, e)
	}
	for _, e := range t.new.entries {
		t.getsFilter = t.getsFilter || places[e.dispatcher].table == names.Filter && !has(t.old.entries, e)
	}
	return t
}

// inForce is what a ServicePort has contributed to what the kernel holds; nothing, if it is nil.
func (r *rules) inForce(sp *plan.ServicePort) fragment {
	if sp != nil {
		if spared, is := r.spared[sp.Key]; is {
			return spared
		}
	}
	return r.fragment(sp)
}

// step applies transitions in one table, and returns the changes that do the same in the kernel.
func (r *rules) step(in names.Table, transitions []*transition) []xtables.Change {
	if len(transitions) == 0 {
		return nil
	}
	var out []xtables.Change
	before := r.tries
	// All old entries go before new ones come: a frontend may pass from one ServicePort to another.
	for _, t := range transitions {
		for _, e := range t.old.entries {
			// In a step before, the frontend may have got another owner, whose entry is not to go.
			if places[e.dispatcher].table == in && r.tries[e.dispatcher].at(e.key) == e.from {
				r.tries[e.dispatcher] = r.tries[e.dispatcher].without(e.key)
			}
		}
	}
	for _, t := range transitions {
		for _, e := range t.new.entries {
			if places[e.dispatcher].table == in {
				r.tries[e.dispatcher] = r.tries[e.dispatcher].with(e.key, e.from)
			}
		}
		if in == names.NAT {
			out = append(out, ownChains(t.old.chains, t.new.chains)...)
		}
	}
	for _, id := range dispatcherOrder {
		if places[id].table == in {
			out = append(out, changes(r.dispatcher(id, &before), r.dispatcher(id, &r.tries))...)
		}
	}
	return out
}

// ownChains returns what differs between the chains that a ServicePort had and those that it has.
func ownChains(before, after []xtables.Chain) []xtables.Change {
	old := make(map[string]xtables.Chain, len(before))
	for _, c := range before {
		old[c.Name] = c
	}
	var out []xtables.Change
	for _, c := range after {
		if was, exists := old[c.Name]; !exists || !slices.Equal(was.Rules, c.Rules) {
			change := xtables.WriteChain(c)
			change.Exists, change.Have = exists, was.Rules
			out = append(out, change)
		}
		delete(old, c.Name)
	}
	for _, c := range before {
		if _, gone := old[c.Name]; gone {
			out = append(out, removal(c))
		}
	}
	return out
}
