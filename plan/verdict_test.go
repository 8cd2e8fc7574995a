package plan

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// The world of these tests: a node 192.168.1.10 with pods 10.244.1.0/24, of the cluster's 10.244.0.0/16.
var (
	tNode    = netip.MustParseAddr("192.168.1.10")
	tPod     = netip.MustParseAddr("10.244.1.2")
	tClient  = netip.MustParseAddr("203.0.113.1")
	tCluster = netip.MustParseAddr("10.96.0.1")
	tLB      = netip.MustParseAddr("172.20.0.1")
	tExt     = netip.MustParseAddr("198.18.0.1")

	tLocalEP = Endpoint{Addr: netip.MustParseAddrPort("10.244.1.2:8080"), Local: true}
	tFarEP   = Endpoint{Addr: netip.MustParseAddrPort("10.244.2.2:8080")}
)

// tPlan is a plan with one ServicePort that has every kind of frontend, all TCP port 80, node port 30080 and health check
// node port 32000, with an endpoint here and one elsewhere. change alters it.
func tPlan(change func(*ServicePort, *Settings)) *Plan {
	sp := &ServicePort{
		Key: Key{Service: Service{"ns", "svc"}, Protocol: TCP, Family: IPv4},
		Frontends: []Frontend{
			{tCluster, TCP, 80, ClusterIP}, {tLB, TCP, 80, LoadBalancerIP}, {tExt, TCP, 80, ExternalIP},
			{netip.Addr{}, TCP, 30080, NodePort}, {netip.Addr{}, TCP, 32000, HealthCheckNodePort},
		},
		Endpoints: Endpoints{Cluster: []Endpoint{tFarEP, tLocalEP}, Local: []Endpoint{tLocalEP}, Any: true},
	}
	settings := Settings{DetectLocal: DetectLocal{
		Mode: DetectClusterCIDR, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
	}}
	change(sp, &settings)
	p := New(Node{Name: "n", IPs: []netip.Addr{tNode}}, settings)
	p.Set(sp)
	return p
}

// tPacket is a TCP packet; what the node's own addresses are is known.
func tPacket(src, dst netip.Addr, port uint16) Packet {
	local := func(a netip.Addr) bool { return a == tNode || a.IsLoopback() }
	pkt := Packet{Src: src, Dst: dst, Protocol: TCP, DstPort: port, SrcLocal: local(src), DstLocal: local(dst),
		InInterface: "eth0"}
	if pkt.SrcLocal {
		pkt.Output, pkt.InInterface = true, ""
	}
	return pkt
}

// The verdicts that most packets get.
const (
	tBoth     = "forward to 10.244.1.2:8080, 10.244.2.2:8080"
	tBothMasq = "forward to 10.244.1.2:8080 masqueraded, 10.244.2.2:8080 masqueraded"
	tHere     = "forward to 10.244.1.2:8080"
	tThere    = "forward to 10.244.2.2:8080"
	tHairpin  = "forward to 10.244.1.2:8080 masqueraded, 10.244.2.2:8080"
)

// tPod3 is a pod of another node that is no endpoint.
var tPod3 = netip.MustParseAddr("10.244.3.9")

// The changes that make tPlan one for the case in question.

type tChange = func(*ServicePort, *Settings)

func plain(*ServicePort, *Settings)              {}
func internalLocal(sp *ServicePort, _ *Settings) { sp.InternalPolicy = Local }
func externalLocal(sp *ServicePort, _ *Settings) { sp.ExternalPolicy = Local }
func noDetection(_ *ServicePort, s *Settings)    { s.DetectLocal = DetectLocal{} }
func masqueradeAll(_ *ServicePort, s *Settings)  { s.MasqueradeAll = true }
func none(sp *ServicePort, _ *Settings)          { sp.Endpoints = Endpoints{} }
func noneHere(sp *ServicePort, _ *Settings) {
	sp.Endpoints = Endpoints{Cluster: []Endpoint{tFarEP}, Any: true}
}
func primary(_ *ServicePort, s *Settings) { s.NodePortAddresses.Primary = true }
func ownAddressAsExternal(sp *ServicePort, _ *Settings) {
	sp.Frontends[2] = Frontend{tNode, TCP, 30080, ExternalIP}
}

func ranges(list ...string) tChange {
	return func(sp *ServicePort, _ *Settings) {
		for _, r := range list {
			sp.SourceRanges = append(sp.SourceRanges, netip.MustParsePrefix(r))
		}
	}
}

func nodePortsAt(cidr string) tChange {
	return func(_ *ServicePort, s *Settings) {
		s.NodePortAddresses.CIDRs = []netip.Prefix{netip.MustParsePrefix(cidr)}
	}
}

func all(changes ...tChange) tChange {
	return func(sp *ServicePort, s *Settings) {
		for _, change := range changes {
			change(sp, s)
		}
	}
}

// verdictCase is a packet and what becomes of it.
type verdictCase struct {
	name   string
	change tChange
	packet Packet
	want   string
}

func testVerdicts(t *testing.T, cases []verdictCase) {
	t.Parallel()
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			v := tPlan(tc.change).Verdict(tc.packet)
			if v.String() != tc.want {
				t.Errorf("verdict on %s is %s, want %s; reasons:\n%s", tc.packet, v, tc.want, strings.Join(v.Reasons(),
					"\n"))
			}
			if len(v.Decisions) == 0 {
				t.Error("there are no reasons")
			}
		})
	}
}

func TestVerdictClusterIP(t *testing.T) {
	testVerdicts(t, []verdictCase{
		{"cluster IP, pod", plain, tPacket(tPod3, tCluster, 80), tBoth},
		{"cluster IP, own endpoint", plain, tPacket(tPod, tCluster, 80), tHairpin},
		{"cluster IP, node", plain, tPacket(tNode, tCluster, 80), tBothMasq},
		{"cluster IP, outside", plain, tPacket(tClient, tCluster, 80), tBothMasq},
		{"cluster IP, outside, no detection", noDetection, tPacket(tClient, tCluster, 80), tBoth},
		{"cluster IP, masquerade all", masqueradeAll, tPacket(tPod3, tCluster, 80), tBothMasq},
		{"cluster IP, local", internalLocal, tPacket(tPod3, tCluster, 80), tHere},
		{"cluster IP, local, none here", all(internalLocal, noneHere), tPacket(tPod3, tCluster, 80), "drop"},
		{"cluster IP, external policy does not matter", all(externalLocal, noneHere), tPacket(tPod3, tCluster, 80),
			tThere},
		{"cluster IP, none", none, tPacket(tPod3, tCluster, 80), "reject"},
		{"cluster IP, other port", plain, tPacket(tPod3, tCluster, 81), "pass"},
		{"cluster IP, other protocol", plain, Packet{Src: tPod3, Dst: tCluster, Protocol: UDP, DstPort: 80}, "pass"},
	})
}

func TestVerdictExternalIP(t *testing.T) {
	testVerdicts(t, []verdictCase{
		{"external IP, outside", plain, tPacket(tClient, tExt, 80), tBothMasq},
		{"external IP, pod", plain, tPacket(tPod3, tExt, 80), tBothMasq},
		{"external IP, local, outside", externalLocal, tPacket(tClient, tExt, 80), tHere},
		{"external IP, local, pod", externalLocal, tPacket(tPod3, tExt, 80), tBoth},
		{"external IP, local, own endpoint", externalLocal, tPacket(tPod, tExt, 80), tHairpin},
		{"external IP, local, node", externalLocal, tPacket(tNode, tExt, 80), tBothMasq},
		{"external IP, local, pod, no detection", all(externalLocal, noDetection), tPacket(tPod3, tExt, 80), tHere},
		{"external IP, local, outside, none here", all(externalLocal, noneHere), tPacket(tClient, tExt, 80), "drop"},
		{"external IP, local, pod, none here", all(externalLocal, noneHere), tPacket(tPod3, tExt, 80), tThere},
		{"external IP, local, node, none here", all(externalLocal, noneHere), tPacket(tNode, tExt, 80),
			"forward to 10.244.2.2:8080 masqueraded"},
		{"external IP, internal policy does not matter", all(internalLocal, noneHere), tPacket(tClient, tExt, 80),
			"forward to 10.244.2.2:8080 masqueraded"},
		{"external IP, none", none, tPacket(tClient, tExt, 80), "reject"},
		{"external IP, none, node", none, tPacket(tNode, tExt, 80), "reject"},
		{"external IP, source ranges do not matter", ranges("10.0.0.0/8"), tPacket(tClient, tExt, 80), tBothMasq},
	})
}

func TestVerdictLoadBalancerIP(t *testing.T) {
	fromLB := Packet{Src: tLB, Dst: tLB, Protocol: TCP, DstPort: 80, SrcLocal: true, DstLocal: true, Output: true}
	testVerdicts(t, []verdictCase{
		{"load balancer IP, within", ranges("203.0.113.0/24"), tPacket(tClient, tLB, 80), tBothMasq},
		{"load balancer IP, outside of ranges", ranges("203.0.114.0/24", "198.51.100.0/24"), tPacket(tClient, tLB,
			80), "drop"},
		{"load balancer IP, pod outside of ranges", ranges("203.0.113.0/24"), tPacket(tPod3, tLB, 80), "drop"},
		{"load balancer IP, node outside of ranges", ranges("203.0.113.0/24"), tPacket(tNode, tLB, 80), "drop"},
		{"load balancer IP, from itself", ranges("192.168.1.0/24"), fromLB, tBothMasq},
		{"load balancer IP, from itself, node outside", ranges("203.0.113.0/24"), fromLB, "drop"},
		{"load balancer IP, outside of ranges, none", all(ranges("10.0.0.0/8"), none), tPacket(tClient, tLB, 80),
			"reject"},
		{"load balancer IP, local, within, none here", all(ranges("203.0.113.0/24"), externalLocal, noneHere),
			tPacket(tClient, tLB, 80), "drop"},
	})
}

func TestVerdictNodePort(t *testing.T) {
	testVerdicts(t, []verdictCase{
		{"node port, outside", plain, tPacket(tClient, tNode, 30080), tBothMasq},
		{"node port, source ranges do not matter", ranges("10.0.0.0/8"), tPacket(tClient, tNode, 30080), tBothMasq},
		{"node port, local", externalLocal, tPacket(tClient, tNode, 30080), tHere},
		{"node port, local, none here", all(internalLocal, externalLocal, noneHere), tPacket(tClient, tNode, 30080),
			"drop"},
		{"node port, none", none, tPacket(tClient, tNode, 30080), "reject"},
		{"node port, another host", plain, tPacket(tClient, netip.MustParseAddr("192.168.1.11"), 30080), "pass"},
		{"node port, at a service address", plain, tPacket(tClient, tExt, 30080), "pass"},
		{"service port at the node", plain, tPacket(tClient, tNode, 80), "pass"},
		{"node port, not at this address", nodePortsAt("10.0.0.0/8"), tPacket(tClient, tNode, 30080), "pass"},
		{"node port, none, not at this address", all(none, nodePortsAt("10.0.0.0/8")), tPacket(tClient, tNode, 30080),
			"pass"},
		{"node port, ranges of the other family", nodePortsAt("fd00::/8"), tPacket(tClient, tNode, 30080), tBothMasq},
		{"node port, primary", primary, tPacket(tClient, tNode, 30080), tBothMasq},
		{"node port, health check", plain, tPacket(tClient, tNode, 32000), "pass"},
		{"external IP of the node before a node port", all(externalLocal, noneHere, ownAddressAsExternal),
			tPacket(tClient, tNode, 30080), "drop"},
	})
}

// TestVerdictLoopback is about who reaches what at loopback addresses.
func TestVerdictLoopback(t *testing.T) {
	t.Parallel()
	localhost := netip.MustParseAddr("127.0.0.1")
	for _, tc := range []struct {
		name     string
		enabled  bool
		cidrs    []netip.Prefix
		src      netip.Addr
		port     uint16
		dropped  bool
		forwards bool
	}{
		{name: "node port", enabled: true, src: localhost, port: 30080, forwards: true},
		{name: "node port, off", src: localhost, port: 30080},
		{name: "node port, other addresses", enabled: true, src: localhost, port: 30080,
			cidrs: []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")}},
		{name: "node port, its address", enabled: true, src: localhost, port: 30080,
			cidrs: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}, forwards: true},
		{name: "node port, ranges of the other family", enabled: true, src: localhost, port: 30080,
			cidrs: []netip.Prefix{netip.MustParsePrefix("fd00::/8")}, forwards: true},
		{name: "node port from outside", enabled: true, src: tClient, port: 30080, forwards: true},
		{name: "other port", enabled: true, src: localhost, port: 22},
		{name: "other port from outside", enabled: true, src: tClient, port: 22, dropped: true},
		{name: "other port from outside, off", src: tClient, port: 22},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p := tPlan(func(_ *ServicePort, s *Settings) {
				s.LocalhostNodePorts = tc.enabled
				s.NodePortAddresses.CIDRs = tc.cidrs
			})
			want := Pass
			if tc.dropped {
				want = Drop
			} else if tc.forwards {
				want = Forward
			}
			if v := p.Verdict(tPacket(tc.src, localhost, tc.port)); v.Action != want {
				t.Errorf("verdict is %s, want %s: %v", v, want, v.Reasons())
			}
		})
	}
}

func TestVerdictIPv6(t *testing.T) {
	t.Parallel()
	key := Key{Service: Service{"ns", "svc"}, Protocol: UDP, Family: IPv6}
	ep := Endpoint{Addr: netip.MustParseAddrPort("[fd00::2]:53")}
	p := New(Node{}, Settings{LocalhostNodePorts: true})
	p.Set(&ServicePort{Key: key, Endpoints: Endpoints{Any: true, Cluster: []Endpoint{ep}},
		Frontends: []Frontend{{netip.Addr{}, UDP, 30053, NodePort}}})
	e := NewEvaluator(p)
	for dst, want := range map[string]Action{"2001:db8::1": Forward, "fe80::1%eth0": Forward, "::1": Pass,
		"192.168.1.10": Pass} {
		pkt := Packet{Src: netip.MustParseAddr("2001:db8::9"), Dst: netip.MustParseAddr(dst), Protocol: UDP,
			DstPort: 30053, DstLocal: true}
		if v := e.Verdict(pkt); v.Action != want {
			t.Errorf("verdict on %s is %s, want %s", pkt, v, want)
		}
	}
}

// TestVerdictByInterface recognises pods by the interface that they send by.
func TestVerdictByInterface(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		mode   DetectLocalMode
		iface  string
		in     string
		output bool
		masq   bool
	}{
		{DetectBridgeInterface, "cni0", "cni0", false, false},
		{DetectBridgeInterface, "cni0", "cni01", false, true},
		{DetectBridgeInterface, "cni0", "", true, true},
		{DetectInterfaceNamePrefix, "veth", "veth12", false, false},
		{DetectInterfaceNamePrefix, "veth", "eth0", false, true},
		{DetectInterfaceNamePrefix, "veth", "", true, true},
	} {
		p := tPlan(func(_ *ServicePort, s *Settings) { s.DetectLocal = DetectLocal{Mode: tc.mode, Interface: tc.iface} })
		pkt := Packet{Src: tClient, Dst: tCluster, Protocol: TCP, DstPort: 80, InInterface: tc.in, Output: tc.output}
		if v := p.Verdict(pkt); v.Action != Forward || v.Targets[0].Masquerade != tc.masq {
			t.Errorf("mode %s on %s: verdict on %s is %s, want masquerading %t", tc.mode, tc.iface, pkt, v, tc.masq)
		}
	}
}

func TestVerdictNamesDestination(t *testing.T) {
	t.Parallel()
	p := tPlan(func(sp *ServicePort, _ *Settings) { sp.ExternalPolicy = Local })
	v := p.Verdict(tPacket(tNode, tExt, 80))
	if want := (Key{Service: Service{"ns", "svc"}, Protocol: TCP, Family: IPv4}); v.ServicePort != want {
		t.Errorf("it is for %s, want %s", v.ServicePort, want)
	}
	if want := (Frontend{tExt, TCP, 80, ExternalIP}); v.Frontend != want {
		t.Errorf("it is for %s, want %s", v.Frontend, want)
	}
	want := []string{
		"it is for external IP 198.18.0.1:80/TCP of ns/svc/TCP/IPv4",
		"the external traffic policy is Local, but the node itself reaches every endpoint, masqueraded",
	}
	if !slices.Equal(v.Reasons(), want) {
		t.Errorf("reasons are %q, want %q", v.Reasons(), want)
	}
	if v := p.Verdict(tPacket(tClient, tNode, 32000)); v.Frontend.Kind != HealthCheckNodePort {
		t.Errorf("the health check node port is reported as %s", v.Frontend)
	}
	if v := p.Verdict(tPacket(tClient, tNode, 22)); v.ServicePort != (Key{}) || v.Frontend != (Frontend{}) {
		t.Errorf("a packet for nothing is reported as for %s", v.Frontend)
	}
}
