package endpoints

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/inspect/reality"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/sockets"
	"nodeproxy/plan"
)

// pod is a network namespace that has the address of an endpoint.
type pod struct {
	sockets.Namespace
	// link is this node's end of the pair of interfaces to it, and own the other one. They are known of what may be entered.
	link, own host.Link
	// attached says that packets for the address leave by the link, or the bridge that it is a port of.
	attached bool
	// hardware are the addresses of its interfaces in their networks.
	hardware []string
	// bridge is the bridge of which the link is a port; the zero value if there is none.
	bridge host.Link
	// noRoute says why its answers do not get to this node, and noDefault why those to other hosts do not.
	noRoute, noDefault string
}

// attachment is what is wrong with how a Pod is attached to this node, where packets for it leave by lead, and an entry that somebody has made, unless it
// is "", says where it is.
func (p pod) attachment(lead host.Link, fixed string) reality.Attachment {
	a := reality.Attachment{NoRoute: p.noRoute, NoDefault: p.noDefault, Loose: !p.attached && lead.Kind == "bridge"}
	a.Down = !p.link.Up || !p.own.Up || p.bridge.Index != 0 && !p.bridge.Up
	if !p.attached && leadsAway(lead.Kind) {
		a.By = lead.Name // Others may be the network plugin's own, or a switch beyond that sends them back.
	}
	if a.Loose && p.bridge.Index != 0 {
		a.Loose, a.By = false, lead.Name
	}
	if p.own.MTU > p.link.MTU { // The other way round, they agree on shorter segments (RFC 9293, 3.7.1).
		a.MTU, a.OwnMTU = p.link.MTU, p.own.MTU
	}
	if fixed != "" && !slices.Contains(p.hardware, fixed) {
		a.Wrong = fixed
	}
	if p.link.Index == 0 || a == (reality.Attachment{}) {
		return reality.Attachment{}
	}
	a.Link, a.Bridge = p.link.Name, p.bridge.Name
	if lead.Kind == "bridge" && a.By == "" {
		a.Bridge = lead.Name
	}
	return a
}

// leadsAway reports whether an interface of a kind leads to other hosts in any case.
func leadsAway(kind string) bool {
	return tunnels[kind] != 0 || kind == "tuntap" || kind == "wireguard"
}

// owners returns the network namespaces that have addresses, for which packets leave by the interfaces in leads. Where it is known which have a pair of
// interfaces with this node, there are no others.
func (v *View) owners(ctx context.Context, leads map[netip.Addr]host.Link) map[netip.Addr][]pod {
	out := map[netip.Addr][]pod{}
	if len(leads) == 0 {
		return out
	}
	among := map[netip.Addr]bool{}
	for a := range leads {
		among[a] = true
	}
	for _, n := range sockets.Namespaces(ctx) {
		if ctx.Err() != nil {
			break
		}
		own, _ := n.Addresses(among) // Its process may have ended.
		for _, a := range own {
			out[a] = append(out[a], v.look(ctx, n, a, leads[a]))
		}
	}
	for a, list := range out {
		if here := func(p pod) bool { return p.link.Index != 0 }; slices.ContainsFunc(list, here) {
			out[a] = slices.DeleteFunc(list, func(p pod) bool { return !here(p) })
		}
	}
	return out
}

// look looks at a namespace that has an address, from inside if that is allowed.
func (v *View) look(ctx context.Context, n sockets.Namespace, a netip.Addr, lead host.Link) pod {
	p := pod{Namespace: n}
	file, err := n.Open()
	if err != nil { // Its process has ended.
		return p
	}
	defer file.Close()
	id := host.NamespaceID(file)
	asks := netip.Addr{}
	if r, err := host.RouteTo(a, host.Way{}); err == nil {
		asks = r.Source
	}
	var inside map[int]host.Link
	var via netip.Addr
	by := 0
	_ = n.Enter(func() (err error) { // It may not be allowed.
		if inside, err = host.Links(); err == nil && asks.IsValid() {
			via, by, p.noRoute, err = answersBy(ctx, asks)
			if err == nil && a.Is4() {
				_, failed := host.RouteTo(somewhere, host.Way{})
				p.noDefault, _ = noRoute(failed)
			}
		}
		return err
	})
	for _, l := range inside {
		p.hardware = append(p.hardware, l.Hardware)
		end := v.links[l.Peer]
		own := l.Kind == "veth" && end.Kind == "veth" && end.Peer == l.Index && end.PeerNamespace == id && id >= 0
		if own && !p.attached {
			p.link, p.own, p.attached = end, l, end.Index == lead.Index || end.Master == lead.Index
			p.bridge = v.links[end.Master]
		}
	}
	if by != 0 && by != p.own.Index { // Others are answered by this one.
		p.noRoute = ""
		return p
	}
	if r, err := host.RouteTo(via, host.Way{}); via.IsValid() && p.link.Index == lead.Index && p.noRoute == "" && (err != nil || !r.Local) && !host.AnswersFor(v.sysctls, lead.Name) {
		p.noRoute = fmt.Sprintf("their next hop %s is no address of this node, and net.ipv4.conf.%s.proxy_arp is 0", via, lead.Name)
	}
	return p
}

// answersBy looks by which interface and next hop answers leave this network namespace for an address, and whether they can: via is valid if somebody
// has to be asked where it is, and is of IPv4.
func answersBy(ctx context.Context, to netip.Addr) (via netip.Addr, by int, not string, err error) {
	r, err := host.RouteTo(to, host.Way{})
	if why, none := noRoute(err); none {
		return via, 0, why, nil
	}
	if err != nil || len(r.Links) != 1 || !r.Via.Is4() {
		return via, 0, "", err
	}
	by = r.Links[0]
	at := host.Neighbour{Link: r.Links[0], Addr: r.Via}
	fixed, err := host.Fixed()
	if err != nil || fixed[at] != "" {
		return via, by, "", err
	}
	silent, err := host.Silent(ctx)
	if silent[at] {
		not = fmt.Sprintf("their next hop %s does not answer", at.Addr)
	}
	return r.Via, by, not, err
}

// mostEntered is how many namespaces of Pods are entered to look at their rules.
const mostEntered = 4

// Within calls look in the network namespaces of ServicePorts' endpoints on this node, up to a number, with these ServicePorts and no other endpoints.
// listens reports whether something listens there at a port. all is false where some could not be entered.
func (v *View) Within(ctx context.Context, ports []*plan.ServicePort, look func(its []*plan.ServicePort, listens func(plan.Protocol, uint16) bool) error) (all bool, err error) {
	leads := map[netip.Addr]host.Link{}
	for _, sp := range ports {
		for _, ep := range sp.All() {
			a := ep.Addr.Addr()
			if _, known := leads[a]; known || !ep.Local || len(leads) == mostEntered {
				continue
			}
			if _, by, one := v.leave(a, host.Way{}); one {
				leads[a] = by
			}
		}
	}
	found, all := v.owners(ctx, leads), true
	for _, a := range slices.SortedFunc(maps.Keys(leads), netip.Addr.Compare) {
		if len(found[a]) != 1 {
			all = false
			continue
		}
		in := found[a][0]
		listens := func(p plan.Protocol, port uint16) bool {
			list, err := in.Sockets(p)
			return err != nil || slices.ContainsFunc(list, func(s sockets.Socket) bool { return s.Port == port })
		}
		switch err := in.Enter(func() error { return look(only(ports, a), listens) }); {
		case errors.Is(err, fs.ErrPermission), errors.Is(err, fs.ErrNotExist): // Its process may have ended.
			all = false
		case err != nil:
			return false, fmt.Errorf("looking at the rules in the Pod of %s: %w", a, err)
		}
	}
	return all, v.err
}

// only returns ServicePorts with no other endpoints than those that have an address.
func only(ports []*plan.ServicePort, a netip.Addr) (out []*plan.ServicePort) {
	for _, sp := range ports {
		its := *sp
		its.Endpoints = plan.Endpoints{}
		for _, ep := range sp.All() {
			if ep.Addr.Addr() == a {
				its.Endpoints.Cluster = append(its.Endpoints.Cluster, ep)
			}
		}
		if len(its.Endpoints.Cluster) > 0 {
			out = append(out, &its)
		}
	}
	return out
}
