package ipvs_test

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/set"
	"nodeproxy/iptables"
	"nodeproxy/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

// TestDifferences shows where mode ipvs does otherwise than mode iptables. They are what packetsim.IPVSTolerance and the other
// tests here make allowance for, and nothing else is.
func TestDifferences(t *testing.T) {
	t.Parallel()
	node, far := netip.MustParseAddr("192.168.1.10"), netip.MustParseAddr("10.244.2.2")
	neighbour := netip.MustParseAddr("192.168.1.11")
	frontend := func(kind plan.FrontendKind, a string, port uint16) plan.Frontend {
		f := plan.Frontend{Kind: kind, Protocol: plan.TCP, Port: port}
		if a != "" {
			f.Addr = netip.MustParseAddr(a)
		}
		return f
	}
	p := plan.New(plan.Node{Name: "n", IPs: []netip.Addr{node}}, plan.Settings{DetectLocal: plan.DetectLocal{
		Mode: plan.DetectClusterCIDR, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}})
	p.Set(&plan.ServicePort{
		Key: plan.Key{Service: plan.Service{Namespace: "a", Name: "b"}, Protocol: plan.TCP, Family: plan.IPv4},
		Frontends: []plan.Frontend{frontend(plan.ClusterIP, "10.96.0.1", 80),
			frontend(plan.ExternalIP, "192.168.1.11", 80), frontend(plan.NodePort, "", 30080)},
		Endpoints: plan.Endpoints{Any: true, Cluster: []plan.Endpoint{{Addr: netip.AddrPortFrom(far, 8080)}}},
	})
	p.Set(&plan.ServicePort{
		Key:       plan.Key{Service: plan.Service{Namespace: "a", Name: "c"}, Protocol: plan.TCP, Family: plan.IPv4},
		Frontends: []plan.Frontend{frontend(plan.ClusterIP, "10.96.0.2", 80)},
		Endpoints: plan.Endpoints{Any: true, Cluster: []plan.Endpoint{{Addr: netip.AddrPortFrom(neighbour, 8080)}}},
	})
	in := func(src netip.Addr, dst string, port uint16) plan.Packet {
		return plan.Packet{Src: src, Dst: netip.MustParseAddr(dst), Protocol: plan.TCP, DstPort: port, InInterface: "eth0"}
	}
	loopback := in(netip.MustParseAddr("127.0.0.1"), "192.168.1.10", 30080)
	loopback.Output, loopback.InInterface = true, ""
	pod := netip.MustParseAddr("10.244.1.2")
	o := iptables.Options{MasqueradeBit: 14}
	rules, err := restore.Parse(plan.IPv4, iptables.Render(p, plan.IPv4, o))
	require.NoError(t, err)
	rs, err := ipvs.Machine(p, plan.IPv4, ipvs.Options{MasqueradeBit: 14, Host: set.Of(node)})
	require.NoError(t, err)
	for _, tc := range []struct {
		name           string
		packet         plan.Packet
		iptables, ipvs packetsim.Outcome // but for probability and rules
	}{
		{"a port that no Service has, at a cluster IP", in(pod, "10.96.0.1", 81),
			packetsim.Outcome{Action: packetsim.Accept, Dst: netip.MustParseAddrPort("10.96.0.1:81")},
			packetsim.Outcome{Action: packetsim.Reject, Dst: netip.MustParseAddrPort("10.96.0.1:81"), Delivered: true}},
		{"an endpoint of another node to itself by way of this one", in(far, "10.96.0.1", 80),
			packetsim.Outcome{Action: packetsim.Accept, Dst: netip.MustParseAddrPort("10.244.2.2:8080"), DNAT: true,
				Masquerade: true},
			packetsim.Outcome{Action: packetsim.Accept, Dst: netip.MustParseAddrPort("10.244.2.2:8080"), DNAT: true}},
		{"from a loopback address to another node", loopback,
			packetsim.Outcome{Action: packetsim.Accept, Dst: netip.MustParseAddrPort("10.244.2.2:8080"), DNAT: true,
				Masquerade: true},
			packetsim.Outcome{Action: packetsim.Drop, Dst: netip.MustParseAddrPort("192.168.1.10:30080"), Delivered: true}},
		{"an external IP that is another node's: its other ports are no difference", in(pod, "192.168.1.11", 22),
			packetsim.Outcome{Action: packetsim.Accept, Dst: netip.MustParseAddrPort("192.168.1.11:22")},
			packetsim.Outcome{Action: packetsim.Accept, Dst: netip.MustParseAddrPort("192.168.1.11:22")}},
		{"an external IP that is another node's: nor is an endpoint there", in(pod, "10.96.0.2", 80),
			packetsim.Outcome{Action: packetsim.Accept, Dst: netip.MustParseAddrPort("192.168.1.11:8080"), DNAT: true},
			packetsim.Outcome{Action: packetsim.Accept, Dst: netip.MustParseAddrPort("192.168.1.11:8080"), DNAT: true}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			for _, mode := range []struct {
				name string
				rs   *packetsim.Machine
				want packetsim.Outcome
			}{{"iptables", rules, tc.iptables}, {"ipvs", rs, tc.ipvs}} {
				outcomes, err := mode.rs.Trace(tc.packet, packetsim.Node{Local: func(a netip.Addr) bool {
					return a == node || a.IsLoopback()
				}})
				require.NoError(t, err)
				if len(outcomes) != 1 {
					t.Fatalf("mode %s: outcomes are %v", mode.name, outcomes)
				}
				got := outcomes[0]
				if got.Action != mode.want.Action || got.Dst != mode.want.Dst || got.DNAT != mode.want.DNAT ||
					got.Masquerade != mode.want.Masquerade || got.Delivered != mode.want.Delivered {
					t.Errorf("mode %s: outcome is %+v, want %+v", mode.name, got, mode.want)
				}
			}
		})
	}
}
