package inspect

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/inspect/reality"
	"nodeproxy/plan"
)

// endpoints is about what listens at the endpoints that are on this node. Nothing is said if there are none, or nothing can be known of them.
func (c *checks) endpoints(ctx context.Context) error {
	list, err := c.reality.Endpoints(ctx, c.ports)
	if err != nil {
		return err
	}
	badly := c.attachments(list)
	if list = slices.DeleteFunc(list, func(l reality.Listening) bool { return badly[l.Addr.Addr()] }); len(list) == 0 {
		return nil
	}
	var refusing []reality.Listening
	for _, l := range list {
		if _, is := c.frontends[l.Addr]; !l.Listens && !is {
			refusing = append(refusing, l)
		}
	}
	switch stuck := c.stuck(list); {
	case len(refusing) > 0:
		severity := note
		for _, alike := range grouped(refusing, reason) {
			first := alike[0]
			differs := slices.ContainsFunc(list, func(l reality.Listening) bool {
				return l.Listens && l.Protocol == first.Protocol && l.Addr.Port() == first.Addr.Port()
			})
			severity = severer(severity, c.refuses(alike, differs))
		}
		c.found(severity, "nothing listens at %d of %d that are known on this node", len(refusing), len(list))
	case stuck > 0:
		c.found(problem, "at %d of %d that are known on this node, what listens does not accept", stuck, len(list))
	default:
		c.found(ok, "something listens at all that are known on this node: %d", len(list))
	}
	return nil
}

// reason is the same for endpoints that refuse what they get for the same reason.
func reason(l reality.Listening) string {
	l.Addr = netip.AddrPortFrom(netip.IPv4Unspecified(), l.Addr.Port()) // which matters
	return fmt.Sprint(l)
}

// grouped puts together what has the same key, in the order of the first of each.
func grouped[T any, K comparable](list []T, key func(T) K) [][]T {
	var out [][]T
	at := map[K]int{}
	for _, v := range list {
		i, known := at[key(v)]
		if !known {
			i = len(out)
			at[key(v)], out = i, append(out, nil)
		}
		out[i] = append(out[i], v)
	}
	return out
}

// attachments is about Pods that are not attached to this node as they should be. It returns their addresses.
func (c *checks) attachments(list []reality.Listening) (said map[netip.Addr]bool) {
	const routes = "see the routes in the Pod, which the network plugin makes: nsenter -t PID -n ip route, with the PID of a process of the Pod"
	unmasqueraded := either(c.any(func(sp *plan.ServicePort) bool { return sp.ExternalPolicy == plan.Local && sp.HasExternal() }), problem, note)
	said = map[netip.Addr]bool{}
	for _, l := range list {
		a, at := l.Addr.Addr(), l.Attachment
		if !l.Several && at == (reality.Attachment{}) || said[a] {
			continue
		}
		said[a] = true
		wrongs := []struct { // The first that holds is told.
			holds                           bool
			severity, code, do, found, what string
		}{
			{l.Several, problem, SharedAddress, "see what gives addresses to Pods on this node (the network plugin's IPAM), and delete the Pods that have this one: kubectl get pods -A -o wide | grep -w {address}",
				"several Pods have the address {address}", "More than one Pod on this node has the address of endpoint {endpoint}, and connections go to one or the other."},
			{at.Down, problem, Detached, "see which is down, and what has taken it down: ip link; ip link set NAME up",
				"{link or bridge} is down", "Endpoint {endpoint} is in a Pod whose interface on this node is down ({link or bridge}), and connections that go there fail."},
			{at.By != "", problem, NoRoute, "see what has made that route, and whether interfaces have the same network: ip addr; ip rule; ip route get {address}",
				"{address} is at {link}, and not at {by}", "Endpoint {endpoint} is in a Pod of this node, at {port of bridge}, but packets for it leave by {by}, and connections that go there fail."},
			{at.Loose, problem, Detached, "ip link set {link} master {bridge}, and see what has taken it out; or delete the Pod, so that another takes its place",
				"{link} is not a port of {bridge}", "Endpoint {endpoint} is in a Pod whose interface on this node, {link}, is not a port of {bridge}, by which packets for it leave, and connections that go there fail."},
			{at.Wrong != "", problem, WrongNeighbour, "delete the entry, which somebody has made (permanent), and see who: ip neigh show to {address}",
				"{address} is not at {wrong}", "This node sends what is for endpoint {endpoint} to {wrong}, by an entry of its neighbours that is permanent, but no interface of the Pod has that address, and connections that go there fail."},
			{at.NoRoute == "" && at.NoDefault != "" && at.MTU == at.OwnMTU, unmasqueraded, NoRoute, routes, "the Pod of {address} has no route to other hosts",
				"Endpoint {endpoint} is in a Pod that has no route to other hosts ({no default}): what reaches it without being masqueraded, as with externalTrafficPolicy Local, is not answered."},
			{at.NoRoute != "", problem, NoRoute, routes, "answers of the Pod of {address} do not get here",
				"Endpoint {endpoint} is in a Pod whose answers do not get to this node ({no route}), and connections from here, the node's own and masqueraded ones, fail."},
			{true, problem, DifferentMTU, "give both the same MTU, in the configuration of the network plugin", "{link} has an MTU of {mtu}, and its other end {own mtu}",
				"Endpoint {endpoint} is in a Pod whose interface has an MTU of {own mtu} bytes, while its other end on this node, {link}, has {mtu}: packets longer than the smaller are lost without a word, so that connections begin and then hang."},
		}
		fill := strings.NewReplacer("{address}", a.String(), "{endpoint}", l.Addr.String(), "{link}", at.Link, "{bridge}", at.Bridge, "{by}", at.By, "{wrong}", at.Wrong,
			"{link or bridge}", at.Link+with(" or its bridge ", at.Bridge), "{port of bridge}", at.Link+with(", a port of ", at.Bridge),
			"{no route}", at.NoRoute, "{no default}", at.NoDefault, "{mtu}", fmt.Sprint(at.MTU), "{own mtu}", fmt.Sprint(at.OwnMTU)).Replace
		for _, w := range wrongs {
			if w.holds {
				c.found(w.severity, "%s", fill(w.found))
				c.diagnose(w.severity, w.code, fill(w.do), "%s", fill(w.what))
				c.about(a)
				break
			}
		}
	}
	return said
}

// stuck is about endpoints whose programs listen and do not take what comes. It returns how many there are.
func (c *checks) stuck(list []reality.Listening) (n int) {
	for _, l := range list {
		if _, is := c.frontends[l.Addr]; l.Waiting == 0 || is {
			continue
		}
		where, what := either(l.Pod, "in its Pod", "on this node"), counted(l.Waiting, either(l.Protocol == plan.UDP, "byte", "connection"))
		if n++; n <= mostFiltered {
			c.diagnose(problem, EndpointStuck, "see whether the program hangs or has too much to do, and have its readiness probe ask this port",
				"Endpoint %s gets traffic, but the program that listens at port %d/%s %s does not take it now, and clients wait. Its queue had %s, and no less a moment later.",
				l.Addr, l.Addr.Port(), l.Protocol, where, what)
		}
	}
	return n
}

// refuses says why endpoints refuse what they get, all for the same reason, and returns how bad that is. differs says that something listens at this port
// of other endpoints.
func (c *checks) refuses(alike []reality.Listening, differs bool) (severity string) {
	l, names := alike[0], words(alike, func(l reality.Listening) string { return l.Addr.String() })
	severity = problem
	who, where := "Endpoint "+names[0]+" gets traffic, but refuses it", either(l.Pod, "in its Pod", "on this node")
	if len(names) > 1 {
		who, where = "Endpoints "+some(names)+" get traffic, but refuse it", either(l.Pod, "in their Pods", "on this node")
	}
	at := fmt.Sprintf("port %d/%s %s", l.Addr.Port(), l.Protocol, where)
	alone := func(how string) string { return "what listens at " + at + " does so " + how + " alone" }
	var do, why string
	switch {
	case l.Loopback:
		if l.Pod && len(l.Others) > 0 { // A service mesh does that.
			severity, who = note, who+", unless another program there passes it on"
		}
		do, why = "have the program listen at all addresses (0.0.0.0 or ::)", alone("at a loopback address")
	case len(l.At) > 0:
		do, why = "have the program listen at all addresses (0.0.0.0 or ::), or at this one", alone("at "+some(words(l.At, netip.Addr.String)))
	case l.OtherFamily:
		other := either(l.Addr.Addr().Is6(), plan.IPv4.String(), plan.IPv6.String())
		do, why = "have the program listen by both families (at ::, without IPV6_V6ONLY), or limit spec.ipFamilies to "+other, alone("by "+other)
	case l.Other != "":
		do = fmt.Sprintf("set spec.ports[].protocol to %s, and that of the container port", l.Other)
		why = fmt.Sprintf("nothing listens at %s, but something does at %d/%s", at, l.Addr.Port(), l.Other)
	default:
		do, why = "set spec.ports[].targetPort to the port at which the program listens, or have it listen at this one", "nothing listens at "+at
		if differs {
			do = "have its program listen at this port, as those of other endpoints do, or, if it is another app's Pod, have spec.selector leave it out"
		}
		switch list := words(l.Others, number); {
		case !l.Pod: // They are those of all programs of the node.
		case len(list) == 1:
			why += "; the only port at which anything does is " + list[0]
		case len(list) > 1:
			why += "; the ports at which anything does are " + some(list)
		}
	}
	c.diagnose(severity, EndpointRefuses, do, "%s: %s.", who, why)
	return severity
}

// used are the addresses of endpoints of a family that get traffic, up to a number, and how many there are.
func (c *checks) used(f plan.Family) (some []netip.Addr, all int) {
	seen := map[netip.Addr]bool{}
	for _, sp := range c.ports {
		for _, ep := range sp.All() {
			if a := ep.Addr.Addr(); sp.Key.Family == f && !seen[a] {
				seen[a] = true
				if len(some) < mostAddresses {
					some = append(some, a)
				}
			}
		}
	}
	return some, len(seen)
}
