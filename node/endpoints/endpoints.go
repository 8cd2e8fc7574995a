// Package endpoints looks at the endpoints of a Service from this node: whether anything listens at those that are on it, and whether the
// kernel takes their answers. It sends nothing.
package endpoints

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"time"

	"nodeproxy/inspect/reality"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/sockets"
	"nodeproxy/plan"
)

// moment is how long a program has to accept what waits.
const moment = 300 * time.Millisecond

// most bounds how many endpoints are looked at.
const most = 32

// at is an endpoint by a protocol.
type at struct {
	addr     netip.AddrPort
	protocol plan.Protocol
}

// sites are the endpoints in use, up to a number, that are this node's own, and those of its Pods, with the interfaces that lead to these.
func (v *View) sites(ports []*plan.ServicePort) (here, pods []at, leads map[netip.Addr]host.Link) {
	leads = map[netip.Addr]host.Link{}
	asked := map[at]bool{}
	for _, sp := range ports {
		for _, ep := range sp.All() {
			a := at{ep.Addr, sp.Key.Protocol}
			if asked[a] || len(asked) == most {
				continue
			}
			asked[a] = true
			r, by, one := v.leave(a.addr.Addr(), host.Way{})
			switch {
			case r.Local:
				here = append(here, a)
			case one && (by.Kind == "veth" || by.Kind == "bridge" || leadsAway(by.Kind) || ep.Local) && a.protocol != plan.SCTP:
				pods, leads[a.addr.Addr()] = append(pods, a), by
			}
		}
	}
	return here, pods, leads
}

// Look looks at the endpoints in use that are on this node, up to a number. Those of which nothing can be known are left out: where processes of
// Pods are not visible, several namespaces have the address and may not be entered, or a virtual machine or a sandbox may listen.
func (v *View) Look(ctx context.Context, ports []*plan.ServicePort) ([]reality.Listening, error) {
	here, pods, leads := v.sites(ports)
	var out []reality.Listening
	var read []func(plan.Protocol) ([]sockets.Socket, error) // where the sockets of each are listed
	add := func(l reality.Listening, from func(plan.Protocol) ([]sockets.Socket, error)) {
		if other := map[plan.Protocol]plan.Protocol{plan.TCP: plan.UDP, plan.UDP: plan.TCP}[l.Protocol]; !l.Listens && other != "" {
			if list, err := from(other); err == nil && judge(l.Addr, other, list).Listens { // Else its process may have ended.
				l.Other = other
			}
		}
		out, read = append(out, l), append(read, from)
	}
	known := map[plan.Protocol][]sockets.Socket{}
	for _, a := range here {
		list, is := known[a.protocol]
		if !is {
			var err error
			if list, err = sockets.List(a.protocol); err != nil { // The kernel does not know the protocol.
				continue
			}
			known[a.protocol] = list
		}
		add(judge(a.addr, a.protocol, list), sockets.List)
	}
	found := v.owners(ctx, leads)
	fixed, err := host.Fixed()
	if err = cmp.Or(v.err, err); err != nil {
		return nil, err
	}
	for _, a := range pods {
		owner := found[a.addr.Addr()]
		if ctx.Err() != nil {
			break
		}
		if len(owner) > 1 && owner[0].link.Index != 0 {
			out, read = append(out, reality.Listening{Addr: a.addr, Protocol: a.protocol, Pod: true, Several: true}), append(read, nil)
			continue
		}
		if len(owner) != 1 { // There may be more that have the same address.
			continue
		}
		list, err := owner[0].Sockets(a.protocol)
		if err != nil { // Its process may have ended.
			continue
		}
		l := judge(a.addr, a.protocol, list)
		if relays, err := owner[0].Relays(); !l.Listens && (err != nil || relays) {
			continue
		}
		l.Pod = true
		lead := leads[a.addr.Addr()]
		l.Attachment = owner[0].attachment(lead, fixed[host.Neighbour{Link: lead.Index, Addr: a.addr.Addr()}])
		add(l, owner[0].Sockets)
	}
	stillWaiting(ctx, out, read)
	return out, nil
}

// stillWaiting looks again where something waits, and clears what has become less.
func stillWaiting(ctx context.Context, list []reality.Listening, read []func(plan.Protocol) ([]sockets.Socket, error)) {
	if !slices.ContainsFunc(list, func(l reality.Listening) bool { return l.Waiting > 0 }) {
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(moment):
	}
	for i := range list {
		before := list[i].Waiting
		if list[i].Waiting = 0; before == 0 || ctx.Err() != nil {
			continue
		}
		if again, err := read[i](list[i].Protocol); err == nil { // Else its process has ended.
			if now := judge(list[i].Addr, list[i].Protocol, again).Waiting; now >= before {
				list[i].Waiting = now
			}
		}
	}
}

// judge says what sockets mean for an endpoint.
func judge(addr netip.AddrPort, p plan.Protocol, list []sockets.Socket) reality.Listening {
	out := reality.Listening{Addr: addr, Protocol: p}
	for _, s := range list {
		reached := s.Addr == addr.Addr() || s.Everywhere() && (s.Both || s.Addr.Is4() == addr.Addr().Is4())
		switch {
		case reached && s.Port == addr.Port():
			out.Listens = true
			out.Waiting += s.Waiting
		case reached:
			out.Others = append(out.Others, s.Port)
		case s.Everywhere() && s.Port == addr.Port():
			out.OtherFamily = true
		case s.Port == addr.Port() && !s.Addr.IsLoopback() && !slices.Contains(out.At, s.Addr):
			out.At = append(out.At, s.Addr)
		case s.Addr.IsLoopback() && s.Port == addr.Port():
			out.Loopback = true
		}
	}
	if slices.SortFunc(out.At, netip.Addr.Compare); out.Listens {
		out.At = nil
	}
	out.Loopback, out.OtherFamily = out.Loopback && !out.Listens, out.OtherFamily && !out.Listens
	slices.Sort(out.Others)
	out.Others = slices.Compact(out.Others)
	return out
}
