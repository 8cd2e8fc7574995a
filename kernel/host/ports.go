package host

import (
	"fmt"
	"os"

	"nodeproxy/plan"
)

// EphemeralPorts returns the ports that the kernel chooses from for a socket that asks for none in particular, which are the same in
// both families; Linux's default if they can't be read.
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
