package harness

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// TCPFlags are the flags of a TCP header.
type TCPFlags uint8

// The TCP flags that tests need.
const (
	FIN TCPFlags = 1
	SYN TCPFlags = 2
)

// SendTCP sends one TCP packet with these flags, of no connection.
func (h *Host) SendTCP(from, to netip.AddrPort, flags TCPFlags) error {
	p := make([]byte, 20)
	binary.BigEndian.PutUint16(p[0:], from.Port())
	binary.BigEndian.PutUint16(p[2:], to.Port())
	binary.BigEndian.PutUint32(p[4:], 1)
	p[12], p[13] = 5<<4, byte(flags)
	binary.BigEndian.PutUint16(p[14:], 1024)
	pseudo := append(from.Addr().AsSlice(), to.Addr().AsSlice()...)
	pseudo = append(pseudo, 0, syscall.IPPROTO_TCP, 0, byte(len(p)))
	binary.BigEndian.PutUint16(p[16:], checksum(append(pseudo, p...)))
	return h.Do(func() error {
		c, err := net.ListenPacket(fmt.Sprintf("ip%d:tcp", familyOf(to.Addr())), from.Addr().String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.WriteTo(p, &net.IPAddr{IP: to.Addr().AsSlice()})
		return err
	})
}

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

// Watch keeps the packets that reach a socket.
type Watch struct {
	conn net.PacketConn

	mu      sync.Mutex
	packets [][]byte
}

// WatchTCP starts to watch the TCP packets of one family that a host gets.
func (h *Host) WatchTCP(family int) (*Watch, error) {
	return h.watch(fmt.Sprintf("ip%d:tcp", family), h.IP(family).String())
}

// CountUDP starts to watch the UDP packets to an address of the namespace.
func (n *Netns) CountUDP(at netip.AddrPort) (*Watch, error) { return n.watch("udp", at.String()) }

func (n *Netns) watch(network, address string) (*Watch, error) {
	conn, err := In(n, func() (net.PacketConn, error) { return net.ListenPacket(network, address) })
	if err != nil {
		return nil, err
	}
	w := &Watch{conn: conn}
	go func() {
		for {
			packet := make([]byte, 2048)
			n, _, err := w.conn.ReadFrom(packet)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				w.mu.Lock()
				w.packets = append(w.packets, packet[:n])
				w.mu.Unlock()
			}
		}
	}()
	return w, nil
}

// Saw reports whether a TCP packet from this source port came, and waits for it up to the timeout.
func (w *Watch) Saw(port uint16, timeout time.Duration) bool {
	for deadline := time.Now().Add(timeout); ; time.Sleep(5 * time.Millisecond) {
		w.mu.Lock()
		saw := slices.ContainsFunc(w.packets, func(p []byte) bool { return len(p) >= 20 && binary.BigEndian.Uint16(p) == port })
		w.mu.Unlock()
		if saw || time.Now().After(deadline) {
			return saw
		}
	}
}

// Count is the number of packets so far.
func (w *Watch) Count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.packets)
}

// Close ends the watch.
func (w *Watch) Close() { w.conn.Close() }

// SendUDPFrame sends one IPv4 UDP packet in a frame to a neighbour's interface eth0, whatever the routes say.
func (h *Host) SendUDPFrame(neighbour *Host, from, to netip.AddrPort) error {
	out, err := link(h.Netns, "eth0")
	if err != nil {
		return err
	}
	in, err := link(neighbour.Netns, "eth0")
	if err != nil {
		return err
	}
	udp := make([]byte, 8) // without a checksum, which IPv4 allows
	binary.BigEndian.PutUint16(udp[0:], from.Port())
	binary.BigEndian.PutUint16(udp[2:], to.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	ip := make([]byte, 20, 20+len(udp))
	ip[0], ip[8], ip[9] = 0x45, 64, syscall.IPPROTO_UDP
	binary.BigEndian.PutUint16(ip[2:], uint16(20+len(udp)))
	copy(ip[12:], from.Addr().AsSlice())
	copy(ip[16:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(ip[10:], checksum(ip))
	address := syscall.SockaddrLinklayer{
		Protocol: networkOrder(syscall.ETH_P_IP), Ifindex: out.Attrs().Index, Halen: 6}
	copy(address.Addr[:], in.Attrs().HardwareAddr)
	return h.Do(func() error {
		fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer syscall.Close(fd)
		return syscall.Sendto(fd, append(ip, udp...), 0, &address)
	})
}

func networkOrder(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

// checksum is the Internet checksum (RFC 1071) of an even number of bytes.
func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
