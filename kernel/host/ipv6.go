package host

import (
	"os"
	"strings"
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
