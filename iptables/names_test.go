package iptables

import (
	"net/netip"
	"testing"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// TestNamesAreKubeProxys: kube-proxy and nodeproxy take over from each other in place only if both derive the same names.
// These were read off a kube-proxy's iptables-save.
func TestNamesAreKubeProxys(t *testing.T) {
	key := func(svc, port string, proto plan.Protocol) plan.Key {
		return plan.Key{Service: plan.Service{Namespace: "ns" + svc, Name: "svc" + svc}, Port: port, Protocol: proto}
	}
	for _, c := range []struct{ got, want string }{
		{serviceChain(names.PrefixCluster, key("1", "p80", plan.TCP)), "KUBE-SVC-XPGD46QRK7WJZT7O"},
		{endpointChain(key("1", "p80", plan.TCP), netip.MustParseAddrPort("10.180.0.1:80")), "KUBE-SEP-SXIVWICOYRO3J4NJ"},
		{serviceChain(names.PrefixExternal, key("2", "p80", plan.TCP)), "KUBE-EXT-GNZBNJ2PO5MGZ6GT"},
		{serviceChain(names.PrefixLocal, key("2", "p80", plan.TCP)), "KUBE-SVL-GNZBNJ2PO5MGZ6GT"},
	} {
		if c.got != c.want {
			t.Errorf("got %s, want %s", c.got, c.want)
		}
	}
}
