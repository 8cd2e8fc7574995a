// Package sockets lists the sockets of the calling thread's network namespace, and finds the processes that own them.
package sockets

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Socket is a socket that receives from any peer: a TCP or SCTP socket that listens, or a UDP socket that is bound and not
// connected.
type Socket struct {
	Protocol plan.Protocol
	// Addr is its local address; the unspecified address of its family for all.
	Addr netip.Addr
	Port uint16
	// Both is set for an IPv6 socket that is bound to all addresses and receives IPv4 too.
	Both bool
	// UID is the user that it belongs to.
	UID uint32
	// Inode identifies it; 0 if it is not known.
	Inode uint32
	// Waiting is how many connections wait to be accepted; of UDP, how many bytes to be read.
	Waiting uint32
}

// Everywhere reports whether a socket is bound to no address in particular.
func (s Socket) Everywhere() bool { return s.Addr.IsUnspecified() }

// The layout of struct inet_diag_req_v2 and inet_diag_msg, and what is not in golang.org/x/sys/unix.
const (
	requestLength = 56
	messageLength = 72
	attrV6Only    = 11 // INET_DIAG_SKV6ONLY
	stateClose    = 7  // TCP_CLOSE: for UDP, not connected
	stateListen   = 10 // TCP_LISTEN, and SCTP_SS_LISTENING
)

// stateOf returns the state of sockets of a protocol that receive from any peer.
func stateOf(p plan.Protocol) int {
	if p == plan.UDP {
		return stateClose
	}
	return stateListen
}

// List asks the kernel, by sock_diag, for the sockets of a protocol and of both families. The error of a kernel that does not
// know the protocol, or can't show its sockets, is ENOENT.
func List(p plan.Protocol) ([]Socket, error) {
	c, err := netlink.Dial(unix.NETLINK_INET_DIAG)
	if err != nil {
		return nil, fmt.Errorf("listing the %s sockets of this node by sock_diag: %w", p, err)
	}
	defer c.Close()
	var out []Socket
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		request := make([]byte, requestLength)
		request[0], request[1] = family, netlink.Protocol(p)
		binary.NativeEndian.PutUint32(request[4:], 1<<stateOf(p))
		err := c.Dump(netlink.Message{Type: unix.SOCK_DIAG_BY_FAMILY, Body: request}, func(message []byte) error {
			if s, ok := parse(p, message); ok {
				out = append(out, s)
			}
			return nil
		})
		// What is added or goes while the kernel lists may be missing; the next look sees it.
		if err != nil && !errors.Is(err, netlink.ErrInterrupted) {
			return nil, fmt.Errorf("listing the %s sockets of this node by sock_diag: %w", p, err)
		}
	}
	return out, nil
}

// parse reads an inet_diag_msg. It returns false if it is not one, and for a socket without a port.
func parse(p plan.Protocol, m []byte) (Socket, bool) {
	if len(m) < messageLength {
		return Socket{}, false
	}
	s := Socket{
		Protocol: p, Port: binary.BigEndian.Uint16(m[4:]),
		Waiting: binary.NativeEndian.Uint32(m[56:]), UID: binary.NativeEndian.Uint32(m[64:]), Inode: binary.NativeEndian.Uint32(m[68:]),
	}
	switch m[0] {
	case unix.AF_INET:
		s.Addr = netip.AddrFrom4([4]byte(m[8:12]))
	case unix.AF_INET6:
		raw := netip.AddrFrom16([16]byte(m[8:24]))
		s.Addr = raw.Unmap()
		s.Both = raw.IsUnspecified() && !v6Only(m[messageLength:])
	default:
		return Socket{}, false
	}
	return s, s.Port != 0
}

// v6Only looks for the attribute that says that a socket of IPv6 takes no IPv4.
func v6Only(attributes []byte) bool {
	value := netlink.Attribute(attributes, attrV6Only)
	return len(value) > 0 && value[0] != 0
}
