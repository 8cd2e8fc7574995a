package inspect

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// ways is about the ways to endpoints, and to the Service itself.
func (c *checks) ways(ctx context.Context) {
	if c.reality.Ways == nil {
		return
	}
	const name = "routes to endpoints"
	var to Places
	all := 0
	for _, f := range plan.Families {
		some, n := c.used(f)
		to.Endpoints, all = append(to.Endpoints, some...), all+n
	}
	for _, sp := range c.ports {
		for _, f := range sp.Frontends {
			switch {
			case f.Kind == plan.ClusterIP && !slices.Contains(to.ClusterIPs, f.Addr):
				to.ClusterIPs = append(to.ClusterIPs, f.Addr)
			case f.Kind == plan.ExternalIP && len(to.ExternalIPs) < mostAddresses && !slices.Contains(to.ExternalIPs, f.Addr):
				to.ExternalIPs = append(to.ExternalIPs, f.Addr)
			}
		}
	}
	if len(to.Endpoints) == 0 {
		return
	}
	of := "the " + counted(all, "endpoint") + " in use"
	if all > len(to.Endpoints) {
		of = fmt.Sprintf("%d of the %d endpoints in use, which are those that were looked at", len(to.Endpoints), all)
	}
	w, err := c.reality.Ways(ctx, to)
	if err != nil {
		c.found(name, unknown, "%v", err)
		return
	}
	c.notForwarded(w.NotForwarded)
	for _, name := range w.NotForwardedBy {
		setting := "net.ipv4.conf." + name + ".forwarding"
		c.found("forwarding", problem, "%s is 0", setting)
		c.diagnose(problem, NotForwarded, "set "+setting+" to 1, and see what has cleared it",
			"This node does not forward what comes by %s (%s is 0): connections from there to endpoints elsewhere or in Pods fail, and so do others whose endpoints answer from there.", name, setting)
	}
	if n := len(w.Unreached); n > 0 {
		addrs, list := listed(w.Unreached, "%s (%s)")
		c.found(name, problem, "none to %d of %s", n, of)
		c.diagnose(problem, NoRoute, "see whether the network plugin runs on this node and on theirs, and whether it has left a route: ip route show table all match "+addrs[0].String(),
			"The kernel sends nothing to %d of %s, and connections that go there fail: %s.", n, of, some(list))
	} else if len(w.NotForwarded)+len(w.NotForwardedBy) == 0 {
		each := of
		if all > 1 {
			each = "each of " + of
		}
		c.found(name, ok, "there is one to %s", each)
	}
	c.unrouted(w.Unrouted)
	c.strayed(w)
	if n := len(w.Silent); n > 0 {
		addrs, list := listed(w.Silent, "%s (by %s)")
		c.found("next hops", problem, "that of %d of %s does not answer", n, of)
		do := "see whether the addresses are right, where the Pods are, whether two nodes have the same range (spec.podCIDR), and whether those nodes run"
		if !slices.ContainsFunc(addrs, func(a netip.Addr) bool { return !c.nowhere[a] }) {
			do = "see whether that host runs, or correct the address where it is written (Endpoints or EndpointSlice)"
		}
		c.diagnose(problem, NoNeighbour, do+": ip neigh show; ip route get "+addrs[0].String(),
			"Nobody in the network of this node answers for the next hop to %d of %s (ARP or neighbour discovery), and connections that go there fail: %s.", n, of, some(list))
		c.about(addrs...)
	}
	c.shut(w.Shut)
	c.misled(w)
	if len(w.Cut) > 0 {
		addrs, list := listed(w.Cut, "%s (%s)")
		c.found("route to the cluster IP", problem, "none: %s", some(list))
		c.diagnose(problem, NoRoute, "give this node a default route, or one to the range of cluster IPs; by which interface does not matter: ip route get "+addrs[0].String(),
			"What this node itself sends to the cluster IP fails before it meets any rule, since the kernel has no route there: %s. Pods have routes of their own.", some(list))
	}
	c.bridged(w.Bridged)
	if len(w.NoHairpin) > 0 && !c.masqueradeAll {
		addrs, list := listed(w.NoHairpin, "%s (port %s)")
		c.diagnose(note, NoHairpin, "set hairpinMode in the configuration of the network plugin (bridge); at once: ip link set "+w.NoHairpin[addrs[0]]+" type bridge_slave hairpin on",
			"A Pod can't reach itself by this Service, since hairpin mode is off at its bridge's port: %s. Connections of its own that are sent to it hang; those of others do not.", some(list))
	}
	if len(w.Unclaimed) > 0 {
		_, list := listed(w.Unclaimed, "%s (%s)")
		c.diagnose(note, Unclaimed, "give it to a node, or have something announce it or route it to one",
			"External IP in the network of an interface, but no address of this node: %s. nodeproxy announces none, so that clients of that network get there only if another node or program answers for it.", some(list))
	}
}

// shut is about endpoints for which IPsec lets nothing pass.
func (c *checks) shut(at map[netip.Addr]string) {
	if len(at) == 0 {
		return
	}
	_, list := listed(at, "%s (%s)")
	c.found("policies of IPsec", problem, "packets of %s are dropped", counted(len(at), "endpoint"))
	c.diagnose(problem, ShutByIPsec, "see what manages IPsec on this node, and whether it has agreed on keys: ip xfrm policy; ip xfrm state",
		"A policy of IPsec has the kernel drop packets for endpoints, or their answers, and those connections fail: %s.", some(list))
}

// misled is about endpoints whose packets or answers take a way that is very likely a wrong one.
func (c *checks) misled(w *Ways) {
	local, outside := map[netip.Addr]bool{}, false
	for _, sp := range c.ports {
		outside = outside || sp.HasExternal()
		for _, ep := range sp.All() {
			local[ep.Addr.Addr()] = ep.Local
		}
	}
	here := map[netip.Addr]string{}
	for a, hop := range w.ByDefault {
		if local[a] {
			here[a] = hop
		}
	}
	if len(here) > 0 {
		addrs, list := listed(here, "%s (via %s)")
		c.found("default route", note, "it leads to %s of this node", counted(len(here), "endpoint"))
		c.diagnose(note, LeavesNode, "see whether the network plugin's interface and its address are still there: ip addr; ip route get "+addrs[0].String(),
			"Endpoints are Pods of this node, but the node has no route to them but the default one, by which packets leave it; unless something there sends them back, connections fail: %s.", some(list))
	}
	if away := maps.Clone(w.ByDefault); len(away) > len(here) {
		maps.DeleteFunc(away, func(a netip.Addr, _ string) bool { return local[a] })
		addrs, list := listed(away, "%s (via %s)")
		c.suspect(NoRoute, "where nodes have routes to each other's Pods, see whether one is missing: ip route get "+addrs[0].String(),
			"Packets to endpoints on other nodes leave by the default route: %s.", some(list))
	}
	if len(w.Unserved) > 0 && slices.ContainsFunc(c.ports, func(sp *plan.ServicePort) bool {
		return slices.ContainsFunc(sp.Frontends, func(f plan.Frontend) bool { return f.Kind == plan.NodePort })
	}) {
		_, list := listed(w.Unserved, "%s (%s)")
		c.diagnose(note, NodePortsNowhere, "if clients use these, set nodePortAddresses to all or to their range, or correct the Node's InternalIP (--node-ip of the kubelet)",
			"Node ports do not answer at these addresses of this node, as nodePortAddresses limits them to others: %s.", some(list))
	}
	if fixed := maps.Clone(w.Fixed); len(fixed) > 0 {
		maps.DeleteFunc(fixed, func(a netip.Addr, _ string) bool { return local[a] })
		if addrs, list := listed(fixed, "%s (by %s)"); len(list) > 0 {
			c.suspect(WrongNeighbour, "compare it with that node's interface, and delete it if nothing needs it: ip neigh show; ip route get "+addrs[0].String(),
				"Somebody has made an entry of this node's neighbours (permanent) for the next hop to endpoints, so that the kernel asks nobody where it is; if that is not right any more, connections that go there fail: %s.", some(list))
		}
	}
	if len(w.Astray) > 0 && outside {
		addrs, list := listed(w.Astray, "%s (by %s)")
		say := c.suspect
		if !w.Marked { // Marks may have them go back where they came from.
			c.found("routes of answers", note, "those to clients outside leave by %s, not by %s", w.Astray[addrs[0]], w.Uplink)
			say = func(code, do, what string, args ...any) { c.diagnose(note, code, do, what, args...) }
		}
		say(AnswersAstray, fmt.Sprintf("see the rules for routing, and except what comes from endpoints: ip rule; ip route get 198.51.100.7 from %s iif INTERFACE", addrs[0]),
			"The answers of endpoints to clients outside leave by another interface than %s, to which the default route leads, as a rule for routing has it; if clients come by that, they most likely get no answer: %s.", w.Uplink, some(list))
	}
	if len(w.Looped) > 0 {
		_, list := listed(w.Looped, "%s (%s)")
		c.found("tunnels", problem, "one sends packets for %s to this node itself", counted(len(w.Looped), "endpoint"))
		c.diagnose(problem, NoRoute, "see which address the other node has told the network plugin: two nodes with one InternalIP, as machines of Vagrant may have, need another interface for it (flannel: --iface; kubelet: --node-ip)",
			"A tunnel sends packets for endpoints on other nodes to an address of this node, and connections that go there fail: %s.", some(list))
	}
	if len(w.Lost) > 0 {
		_, list := listed(w.Lost, "%s (%s)")
		c.found("tunnels", problem, "one knows no host for %s", counted(len(w.Lost), "endpoint"))
		c.diagnose(problem, NoRoute, "see whether the network plugin runs on this node and knows the other: bridge fdb show dev NAME",
			"A tunnel has no entry for the next hop to endpoints on other nodes, and connections that go there fail: %s.", some(list))
	}
	if len(w.Captive) > 0 {
		_, list := listed(w.Captive, "%s (%s)")
		c.found("networks of this node", problem, "one has the cluster IP: %s", some(list))
		c.diagnose(problem, Overlap, "give Services and Pods ranges that have no address in common (--service-cluster-ip-range, --cluster-cidr)",
			"The cluster IP is in the network of a bridge, so that Pods there look for it among themselves, and their connections fail: %s.", some(list))
	}
	if len(w.Overlaps) > 0 {
		severity := note
		if outside {
			severity = problem
		}
		c.found("networks of this node", severity, "some overlap: %s", some(w.Overlaps))
		c.diagnose(severity, Overlap, "give Pods a range that no host has: ip addr; ip route", "Networks of this node overlap, so that it looks for some hosts in the wrong one, and those can't reach the Service: %s.", some(w.Overlaps))
	}
	if w.Narrow != "" {
		c.diagnose(note, LongPackets, "set the MTU of Pods in the configuration of the network plugin to no more than that",
			"Pods send packets of up to %d bytes, and %s takes %d: what is longer gets through only if its sender learns that by ICMP errors.", w.PodMTU, w.Narrow, w.NarrowMTU)
	}
}

// strayed is about endpoints on other nodes that this node looks for in a network of its own: a bridge that has their range, mostly. It takes them
// from those whose next hop does not answer.
func (c *checks) strayed(w *Ways) {
	for _, sp := range c.ports {
		for _, ep := range sp.All() {
			a := ep.Addr.Addr()
			name, near := w.Near[a]
			if _, silent := w.Silent[a]; !near || !silent || ep.Local || c.nowhere[a] {
				continue
			}
			delete(w.Silent, a)
			c.found("next hops", problem, "%s does not answer at %s", a, name)
			c.diagnose(problem, NoNeighbour, fmt.Sprintf("if endpoints of other nodes are not to be reached by %s, give it another range, or remove it: ip addr show dev %s; ip route get %s", name, name, a),
				"Endpoint %s is on another node, but this node looks for it in the network of its own interface %s, where nobody answers for it, and connections that go there fail.", a, name)
		}
	}
}

// unrouted is about endpoints to which nothing is forwarded of what comes from elsewhere.
func (c *checks) unrouted(list []Unrouted) {
	if !slices.ContainsFunc(c.ports, (*plan.ServicePort).HasExternal) {
		list = slices.DeleteFunc(list, func(r Unrouted) bool { return r.From.Outside })
	}
	if !slices.ContainsFunc(c.ports, func(sp *plan.ServicePort) bool { return sp.ExternalPolicy == plan.Cluster }) { // Nothing is masqueraded.
		list = slices.DeleteFunc(list, func(r Unrouted) bool { return r.From.Mark != 0 })
	}
	for len(list) > 0 {
		first, addrs := list[0], []string(nil)
		list = slices.DeleteFunc(list, func(r Unrouted) bool {
			same := r.From == first.From && r.Why == first.Why
			if same {
				addrs = append(addrs, r.Addr.String())
			}
			return same
		})
		marked, command := "", fmt.Sprintf("ip rule; ip route get %s from %s iif %s", first.Addr, first.From.Addr, first.From.By)
		if first.From.Mark != 0 {
			marked = fmt.Sprintf(" and is marked to be masqueraded (%#x)", first.From.Mark)
			command += fmt.Sprintf(" mark %#x", first.From.Mark)
		}
		c.found("routes for others", problem, "none for what comes from %s by %s%s", first.From.Name, first.From.By, marked)
		c.diagnose(problem, NoRoute, "see the rules for routing: "+command,
			"This node has a route to the endpoints, but for what comes from %s by %s%s there is none that leads there (%s), as a rule for routing has it, and those connections hang: %s.",
			first.From.Name, first.From.By, marked, first.Why, some(addrs))
	}
}

// listed returns addresses in order, and each with what is said of it.
func listed(of map[netip.Addr]string, format string) (addrs []netip.Addr, each []string) {
	addrs = slices.SortedFunc(maps.Keys(of), netip.Addr.Compare)
	return addrs, words(addrs, func(a netip.Addr) string { return fmt.Sprintf(format, a, of[a]) })
}

func (c *checks) notForwarded(families []plan.Family) {
	for _, f := range families {
		what, do := notForwarding(f)
		c.found("forwarding", problem, "%s is 0", forwards(f))
		c.diagnose(problem, NotForwarded, do, "%s", what)
	}
}

// forwards is the setting by which the kernel forwards packets of a family.
func forwards(f plan.Family) string {
	if f == plan.IPv6 {
		return "net.ipv6.conf.all.forwarding"
	}
	return "net.ipv4.ip_forward"
}

// notForwarding says what it means that the kernel forwards no packets of a family, and what to do.
func notForwarding(f plan.Family) (what, do string) {
	return fmt.Sprintf("This node does not forward packets of %s (%s is 0): of the connections to endpoints elsewhere, or from elsewhere to Pods, only its own get there.", f, forwards(f)),
		"set " + forwards(f) + " to 1, and see what has cleared it: every node needs it, at every start"
}

// bridged is about endpoints whose answers to Pods of the same bridge pass no rule, so that nothing translates them back.
func (c *checks) bridged(at map[netip.Addr]string) {
	here := map[netip.Addr]string{}
	for _, sp := range c.ports {
		for _, ep := range sp.All() {
			if name := at[ep.Addr.Addr()]; name != "" && ep.Local { // Of others, it is a bridge to other nodes.
				here[ep.Addr.Addr()] = name
			}
		}
	}
	if at = here; len(at) == 0 || c.masqueradeAll {
		return
	}
	addrs, list := listed(at, "%s (%s)")
	setting := "net.bridge.bridge-nf-call-iptables"
	if addrs[0].Is6() {
		setting = "net.bridge.bridge-nf-call-ip6tables"
	}
	c.found("bridges", problem, "%s is 0 or missing", setting)
	c.diagnose(problem, Bridged, "load the module br_netfilter, set "+setting+" to 1, and see that both happen at every start",
		"What goes from Pod to Pod within a bridge passes no rule (%s is 0, or the module br_netfilter is not loaded): a Pod that connects to the cluster IP, and gets an endpoint at its own bridge, gets answers from an address that it did not ask. Endpoints at a bridge: %s.",
		setting, some(list))
}

// toFilter is what to do about strict rp_filter at an interface.
const toFilter = "have the same routes hold for answers (ip rule), or set net.ipv4.conf.%s.rp_filter to 2, which is loose"

// reverse is about answers that the kernel does not take.
func (c *checks) reverse(ctx context.Context) {
	endpoints, _ := c.used(plan.IPv4)
	if c.reality.Reverse == nil || len(endpoints) == 0 {
		return
	}
	const name = "reverse path filter"
	r, err := c.reality.Reverse(ctx, endpoints)
	switch {
	case err != nil:
		c.found(name, unknown, "%v", err)
		return
	case len(r.Strict) == 0: // Then it does not matter for answers.
		if r.Known && r.Drops > 0 && len(r.Anywhere) > 0 && slices.ContainsFunc(c.ports, (*plan.ServicePort).HasExternal) {
			c.found(name, note, "strict at %s; %s dropped by it on this node", some(r.Anywhere), counted(r.Drops, "packet"))
			c.diagnose(note, AnswersFiltered, fmt.Sprintf("if clients come there, have a route lead back to them, or set net.ipv4.conf.%s.rp_filter to 2, which is loose", r.Anywhere[0]),
				"The kernel has dropped %s on this node since rp_filter is strict at %s: clients that come by another interface than that of the route back to them get nowhere.",
				counted(r.Drops, "packet"), some(r.Anywhere))
		}
		return
	}
	result, drops := ok, ""
	if r.Known {
		drops = fmt.Sprintf("; %s dropped by it on this node", counted(r.Drops, "packet"))
		if r.Drops > 0 {
			result = note
			c.suspect(AnswersFiltered, fmt.Sprintf(toFilter, r.Strict[0]),
				"The kernel has dropped %s on this node since rp_filter is strict at %s: answers that come there although the route back to their source leads elsewhere are dropped.",
				counted(r.Drops, "packet"), some(r.Strict))
		}
	}
	if len(r.Filtered) == 0 {
		c.found(name, result, "strict at %s, by which the routes back to the endpoints lead%s", some(r.Strict), drops)
		return
	}
	c.found(name, problem, "strict at %s, by which the routes back to %d of the endpoints do not lead%s", some(r.Strict), len(r.Filtered), drops)
	for _, f := range r.Filtered[:min(len(r.Filtered), mostFiltered)] {
		c.diagnose(problem, AnswersFiltered, fmt.Sprintf(toFilter, f.By), "%s.", f)
	}
}

const (
	mostAddresses = 32 // endpoints of a family to which the ways are looked at
	mostFiltered  = 3  // of those whose answers are dropped, are named
)
