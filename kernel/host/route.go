package host

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"slices"

	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Route is where the kernel sends packets for an address.
type Route struct {
	// Local says that the address is this node's.
	Local bool
	// Links are the indexes of the interfaces by which they leave: several where a route has several next hops, if all of them are asked for.
	Links []int
	// Source is the address that this node's own packets have; invalid if that is not known.
	Source netip.Addr
	// Via is the next hop; invalid where packets go to their destination itself, or there are several.
	Via netip.Addr
}

// Way says which packets a route is for. The zero value is those that this node sends.
type Way struct {
	// In is the index of the interface by which they come, From their source.
	In   int
	From netip.Addr
	// Mark is the mark that they have.
	Mark uint32
	// All asks for all next hops of the route.
	All bool
}

// RouteTo asks the kernel for the route of packets.
func RouteTo(to netip.Addr, w Way) (Route, error) {
	o := &links.RouteGetOptions{IifIndex: w.In, FIBMatch: w.All, Mark: w.Mark}
	if w.From.IsValid() {
		o.SrcAddr = w.From.AsSlice()
	}
	list, err := links.RouteGetWithOptions(to.AsSlice(), o)
	if err != nil {
		return Route{}, fmt.Errorf("asking for the route to %s: %w", to, err)
	}
	var out Route
	for _, r := range list {
		out.Local = out.Local || r.Type == unix.RTN_LOCAL
		out.Source = cmp.Or(out.Source, addrOf(r.Src))
		out.Via = cmp.Or(nextHop(r), out.Via)
		if r.LinkIndex > 0 {
			out.Links = append(out.Links, r.LinkIndex)
		}
		for _, hop := range r.MultiPath {
			out.Links = append(out.Links, hop.LinkIndex)
		}
	}
	return out, nil
}

// Link is a network interface.
type Link struct {
	Index int
	// Name is its name, and Kind its type as in "ip link add type"; "device" for a real one.
	Name, Kind string
	Up         bool
	// Master is the index of the interface that it is part of, such as a bridge or a VRF; 0 for none.
	Master int
	// Port is the UDP port at which a tunnel takes packets (VXLAN, Geneve); 0 for others.
	Port uint16
	// Under is the index of the interface by which a tunnel or a VLAN sends; 0 if it has none, or for others.
	Under int
	// Peer is the index of the other end of a veth, which is in the network namespace of this number (see NamespaceID); -1 if that is the link's own.
	Peer, PeerNamespace int
	// MTU is the most bytes that a packet may have.
	MTU int
	// Hardware is its address in its network, such as 02:42:0a:00:00:01.
	Hardware string
}

// Links returns the network interfaces by their indexes.
func Links() (map[int]Link, error) {
	list, err := List(links.LinkList)
	if err != nil {
		return nil, fmt.Errorf("listing the network interfaces: %w", err)
	}
	out := map[int]Link{}
	for _, l := range list {
		a := l.Attrs()
		link := Link{Index: a.Index, Name: a.Name, Kind: l.Type(), Up: a.RawFlags&unix.IFF_UP != 0, Master: a.MasterIndex,
			MTU: a.MTU, Hardware: a.HardwareAddr.String()}
		switch l := l.(type) {
		case *links.Vxlan:
			link.Port, link.Under = uint16(l.Port), l.VtepDevIndex
		case *links.Geneve:
			link.Port = l.Dport
		case *links.Veth:
			link.Peer, link.PeerNamespace = a.ParentIndex, a.NetNsID
		default:
			link.Under = a.ParentIndex
		}
		out[a.Index] = link
	}
	return out, nil
}

// Default returns the index of the interface of the default route of IPv4 in the main table, and its next hop, if it has a single one; rules for routing may
// have packets go elsewhere.
func Default() (index int, via netip.Addr, known bool) {
	main := &links.Route{Table: unix.RT_TABLE_MAIN}
	list, err := routes(new(links.Handle), unix.AF_INET, main, links.RT_FILTER_TABLE|links.RT_FILTER_DST)
	if err != nil || len(list) == 0 {
		return 0, netip.Addr{}, false
	}
	first := slices.MinFunc(list, func(a, b links.Route) int { return cmp.Compare(a.Priority, b.Priority) })
	via = nextHop(first)
	return first.LinkIndex, via, via.IsValid()
}

// Attached returns the networks within a range, single addresses among them, to which routes of the main table lead without a next hop, each with
// the index of its interface.
func Attached(within netip.Prefix) (map[netip.Prefix]int, error) {
	main := &links.Route{Table: unix.RT_TABLE_MAIN}
	list, err := routes(new(links.Handle), familyOf(within.Addr()), main, links.RT_FILTER_TABLE)
	if err != nil {
		return nil, fmt.Errorf("listing the routes: %w", err)
	}
	out := map[netip.Prefix]int{}
	for _, r := range list {
		p := prefixOf(r.Dst)
		if r.LinkIndex > 0 && !nextHop(r).IsValid() && within.Contains(p.Addr()) && p.Bits() >= within.Bits() {
			out[p] = r.LinkIndex
		}
	}
	return out, nil
}

// Proxied reports whether this node answers for an address as a neighbour, by an entry that somebody has made (ip neigh show proxy).
func Proxied(a netip.Addr) bool {
	list, _ := links.NeighProxyList(0, int(familyOf(a))) // Without them, none is known.
	return slices.ContainsFunc(list, func(n links.Neigh) bool { return addrOf(n.IP) == a })
}

// familyOf is the family of an address, as netlink has it.
func familyOf(a netip.Addr) uint8 { return netlink.Family(plan.FamilyOf(a)) }

// nextHop is the next hop of a route; invalid if it has none, or several.
func nextHop(r links.Route) netip.Addr {
	if v, is := r.Via.(*links.Via); is { // one of the other family
		return addrOf(v.Addr)
	}
	return addrOf(r.Gw)
}

// RuledByMark reports whether rules for routing of IPv4, but for this program's, choose packets by a mark that they have.
func RuledByMark() (bool, error) {
	list, err := List(func() ([]links.Rule, error) { return links.RuleList(unix.AF_INET) })
	if err != nil {
		return false, fmt.Errorf("listing the rules for routing: %w", err)
	}
	return slices.ContainsFunc(list, func(r links.Rule) bool { return r.Mark != 0 && !r.Invert && r.Table != names.PortsRouteTable }), nil
}

// NamespaceID returns the number by which this network namespace knows another one; -1 if it has nothing to do with it.
func NamespaceID(f *os.File) int {
	id, err := links.GetNetNsIdByFd(int(f.Fd()))
	if err != nil {
		return -1
	}
	return id
}
