package host

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// answersWithin is how long a neighbour may take to answer.
	answersWithin = 300 * time.Millisecond
	// failedLately is for how long it counts that one has not answered: the kernel keeps that for as long as it has room, also if the neighbour is back.
	failedLately = 30 * time.Second
	// tick is the unit of times in what the kernel tells of neighbours.
	tick = time.Second / 100
)

// Neighbour is a host in the network of an interface.
type Neighbour struct {
	Link int
	Addr netip.Addr
}

// Silent returns the neighbours for which the kernel has asked in vain just now: nobody has answered (ARP, RFC 826, or neighbour discovery, RFC 4861).
// Where a question is open, it waits for a moment.
func Silent(ctx context.Context) (map[Neighbour]bool, error) {
	failed, open, err := unresolved()
	if err != nil || len(open) == 0 {
		return failed, err
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(answersWithin):
	}
	failed, still, err := unresolved()
	for n := range still {
		if open[n] && err == nil {
			failed[n] = true
		}
	}
	return failed, err
}

// Fixed returns the neighbours whose entries somebody has made (permanent), with the address of each in its network. Nobody is asked for them.
func Fixed() (map[Neighbour]string, error) {
	list, err := neighbours()
	out := map[Neighbour]string{}
	for _, n := range list {
		if a := addrOf(n.IP); a.IsValid() && n.State == links.NUD_PERMANENT && len(n.HardwareAddr) > 0 {
			out[Neighbour{n.LinkIndex, a}] = n.HardwareAddr.String()
		}
	}
	return out, err
}

func neighbours() ([]links.Neigh, error) {
	list, err := List(func() ([]links.Neigh, error) { return links.NeighList(0, links.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("listing the neighbours: %w", err)
	}
	return list, nil
}

// behind lists the neighbours in the network of an interface, and the forwarding table of another one, or of all if that is 0.
func behind(kind string, link, table int) (list, forwarding []links.Neigh, err error) {
	list, err = List(func() ([]links.Neigh, error) { return links.NeighList(link, links.FAMILY_ALL) })
	if err == nil {
		forwarding, err = List(func() ([]links.Neigh, error) { return links.NeighList(table, unix.AF_BRIDGE) })
	}
	if err != nil {
		return nil, nil, fmt.Errorf("listing the neighbours of %s %d: %w", kind, link, err)
	}
	return list, forwarding, nil
}

// unresolved returns the neighbours that have not answered lately, and those for whose answer the kernel still waits.
func unresolved() (failed, open map[Neighbour]bool, err error) {
	list, err := neighbours()
	if err != nil {
		return nil, nil, err
	}
	failed, open = map[Neighbour]bool{}, map[Neighbour]bool{}
	for _, n := range list {
		at := Neighbour{n.LinkIndex, addrOf(n.IP)}
		switch {
		case !at.Addr.IsValid():
		case n.State&links.NUD_FAILED != 0 && time.Duration(n.Updated)*tick < failedLately:
			failed[at] = true
		case n.State&links.NUD_INCOMPLETE != 0:
			open[at] = true
		}
	}
	return failed, open, nil
}

// Beyond returns the host to which a tunnel (VXLAN) sends packets for a next hop, by its neighbours and its forwarding table; invalid if that is not known.
// lost says that it has no entry for them, so that they go nowhere.
func Beyond(tunnel int, hop netip.Addr) (to netip.Addr, lost bool, err error) {
	if link, err := links.LinkByIndex(tunnel); err == nil {
		if v, is := link.(*links.Vxlan); is && v.FlowBased { // A program says it for each packet.
			return to, false, nil
		}
	}
	list, forwarding, err := behind("tunnel", tunnel, tunnel)
	if err != nil {
		return to, false, err
	}
	for _, n := range list {
		if addrOf(n.IP) != hop {
			continue
		}
		for _, f := range forwarding {
			if to := addrOf(f.IP); to.IsValid() && f.HardwareAddr.String() == n.HardwareAddr.String() {
				return to, false, nil
			}
		}
		all := func(f links.Neigh) bool { return f.HardwareAddr.String() == "00:00:00:00:00:00" } // for whatever has no other
		return to, len(n.HardwareAddr) > 0 && !slices.ContainsFunc(forwarding, all), nil
	}
	return to, false, nil
}

// WithoutHairpin returns the addresses at a bridge of which the port does not send back what came by it, with the name of that port: a frame that is to go
// back by the port that it came by is dropped. What is not known of is left out.
func WithoutHairpin(bridge int) (map[netip.Addr]string, error) {
	list, forwarding, err := behind("bridge", bridge, 0)
	if err != nil {
		return nil, err
	}
	ports := map[string]int{} // by the address of what is behind them
	for _, n := range forwarding {
		if n.MasterIndex == bridge && n.State&links.NUD_PERMANENT == 0 { // Those are the port's own.
			ports[n.HardwareAddr.String()] = n.LinkIndex
		}
	}
	out, names := map[netip.Addr]string{}, map[int]string{}
	for _, n := range list {
		a, port := addrOf(n.IP), ports[n.HardwareAddr.String()]
		if !a.IsValid() || port == 0 {
			continue
		}
		if _, known := names[port]; !known {
			names[port] = ""
			link, err := links.LinkByIndex(port)
			if err != nil { // It is gone.
				continue
			}
			if info, err := links.LinkGetProtinfo(link); err == nil && !info.Hairpin {
				names[port] = link.Attrs().Name
			}
		}
		if name := names[port]; name != "" {
			out[a] = name
		}
	}
	return out, nil
}
