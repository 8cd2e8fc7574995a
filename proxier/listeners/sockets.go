package listeners

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"nodeproxy/proxier/plan"
)

// socket is one that takes what comes in from anywhere.
type socket struct {
	protocol plan.Protocol
	// addr is where it is bound; the unspecified address of its family for everywhere.
	addr netip.Addr
	port uint16
	// both is set for a socket of IPv6 that is bound everywhere and takes IPv4 too.
	both  bool
	inode uint32
}

// The layout of struct inet_diag_req_v2 and inet_diag_msg, and what is not in golang.org/x/sys/unix.
const (
	requestLength = 56
	messageLength = 72
	attrV6Only    = 11 // INET_DIAG_SKV6ONLY
	stateClose    = 7  // TCP_CLOSE: for UDP, not connected
	stateListen   = 10 // TCP_LISTEN, and SCTP_SS_LISTENING
)

var protocolNumbers = map[plan.Protocol]uint8{
	plan.TCP: unix.IPPROTO_TCP, plan.UDP: unix.IPPROTO_UDP, plan.SCTP: unix.IPPROTO_SCTP,
}

// dumpSockets asks the kernel for the sockets of a protocol and of both families. A kernel that does not know the protocol,
// or can't show its sockets, has none to show.
func dumpSockets(p plan.Protocol) ([]socket, error) {
	state := uint32(1) << stateListen
	if p == plan.UDP {
		state = 1 << stateClose
	}
	var out []socket
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		request := make([]byte, requestLength)
		request[0], request[1] = family, protocolNumbers[p]
		binary.NativeEndian.PutUint32(request[4:], state)
		ask := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		ask.AddRawData(request)
		err := ask.ExecuteIter(unix.NETLINK_INET_DIAG, 0, func(message []byte) bool {
			if s, ok := parseSocket(p, message); ok {
				out = append(out, s)
			}
			return true
		})
		// What is added or goes while the kernel lists may be missing; the next look sees it.
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, nl.ErrDumpInterrupted) {
			return nil, fmt.Errorf("listing the %s sockets of this node by sock_diag: %w", p, err)
		}
	}
	return out, nil
}

// parseSocket reads an inet_diag_msg. It returns false for what is none, and for a socket without a port.
func parseSocket(p plan.Protocol, m []byte) (socket, bool) {
	if len(m) < messageLength {
		return socket{}, false
	}
	s := socket{protocol: p, port: binary.BigEndian.Uint16(m[4:]), inode: binary.NativeEndian.Uint32(m[68:])}
	switch m[0] {
	case unix.AF_INET:
		s.addr = netip.AddrFrom4([4]byte(m[8:12]))
	case unix.AF_INET6:
		raw := netip.AddrFrom16([16]byte(m[8:24]))
		s.addr = raw.Unmap()
		s.both = raw.IsUnspecified() && !v6Only(m[messageLength:])
	default:
		return socket{}, false
	}
	return s, s.port != 0
}

// v6Only looks for the attribute that says that a socket of IPv6 takes no IPv4.
func v6Only(attributes []byte) bool {
	for len(attributes) >= unix.SizeofNlAttr {
		length := int(binary.NativeEndian.Uint16(attributes))
		if length < unix.SizeofNlAttr || length > len(attributes) {
			return false
		}
		if binary.NativeEndian.Uint16(attributes[2:]) == attrV6Only && length > unix.SizeofNlAttr {
			return attributes[unix.SizeofNlAttr] != 0
		}
		attributes = attributes[min(len(attributes), (length+3)&^3):]
	}
	return false
}

// families are those whose packets a socket takes.
func (s socket) families() []plan.Family {
	if s.both {
		return plan.Families[:]
	}
	return []plan.Family{plan.FamilyOf(s.addr)}
}

// everywhere reports whether a socket is bound to no address in particular.
func (s socket) everywhere() bool { return s.addr.IsUnspecified() }

// where names the place for people.
func (s socket) where() string {
	at := s.addr.String()
	switch {
	case s.both:
		at = "every address"
	case s.everywhere():
		at = "every " + plan.FamilyOf(s.addr).String() + " address"
	}
	return fmt.Sprintf("%s, port %d/%s", at, s.port, s.protocol)
}
