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

// LookOut looks at the ways to addresses of a Service, for this node and for others. sysctls is /proc/sys.
func LookOut(ctx context.Context, sysctls string, to reality.Places, from []reality.Origin) (*reality.Ways, error) {
	links, err := host.Links()
	if err != nil {
		return nil, err
	}
	silent, err := host.Silent(ctx)
	if err != nil {
		return nil, err
	}
	l := &lookout{sysctls: sysctls, from: from, links: links, silent: silent, others: map[int]bool{}, without: map[int]map[netip.Addr]string{}, away: map[plan.Family]bool{},
		ways: &reality.Ways{Unreached: map[netip.Addr]string{}, Cut: map[netip.Addr]string{}, Silent: map[netip.Addr]string{}, Near: map[netip.Addr]string{},
			Bridged: map[netip.Addr]string{}, Unclaimed: map[netip.Addr]string{}, NoHairpin: map[netip.Addr]string{}, Fixed: map[netip.Addr]string{},
			ByDefault: map[netip.Addr]string{}, Astray: map[netip.Addr]string{}, Shut: map[netip.Addr]string{}, Looped: map[netip.Addr]string{},
			Lost: map[netip.Addr]string{}, Captive: map[netip.Addr]string{}, Uplink: Uplink()}}
	if l.addressed, err = l.networks(to); err != nil {
		return nil, err
	}
	uplink, gateway, _ := host.Default()
	if l.gateway = gateway; links[uplink].MTU > 0 {
		l.narrow(links[uplink])
	}
	if l.fixed, err = host.Fixed(); err != nil {
		return nil, err
	}
	l.policies, _ = host.Shut() // Without them, none is known.
	if l.ways.Marked, err = host.RuledByMark(); err != nil {
		return nil, err
	}
	if err := l.each(ctx, to.Endpoints, l.ways.Unreached, l.endpoint); err != nil {
		return nil, err
	}
	if err := l.each(ctx, to.ClusterIPs, l.ways.Cut, func(netip.Addr, host.Route, host.Link) error { return nil }); err != nil {
		return nil, err
	}
	if err := l.each(ctx, to.ExternalIPs, map[netip.Addr]string{}, l.externalIP); err != nil {
		return nil, err
	}
	l.forwarding()
	return l.ways, nil
}

// lookout is one call of LookOut.
type lookout struct {
	sysctls   string
	from      []reality.Origin
	links     map[int]host.Link
	silent    map[host.Neighbour]bool
	fixed     map[host.Neighbour]string
	addressed map[int]bool // the interfaces that have addresses of IPv4
	others    map[int]bool // and those of them that have none of Pods' range
	gateway   netip.Addr   // the next hop of the default route
	// policies are those of IPsec by which packets are dropped.
	policies []host.Policy
	without  map[int]map[netip.Addr]string // the ports without hairpin mode, by bridge
	away     map[plan.Family]bool          // the families of endpoints elsewhere
	by       []string                      // the interfaces to those of IPv4
	ways     *reality.Ways
}

// each looks for the routes to addresses, and calls routed with those to others by a single interface. It notes in without why there is none.
func (l *lookout) each(ctx context.Context, list []netip.Addr, without map[netip.Addr]string, routed func(netip.Addr, host.Route, host.Link) error) error {
	for _, a := range list {
		if err := ctx.Err(); err != nil {
			return err
		}
		r, err := host.RouteTo(a, host.Way{})
		var why syscall.Errno
		switch {
		case err == nil && !r.Local && len(r.Links) == 1:
			err = routed(a, r, l.links[r.Links[0]])
		case err != nil && errors.As(err, &why):
			without[a], err = noRoute(why), nil
			if off := host.WithoutIPv6(); off != "" && a.Is6() {
				without[a] = off
			}
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
	if hop := cmp.Or(r.Via, a); hop != a || link.Kind != "bridge" && link.Kind != "veth" {
		l.narrow(link)
	}
	hop := cmp.Or(r.Via, a)
	if at := l.fixed[host.Neighbour{Link: link.Index, Addr: hop}]; at != "" && tunnels[link.Kind] == 0 { // Tunnels have such entries.
		l.ways.Fixed[a] = fmt.Sprintf("%s at %s (lladdr %s)", hop, link.Name, at)
	}
	if r.Via.IsValid() && link.Name == l.ways.Uplink && r.Via == l.gateway {
		l.ways.ByDefault[a] = fmt.Sprintf("%s by %s", r.Via, link.Name)
	}
	if back, err := host.RouteTo(somewhere, host.Way{From: a, In: link.Index}); a.Is4() && err == nil && len(back.Links) == 1 && l.ways.Uplink != "" {
		if by := l.links[back.Links[0]].Name; by != l.ways.Uplink && by != link.Name {
			l.ways.Astray[a] = by
		}
	}
	if l.silent[host.Neighbour{Link: link.Index, Addr: hop}] {
		l.ways.Silent[a] = fmt.Sprintf("%s at %s", hop, link.Name)
		if hop == a {
			l.ways.Near[a] = link.Name
		}
	}
	if link.Kind == "vxlan" {
		to, lost, err := host.Beyond(link.Index, hop)
		if err != nil {
			return err
		}
		if lost {
			l.ways.Lost[a] = fmt.Sprintf("%s at %s", hop, link.Name)
		}
		if r, failed := host.RouteTo(to, host.Way{}); to.IsValid() && failed == nil && r.Local {
			l.ways.Looped[a] = fmt.Sprintf("%s to %s", link.Name, to)
		}
	}
	if link.Kind != "bridge" || hop != a {
		return nil
	}
	if !BridgeFiltered(l.sysctls, link.Name, plan.FamilyOf(a)) {
		l.ways.Bridged[a] = link.Name
		return nil
	}
	if l.without[link.Index] == nil {
		var err error
		if l.without[link.Index], err = host.WithoutHairpin(link.Index); err != nil {
			return err
		}
	}
	if port := l.without[link.Index][a]; port != "" {
		l.ways.NoHairpin[a] = port
	}
	return nil
}

// foreign are how names of bridges begin that are not those of Pods: Docker's, libvirt's and LXC's.
var foreign = []string{"docker", "br-", "virbr", "lxc"}

func isForeign(l host.Link) bool {
	return slices.ContainsFunc(foreign, func(prefix string) bool { return strings.HasPrefix(l.Name, prefix) })
}

// ofPods reports whether an interface is a bridge between Pods, and not that of a network outside, too.
func ofPods(links map[int]host.Link, bridge host.Link) bool {
	if bridge.Kind != "bridge" || isForeign(bridge) {
		return false
	}
	pods := false
	for _, port := range links {
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
			if ofPods(l.links, l.links[a.Index]) && !a.Network.IsSingleIP() && a.Network.Contains(ip) {
				l.ways.Captive[ip] = l.links[a.Index].Name
			}
		}
		for _, b := range list {
			bridge, other := l.links[a.Index], l.links[b.Index]
			apart := ofPods(l.links, bridge) && other.Kind != "bridge" && other.Kind != "dummy" && !b.Addr.IsLoopback() && bridge.Up && other.Up
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
			l.ways.Shut[a] = p.String()
		case p.From.Contains(a) && p.To.Bits() == 0 && p.Incoming:
			l.ways.Shut[a] = p.String()
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
			var why syscall.Errno
			if link.Name != o.By {
				continue
			}
			r, err := host.RouteTo(to, host.Way{From: o.Addr, In: link.Index, Mark: o.Mark})
			switch {
			case errors.As(err, &why) && why != unix.EXDEV: // which is of rp_filter
				l.ways.Unrouted = append(l.ways.Unrouted, reality.Unrouted{Addr: to, From: o, Why: noRoute(why)})
			case err == nil && !r.Local && len(r.Links) == 1 && r.Links[0] != own.Index && !route.Via.IsValid() && (own.Kind == "veth" || own.Kind == "bridge"):
				l.ways.Unrouted = append(l.ways.Unrouted, reality.Unrouted{Addr: to, From: o, Why: "it goes by " + l.links[r.Links[0]].Name})
			}
		}
	}
}

// externalIP looks whether an external IP is in the network of an interface.
func (l *lookout) externalIP(a netip.Addr, r host.Route, link host.Link) error {
	if !r.Via.IsValid() && link.Kind != "bridge" && link.Kind != "dummy" {
		l.ways.Unclaimed[a] = link.Name
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
	names := append(l.by, Uplink())
	for _, o := range l.from {
		names = append(names, o.By)
	}
	for _, name := range names {
		text, err := os.ReadFile(filepath.Join(l.sysctls, "net/ipv4/conf", name, "forwarding"))
		if name != "" && err == nil && strings.TrimSpace(string(text)) == "0" && !slices.Contains(l.ways.NotForwardedBy, name) {
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
	for _, setting := range []string{
		filepath.Join(sysctls, "net/bridge/bridge-nf-call-"+name), filepath.Join("/sys/class/net", bridge, "bridge/nf_call_"+name),
	} {
		if text, err := os.ReadFile(setting); err == nil && strings.TrimSpace(string(text)) != "0" {
			return true
		}
	}
	return false
}

// Detour says in what the way of a client's packets to an endpoint differs from that of this node's own; "" if in nothing, or if that is not known.
func Detour(from, to netip.Addr) string {
	back, err := host.RouteTo(from, host.Way{})
	own, failed := host.RouteTo(to, host.Way{})
	if err != nil || failed != nil || back.Local || own.Local || len(back.Links) != 1 || len(own.Links) != 1 {
		return ""
	}
	links, err := host.Links()
	if err != nil {
		return ""
	}
	say := func(r host.Route) string {
		s := "by " + links[r.Links[0]].Name
		if r.Via.IsValid() {
			s += " via " + r.Via.String()
		}
		return s
	}
	r, err := host.RouteTo(to, host.Way{From: from, In: back.Links[0]})
	switch {
	case errors.Is(err, unix.ENETUNREACH):
		return fmt.Sprintf("what this node sends there goes %s, but for what comes from %s there is no route (ip rule)", say(own), from)
	case err == nil && len(r.Links) == 1 && (r.Links[0] != own.Links[0] || r.Via != own.Via):
		return fmt.Sprintf("what comes from %s goes %s, and what this node sends there %s (ip rule)", from, say(r), say(own))
	}
	return ""
}

// By returns what tells the interface by which packets leave for an address; "" where that is not known, or it is the node's own.
func By() func(netip.Addr) string {
	links, err := host.Links()
	return func(a netip.Addr) string {
		r, failed := host.RouteTo(a, host.Way{})
		if err != nil || failed != nil || r.Local || len(r.Links) != 1 {
			return ""
		}
		return links[r.Links[0]].Name
	}
}

// tunnels are the protocols by which kinds of interfaces send.
var tunnels = map[string]byte{
	"vxlan": unix.IPPROTO_UDP, "geneve": unix.IPPROTO_UDP, "ipip": unix.IPPROTO_IPIP, "gre": unix.IPPROTO_GRE, "gretap": unix.IPPROTO_GRE, "sit": unix.IPPROTO_IPV6,
}

// Tunnels returns the tunnels by which packets leave for the endpoints of ServicePorts, up to a number of endpoints.
func Tunnels(ports []*plan.ServicePort) ([]reality.Tunnel, error) {
	links, err := host.Links()
	if err != nil {
		return nil, err
	}
	var out []reality.Tunnel
	left, uplink := most, Uplink()
	for _, sp := range ports {
		for _, ep := range sp.All()[:min(left, len(sp.All()))] {
			left--
			r, err := host.RouteTo(ep.Addr.Addr(), host.Way{})
			if err != nil || r.Local || len(r.Links) != 1 { // There is none, or there are several.
				continue
			}
			l := links[r.Links[0]]
			t := reality.Tunnel{Name: l.Name, Protocol: tunnels[l.Kind], Port: l.Port, By: links[l.Under].Name, Peer: r.Via}
			if l.Kind == "vxlan" {
				t.Peer, _, _ = host.Beyond(l.Index, cmp.Or(r.Via, ep.Addr.Addr())) // Without its entries, it is not known.
			}
			if !t.Peer.Is4() {
				t.Peer = netip.Addr{}
			}
			if to, err := host.RouteTo(t.Peer, host.Way{}); t.By == "" && t.Peer.IsValid() && err == nil && len(to.Links) == 1 {
				t.By = links[to.Links[0]].Name
			}
			if t.By = cmp.Or(t.By, uplink); t.Protocol != 0 && !slices.Contains(out, t) {
				out = append(out, t)
			}
		}
	}
	return out, nil
}

// somewhere stands for a host outside: an address for documentation (RFC 5737).
var somewhere = netip.MustParseAddr("198.51.100.7")

// Outside is what comes from other hosts by the interface of the default route of IPv4; false if that is not known.
func Outside() (reality.Origin, bool) {
	by := Uplink()
	return reality.Origin{Name: "outside", By: by, Addr: somewhere, Outside: true}, by != ""
}

// Uplink returns the interface of the default route of IPv4, by which packets of other hosts come on most nodes; "" if that is not known.
func Uplink() string {
	links, _ := host.Links() // Without them, it is not known.
	index, _, known := host.Default()
	if known {
		return links[index].Name
	}
	if r, err := host.RouteTo(somewhere, host.Way{}); err == nil && r.Via.IsValid() && len(r.Links) == 1 { // It has several hops, or is in another table.
		return links[r.Links[0]].Name
	}
	return ""
}

// Near reports whether an address is in a network of this node, so that its neighbours ask for it there, and not one of the node's own, nor one for which
// it answers.
func Near(a netip.Addr) bool {
	r, err := host.RouteTo(a, host.Way{})
	return err == nil && !r.Local && !r.Via.IsValid() && !host.Proxied(a)
}

// Outward returns those of this node's addresses of IPv4 that other hosts may use, of some, with their interfaces: not those of bridges, tunnels and the
// like.
func Outward(some func(netip.Addr) bool) (map[netip.Addr]string, error) {
	list, err := host.Filter{}.Addresses(plan.IPv4)
	if err != nil {
		return nil, err
	}
	links, err := host.Links()
	out := map[netip.Addr]string{}
	uplink := Uplink() // That of a node in a container is one end of a pair.
	for _, a := range list {
		outward := slices.Contains([]string{"device", "bond", "team", "vlan"}, links[a.Index].Kind) || links[a.Index].Name == uplink
		if outward && links[a.Index].Name != "lo" && links[a.Index].Up && a.Addr.IsGlobalUnicast() && some(a.Addr) {
			out[a.Addr] = links[a.Index].Name
		}
	}
	return out, err
}

// PodsHere returns the range within which this node's Pods have their addresses, and the interface by which the packets of all of them come: "" if each has
// its own, or that is not known. within is the range of all Pods, and known are some of this node. The range is invalid if there are none here.
func PodsHere(within netip.Prefix, known []netip.Addr) (pods netip.Prefix, by string) {
	links, err := host.Links()
	networks, failed := host.Attached(within)
	if err != nil || failed != nil {
		return netip.Prefix{}, ""
	}
	uplink, found := Uplink(), map[int]bool{}
	for _, a := range known {
		if r, err := host.RouteTo(a, host.Way{}); err == nil && !r.Local && len(r.Links) == 1 {
			found[r.Links[0]] = true
		}
	}
	for p, index := range networks {
		l := links[index]
		if l.Up && l.Name != uplink && (ofPods(links, l) || p.IsSingleIP() && l.Kind == "veth" && l.PeerNamespace >= 0) {
			found[index] = true
		}
	}
	pods = within.Masked()
	if len(found) == 0 {
		return netip.Prefix{}, ""
	}
	for index := range found {
		if len(found) > 1 || links[index].Kind != "bridge" {
			return pods, ""
		}
		by = links[index].Name
	}
	var its []netip.Prefix
	for p, index := range networks {
		if links[index].Name == by {
			its = append(its, p.Masked())
		}
	}
	if len(its) == 1 {
		pods = its[0]
	}
	return pods, by
}

// Bridges are the names of this node's bridges.
func Bridges() map[string]bool {
	links, _ := host.Links() // Without them, none is known.
	out := map[string]bool{}
	for _, l := range links {
		if l.Kind == "bridge" {
			out[l.Name] = true
		}
	}
	return out
}

// noRoute says why the kernel has no route.
func noRoute(why syscall.Errno) string {
	switch why {
	case unix.EINVAL:
		return "its route is of type blackhole"
	case unix.EACCES:
		return "its route is of type prohibit"
	case unix.EHOSTUNREACH:
		return "its route is of type unreachable"
	}
	return why.Error()
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
		text, err := os.ReadFile(path)
		if err != nil { // The interface may be gone.
			continue
		}
		if read++; strings.TrimSpace(string(text)) != "0" {
			return true
		}
	}
	return read == 0
}
