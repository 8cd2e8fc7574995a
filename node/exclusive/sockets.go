package exclusive

import (
	"net/netip"
	"slices"

	"nodeproxy/kernel/sockets"
	"nodeproxy/plan"
)

// listeningAt lists the sockets that listen on one of these TCP ports.
func listeningAt(ports []uint16) ([]sockets.Socket, error) {
	list, err := sockets.List(plan.TCP)
	return slices.DeleteFunc(list, func(s sockets.Socket) bool { return !slices.Contains(ports, s.Port) }), err
}

// reach returns the addresses at which a socket may be reached from this host; the first that answers is used. A socket bound to
// all IPv6 addresses usually accepts IPv4 too, even where IPv6 is off.
func reach(s sockets.Socket) []netip.AddrPort {
	addrs := []netip.Addr{s.Addr}
	switch {
	case s.Everywhere() && s.Addr.Is4():
		addrs = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	case s.Everywhere():
		addrs = []netip.Addr{netip.IPv6Loopback(), netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	}
	var out []netip.AddrPort
	for _, a := range addrs {
		out = append(out, netip.AddrPortFrom(a, s.Port))
	}
	return out
}
