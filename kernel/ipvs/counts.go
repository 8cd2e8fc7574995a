package ipvs

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Counts reads how many real servers each virtual server of IPv4 has, by the older interface of IPVS, socket options, which knows no IPv6.
// The kernel copies a hundred bytes for each in a single system call; by netlink, it takes a request for each.
type Counts struct {
	fd  int
	buf []byte
}

// From linux/ip_vs.h: the option, and struct ip_vs_service_entry behind a number.
const (
	getServices = 64 + 1024 + 64 + 2
	entriesAt   = 8
	entrySize   = 104

	entryProtocol  = 0
	entryAddr      = 4
	entryPort      = 8
	entryMark      = 12
	entryScheduler = 16
	entryDests     = 44
)

// OpenCounts opens Counts of the virtual servers in the network namespace of the calling thread. It is an error if they can't be read.
func OpenCounts() (*Counts, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket to count real servers: %w", err)
	}
	c := &Counts{fd: fd}
	if err := c.Read(func(ServerID, int) {}); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// Close closes the socket.
func (c *Counts) Close() error { return unix.Close(c.fd) }

// Read calls each with the number of real servers of each virtual server of IPv4.
func (c *Counts) Read(each func(id ServerID, realServers int)) error {
	if c.buf == nil {
		c.buf = make([]byte, entriesAt+64*entrySize)
	}
	for {
		n := (len(c.buf) - entriesAt) / entrySize
		clear(c.buf)
		binary.NativeEndian.PutUint32(c.buf, uint32(n))
		size := uint32(len(c.buf))
		// No package has a call for this option, whose buffer is read and written.
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(c.fd), unix.IPPROTO_IP, getServices,
			uintptr(unsafe.Pointer(&c.buf[0])), uintptr(unsafe.Pointer(&size)), 0)
		if errno != 0 {
			return fmt.Errorf("counting real servers: %w", errno)
		}
		if c.buf[len(c.buf)-entrySize+entryScheduler] == 0 { // The last one is empty, so there are no more.
			break
		}
		c.buf = make([]byte, entriesAt+(n+n/4+64)*entrySize)
	}
	for b := c.buf[entriesAt:]; b[entryScheduler] != 0; b = b[entrySize:] {
		id := ServerID{Family: plan.IPv4, Mark: binary.NativeEndian.Uint32(b[entryMark:])}
		if id.Mark == 0 {
			id.Protocol = netlink.ProtocolOf(uint8(binary.NativeEndian.Uint16(b[entryProtocol:])))
			id.Addr = netip.AddrFrom4([4]byte(b[entryAddr:]))
			id.Port = binary.BigEndian.Uint16(b[entryPort:])
		}
		each(id, int(binary.NativeEndian.Uint32(b[entryDests:])))
	}
	return nil
}
