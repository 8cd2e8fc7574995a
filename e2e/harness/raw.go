package harness

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
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

const protoTCP, protoUDP = 6, 17

// SendTCP sends one TCP packet with these flags, of no connection.
func (h *Host) SendTCP(from, to netip.AddrPort, flags TCPFlags) error {
	p := make([]byte, 20)
	binary.BigEndian.PutUint16(p[0:], from.Port())
	binary.BigEndian.PutUint16(p[2:], to.Port())
	binary.BigEndian.PutUint32(p[4:], 1)
	p[12], p[13] = 5<<4, byte(flags)
	binary.BigEndian.PutUint16(p[14:], 1024)
	binary.BigEndian.PutUint16(p[16:], transportChecksum(protoTCP, from.Addr(), to.Addr(), p))
	return h.Do(func() error {
		network := "ip4:tcp"
		if to.Addr().Is6() {
			network = "ip6:tcp"
		}
		c, err := net.ListenPacket(network, from.Addr().String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.WriteTo(p, &net.IPAddr{IP: to.Addr().AsSlice()})
		return err
	})
}

// Watch notes the source ports of the TCP packets that reach a host.
type Watch struct {
	conn net.PacketConn

	mu    sync.Mutex
	ports map[uint16]bool
}

// WatchTCP starts to watch the TCP packets of one family that a host gets.
func (h *Host) WatchTCP(family int) (*Watch, error) {
	w := &Watch{ports: map[uint16]bool{}}
	err := h.Do(func() (err error) {
		w.conn, err = net.ListenPacket(fmt.Sprintf("ip%d:tcp", family), h.IP(family).String())
		return err
	})
	if err != nil {
		return nil, err
	}
	go func() {
		buf := make([]byte, 2048)
		for {
			n, _, err := w.conn.ReadFrom(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil && n >= 20 {
				w.mu.Lock()
				w.ports[binary.BigEndian.Uint16(buf)] = true
				w.mu.Unlock()
			}
		}
	}()
	return w, nil
}

// Saw reports whether a packet from this source port came, and waits for it up to the timeout.
func (w *Watch) Saw(port uint16, timeout time.Duration) bool {
	for deadline := time.Now().Add(timeout); ; time.Sleep(5 * time.Millisecond) {
		w.mu.Lock()
		saw := w.ports[port]
		w.mu.Unlock()
		if saw || time.Now().After(deadline) {
			return saw
		}
	}
}

// Close ends the watch.
func (w *Watch) Close() { w.conn.Close() }

// Counter counts the UDP packets that reach an address.
type Counter struct {
	conn *net.UDPConn
	n    atomic.Int64
}

// CountUDP starts to count the UDP packets to an address of the namespace.
func (n *Netns) CountUDP(at netip.AddrPort) (*Counter, error) {
	c := &Counter{}
	err := n.Do(func() (err error) {
		c.conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		return err
	})
	if err != nil {
		return nil, err
	}
	go func() {
		buf := make([]byte, 2048)
		for {
			if _, _, err := c.conn.ReadFromUDPAddrPort(buf); errors.Is(err, net.ErrClosed) {
				return
			} else if err == nil {
				c.n.Add(1)
			}
		}
	}()
	return c, nil
}

// Count is the number of packets so far.
func (c *Counter) Count() int { return int(c.n.Load()) }

// Close ends the count.
func (c *Counter) Close() { c.conn.Close() }

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
	udp := make([]byte, 8)
	binary.BigEndian.PutUint16(udp[0:], from.Port())
	binary.BigEndian.PutUint16(udp[2:], to.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	binary.BigEndian.PutUint16(udp[6:], transportChecksum(protoUDP, from.Addr(), to.Addr(), udp))
	ip := make([]byte, 20, 20+len(udp))
	ip[0], ip[8], ip[9] = 0x45, 64, protoUDP
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

// transportChecksum is the checksum of a TCP or UDP packet with its pseudo header.
func transportChecksum(protocol byte, from, to netip.Addr, packet []byte) uint16 {
	pseudo := append(from.AsSlice(), to.AsSlice()...)
	pseudo = append(pseudo, 0, protocol)
	pseudo = binary.BigEndian.AppendUint16(pseudo, uint16(len(packet)))
	return checksum(append(pseudo, packet...))
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
