package source

import "net/netip"

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
