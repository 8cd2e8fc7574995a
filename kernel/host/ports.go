package host

import (
	"fmt"
	"os"

	"nodeproxy/plan"
)

// EphemeralPorts returns the range from which the kernel chooses ports of sockets that ask for none in particular, the same in both
// families; Linux's default if it can't be read.
func EphemeralPorts() plan.PortRange {
	out := plan.PortRange{First: 32768, Last: 60999}
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return out
	}
	var r plan.PortRange
	if n, _ := fmt.Sscan(string(text), &r.First, &r.Last); n == 2 {
		out = r
	}
	return out
}
