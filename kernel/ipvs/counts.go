package ipvs

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Counts reads how many virtual servers of IPv4 there are, and how many real servers each has, by the older interface of IPVS, socket
// options, which knows no IPv6. The kernel copies a hundred bytes for each in a single system call; by netlink, it takes a request for
// each.
type Counts struct {
	fd  int
	buf []byte
}

// From linux/ip_vs.h: options; the number in struct ip_vs_getinfo; struct ip_vs_service_entry, behind a number; and struct
// ip_vs_dest_entry, behind what names the virtual server and a number.
const (
	getInfo     = 64 + 1024 + 64 + 1
	getServices = 64 + 1024 + 64 + 2
	getDests    = 64 + 1024 + 64 + 4

	infoSize     = 12
	infoServices = 8

	entriesAt = 8
	entrySize = 104

	entryProtocol  = 0
	entryAddr      = 4
	entryPort      = 8
	entryMark      = 12
	entryScheduler = 16
	entryDests     = 44

	destsProtocol = 0
	destsAddr     = 4
	destsPort     = 8
	destsMark     = 12
	destsNumber   = 16
	destsAt       = 24
	destSize      = 96

	oldDestAddr       = 0
	oldDestPort       = 4
	oldDestForwarding = 8
	oldDestWeight     = 12
	oldDestUpper      = 16
	oldDestLower      = 20
	oldDestActive     = 24
	oldDestInactive   = 28
	oldDestPersistent = 32
)

// OpenCounts opens Counts of the virtual servers in the network namespace of the calling thread. It is an error if they can't be read.
func OpenCounts() (*Counts, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket to count real servers: %w", err)
	}
	c := &Counts{fd: fd}
	if _, err = c.Servers(); err == nil {
		_, err = c.first(1)
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// Close closes the socket. Later uses fail; they never reach another file with the same number.
func (c *Counts) Close() error {
	fd := c.fd
	c.fd = -1
	return unix.Close(fd)
}

// get asks for an option, for which b holds the question and then the answer. No package has a call for that.
func (c *Counts) get(option uintptr, b []byte) error {
	size := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(c.fd), unix.IPPROTO_IP, option,
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return fmt.Errorf("counting virtual and real servers: %w", errno)
	}
	return nil
}

// empty returns a buffer of zeros, which is valid until the next call.
func (c *Counts) empty(size int) []byte {
	c.buf = slices.Grow(c.buf[:0], size)[:size]
	clear(c.buf)
	return c.buf
}

// Servers returns the number of virtual servers of IPv4. The kernel has it at hand, however large it is.
func (c *Counts) Servers() (int, error) {
	var b [infoSize]byte
	err := c.get(getInfo, b[:])
	return int(binary.NativeEndian.Uint32(b[infoServices:])), err
}

// first returns the entries of the first n virtual servers, behind a number. Those that are not there are empty.
func (c *Counts) first(n int) ([]byte, error) {
	b := c.empty(entriesAt + n*entrySize)
	binary.NativeEndian.PutUint32(b, uint32(n))
	return b, c.get(getServices, b)
}

// Read calls each with the number of real servers of each virtual server of IPv4.
func (c *Counts) Read(each func(id ServerID, realServers int)) error {
	var b []byte
	for {
		n, err := c.Servers()
		if err != nil {
			return err
		}
		if b, err = c.first(n + 1); err != nil {
			return err
		}
		if b[len(b)-entrySize+entryScheduler] == 0 { // The last one is empty, so there are no more.
			break
		}
	}
	for b = b[entriesAt:]; b[entryScheduler] != 0; b = b[entrySize:] {
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

// realServers reads the real servers of a virtual server of IPv4 into it, in one system call. It reports whether that is there and has n of
// them, none of which is of IPv6.
func (c *Counts) realServers(h *ActualServer, n int) bool {
	b := c.empty(destsAt + (n+1)*destSize) // The last one is to stay empty.
	if h.ID.Mark == 0 {
		binary.NativeEndian.PutUint16(b[destsProtocol:], uint16(netlink.Protocol(h.ID.Protocol)))
		copy(b[destsAddr:], h.ID.Addr.AsSlice())
		binary.BigEndian.PutUint16(b[destsPort:], h.ID.Port)
	}
	binary.NativeEndian.PutUint32(b[destsMark:], h.ID.Mark)
	binary.NativeEndian.PutUint32(b[destsNumber:], uint32(n+1))
	if c.get(getDests, b) != nil {
		return false
	}
	for b = b[destsAt:]; len(b) > destSize; b = b[destSize:] {
		number := func(at int) uint32 { return binary.NativeEndian.Uint32(b[at:]) }
		if number(oldDestAddr) == 0 {
			return false
		}
		d := ActualRealServer{Connections: Connections{number(oldDestActive), number(oldDestInactive), number(oldDestPersistent)}}
		d.Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[oldDestAddr:])), binary.BigEndian.Uint16(b[oldDestPort:]))
		d.Weight = number(oldDestWeight)
		h.Foreign = h.Foreign || number(oldDestForwarding)&forwardMask != forwardMasquerade || number(oldDestUpper)|number(oldDestLower) != 0
		h.RealServers[d.Addr] = d
	}
	return binary.NativeEndian.Uint32(b[oldDestAddr:]) == 0
}
