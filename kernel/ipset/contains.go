package ipset

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
)

// NameOf returns the name of the set with an index, by which rules refer to it (Linux 4.20).
func (s *Sets) NameOf(index uint16) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	const newer = 7 // the version of the protocol that has this command
	body := netlink.Buffer{unix.AF_UNSPEC, 0, 0, 0}.Bytes(setAttrProtocol, newer).BigEndian16(setAttrIndex|netOrder, index)
	answer, err := s.conn.Ask(netlink.Message{Type: unix.NFNL_SUBSYS_IPSET<<8 | ipsetNameOf, Body: body})
	if err != nil {
		return "", fmt.Errorf("asking for the name of ipset %d: %w", index, explain(err))
	}
	return netlink.Text(netlink.Attribute(behindHeader(answer), setAttrName)), nil
}

// Side is one side of a packet. An address that is not valid is not known, and neither is a port if Known is false.
type Side struct {
	Addr  netip.Addr
	Port  uint16
	Known bool
}

// Contains reports whether a set, of whatever type, has what a rule asks it for: one side of a packet for each part of the set's type. known is
// false if what the set asks for is not known, such as a mark or a MAC address.
func (s *Sets) Contains(name string, sides []Side, protocol uint8) (is, known bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, err := s.header(name)
	if err != nil {
		return false, false, fmt.Errorf("reading ipset %s: %w", name, err)
	}
	_, parts, _ := strings.Cut(h.kind, ":")
	var data netlink.Buffer
	ip := uint16(dataIP)
	for i, part := range strings.Split(parts, ",") {
		switch {
		case i >= len(sides):
			return false, false, nil
		case (part == "ip" || part == "net") && sides[i].Addr.IsValid():
			if h.family != unix.AF_UNSPEC && (h.family == unix.AF_INET6) != sides[i].Addr.Is6() {
				return false, true, nil
			}
			data = appendIP(data, ip, sides[i].Addr)
			ip = dataIP2
		case part == "port" && sides[i].Known:
			if h.kind != "bitmap:port" {
				data = data.Bytes(dataProtocol, protocol)
			}
			data = data.BigEndian16(dataPort|netOrder, sides[i].Port)
		default:
			return false, false, nil
		}
	}
	err = s.do(setMessage(ipsetTest, 0, name, func(b netlink.Buffer) netlink.Buffer {
		return b.Nest(setAttrData, func(b netlink.Buffer) netlink.Buffer { return append(b, data...) })
	}))
	switch {
	case err == nil:
		return true, true, nil
	case isSetError(err, ipsetExists), isSetError(err, ipsetOutOfRange): // The latter is of bitmaps.
		return false, true, nil
	case errors.Is(err, unix.ENOENT):
		return false, false, nil
	}
	return false, false, fmt.Errorf("asking ipset %s: %w", name, err)
}
