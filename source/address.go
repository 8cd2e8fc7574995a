package source

import "net/netip"

// SpecialAddress names the kind of an address that no endpoint and no external IP may have; for others it is empty. The API
// server refuses such addresses too, since traffic to them would reach the node itself or leave unrouted (CVE-2021-25737 and
// its like).
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
