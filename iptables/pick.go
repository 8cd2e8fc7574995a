package iptables

import (
	"hash/fnv"
	"net/netip"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// maxFlatEndpoints is how many endpoints a chain picks from in one line of rules. Rule k of n is tried by every
// connection that the k-1 before it did not take, so a connection passes n/2 rules on average. Beyond this number,
// endpoints are picked in two steps, of about the square root each.
const maxFlatEndpoints = 64

// pick makes the rules that send to each endpoint with equal probability: the first takes 1/n of all, the second 1/(n-1)
// of the rest, and so on.
func (b *builder) pick(endpoints []plan.Endpoint) []string {
	rules := make([]string, 0, len(endpoints))
	for i, ep := range endpoints {
		r := b.rule.Begin()
		if b.direct {
			r.Proto(b.sp.Key.Protocol)
		} else {
			r.Comment(b.toward(ep))
		}
		if left := len(endpoints) - i; left > 1 {
			r.OneIn(1 / float64(left))
		}
		if b.direct {
			rules = append(rules, r.DNAT(ep.Addr))
		} else {
			rules = append(rules, r.Jump(endpointChain(b.sp.Key, ep.Addr)))
		}
	}
	return rules
}

// maxInlineEndpoints is up to how many endpoints a ServicePort without other frontends than its cluster IP has no chain in the
// compact form: the dispatcher itself sends to them. That is a third fewer rules, and no chain, for the kernel to walk at every
// change; with more endpoints, the packets for others would pass too many rules.
const maxInlineEndpoints = 2

// inlineRules do in a dispatcher what the ServicePort's chain would. The first that sends on says in a comment for whom.
func (b *builder) inlineRules(f plan.Frontend, endpoints []plan.Endpoint) []string {
	var rules []string
	if r := b.masqueradeClusterIP(f); r != "" {
		rules = append(rules, r)
	}
	comment := b.name + " cluster IP"
	for i, ep := range endpoints {
		r := b.at(f, comment)
		if left := len(endpoints) - i; left > 1 {
			r.OneIn(1 / float64(left))
		}
		rules = append(rules, r.DNAT(ep.Addr))
		comment = ""
	}
	return rules
}

// groups divides endpoints among chains and makes the rules that pick a chain in proportion to what it holds. To which
// group an endpoint belongs depends on the endpoint alone, so a change of one endpoint rewrites one group and the line
// that picks the group.
func (b *builder) groups(p plan.Policy, endpoints []plan.Endpoint) (rules []string, chains []xtables.Chain) {
	count := 1
	for count*count < len(endpoints) {
		count *= 2
	}
	members := make([][]plan.Endpoint, count)
	for _, ep := range endpoints {
		g := groupOf(ep.Addr, count)
		members[g] = append(members[g], ep)
	}
	prefix := names.PrefixCluster
	if p == plan.Local {
		prefix = names.PrefixLocal
	}
	left := len(endpoints)
	for g, m := range members {
		if len(m) == 0 {
			continue
		}
		name := groupChain(prefix, b.sp.Key, count, g)
		r := xtables.NewRule()
		if !b.compact {
			r.Comment(b.name + " endpoints")
		}
		if left > len(m) {
			r.OneIn(float64(len(m)) / float64(left))
		}
		left -= len(m)
		rules = append(rules, r.Jump(name))
		chains = append(chains, xtables.Chain{Table: names.NAT, Name: name, Rules: b.pick(m)})
	}
	return rules, chains
}

// groupOf spreads endpoints evenly over groups. FNV's low bits hardly differ between neighbouring addresses, so they are
// mixed first.
func groupOf(ep netip.AddrPort, groups int) int {
	h := fnv.New64a()
	h.Write([]byte(ep.String())) // never fails
	x := h.Sum64()
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	return int(x % uint64(groups))
}
