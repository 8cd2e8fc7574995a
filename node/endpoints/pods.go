package endpoints

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

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
	// noRoute says why its answers do not get to this node.
	noRoute string
}

// attachment is what is wrong with how a Pod is attached to this node, where packets for it leave by lead, and an entry that somebody has made, unless it
// is "", says where it is.
func (p pod) attachment(lead host.Link, fixed string) Attachment {
	a := Attachment{Down: !p.link.Up || !p.own.Up, Loose: !p.attached, NoRoute: p.noRoute}
	if p.link.MTU != p.own.MTU {
		a.MTU, a.OwnMTU = p.link.MTU, p.own.MTU
	}
	if fixed != "" && !slices.Contains(p.hardware, fixed) {
		a.Wrong = fixed
	}
	if p.link.Index == 0 || a == (Attachment{}) {
		return Attachment{}
	}
	if a.Link = p.link.Name; lead.Kind == "bridge" {
		a.Bridge = lead.Name
	}
	return a
}

// owners returns the network namespaces that have addresses, for which packets leave by the interfaces in leads. Where it is known which are attached
// to these, there are no others.
func owners(ctx context.Context, leads map[netip.Addr]host.Link, links map[int]host.Link) map[netip.Addr][]pod {
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
			out[a] = append(out[a], look(ctx, n, a, leads[a], links))
		}
	}
	for a, list := range out {
		for _, is := range []func(pod) bool{func(p pod) bool { return p.link.Index != 0 }, func(p pod) bool { return p.attached }} {
			if slices.ContainsFunc(list, is) {
				list = slices.DeleteFunc(list, func(p pod) bool { return !is(p) })
			}
		}
		out[a] = list
	}
	return out
}

// look looks at a namespace that has an address, from inside if that is allowed.
func look(ctx context.Context, n sockets.Namespace, a netip.Addr, lead host.Link, links map[int]host.Link) pod {
	p := pod{Namespace: n}
	file, err := n.Open()
	if err != nil { // Its process has ended.
		return p
	}
	defer file.Close()
	id := host.Namespace(file)
	asks := netip.Addr{}
	if r, err := host.RouteTo(a, host.Way{}); err == nil {
		asks = r.Source
	}
	var inside map[int]host.Link
	var via netip.Addr
	_ = n.Enter(func() (err error) { // It may not be allowed.
		if inside, err = host.Links(); err == nil && asks.IsValid() {
			via, p.noRoute, err = answersBy(ctx, asks)
		}
		return err
	})
	for _, l := range inside {
		p.hardware = append(p.hardware, l.Hardware)
		end := links[l.Peer]
		own := l.Kind == "veth" && end.Kind == "veth" && end.Peer == l.Index && end.PeerNamespace == id && id >= 0
		if own && !p.attached {
			p.link, p.own, p.attached = end, l, end.Index == lead.Index || end.Master == lead.Index
		}
	}
	if r, err := host.RouteTo(via, host.Way{}); via.IsValid() && p.link.Index == lead.Index && p.noRoute == "" && (err != nil || !r.Local) && !host.AnswersFor("/proc/sys", lead.Name) {
		p.noRoute = fmt.Sprintf("their next hop %s is no address of this node, and net.ipv4.conf.%s.proxy_arp is 0", via, lead.Name)
	}
	return p
}

// answersBy looks by which next hop answers leave this network namespace for an address, and whether they can: via is valid if somebody has to be
// asked where it is, and is of IPv4.
func answersBy(ctx context.Context, to netip.Addr) (via netip.Addr, not string, err error) {
	r, err := host.RouteTo(to, host.Way{})
	if why := syscall.Errno(0); errors.As(err, &why) {
		return via, noRoute(why), nil
	}
	if err != nil || !r.Via.Is4() || len(r.Links) != 1 {
		return via, "", err
	}
	at := host.Neighbour{Link: r.Links[0], Addr: r.Via}
	fixed, err := host.Fixed()
	if err != nil || fixed[at] != "" {
		return via, "", err
	}
	silent, err := host.Silent(ctx)
	if silent[at] {
		not = fmt.Sprintf("their next hop %s does not answer", at.Addr)
	}
	return r.Via, not, err
}

// mostEntered is how many namespaces of Pods are entered to look at their rules.
const mostEntered = 4

// Within calls look in the network namespaces of ServicePorts' endpoints on this node, up to a number, with these ServicePorts and no other endpoints.
// listens reports whether something listens there at a port. The error is fs.ErrPermission where they may not be entered.
func Within(ctx context.Context, ports []*plan.ServicePort, look func(its []*plan.ServicePort, listens func(plan.Protocol, uint16) bool) error) error {
	links, err := host.Links()
	if err != nil {
		return err
	}
	leads := map[netip.Addr]host.Link{}
	for _, sp := range ports {
		for _, ep := range sp.All() {
			a := ep.Addr.Addr()
			if _, known := leads[a]; known || len(leads) == mostEntered {
				continue
			}
			r, err := host.RouteTo(a, host.Way{})
			if err != nil || r.Local || len(r.Links) != 1 {
				continue
			}
			if l := links[r.Links[0]]; l.Kind == "veth" || l.Kind == "bridge" {
				leads[a] = l
			}
		}
	}
	for a, found := range owners(ctx, leads, links) {
		if len(found) != 1 {
			continue
		}
		var its []*plan.ServicePort
		for _, sp := range ports {
			only := *sp
			only.Endpoints = plan.Endpoints{}
			for _, ep := range sp.All() {
				if ep.Addr.Addr() == a {
					only.Endpoints.Cluster = append(only.Endpoints.Cluster, ep)
				}
			}
			if len(only.Endpoints.Cluster) > 0 {
				its = append(its, &only)
			}
		}
		listens := func(p plan.Protocol, port uint16) bool {
			list, err := found[0].Sockets(p)
			return err != nil || slices.ContainsFunc(list, func(s sockets.Socket) bool { return s.Port == port })
		}
		if err := found[0].Enter(func() error { return look(its, listens) }); err != nil {
			return err
		}
	}
	return nil
}
