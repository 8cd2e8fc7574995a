package harness

import (
	"net"
	"net/netip"
	"os"
	"time"
)

// Ping sends one ICMP echo request, and reports whether there was an answer from the address that it went to.
func (h *Host) Ping(to netip.Addr, timeout time.Duration) (bool, error) {
	// Type, code, checksum, identifier, sequence number (RFC 792, RFC 4443). The checksum over IPv6 is the kernel's affair.
	network, request, reply := "ip4:icmp", []byte{8, 0, 0xf7, 0xfd, 0, 1, 0, 1}, byte(0)
	if to.Is6() {
		network, request, reply = "ip6:ipv6-icmp", []byte{128, 0, 0, 0, 0, 1, 0, 1}, 129
	}
	c, err := In(h.Netns, func() (net.PacketConn, error) { return net.ListenPacket(network, h.IP(familyOf(to)).String()) })
	if err != nil {
		return false, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return false, err
	}
	if _, err := c.WriteTo(request, &net.IPAddr{IP: to.AsSlice()}); err != nil {
		return false, err
	}
	buf := make([]byte, 1500)
	for {
		n, from, err := c.ReadFrom(buf)
		if os.IsTimeout(err) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if n > 0 && buf[0] == reply && from.String() == to.String() {
			return true, nil
		}
	}
}
