package exclusive

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/sockets"
	"nodeproxy/plan"
)

// listeningAt lists the sockets that listen at one of these TCP ports.
func listeningAt(ports []uint16) ([]sockets.Socket, error) {
	list, err := sockets.List(plan.TCP)
	return slices.DeleteFunc(list, func(s sockets.Socket) bool { return !slices.Contains(ports, s.Port) }), err
}

// reach are the addresses at which a socket can be reached from this host, the first one that answers. One for all addresses
// of IPv6 takes connections of IPv4 too, most often, also where IPv6 is switched off.
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

// The layout of struct unix_diag_req and unix_diag_msg.
const (
	unixRequestLength = 24
	unixMessageLength = 16
	stateClose        = 7    // TCP_CLOSE: bound, and listening or connected to nobody
	stateListen       = 10   // TCP_LISTEN
	showName          = 1    // UDIAG_SHOW_NAME
	showUID           = 0x40 // UDIAG_SHOW_UID
	unixName          = 0    // UNIX_DIAG_NAME
	unixUID           = 7    // UNIX_DIAG_UID
)

// userOf finds the user whose Unix socket has a name, by sock_diag. It is -1 where nobody's has, and before Linux 5.3.
func userOf(name string) int {
	request := make([]byte, unixRequestLength)
	request[0] = unix.AF_UNIX
	binary.NativeEndian.PutUint32(request[4:], 1<<stateListen|1<<stateClose)
	binary.NativeEndian.PutUint32(request[12:], showName|showUID)
	ask := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
	ask.AddRawData(request)
	uid := -1
	_ = ask.ExecuteIter(unix.NETLINK_INET_DIAG, 0, func(message []byte) bool { // An error leaves it unknown.
		if len(message) < unixMessageLength {
			return true
		}
		attributes, err := nl.ParseRouteAttrAsMap(message[unixMessageLength:])
		user := attributes[unixUID].Value
		if err == nil && string(attributes[unixName].Value) == name && len(user) == 4 {
			uid = int(binary.NativeEndian.Uint32(user))
		}
		return true
	})
	return uid
}
