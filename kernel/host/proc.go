package host

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"nodeproxy/plan"
)

// WithoutIPv6 returns why this host has no IPv6; "" if it has.
func WithoutIPv6() string {
	if _, err := os.Stat("/proc/net/if_inet6"); err != nil {
		return "this kernel has no IPv6"
	}
	off, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6")
	if err == nil && strings.TrimSpace(string(off)) == "1" {
		return "IPv6 is switched off by net.ipv6.conf.all.disable_ipv6"
	}
	return ""
}

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

// AnswersFor reports whether the kernel answers at an interface when it is asked for other hosts' addresses (proxy_arp). sysctls is /proc/sys.
func AnswersFor(sysctls, name string) bool {
	for _, of := range []string{"all", name} {
		text, err := os.ReadFile(filepath.Join(sysctls, "net/ipv4/conf", of, "proxy_arp"))
		if err != nil || strings.TrimSpace(string(text)) != "0" { // Where it is not known, it may.
			return true
		}
	}
	return false
}

// StrictReversePath reports whether the kernel drops packets of IPv4 that come by an interface other than that of the route to their source. sysctls
// is /proc/sys.
func StrictReversePath(sysctls, name string) bool {
	strictest := 0
	for _, of := range []string{"all", name} {
		text, err := os.ReadFile(filepath.Join(sysctls, "net/ipv4/conf", of, "rp_filter"))
		if n, bad := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && bad == nil {
			strictest = max(strictest, n) // 2 is loose, and wins.
		}
	}
	return strictest == 1
}

// ReversePathDrops returns how many packets the kernel has dropped for that since it started, in the network namespace of the calling thread; false
// if that is not known.
func ReversePathDrops() (uint64, bool) {
	text, err := os.ReadFile("/proc/thread-self/net/netstat")
	if err != nil {
		return 0, false
	}
	lines := strings.Split(string(text), "\n")
	for i := 0; i+1 < len(lines); i += 2 { // Names, and below them values.
		names, values := strings.Fields(lines[i]), strings.Fields(lines[i+1])
		for j, name := range names {
			if name == "IPReversePathFilter" && j < len(values) {
				n, err := strconv.ParseUint(values[j], 10, 64)
				return n, err == nil
			}
		}
	}
	return 0, false
}
