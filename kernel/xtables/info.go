package xtables

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// info is how much a table of the legacy variant holds.
type info struct{ entries, bytes uint32 }

// infoSockets are sockets of both families, by which the kernel is asked for that. One of a family that it lacks is -1.
type infoSockets struct{ v4, v6 int }

// tableInfo is struct ipt_getinfo of linux/netfilter_ipv4/ip_tables.h; that of IPv6 is the same.
type tableInfo struct {
	name                  [32]byte
	hooks                 uint32
	entry, underflow      [5]uint32
	entries, sizeOfTables uint32
}

// getInfo is IPT_SO_GET_INFO and IP6T_SO_GET_INFO.
const getInfo = 64

func openInfo() (*infoSockets, error) {
	open := func(domain int) (int, error) { return unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) }
	s := &infoSockets{}
	var err4, err6 error
	s.v4, err4 = open(unix.AF_INET)
	s.v6, err6 = open(unix.AF_INET6)
	if err4 != nil && err6 != nil {
		return nil, fmt.Errorf("sockets to read sizes of tables: %w", errors.Join(err4, err6))
	}
	return s, nil
}

// read returns the zero value for a table that can't be read. As long as it can't, it does not change either.
func (s *infoSockets) read(f plan.Family, t names.Table) info {
	fd, level := s.v4, unix.IPPROTO_IP
	if f == plan.IPv6 {
		fd, level = s.v6, unix.IPPROTO_IPV6
	}
	var in tableInfo
	copy(in.name[:], t)
	size := uint32(unsafe.Sizeof(in))
	// No package has a call for this option, whose buffer is read and written.
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), getInfo,
		uintptr(unsafe.Pointer(&in)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return info{}
	}
	return info{in.entries, in.sizeOfTables}
}

func (s *infoSockets) close() {
	for _, fd := range []int{s.v4, s.v6} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}
