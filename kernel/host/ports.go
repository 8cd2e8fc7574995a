package host

import (
	"fmt"
	"os"
)

// PortRange is a range of ports, both ends included.
type PortRange struct{ First, Last uint16 }

// Contains reports whether a port is in the range.
func (r PortRange) Contains(port uint16) bool { return r.First <= port && port <= r.Last }

// EphemeralPorts returns the ports that the kernel chooses from for a socket that asks for none in particular, which are the same in
// both families; Linux's default if they can't be read.
func EphemeralPorts() PortRange {
	out := PortRange{32768, 60999}
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return out
	}
	var r PortRange
	if n, _ := fmt.Sscan(string(text), &r.First, &r.Last); n == 2 {
		out = r
	}
	return out
}
