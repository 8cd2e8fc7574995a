package endpoints

import (
	"context"
	"net/netip"
	"slices"

	"nodeproxy/inspect/reality"
	"nodeproxy/kernel/host"
	"nodeproxy/plan"
)

// mostWays bounds how many interfaces are looked at by which clients come.
const mostWays = 8

// LookBack finds out whether strict rp_filter drops the answers of endpoints: where policy routing sends packets to them by another interface than the
// kernel looks for their answers. Only IPv4 has rp_filter.
func (v *View) LookBack(ctx context.Context, endpoints []netip.Addr) (*reality.Reverse, error) {
	out := &reality.Reverse{}
	out.Drops, out.Known = host.ReversePathDrops()
	strict := map[int]bool{}
	for i, l := range v.links {
		if l.Up && host.StrictReversePath(v.sysctls, l.Name) {
			strict[i], out.Anywhere = true, append(out.Anywhere, l.Name)
		}
	}
	slices.Sort(out.Anywhere)
	if len(strict) == 0 { // As on most nodes.
		return out, v.err
	}
	ways, own, err := v.waysIn()
	if err != nil {
		return nil, err
	}
	for _, ep := range endpoints[:min(len(endpoints), most)] {
		if !ep.Is4() {
			continue
		}
		for _, w := range ways {
			if ctx.Err() != nil {
				return out, nil
			}
			to, by, one := v.leave(ep, w)
			if !one || !strict[by.Index] || by.Master != 0 {
				continue // Packets do not go there, or their answers are taken from anywhere; of a VRF, this can't be told.
			}
			if !slices.Contains(out.Strict, by.Name) {
				out.Strict = append(out.Strict, by.Name)
			}
			answered := to.Source // The address that masquerading takes, or that this node sends from.
			if a, has := own[by.Index]; has {
				answered = a
			}
			back, err := host.RouteTo(ep, host.Way{From: answered, All: true})
			if err != nil || len(back.Links) == 0 || slices.Contains(back.Links, by.Index) {
				continue
			}
			out.Filtered = append(out.Filtered, reality.Filtered{Addr: ep, By: by.Name, Back: v.links[back.Links[0]].Name})
			break
		}
	}
	return out, nil
}

// waysIn are the ways of packets: those of this node, and those of clients beyond its interfaces, with the first address of each interface. Pods' interfaces
// are left out.
func (v *View) waysIn() ([]host.Way, map[int]netip.Addr, error) {
	list, err := host.Filter{}.Addresses(plan.IPv4)
	if err != nil {
		return nil, nil, err
	}
	ways, own := []host.Way{{}}, map[int]netip.Addr{}
	taken := map[netip.Addr]bool{}
	for _, a := range list {
		taken[a.Addr] = true
	}
	for _, a := range list {
		l := v.links[a.Index]
		if _, has := own[l.Index]; has || !l.Up || a.Addr.IsLoopback() {
			continue
		}
		own[l.Index] = a.Addr
		client := a.Addr.Next()
		for taken[client] {
			client = client.Next()
		}
		if l.Kind != "veth" && len(ways) <= mostWays {
			ways = append(ways, host.Way{In: l.Index, From: client})
		}
	}
	return ways, own, nil
}
