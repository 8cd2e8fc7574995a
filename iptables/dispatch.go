package iptables

import (
	"cmp"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// dispatcherID names a place where packets are sent on to a ServicePort's rule by their destination.
type dispatcherID int

const (
	natServices             dispatcherID = iota // addresses of ServicePorts that have endpoints
	natNodePorts                                // their node ports
	filterServices                              // cluster IPs to refuse
	filterExternal                              // external addresses to refuse
	filterExternalNodePorts                     // node ports to refuse
	filterFirewall                              // load balancer IPs with source ranges
	filterNodePorts                             // health check node ports to accept
	dispatchers
)

// place is where a dispatcher stands: its table and chain, and the prefix of the names of the chains below that.
type place struct {
	table  names.Table
	chain  string
	prefix string
	// depth is how many chains below the built-in one chain is at most, and tail how many chains a packet passes at most
	// behind the dispatcher's last one.
	depth, tail int
}

var places = [dispatchers]place{
	// Behind it come KUBE-FW, KUBE-EXT, KUBE-SVC or KUBE-SVL, a group of endpoints, KUBE-SEP, KUBE-MARK-MASQ.
	natServices: {names.NAT, names.Services, names.PrefixCluster, 1, 6},
	// KUBE-SERVICES leads to it. Behind it come the same but for KUBE-FW.
	natNodePorts:   {names.NAT, names.NodePorts, names.PrefixExternal, 2, 5},
	filterServices: {names.Filter, names.Services, names.PrefixCluster, 1, 0},
	// In OUTPUT it is KUBE-SERVICES that leads to it.
	filterExternal:          {names.Filter, names.ExternalServices, names.PrefixExternal, 2, 0},
	filterExternalNodePorts: {names.Filter, names.ExternalNodePorts, names.PrefixExternal, 3, 0},
	filterFirewall:          {names.Filter, names.ProxyFirewall, names.PrefixFirewall, 1, 0},
	filterNodePorts:         {names.Filter, names.NodePorts, names.PrefixLocal, 1, 0},
}

// levels is how many chains deep the tree below a dispatcher's own chain may be.
func (p place) levels() int { return xtables.MaxNesting - p.depth - p.tail }

// A chain of a dispatcher lists its entries one by one while there are up to maxFlat. Beyond that it has a rule for each value of the next
// four bits, which leads to a chain of its own unless a single entry would be in it. So a chain has few rules, which matters more than how
// many chains there are: a change writes all rules of each chain that it changes. With 10,000 cluster IPs spread over a /16, that is 8 rules
// of Services of two endpoints, and a packet passes about 30 rules instead of 5,000, and a pod's address, which is not in that range, one.
const maxFlat = 16

// protocolDigit stands for a protocol in a key.
var protocolDigit = map[plan.Protocol]byte{plan.TCP: 0, plan.UDP: 1, plan.SCTP: 2}
var protocolOfDigit = [...]plan.Protocol{plan.TCP, plan.UDP, plan.SCTP}

// keyOf makes the key of a frontend: the address, if it has one, then protocol and port.
func keyOf(f plan.Frontend) key {
	k := make([]byte, 0, 2*16+1+portDigits)
	if f.Addr.IsValid() {
		for _, octet := range f.Addr.AsSlice() {
			k = append(k, octet>>4, octet&0xf)
		}
	}
	k = append(k, protocolDigit[f.Protocol])
	for shift := 12; shift >= 0; shift -= 4 {
		k = append(k, byte(f.Port>>shift)&0xf)
	}
	return key(k)
}

// portDigits is how many digits of a key are the port, behind one for the protocol.
const portDigits = 4

// dispatch is the content of one dispatcher: its entries, and the rules that its chain begins and ends with.
type dispatch struct {
	place  place
	family plan.Family
	head   []string
	root   *trie
	tail   []string
	made   func(key, origin) []string // makes the rules of an entry
	known  map[*trie][]string         // those that have been made already; nil if none will be needed again
	rule   xtables.Rule               // the one that is being built
}

// A subtree is a trie that becomes a chain, and how many chains deep the tree from that one on may be. Where this is less than
// the trie has levels, the chain is a wide one, which takes in what would be chains below it. levels is never more than the
// trie's, so that equal subtrees become equal chains with equal chains below.
type subtree struct {
	*trie
	levels int
}

func subtreeOf(t *trie, levels int) subtree { return subtree{t, min(levels, int(t.levels))} }

// parts calls branch for every trie that becomes a chain below that of an inner subtree, and inline for those whose entries
// stand in the subtree's own chain.
//
// A wide chain has the branches of all tries below it that hold more than about a quarter of its entries: those are not
// more than three beside each other, so the chain is not much wider than the tree is deep there, and each chain that it
// leads to has less than half of its entries. The comparison is by powers of two, so that one entry more or less seldom
// moves anything else. With one level left there is nothing but entries.
func (n subtree) parts(branch func(subtree), inline func(*trie)) {
	wide := n.levels < int(n.trie.levels)
	var expand func(*trie)
	expand = func(t *trie) {
		for _, kid := range t.kids {
			switch {
			case n.levels == 1 || kid.isEntry():
				inline(kid)
			case wide && inner(kid) && bits.Len(uint(kid.count)) > bits.Len(uint(n.count))-2:
				expand(kid)
			default:
				branch(subtreeOf(kid, n.levels-1))
			}
		}
	}
	expand(n.trie)
}

// below are the subtrees whose chains a subtree's chain leads to.
func (n subtree) below() []subtree {
	var out []subtree
	if n.trie != nil && inner(n.trie) {
		n.parts(func(kid subtree) { out = append(out, kid) }, func(*trie) {})
	}
	return out
}

// top are the subtrees whose chains the dispatcher's own chain leads to: the root, unless its entries stand there.
func (d *dispatch) top() []subtree {
	if d.root == nil || !inner(d.root) {
		return nil
	}
	return []subtree{subtreeOf(d.root, d.place.levels())}
}

// chains calls do for the dispatcher's chain and all below it, those below first; for those that are in bare, without their rules.
func (d *dispatch) chains(bare digests, do func(xtables.Chain)) {
	d.walk(func(n subtree) {
		if c := (xtables.Chain{Table: d.place.table, Name: d.name(n.prefix)}); bare.has(c) {
			do(c)
		} else {
			do(d.chain(n))
		}
	})
	do(d.rootChain())
}

// walk calls visit for all subtrees, those below first.
func (d *dispatch) walk(visit func(subtree)) {
	var down func([]subtree)
	down = func(level []subtree) {
		for _, n := range level {
			down(n.below())
			visit(n)
		}
	}
	down(d.top())
}

// inner reports whether a trie's chain leads to further chains, rather than listing its entries.
func inner(t *trie) bool { return t.count > maxFlat }

// chain is what a subtree becomes.
func (d *dispatch) chain(n subtree) xtables.Chain {
	return xtables.Chain{Table: d.place.table, Name: d.name(n.prefix), Rules: d.rules(n)}
}

// lines are what the chain of a subtree has rules for, in their order.
func (n subtree) lines() []line {
	out := make([]line, 0, 2*maxFlat)
	list := func(t *trie) { t.entries(func(e *trie) { out = append(out, line{e.prefix, e}) }) }
	if inner(n.trie) {
		n.parts(func(kid subtree) { out = append(out, line{kid.prefix, nil}) }, list)
	} else {
		list(n.trie)
	}
	return out
}

// line is an entry or, where that is nil, the chain for all keys with a prefix.
type line struct {
	prefix key
	entry  *trie
}

func (d *dispatch) rules(n subtree) []string {
	var out []string
	for _, l := range n.lines() {
		if l.entry != nil {
			out = append(out, d.entryRules(l.entry)...)
		} else {
			out = append(out, d.match(l.prefix).GoTo(d.name(l.prefix)))
		}
	}
	return out
}

func (d *dispatch) entryRules(e *trie) []string {
	rules, known := d.known[e]
	if !known {
		if rules = d.made(e.prefix, e.from); d.known != nil {
			d.known[e] = rules
		}
	}
	return rules
}

// rootChain is the dispatcher's own chain. It jumps where chains below go to: a packet that nothing below recognises
// comes back to it, and goes on to its last rules.
func (d *dispatch) rootChain() xtables.Chain {
	var rules []string
	switch {
	case d.root == nil:
	case !inner(d.root):
		rules = d.rules(subtree{d.root, 1})
	default:
		rules = append(rules, d.match(d.root.prefix).Jump(d.name(d.root.prefix)))
	}
	return xtables.Chain{Table: d.place.table, Name: d.place.chain, Rules: slices.Concat(d.head, rules, d.tail)}
}

// changes compares two contents of one dispatcher, and returns what is to be written and removed to come from the first to the
// second. Both trees are walked side by side, in order of prefix, where a chain comes before those below it. Chains are the same if
// their prefixes are, at whatever depth they hang: an address far from all others puts a level on top of the tree, and leaves the
// rest as it was. What the two share is not looked at.
func changes(from, to *dispatch) []xtables.Change {
	var out []xtables.Change
	from.known = map[*trie][]string{}
	to.known = from.known
	write := func(old, now xtables.Chain) {
		if !slices.Equal(old.Rules, now.Rules) {
			out = append(out, xtables.Change{Op: xtables.Write, Table: now.Table, Chain: now.Name, Rules: now.Rules,
				Exists: true, Have: old.Rules})
		}
	}
	before, after := from.top(), to.top()
	for len(before)+len(after) > 0 {
		order := 0
		switch {
		case len(before) == 0:
			order = 1
		case len(after) == 0:
			order = -1
		default:
			order = cmp.Compare(before[0].prefix, after[0].prefix)
		}
		var b, a subtree
		if order <= 0 {
			b, before = before[0], before[1:]
		}
		if order >= 0 {
			a, after = after[0], after[1:]
		}
		switch {
		case a == b:
			continue
		case a.trie == nil:
			out = append(out, removal(to.chain(b)))
		case b.trie == nil:
			out = append(out, xtables.WriteChain(to.chain(a)))
		case !slices.Equal(b.lines(), a.lines()):
			write(to.chain(b), to.chain(a))
		}
		before, after = slices.Concat(b.below(), before), slices.Concat(a.below(), after)
	}
	write(from.rootChain(), to.rootChain())
	return out
}

// removal is the change that removes a chain which holds what had been written.
func removal(c xtables.Chain) xtables.Change {
	return xtables.Change{Op: xtables.Remove, Table: c.Table, Chain: c.Name, Exists: true, Have: c.Rules}
}

// addrDigits is the number of digits that an address has in this dispatcher's keys.
func (d *dispatch) addrDigits() int {
	if !d.place.addressed() {
		return 0
	}
	return d.family.Bits() / 4
}

// addressed reports whether the entries of a dispatcher are for addresses, rather than for ports alone.
func (p place) addressed() bool {
	return p.chain != names.NodePorts && p.chain != names.ExternalNodePorts
}

// split takes a key's prefix apart: the address range, the protocol, and the port range that it stands for.
func (d *dispatch) split(prefix key) (addrs netip.Prefix, proto plan.Protocol, first, last uint16) {
	n := d.addrDigits()
	if n > 0 {
		raw := make([]byte, n/2)
		for i, digit := range []byte(prefix[:min(n, len(prefix))]) {
			raw[i/2] |= digit << (4 * (1 - i%2))
		}
		addr, _ := netip.AddrFromSlice(raw)
		addrs = netip.PrefixFrom(addr, 4*min(n, len(prefix)))
	}
	if len(prefix) <= n {
		return addrs, "", 0, 0
	}
	proto = protocolOfDigit[prefix[n]]
	port := prefix[n+1:]
	for i := range portDigits {
		first, last = first<<4, last<<4|0xf
		if i < len(port) {
			first |= uint16(port[i])
			last = last&^0xf | uint16(port[i])
		}
	}
	return addrs, proto, first, last
}

// frontend is that of an entry, without its kind.
func (d *dispatch) frontend(k key) plan.Frontend {
	addrs, proto, port, _ := d.split(k)
	return plan.Frontend{Addr: addrs.Addr(), Protocol: proto, Port: port}
}

// match begins a rule for all keys with a prefix.
func (d *dispatch) match(prefix key) *xtables.Rule {
	addrs, proto, first, last := d.split(prefix)
	r := d.rule.Begin()
	if addrs.IsValid() && addrs.Bits() > 0 {
		r.Dst(addrs)
	}
	if proto != "" {
		r.Proto(proto)
		if first != 0 || last != 0xffff {
			r.Word("-m", proto.Lower(), "--dport", fmt.Sprintf("%d:%d", first, last))
		}
	}
	return r
}

// name is that of the chain for all keys with a prefix: readable where it fits (KUBE-SVC-10.96.128.0/20,
// KUBE-EXT-tcp:30000-30255), else a hash of what would be.
func (d *dispatch) name(prefix key) string {
	addrs, proto, first, last := d.split(prefix)
	name := append(make([]byte, 0, 80), d.place.prefix...)
	if addrs.IsValid() {
		name = addrs.AppendTo(name)
	}
	switch {
	case proto != "" && addrs.IsValid():
		name = fmt.Appendf(name, ":%s:%d-%d", proto.Lower(), first, last)
	case proto != "":
		name = fmt.Appendf(name, "%s:%d-%d", proto.Lower(), first, last)
	case !addrs.IsValid():
		name = append(name, "any"...)
	}
	if len(name) <= names.MaxChainName {
		return string(name)
	}
	return d.place.prefix + hashName("dispatch "+string(name[len(d.place.prefix):]))
}
