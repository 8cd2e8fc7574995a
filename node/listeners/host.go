package listeners

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
)

// addressTries is how often addresses are asked for that change while the kernel lists them.
const addressTries = 5

// hostAddresses returns the addresses of this network namespace, except those of the devices in not.
func hostAddresses(not []string) ([]netip.Addr, error) {
	var skip []int
	for _, name := range not {
		if link, err := netlink.LinkByName(name); err == nil {
			skip = append(skip, link.Attrs().Index)
		}
	}
	var addrs []netlink.Addr
	err := error(netlink.ErrDumpInterrupted)
	for try := 0; try < addressTries && errors.Is(err, netlink.ErrDumpInterrupted); try++ {
		addrs, err = netlink.AddrList(nil, netlink.FAMILY_ALL)
	}
	if err != nil {
		return nil, fmt.Errorf("listing this node's addresses: %w", err)
	}
	var out []netip.Addr
	for _, a := range addrs {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && !slices.Contains(skip, a.LinkIndex) {
			out = append(out, ip.Unmap())
		}
	}
	return out, nil
}

// portRange is from which port to which the kernel chooses one for a socket that asks for none in particular.
type portRange struct{ first, last uint16 }

func (r portRange) contains(port uint16) bool { return r.first <= port && port <= r.last }

// ephemeralPorts reads the range from the kernel, which is one for both families; what can't be read is Linux's default.
func ephemeralPorts() portRange {
	out := portRange{32768, 60999}
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return out
	}
	var r portRange
	if n, _ := fmt.Sscan(string(text), &r.first, &r.last); n == 2 {
		out = r
	}
	return out
}
