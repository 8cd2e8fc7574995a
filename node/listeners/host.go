package listeners

import (
	"fmt"
	"net/netip"
	"os"

	"nodeproxy/kernel/host"
	"nodeproxy/plan"
)

// hostAddresses returns the addresses of this network namespace, except those of the devices in not.
func hostAddresses(not []string) ([]netip.Addr, error) {
	list, err := host.Filter{Except: not, LinkLocal: true}.Addresses(plan.Families[:]...)
	var out []netip.Addr
	for _, a := range list {
		out = append(out, a.Addr)
	}
	return out, err
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
