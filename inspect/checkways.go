package inspect

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/inspect/reality"
	"nodeproxy/plan"
)

// ways is about the ways to endpoints, and to the Service itself.
func (c *checks) ways(ctx context.Context) error {
	var to reality.Places
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
		return nil
	}
	of := "the " + counted(all, "endpoint") + " in use"
	if all > len(to.Endpoints) {
		of = fmt.Sprintf("%d of the %d endpoints in use, which are those that were looked at", len(to.Endpoints), all)
	}
	w, err := c.reality.Ways(ctx, to)
	if err != nil {
		return err
	}
	c.notForwarded(w)
	if len(w.Unreached)+len(w.NotForwarded)+len(w.NotForwardedBy) == 0 {
		c.found(ok, "there is one to %s", either(all > 1, "each of ", "")+of)
	}
	c.tell(w.Unreached, "%s (%s)", problem, NoRoute, c.name, "none to {number} of "+of,
		"see whether the network plugin runs on this node and on theirs, and whether it has left a route: ip route show table all match {address}",
		"The kernel sends nothing to {number} of "+of+", and connections that go there fail: {list}.")
	c.unrouted(w.Unrouted)
	c.strayed(w)
	do := "see whether the addresses are right, where the Pods are, whether two nodes have the same range (spec.podCIDR), and whether those nodes run"
	if !slices.ContainsFunc(slices.Collect(maps.Keys(w.Silent)), func(a netip.Addr) bool { return !c.nowhere[a] }) {
		do = "see whether that host runs, or correct the address where it is written (Endpoints or EndpointSlice)"
	}
	c.tell(w.Silent, "%s (by %s)", problem, NoNeighbour, "next hops", "that of {number} of "+of+" does not answer", do+": ip neigh show; ip route get {address}",
		"Nobody in the network of this node answers for the next hop to {number} of "+of+" (ARP or neighbour discovery), and connections that go there fail: {list}.")
	c.misled(w)
	c.tunnels(w)
	c.clusterIPs(w)
	return nil
}

// tell says what the ways to addresses mean, unless there are none. In the texts, {list} names a few of them, each with what is known of it, {count} and
// {number} say how many endpoints they are, and {address} is the first of them, of which {what} is known. Without a check, only the diagnosis is told.
func (c *checks) tell(of map[netip.Addr]string, each, severity, code, check, found, do, what string) {
	if len(of) == 0 {
		return
	}
	addrs := slices.SortedFunc(maps.Keys(of), netip.Addr.Compare)
	list := words(addrs, func(a netip.Addr) string { return fmt.Sprintf(each, a, of[a]) })
	fill := strings.NewReplacer("{list}", some(list), "{count}", counted(len(addrs), "endpoint"), "{number}", fmt.Sprint(len(addrs)),
		"{address}", addrs[0].String(), "{what}", of[addrs[0]]).Replace
	if check != "" {
		c.foundIn(check, severity, "%s", fill(found))
	}
	c.diagnose(severity, code, fill(do), "%s", fill(what))
	c.about(addrs...)
}

// at returns those endpoints that are on this node, or those that are not.
func (c *checks) at(here bool, of map[netip.Addr]string) map[netip.Addr]string {
	local := map[netip.Addr]bool{}
	for _, sp := range c.ports {
		for _, ep := range sp.All() {
			local[ep.Addr.Addr()] = ep.Local
		}
	}
	of = maps.Clone(of)
	maps.DeleteFunc(of, func(a netip.Addr, _ string) bool { return local[a] != here })
	return of
}

// misled is about endpoints whose packets or answers take a way that is very likely a wrong one.
func (c *checks) misled(w *reality.Ways) {
	c.tell(w.Shut, "%s (%s)", problem, ShutByIPsec, "policies of IPsec", "packets of {count} are dropped",
		"see what manages IPsec on this node, and whether it has agreed on keys: ip xfrm policy; ip xfrm state",
		"A policy of IPsec has the kernel drop packets for endpoints, or their answers, and those connections fail: {list}.")
	c.tell(c.at(true, w.ByDefault), "%s (via %s)", note, LeavesNode, "default route", "it leads to {count} of this node",
		"see whether the network plugin's interface and its address are still there: ip addr; ip route get {address}",
		"Endpoints are Pods of this node, but the node has no route to them but the default one, by which packets leave it; unless something there sends them back, connections fail: {list}.")
	c.tell(c.at(false, w.ByDefault), "%s (via %s)", suspected, NoRoute, "", "",
		"where nodes have routes to each other's Pods, see whether one is missing: ip route get {address}",
		"Packets to endpoints on other nodes leave by the default route: {list}.")
	if c.any(func(sp *plan.ServicePort) bool { return hasKind(sp, plan.NodePort) }) {
		c.tell(w.Unserved, "%s (%s)", note, NodePortsNowhere, "", "",
			"if clients use these, set nodePortAddresses to all or to their range, or correct the Node's InternalIP (--node-ip of the kubelet)",
			"Node ports do not answer at these addresses of this node, as nodePortAddresses limits them to others: {list}.")
	}
	c.tell(c.at(false, w.Fixed), "%s (by %s)", suspected, WrongNeighbour, "", "",
		"compare it with that node's interface, and delete it if nothing needs it: ip neigh show; ip route get {address}",
		"Somebody has made an entry of this node's neighbours (permanent) for the next hop to endpoints, so that the kernel asks nobody where it is; if that is not right any more, connections that go there fail: {list}.")
	if c.any((*plan.ServicePort).HasExternal) {
		severity, check := note, "routes of answers"
		if w.Marked { // Marks may have them go back where they came from.
			severity, check = suspected, ""
		}
		c.tell(w.Astray, "%s (by %s)", severity, AnswersAstray, check, "those to clients outside leave by {what}, not by "+w.Uplink,
			"see the rules for routing, and except what comes from endpoints: ip rule; ip route get 198.51.100.7 from {address} iif INTERFACE",
			"The answers of endpoints to clients outside leave by another interface than "+w.Uplink+", to which the default route leads, as a rule for routing has it; if clients come by that, they most likely get no answer: {list}.")
	}
}

// tunnels is about tunnels that lead astray, and networks that overlap.
func (c *checks) tunnels(w *reality.Ways) {
	c.tell(w.Looped, "%s (%s)", problem, NoRoute, "tunnels", "one sends packets for {count} to this node itself",
		"see which address the other node has told the network plugin: two nodes with one InternalIP, as machines of Vagrant may have, need another interface for it (flannel: --iface; kubelet: --node-ip)",
		"A tunnel sends packets for endpoints on other nodes to an address of this node, and connections that go there fail: {list}.")
	c.tell(w.Lost, "%s (%s)", problem, NoRoute, "tunnels", "one knows no host for {count}",
		"see whether the network plugin runs on this node and knows the other: bridge fdb show dev NAME",
		"A tunnel has no entry for the next hop to endpoints on other nodes, and connections that go there fail: {list}.")
	c.tell(w.Captive, "%s (%s)", problem, Overlap, "networks of this node", "one has the cluster IP: {list}",
		"give Services and Pods ranges that have no address in common (--service-cluster-ip-range, --cluster-cidr)",
		"The cluster IP is in the network of a bridge, so that Pods there look for it among themselves, and their connections fail: {list}.")
	if len(w.Overlaps) > 0 {
		severity := either(c.any((*plan.ServicePort).HasExternal), problem, note)
		c.foundIn("networks of this node", severity, "some overlap: %s", some(w.Overlaps))
		c.diagnose(severity, Overlap, "give Pods a range that no host has: ip addr; ip route", "Networks of this node overlap, so that it looks for some hosts in the wrong one, and those can't reach the Service: %s.", some(w.Overlaps))
	}
	if w.Narrow != "" {
		c.diagnose(note, LongPackets, "set the MTU of Pods in the configuration of the network plugin to no more than that",
			"Pods send packets of up to %d bytes, and %s takes %d: what is longer gets through only if its sender learns that by ICMP errors.", w.PodMTU, w.Narrow, w.NarrowMTU)
	}
}

// clusterIPs is about the Service's own addresses, and about Pods that connect to these.
func (c *checks) clusterIPs(w *reality.Ways) {
	c.tell(w.Cut, "%s (%s)", problem, NoRoute, "route to the cluster IP", "none: {list}",
		"give this node a default route, or one to the range of cluster IPs; by which interface does not matter: ip route get {address}",
		"What this node itself sends to the cluster IP fails before it meets any rule, since the kernel has no route there: {list}. Pods have routes of their own.")
	if !c.masqueradeAll {
		here := c.at(true, w.Bridged) // Of others, it is a bridge to other nodes.
		setting := "net.bridge.bridge-nf-call-iptables"
		if len(here) > 0 && slices.MinFunc(slices.Collect(maps.Keys(here)), netip.Addr.Compare).Is6() {
			setting = "net.bridge.bridge-nf-call-ip6tables"
		}
		c.tell(here, "%s (%s)", problem, Bridged, "bridges", setting+" is 0 or missing",
			"load the module br_netfilter, set "+setting+" to 1, and see that both happen at every start",
			"What goes from Pod to Pod within a bridge passes no rule ("+setting+" is 0, or the module br_netfilter is not loaded): a Pod that connects to the cluster IP, and gets an endpoint at its own bridge, gets answers from an address that it did not ask. Endpoints at a bridge: {list}.")
		c.tell(w.NoHairpin, "%s (port %s)", note, NoHairpin, "", "",
			"set hairpinMode in the configuration of the network plugin (bridge); at once: ip link set {what} type bridge_slave hairpin on",
			"A Pod can't reach itself by this Service, since hairpin mode is off at its bridge's port: {list}. Connections of its own that are sent to it hang; those of others do not.")
	}
	c.tell(w.Unclaimed, "%s (%s)", note, Unclaimed, "", "", "give it to a node, or have something announce it or route it to one",
		"External IP in the network of an interface, but no address of this node: {list}. nodeproxy announces none, so that clients of that network get there only if another node or program answers for it.")
}

// strayed is about endpoints on other nodes that this node looks for in a network of its own: a bridge that has their range, mostly. It takes them
// from those whose next hop does not answer.
func (c *checks) strayed(w *reality.Ways) {
	for _, sp := range c.ports {
		for _, ep := range sp.All() {
			a := ep.Addr.Addr()
			name, near := w.Near[a]
			if _, silent := w.Silent[a]; !near || !silent || ep.Local || c.nowhere[a] {
				continue
			}
			delete(w.Silent, a)
			c.foundIn("next hops", problem, "%s does not answer at %s", a, name)
			c.diagnose(problem, NoNeighbour, fmt.Sprintf("if endpoints of other nodes are not to be reached by %s, give it another range, or remove it: ip addr show dev %s; ip route get %s", name, name, a),
				"Endpoint %s is on another node, but this node looks for it in the network of its own interface %s, where nobody answers for it, and connections that go there fail.", a, name)
		}
	}
}

// unrouted is about endpoints to which nothing is forwarded of what comes from elsewhere.
func (c *checks) unrouted(list []reality.Unrouted) {
	if !c.any((*plan.ServicePort).HasExternal) {
		list = slices.DeleteFunc(list, func(r reality.Unrouted) bool { return r.From.Outside })
	}
	if !c.any(func(sp *plan.ServicePort) bool { return sp.ExternalPolicy == plan.Cluster }) { // Nothing is masqueraded.
		list = slices.DeleteFunc(list, func(r reality.Unrouted) bool { return r.From.Mark != 0 })
	}
	why := func(r reality.Unrouted) reality.Unrouted { return reality.Unrouted{From: r.From, Why: r.Why} }
	for _, alike := range grouped(list, why) {
		first, addrs := alike[0], words(alike, func(r reality.Unrouted) string { return r.Addr.String() })
		marked, command := "", fmt.Sprintf("ip rule; ip route get %s from %s iif %s", first.Addr, first.From.Addr, first.From.By)
		if first.From.Mark != 0 {
			marked = fmt.Sprintf(" and is marked to be masqueraded (%#x)", first.From.Mark)
			command += fmt.Sprintf(" mark %#x", first.From.Mark)
		}
		c.foundIn("routes for others", problem, "none for what comes from %s by %s%s", first.From.Name, first.From.By, marked)
		c.diagnose(problem, NoRoute, "see the rules for routing: "+command,
			"This node has a route to the endpoints, but for what comes from %s by %s%s there is none that leads there (%s), as a rule for routing has it, and those connections hang: %s.",
			first.From.Name, first.From.By, marked, first.Why, some(addrs))
	}
}

// notForwarded is about what this node does not forward, of a family or from an interface.
func (c *checks) notForwarded(w *reality.Ways) {
	for _, f := range w.NotForwarded {
		what, do := notForwarding(f)
		c.foundIn("forwarding", problem, "%s is 0", forwards(f))
		c.diagnose(problem, NotForwarded, do, "%s", what)
	}
	for _, name := range w.NotForwardedBy {
		setting := "net.ipv4.conf." + name + ".forwarding"
		c.foundIn("forwarding", problem, "%s is 0", setting)
		c.diagnose(problem, NotForwarded, "set "+setting+" to 1, and see what has cleared it",
			"This node does not forward what comes by %s (%s is 0): connections from there to endpoints elsewhere or in Pods fail, and so do others whose endpoints answer from there.", name, setting)
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

// toFilter is what to do about strict rp_filter at an interface.
const toFilter = "have the same routes hold for answers (ip rule), or set net.ipv4.conf.%s.rp_filter to 2, which is loose"

// reverse is about answers that the kernel does not take.
func (c *checks) reverse(ctx context.Context) error {
	endpoints, _ := c.used(plan.IPv4)
	if len(endpoints) == 0 {
		return nil
	}
	r, err := c.reality.Reverse(ctx, endpoints)
	if err != nil {
		return err
	}
	if len(r.Strict) == 0 { // Then it does not matter for answers.
		if r.Known && r.Drops > 0 && len(r.Anywhere) > 0 && c.any((*plan.ServicePort).HasExternal) {
			c.found(note, "strict at %s; %s dropped by it on this node", some(r.Anywhere), counted(r.Drops, "packet"))
			c.diagnose(note, AnswersFiltered, fmt.Sprintf("if clients come there, have a route lead back to them, or set net.ipv4.conf.%s.rp_filter to 2, which is loose", r.Anywhere[0]),
				"The kernel has dropped %s on this node since rp_filter is strict at %s: clients that come by another interface than that of the route back to them get nowhere.",
				counted(r.Drops, "packet"), some(r.Anywhere))
		}
		return nil
	}
	result, drops := ok, ""
	if r.Known {
		drops = fmt.Sprintf("; %s dropped by it on this node", counted(r.Drops, "packet"))
		if r.Drops > 0 {
			result = note
			c.diagnose(suspected, AnswersFiltered, fmt.Sprintf(toFilter, r.Strict[0]),
				"The kernel has dropped %s on this node since rp_filter is strict at %s: answers that come there although the route back to their source leads elsewhere are dropped.",
				counted(r.Drops, "packet"), some(r.Strict))
		}
	}
	if len(r.Filtered) == 0 {
		c.found(result, "strict at %s, by which the routes back to the endpoints lead%s", some(r.Strict), drops)
		return nil
	}
	c.found(problem, "strict at %s, by which the routes back to %d of the endpoints do not lead%s", some(r.Strict), len(r.Filtered), drops)
	for _, f := range r.Filtered[:min(len(r.Filtered), mostFiltered)] {
		c.diagnose(problem, AnswersFiltered, fmt.Sprintf(toFilter, f.By), "%s.", f)
	}
	return nil
}

const (
	mostAddresses = 32 // endpoints of a family to which the ways are looked at
	mostFiltered  = 3  // of those whose answers are dropped, are named
)
