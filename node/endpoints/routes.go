package endpoints

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"nodeproxy/inspect/reality"
	"nodeproxy/kernel/host"
	"nodeproxy/plan"
)

// View is this node's interfaces, as they were when it was made, by which the ways to addresses are told.
type View struct {
	// Uplink is the interface of the default route of IPv4, by which packets of other hosts come on most nodes; "" if that is not known.
	Uplink string

	sysctls string // /proc/sys
	err     error  // why the interfaces are not known; nil if they are
	links   map[int]host.Link
	direct  host.Link  // that of the default route in the main table; the zero value if there is none
	gateway netip.Addr // its next hop
}

// See looks at the interfaces of the network namespace of the calling thread. sysctls is /proc/sys. If it can't, methods return why.
func See(sysctls string) *View {
	links, err := host.Links()
	v := &View{sysctls: sysctls, links: links, err: err}
	uplink, gateway, known := host.Default()
	v.direct, v.gateway = links[uplink], gateway
	if known {
		v.Uplink = v.direct.Name
	} else if r, by, one := v.leave(somewhere, host.Way{}); one && r.Via.IsValid() { // It has several hops, or is in another table.
		v.Uplink = by.Name
	}
	return v
}

// leave returns the route for packets to an address, and the interface by which they leave; false if that is not a single one, or the address is
// this node's.
func (v *View) leave(to netip.Addr, w host.Way) (r host.Route, by host.Link, one bool) {
	r, err := host.RouteTo(to, w)
	if err != nil || r.Local || len(r.Links) != 1 {
		return r, host.Link{}, false
	}
	return r, v.links[r.Links[0]], true
}

// By returns the name of the interface by which packets leave for an address; "" where that is not known, or the address is this node's.
func (v *View) By(a netip.Addr) string {
	_, by, _ := v.leave(a, host.Way{})
	return by.Name
}

// LookOut looks at the ways to addresses of a Service, for this node and for others.
func (v *View) LookOut(ctx context.Context, to reality.Places, from []reality.Origin) (*reality.Ways, error) {
	silent, err := host.Silent(ctx)
	if err = cmp.Or(v.err, err); err != nil {
		return nil, err
	}
	l := &lookout{View: v, from: from, silent: silent, others: map[int]bool{}, without: map[int]map[netip.Addr]string{}, away: map[plan.Family]bool{},
		ways: &reality.Ways{Uplink: v.Uplink}}
	if l.addressed, err = l.networks(to); err != nil {
		return nil, err
	}
	if v.direct.MTU > 0 {
		l.narrow(v.direct)
	}
	if l.fixed, err = host.Fixed(); err != nil {
		return nil, err
	}
	l.policies, _ = host.Shut() // Without them, none is known.
	if l.ways.Marked, err = host.RuledByMark(); err != nil {
		return nil, err
	}
	if err := l.each(ctx, to.Endpoints, &l.ways.Unreached, l.endpoint); err != nil {
		return nil, err
	}
	if err := l.each(ctx, to.ClusterIPs, &l.ways.Cut, func(netip.Addr, host.Route, host.Link) error { return nil }); err != nil {
		return nil, err
	}
	if err := l.each(ctx, to.ExternalIPs, new(map[netip.Addr]string), l.externalIP); err != nil {
		return nil, err
	}
	l.forwarding()
	return l.ways, nil
}

// lookout is one call of LookOut.
type lookout struct {
	*View
	from      []reality.Origin
	silent    map[host.Neighbour]bool
	fixed     map[host.Neighbour]string
	addressed map[int]bool // the interfaces that have addresses of IPv4
	others    map[int]bool // and those of them that have none of Pods' range
	// policies are those of IPsec by which packets are dropped.
	policies []host.Policy
	without  map[int]map[netip.Addr]string // the ports without hairpin mode, by bridge
	away     map[plan.Family]bool          // the families of endpoints elsewhere
	by       []string                      // the interfaces to those of IPv4
	ways     *reality.Ways
}

// note notes something of an address.
func note(in *map[netip.Addr]string, a netip.Addr, what string) {
	if *in == nil {
		*in = map[netip.Addr]string{}
	}
	(*in)[a] = what
}

// each looks for the routes to addresses, and calls routed with those to others by a single interface. It notes in without why there is none.
func (l *lookout) each(ctx context.Context, list []netip.Addr, without *map[netip.Addr]string, routed func(netip.Addr, host.Route, host.Link) error) error {
	for _, a := range list {
		if err := ctx.Err(); err != nil {
			return err
		}
		r, err := host.RouteTo(a, host.Way{})
		if err == nil && !r.Local && len(r.Links) == 1 {
			err = routed(a, r, l.links[r.Links[0]])
		} else if why, none := noRoute(err); none {
			if off := host.WithoutIPv6(); off != "" && a.Is6() {
				why = off
			}
			note(without, a, why)
			err = nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// endpoint looks at the way to an endpoint that is not this node's own.
func (l *lookout) endpoint(a netip.Addr, r host.Route, link host.Link) error {
	l.away[plan.FamilyOf(a)] = true
	if a.Is4() && !slices.Contains(l.by, link.Name) {
		l.by = append(l.by, link.Name)
	}
	l.refused(a, r, link)
	l.shut(a)
	hop := cmp.Or(r.Via, a)
	if hop != a || link.Kind != "bridge" && link.Kind != "veth" {
		l.narrow(link)
	}
	if at := l.fixed[host.Neighbour{Link: link.Index, Addr: hop}]; at != "" && tunnels[link.Kind] == 0 { // Tunnels have such entries.
		note(&l.ways.Fixed, a, fmt.Sprintf("%s at %s (lladdr %s)", hop, link.Name, at))
	}
	if r.Via.IsValid() && link.Name == l.Uplink && r.Via == l.gateway {
		note(&l.ways.ByDefault, a, fmt.Sprintf("%s by %s", r.Via, link.Name))
	}
	if back, err := host.RouteTo(somewhere, host.Way{From: a, In: link.Index}); a.Is4() && err == nil && len(back.Links) == 1 && l.Uplink != "" {
		by := l.links[back.Links[0]].Name // That of a route to this node itself is lo.
		if by != l.Uplink && by != link.Name {
			note(&l.ways.Astray, a, by)
		}
	}
	if l.silent[host.Neighbour{Link: link.Index, Addr: hop}] {
		note(&l.ways.Silent, a, fmt.Sprintf("%s at %s", hop, link.Name))
		if hop == a {
			note(&l.ways.Near, a, link.Name)
		}
	}
	if link.Kind == "vxlan" {
		to, lost, err := host.Beyond(link.Index, hop)
		if err != nil {
			return err
		}
		if lost {
			note(&l.ways.Lost, a, fmt.Sprintf("%s at %s", hop, link.Name))
		}
		if r, failed := host.RouteTo(to, host.Way{}); to.IsValid() && failed == nil && r.Local {
			note(&l.ways.Looped, a, fmt.Sprintf("%s to %s", link.Name, to))
		}
	}
	if link.Kind != "bridge" || hop != a {
		return nil
	}
	if !BridgeFiltered(l.sysctls, link.Name, plan.FamilyOf(a)) {
		note(&l.ways.Bridged, a, link.Name)
		return nil
	}
	if l.without[link.Index] == nil {
		var err error
		if l.without[link.Index], err = host.WithoutHairpin(link.Index); err != nil {
			return err
		}
	}
	if port := l.without[link.Index][a]; port != "" {
		note(&l.ways.NoHairpin, a, port)
	}
	return nil
}

// foreign are how names of bridges begin that are not those of Pods: Docker's, libvirt's and LXC's.
var foreign = []string{"docker", "br-", "virbr", "lxc"}

func isForeign(l host.Link) bool {
	return slices.ContainsFunc(foreign, func(prefix string) bool { return strings.HasPrefix(l.Name, prefix) })
}

// ofPods reports whether an interface is a bridge between Pods, and not that of a network outside, too.
func (v *View) ofPods(bridge host.Link) bool {
	if bridge.Kind != "bridge" || isForeign(bridge) {
		return false
	}
	pods := false
	for _, port := range v.links {
		pod := port.Kind == "veth" && port.PeerNamespace >= 0
		if port.Master == bridge.Index && !pod && port.Kind != "vxlan" {
			return false
		}
		pods = pods || port.Master == bridge.Index && pod
	}
	return pods
}

// narrow notes an interface by which packets leave that are shorter than those which Pods send.
func (l *lookout) narrow(by host.Link) {
	for _, pod := range l.links {
		if pod.Kind == "veth" && pod.PeerNamespace >= 0 && !l.addressed[pod.Index] && !isForeign(l.links[pod.Master]) && !l.others[pod.Master] && pod.MTU > max(by.MTU, l.ways.PodMTU) {
			l.ways.Narrow, l.ways.PodMTU, l.ways.NarrowMTU = by.Name, pod.MTU, by.MTU
		}
	}
}

// networks returns the interfaces that have addresses of IPv4, and notes which of their networks overlap, and which of those of bridges have cluster IPs.
func (l *lookout) networks(to reality.Places) (map[int]bool, error) {
	list, err := host.Filter{}.Addresses(plan.IPv4)
	out, pods := map[int]bool{}, map[int]bool{}
	for _, a := range list {
		out[a.Index] = true
		pods[a.Index] = pods[a.Index] || !to.Pods.IsValid() || to.Pods.Contains(a.Addr)
		l.others[a.Index] = !pods[a.Index]
		for _, ip := range to.ClusterIPs {
			if l.ofPods(l.links[a.Index]) && !a.Network.IsSingleIP() && a.Network.Contains(ip) {
				note(&l.ways.Captive, ip, l.links[a.Index].Name)
			}
		}
		for _, b := range list {
			bridge, other := l.links[a.Index], l.links[b.Index]
			apart := l.ofPods(bridge) && other.Kind != "bridge" && other.Kind != "dummy" && !b.Addr.IsLoopback() && bridge.Up && other.Up
			if apart && !a.Network.IsSingleIP() && !b.Network.IsSingleIP() && a.Network.Overlaps(b.Network) {
				l.ways.Overlaps = append(l.ways.Overlaps, fmt.Sprintf("%s of %s and %s of %s", a.Network, bridge.Name, b.Network, other.Name))
			}
		}
	}
	return out, err
}

// shut notes the policy of IPsec that concerns all packets to an address, or all that come from there.
func (l *lookout) shut(a netip.Addr) {
	for _, p := range l.policies {
		switch {
		case p.To.Contains(a) && p.From.Bits() == 0:
			note(&l.ways.Shut, a, p.String())
		case p.From.Contains(a) && p.To.Bits() == 0 && p.Incoming:
			note(&l.ways.Shut, a, p.String())
		}
	}
}

// refused notes the origins for whose packets to an address the kernel has no route, or another one than its own, which leads to a Pod of this node; of an
// interface, the first.
func (l *lookout) refused(to netip.Addr, route host.Route, own host.Link) {
	for _, o := range l.from {
		said := slices.ContainsFunc(l.ways.Unrouted, func(u reality.Unrouted) bool { return u.Addr == to && u.From.By == o.By })
		if said || plan.FamilyOf(to) != plan.FamilyOf(o.Addr) || to == o.Addr {
			continue
		}
		for _, link := range l.links {
			if link.Name != o.By {
				continue
			}
			r, err := host.RouteTo(to, host.Way{From: o.Addr, In: link.Index, Mark: o.Mark})
			switch why, none := noRoute(err); {
			case none && !errors.Is(err, unix.EXDEV): // which is of rp_filter
				l.ways.Unrouted = append(l.ways.Unrouted, reality.Unrouted{Addr: to, From: o, Why: why})
			case err == nil && !r.Local && len(r.Links) == 1 && r.Links[0] != own.Index && !route.Via.IsValid() && (own.Kind == "veth" || own.Kind == "bridge"):
				l.ways.Unrouted = append(l.ways.Unrouted, reality.Unrouted{Addr: to, From: o, Why: "it goes by " + l.links[r.Links[0]].Name})
			}
		}
	}
}

// externalIP looks whether an external IP is in the network of an interface.
func (l *lookout) externalIP(a netip.Addr, r host.Route, link host.Link) error {
	if !r.Via.IsValid() && link.Kind != "bridge" && link.Kind != "dummy" {
		note(&l.ways.Unclaimed, a, link.Name)
	}
	return nil
}

// forwarding looks whether packets are forwarded, from each interface that matters. Where they are not, there is no route for them either.
func (l *lookout) forwarding() {
	for _, f := range plan.Families {
		if l.away[f] && !forwards(l.sysctls, f) {
			l.ways.NotForwarded = append(l.ways.NotForwarded, f)
			l.ways.Unrouted = slices.DeleteFunc(l.ways.Unrouted, func(u reality.Unrouted) bool { return plan.FamilyOf(u.Addr) == f })
		}
	}
	if !l.away[plan.IPv4] || slices.Contains(l.ways.NotForwarded, plan.IPv4) {
		return
	}
	names := append(l.by, l.Uplink)
	for _, o := range l.from {
		names = append(names, o.By)
	}
	for _, name := range names {
		value, _ := sysctl(l.sysctls, "net/ipv4/conf", name, "forwarding")
		if name != "" && value == "0" && !slices.Contains(l.ways.NotForwardedBy, name) {
			l.ways.NotForwardedBy = append(l.ways.NotForwardedBy, name)
		}
	}
	slices.Sort(l.ways.NotForwardedBy)
	l.ways.Unrouted = slices.DeleteFunc(l.ways.Unrouted, func(u reality.Unrouted) bool { return slices.Contains(l.ways.NotForwardedBy, u.From.By) })
}

// BridgeFiltered reports whether packets from one port of a bridge to another pass the rules of a family, so that their addresses are translated
// (module br_netfilter).
func BridgeFiltered(sysctls, bridge string, f plan.Family) bool {
	name := map[plan.Family]string{plan.IPv4: "iptables", plan.IPv6: "ip6tables"}[f]
	all, known := sysctl(sysctls, "net/bridge/bridge-nf-call-"+name)
	its, has := sysctl("/sys/class/net", bridge, "bridge/nf_call_"+name)
	return known && all != "0" || has && its != "0"
}

// sysctl returns a setting of the kernel; false if it can't be read.
func sysctl(path ...string) (value string, known bool) {
	text, err := os.ReadFile(filepath.Join(path...))
	return strings.TrimSpace(string(text)), err == nil
}

// Detour says in what the way of a client's packets to an endpoint differs from that of this node's own; "" if in nothing, or if that is not known.
func (v *View) Detour(from, to netip.Addr) string {
	_, back, known := v.leave(from, host.Way{})
	own, by, one := v.leave(to, host.Way{})
	if !known || !one || back.Name == "" || by.Name == "" { // Of an interface that is newer than the view, nothing is known.
		return ""
	}
	say := func(r host.Route, by host.Link) string {
		s := "by " + by.Name
		if r.Via.IsValid() {
			s += " via " + r.Via.String()
		}
		return s
	}
	r, err := host.RouteTo(to, host.Way{From: from, In: back.Index})
	switch {
	case errors.Is(err, unix.ENETUNREACH):
		return fmt.Sprintf("what this node sends there goes %s, but for what comes from %s there is no route (ip rule)", say(own, by), from)
	case err == nil && len(r.Links) == 1 && (r.Links[0] != by.Index || r.Via != own.Via):
		return fmt.Sprintf("what comes from %s goes %s, and what this node sends there %s (ip rule)", from, say(r, v.links[r.Links[0]]), say(own, by))
	}
	return ""
}

// tunnels are the protocols by which kinds of interfaces send.
var tunnels = map[string]byte{
	"vxlan": unix.IPPROTO_UDP, "geneve": unix.IPPROTO_UDP, "ipip": unix.IPPROTO_IPIP, "gre": unix.IPPROTO_GRE, "gretap": unix.IPPROTO_GRE, "sit": unix.IPPROTO_IPV6,
}

// Tunnels returns the tunnels by which packets leave for the endpoints of ServicePorts, up to a number of endpoints.
func (v *View) Tunnels(ports []*plan.ServicePort) []reality.Tunnel {
	var out []reality.Tunnel
	left := most
	for _, sp := range ports {
		for _, ep := range sp.All()[:min(left, len(sp.All()))] {
			left--
			r, l, one := v.leave(ep.Addr.Addr(), host.Way{})
			if !one {
				continue
			}
			t := reality.Tunnel{Name: l.Name, Protocol: tunnels[l.Kind], Port: l.Port, By: v.links[l.Under].Name, Peer: r.Via}
			if l.Kind == "vxlan" {
				t.Peer, _, _ = host.Beyond(l.Index, cmp.Or(r.Via, ep.Addr.Addr())) // Without its entries, it is not known.
			}
			if !t.Peer.Is4() {
				t.Peer = netip.Addr{}
			}
			if to, err := host.RouteTo(t.Peer, host.Way{}); t.By == "" && t.Peer.IsValid() && err == nil && len(to.Links) == 1 {
				t.By = v.links[to.Links[0]].Name
			}
			if t.By = cmp.Or(t.By, v.Uplink); t.Protocol != 0 && !slices.Contains(out, t) {
				out = append(out, t)
			}
		}
	}
	return out
}

// somewhere stands for a host outside: an address for documentation (RFC 5737).
var somewhere = netip.MustParseAddr("198.51.100.7")

// Outside is what comes from other hosts by the uplink; false if that is not known.
func (v *View) Outside() (reality.Origin, bool) {
	return reality.Origin{Name: "outside", By: v.Uplink, Addr: somewhere, Outside: true}, v.Uplink != ""
}

// Near reports whether an address is in a network of this node, so that its neighbours ask for it there, and not one of the node's own, nor one for which
// it answers.
func Near(a netip.Addr) bool {
	r, err := host.RouteTo(a, host.Way{})
	return err == nil && !r.Local && !r.Via.IsValid() && !host.Proxied(a)
}

// Outward returns those of this node's addresses of IPv4 that other hosts may use, of some, with their interfaces: not those of bridges, tunnels and the
// like.
func (v *View) Outward(some func(netip.Addr) bool) (map[netip.Addr]string, error) {
	list, err := host.Filter{}.Addresses(plan.IPv4)
	out := map[netip.Addr]string{}
	for _, a := range list {
		l := v.links[a.Index]
		// The uplink of a node in a container is one end of a pair.
		outward := slices.Contains([]string{"device", "bond", "team", "vlan"}, l.Kind) || l.Name == v.Uplink
		if outward && l.Name != "lo" && l.Up && a.Addr.IsGlobalUnicast() && some(a.Addr) {
			out[a.Addr] = l.Name
		}
	}
	return out, cmp.Or(v.err, err)
}

// PodsHere returns the range within which this node's Pods have their addresses, and the interface by which the packets of all of them come: "" if each has
// its own, or that is not known. within is the range of all Pods, and known are some of this node. The range is invalid if there are none here.
func (v *View) PodsHere(within netip.Prefix, known []netip.Addr) (pods netip.Prefix, by string) {
	networks, err := host.Attached(within)
	if err != nil {
		return netip.Prefix{}, ""
	}
	found := map[int]bool{}
	for _, a := range known {
		if _, l, one := v.leave(a, host.Way{}); one {
			found[l.Index] = true
		}
	}
	for p, index := range networks {
		l := v.links[index]
		if l.Up && l.Name != v.Uplink && (v.ofPods(l) || p.IsSingleIP() && l.Kind == "veth" && l.PeerNamespace >= 0) {
			found[index] = true
		}
	}
	pods = within.Masked()
	if len(found) == 0 {
		return netip.Prefix{}, ""
	}
	for index := range found {
		if len(found) > 1 || v.links[index].Kind != "bridge" {
			return pods, ""
		}
		by = v.links[index].Name
	}
	var its []netip.Prefix
	for p, index := range networks {
		if v.links[index].Name == by {
			its = append(its, p.Masked())
		}
	}
	if len(its) == 1 {
		pods = its[0]
	}
	return pods, by
}

// Bridges are the names of this node's bridges.
func (v *View) Bridges() map[string]bool {
	out := map[string]bool{}
	for _, l := range v.links {
		if l.Kind == "bridge" {
			out[l.Name] = true
		}
	}
	return out
}

// noRoute says why the kernel has no route, by the error of asking for it; false if it is none of that kind.
func noRoute(err error) (why string, none bool) {
	of, none := errors.AsType[syscall.Errno](err)
	switch {
	case !none:
		return "", false
	case of == unix.EINVAL:
		return "its route is of type blackhole", true
	case of == unix.EACCES:
		return "its route is of type prohibit", true
	case of == unix.EHOSTUNREACH:
		return "its route is of type unreachable", true
	}
	return of.Error(), true
}

// forwards reports whether this node forwards packets of a family, from some interface at least; also where that can't be read.
func forwards(sysctls string, f plan.Family) bool {
	settings := []string{filepath.Join(sysctls, "net/ipv6/conf/all/forwarding")}
	if f == plan.IPv4 {
		settings, _ = filepath.Glob(filepath.Join(sysctls, "net/ipv4/conf/*/forwarding")) // It fails only for a malformed pattern.
	}
	read := 0
	for _, path := range settings {
		if name := filepath.Base(filepath.Dir(path)); name == "lo" || name == "default" {
			continue
		}
		value, known := sysctl(path)
		if !known { // The interface may be gone.
			continue
		}
		if read++; value != "0" {
			return true
		}
	}
	return read == 0
}
