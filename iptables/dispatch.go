package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/proxier/plan"
)

// table is an iptables table.
type table string

const (
	tableFilter table = "filter"
	tableNAT    table = "nat"
	tableMangle table = "mangle" // no rules of this mode
)

// dispatcherID names a place where packets are told apart by destination and sent on to a ServicePort's rule.
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
	table  table
	chain  string
	prefix string
}

var places = [dispatchers]place{
	natServices:             {tableNAT, chainServices, prefixCluster},
	natNodePorts:            {tableNAT, chainNodePorts, prefixExternal},
	filterServices:          {tableFilter, chainServices, prefixCluster},
	filterExternal:          {tableFilter, chainExternalServices, prefixExternal},
	filterExternalNodePorts: {tableFilter, chainExternalNodePorts, prefixExternal},
	filterFirewall:          {tableFilter, chainProxyFirewall, prefixFirewall},
	filterNodePorts:         {tableFilter, chainNodePorts, prefixLocal},
}

// A chain of a dispatcher lists its entries one by one while there are up to maxFlat. Beyond that it has a rule for each
// value of the next four bits, that leads to a chain of its own unless not more than maxInline entries would be in it.
// With 10,000 cluster IPs spread over a /16, a packet passes about 55 rules instead of 5,000, and a pod's address, which
// is not in that range, one.
const (
	maxFlat   = 32
	maxInline = 4
)

// protocolDigit stands for a protocol in a key.
var protocolDigit = map[plan.Protocol]byte{plan.TCP: 0, plan.UDP: 1, plan.SCTP: 2}
var protocolOfDigit = [...]plan.Protocol{plan.TCP, plan.UDP, plan.SCTP}

// keyOf makes the key of a frontend: the address, if it has one, then protocol and port.
func keyOf(f plan.Frontend) key {
	var k []byte
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
}

// chains calls emit for the dispatcher's chain and all below it, those below first.
func (d *dispatch) chains(emit func(chain)) {
	for _, t := range d.topChains() {
		d.emit(t, emit)
	}
	emit(d.rootChain())
}

func (d *dispatch) emit(t *trie, emit func(chain)) {
	for _, kid := range chainsBelow(t) {
		d.emit(kid, emit)
	}
	emit(chain{d.name(t.prefix), d.rules(t)})
}

// branches reports whether a child of an inner chain is a chain of its own.
func branches(kid *trie) bool { return kid.count > maxInline && !kid.isEntry() }

// inner reports whether a trie's chain leads to further chains, rather than listing its entries.
func inner(t *trie) bool { return t.count > maxFlat }

// rules are those of the chain that a trie becomes.
func (d *dispatch) rules(t *trie) []string {
	if !inner(t) {
		return t.list(nil)
	}
	var out []string
	for _, kid := range t.kids {
		if branches(kid) {
			out = append(out, d.match(kid.prefix).goTo(d.name(kid.prefix)))
		} else {
			out = kid.list(out)
		}
	}
	return out
}

// rootChain is the dispatcher's own chain. It jumps where chains below go to: a packet that nothing below recognises
// comes back to it, and goes on to its last rules.
func (d *dispatch) rootChain() chain {
	var rules []string
	switch {
	case d.root == nil:
	case !inner(d.root):
		rules = d.root.list(nil)
	default:
		rules = append(rules, d.match(d.root.prefix).jump(d.name(d.root.prefix)))
	}
	return chain{d.place.chain, slices.Concat(d.head, rules, d.tail)}
}

// changes compares two contents of one dispatcher: replace is called for every chain of to that is not the same in from, with
// the number of rules that it has there, and remove for every chain that only from has. What the two share is not looked at.
func changes(from, to *dispatch, replace func(was int, c chain), remove func(was int, name string)) {
	c := &comparison{dispatch: to, replace: replace, remove: remove}
	c.compare(from.topChains(), to.topChains())
	if old, new := from.rootChain(), to.rootChain(); !sameRules(old, new) {
		replace(len(old.rules), new)
	}
}

// topChains are the tries that become the chains directly below the dispatcher's own.
func (d *dispatch) topChains() []*trie {
	if d.root == nil || !inner(d.root) {
		return nil
	}
	return []*trie{d.root}
}

// chainsBelow are the tries that become the chains directly below that of t.
func chainsBelow(t *trie) []*trie {
	if !inner(t) {
		return nil
	}
	var out []*trie
	for _, kid := range t.kids {
		if branches(kid) {
			out = append(out, kid)
		}
	}
	return out
}

type comparison struct {
	*dispatch
	replace func(was int, c chain)
	remove  func(was int, name string)
}

// compare finds what differs between the chains of before and after, each a list of tries that lie beside each other, and
// all chains below those. Chains are the same if their prefixes are, at whatever depth they hang: an address far from all
// others puts a level on top of the tree, and leaves the rest as it was.
func (c *comparison) compare(before, after []*trie) {
	done := map[*trie]bool{}
	within := func(list []*trie, prefix key) []*trie {
		var out []*trie
		for _, t := range list {
			if !done[t] && strings.HasPrefix(string(t.prefix), string(prefix)) {
				out = append(out, t)
			}
		}
		return out
	}
	for _, a := range after {
		if done[a] {
			continue
		}
		below := within(before, a.prefix)
		around := slices.IndexFunc(before, func(b *trie) bool {
			return len(b.prefix) < len(a.prefix) && strings.HasPrefix(string(a.prefix), string(b.prefix))
		})
		switch {
		case len(below) == 1 && below[0].prefix == a.prefix:
			done[below[0]] = true
			c.same(below[0], a)
		case around >= 0: // a hung below a chain that is gone
			b := before[around]
			group := within(after, b.prefix)
			for _, t := range group {
				done[t] = true
			}
			done[b] = true
			c.remove(len(c.rules(b)), c.name(b.prefix))
			c.compare(chainsBelow(b), group)
		default: // a is new, and what is below it may have been there before
			for _, t := range below {
				done[t] = true
			}
			c.replace(0, chain{c.name(a.prefix), c.rules(a)})
			c.compare(below, chainsBelow(a))
		}
	}
	for _, b := range before {
		if !done[b] {
			c.remove(len(c.rules(b)), c.name(b.prefix))
			c.compare(chainsBelow(b), nil)
		}
	}
}

// same compares a chain with what it becomes.
func (c *comparison) same(b, a *trie) {
	if a == b {
		return
	}
	old, now := chain{rules: c.rules(b)}, chain{c.name(a.prefix), c.rules(a)}
	if !sameRules(old, now) {
		c.replace(len(old.rules), now)
	}
	c.compare(chainsBelow(b), chainsBelow(a))
}

func sameRules(a, b chain) bool { return slices.Equal(a.rules, b.rules) }

// addrDigits is the number of digits that an address has in this dispatcher's keys.
func (d *dispatch) addrDigits() int {
	if !d.place.addressed() {
		return 0
	}
	return d.family.Bits() / 4
}

// addressed reports whether the entries of a dispatcher are for addresses, rather than for ports alone.
func (p place) addressed() bool {
	return p.chain != chainNodePorts && p.chain != chainExternalNodePorts
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

// match begins a rule for all keys with a prefix.
func (d *dispatch) match(prefix key) *rule {
	addrs, proto, first, last := d.split(prefix)
	r := newRule()
	if addrs.IsValid() && addrs.Bits() > 0 {
		r.dst(addrs)
	}
	if proto != "" {
		r.proto(proto)
		if first != 0 || last != 0xffff {
			r.word("-m", proto.Lower(), "--dport", fmt.Sprintf("%d:%d", first, last))
		}
	}
	return r
}

// name is that of the chain for all keys with a prefix: readable where it fits (KUBE-SVC-10.96.128.0/20,
// KUBE-EXT-tcp:30000-30255), else a hash of what would be.
func (d *dispatch) name(prefix key) string {
	addrs, proto, first, last := d.split(prefix)
	text := "any"
	if addrs.IsValid() {
		text = addrs.String()
	}
	if proto != "" {
		if addrs.IsValid() {
			text += ":"
		} else {
			text = ""
		}
		text += fmt.Sprintf("%s:%d-%d", proto.Lower(), first, last)
	}
	if name := d.place.prefix + text; len(name) <= maxChainName {
		return name
	}
	return d.place.prefix + hashName("dispatch "+text)
}
