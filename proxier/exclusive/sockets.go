package exclusive

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// socket is one that takes TCP connections.
type socket struct {
	addr  netip.AddrPort
	uid   uint32
	inode uint32 // 0 where it is not known
}

// reach are the addresses at which the socket can be reached from this host, the first one that answers. One for all addresses
// of IPv6 takes connections of IPv4 too, most often, also where IPv6 is switched off.
func (s socket) reach() []netip.AddrPort {
	addrs := []netip.Addr{s.addr.Addr()}
	switch a := s.addr.Addr(); {
	case a.IsUnspecified() && a.Is4():
		addrs = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	case a.IsUnspecified():
		addrs = []netip.Addr{netip.IPv6Loopback(), netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	}
	var out []netip.AddrPort
	for _, a := range addrs {
		out = append(out, netip.AddrPortFrom(a, s.addr.Port()))
	}
	return out
}

// The layout of struct inet_diag_req_v2 and inet_diag_msg, and what is not in golang.org/x/sys/unix.
const (
	requestLength = 56
	messageLength = 72
	stateListen   = 10 // TCP_LISTEN
)

// listeningAt lists the sockets that listen at one of these ports, by sock_diag.
func listeningAt(ports []uint16) ([]socket, error) {
	var out []socket
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		request := make([]byte, requestLength)
		request[0], request[1] = family, unix.IPPROTO_TCP
		binary.NativeEndian.PutUint32(request[4:], 1<<stateListen)
		ask := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		ask.AddRawData(request)
		err := ask.ExecuteIter(unix.NETLINK_INET_DIAG, 0, func(message []byte) bool {
			s, ok := parseSocket(message)
			for _, port := range ports {
				if ok && s.addr.Port() == port {
					out = append(out, s)
					break
				}
			}
			return true
		})
		// What comes or goes while the kernel lists is seen at the next look.
		if err != nil && !errors.Is(err, nl.ErrDumpInterrupted) {
			return nil, fmt.Errorf("listing sockets by sock_diag: %w", err)
		}
	}
	return out, nil
}

// parseSocket reads an inet_diag_msg.
func parseSocket(m []byte) (socket, bool) {
	if len(m) < messageLength {
		return socket{}, false
	}
	var addr netip.Addr
	switch m[0] {
	case unix.AF_INET:
		addr = netip.AddrFrom4([4]byte(m[8:12]))
	case unix.AF_INET6:
		addr = netip.AddrFrom16([16]byte(m[8:24])).Unmap()
	default:
		return socket{}, false
	}
	return socket{
		addr: netip.AddrPortFrom(addr, binary.BigEndian.Uint16(m[4:])),
		uid:  binary.NativeEndian.Uint32(m[64:]), inode: binary.NativeEndian.Uint32(m[68:]),
	}, true
}

// The layout of struct unix_diag_req and unix_diag_msg.
const (
	unixRequestLength = 24
	unixMessageLength = 16
	stateClose        = 7    // TCP_CLOSE: bound, and listening or connected to nobody
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
