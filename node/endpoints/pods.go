package endpoints

import (
	"context"
	"net/netip"
	"slices"

	"nodeproxy/kernel/host"
	"nodeproxy/kernel/sockets"
	"nodeproxy/plan"
)

// pod is a network namespace that has the address of an endpoint.
type pod struct {
	sockets.Namespace
	// attached says that it is at the other end of an interface of this node by which packets for the address leave; that is known of those which may
	// be entered.
	attached bool
	// hardware are the addresses of its interfaces in their networks.
	hardware []string
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
		if len(own) == 0 {
			continue
		}
		var inside map[int]host.Link
		_ = n.Enter(func() (err error) { // It may not be allowed.
			inside, err = host.Links()
			return err
		})
		for _, a := range own {
			p := pod{Namespace: n}
			for _, l := range inside {
				end := links[l.Peer]
				p.hardware = append(p.hardware, l.Hardware)
				mutual := l.Kind == "veth" && end.Kind == "veth" && end.Peer == l.Index
				p.attached = p.attached || mutual && (end.Index == leads[a].Index || end.Master == leads[a].Index)
			}
			out[a] = append(out[a], p)
		}
	}
	for a, list := range out {
		if slices.ContainsFunc(list, func(p pod) bool { return p.attached }) {
			out[a] = slices.DeleteFunc(list, func(p pod) bool { return !p.attached })
		}
	}
	return out
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
