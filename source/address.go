package source

import (
	"net/netip"

	utilnet "k8s.io/utils/net"
)

// ParseIP reads an address as kube-proxy and the API server do: leading zeros in IPv4 are decimal, not octal, and an IPv4-mapped IPv6
// address is an IPv4 address.
func ParseIP(text string) (netip.Addr, bool) {
	if ip, err := netip.ParseAddr(text); err == nil { // most often, and at less cost
		return ip.Unmap(), ip.Zone() == ""
	}
	ip, ok := netip.AddrFromSlice(utilnet.ParseIPSloppy(text))
	return ip.Unmap(), ok
}

// SpecialAddress describes an address that neither an endpoint nor an external IP may have; it returns "" for others. The API
// server rejects such addresses too, since traffic to them would reach the node itself or leave unrouted (see CVE-2021-25737).
func SpecialAddress(ip netip.Addr) string {
	switch {
	case ip.IsUnspecified():
		return "the unspecified address"
	case ip.IsLoopback():
		return "a loopback address"
	case ip.IsLinkLocalUnicast():
		return "a link-local address"
	case ip.IsMulticast():
		return "a multicast address"
	}
	return ""
}
