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
	tFarPod  = netip.MustParseAddr("10.244.2.2")
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
			{ClusterIP, tCluster, TCP, 80}, {LoadBalancerIP, tLB, TCP, 80}, {ExternalIP, tExt, TCP, 80},
			{NodePort, netip.Addr{}, TCP, 30080}, {HealthCheckNodePort, netip.Addr{}, TCP, 32000},
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
	pkt := Packet{Src: src, Dst: dst, Protocol: TCP, DstPort: port, SrcLocal: local(src), DstLocal: local(dst), InInterface: "eth0"}
	if pkt.SrcLocal {
		pkt.Output, pkt.InInterface = true, ""
	}
	return pkt
}

func TestVerdict(t *testing.T) {
	t.Parallel()
	const (
		both     = "forward to 10.244.1.2:8080, 10.244.2.2:8080"
		bothMasq = "forward to 10.244.1.2:8080 masqueraded, 10.244.2.2:8080 masqueraded"
		here     = "forward to 10.244.1.2:8080"
		hairpin  = "forward to 10.244.1.2:8080 masqueraded, 10.244.2.2:8080"
	)
	internalLocal := func(sp *ServicePort, _ *Settings) { sp.InternalPolicy = Local }
	externalLocal := func(sp *ServicePort, _ *Settings) { sp.ExternalPolicy = Local }
	bothLocal := func(sp *ServicePort, _ *Settings) { sp.InternalPolicy, sp.ExternalPolicy = Local, Local }
	noDetection := func(_ *ServicePort, s *Settings) { s.DetectLocal = DetectLocal{} }
	none := func(sp *ServicePort, _ *Settings) { sp.Endpoints = Endpoints{} }
	noneHere := func(change func(*ServicePort, *Settings)) func(*ServicePort, *Settings) {
		return func(sp *ServicePort, s *Settings) {
			change(sp, s)
			sp.Endpoints = Endpoints{Cluster: []Endpoint{tFarEP}, Any: true}
		}
	}
	ranges := func(list ...string) func(*ServicePort, *Settings) {
		return func(sp *ServicePort, _ *Settings) {
			for _, r := range list {
				sp.SourceRanges = append(sp.SourceRanges, netip.MustParsePrefix(r))
			}
		}
	}
	plain := func(*ServicePort, *Settings) {}
	other := netip.MustParseAddr("10.244.3.9")
	for _, tc := range []struct {
		name   string
		change func(*ServicePort, *Settings)
		packet Packet
		want   string
	}{
		{"cluster IP, pod", plain, tPacket(other, tCluster, 80), both},
		{"cluster IP, own endpoint", plain, tPacket(tPod, tCluster, 80), hairpin},
		{"cluster IP, node", plain, tPacket(tNode, tCluster, 80), bothMasq},
		{"cluster IP, outside", plain, tPacket(tClient, tCluster, 80), bothMasq},
		{"cluster IP, outside, no detection", noDetection, tPacket(tClient, tCluster, 80), both},
		{"cluster IP, masquerade all", func(_ *ServicePort, s *Settings) { s.MasqueradeAll = true }, tPacket(other, tCluster, 80), bothMasq},
		{"cluster IP, local", internalLocal, tPacket(other, tCluster, 80), here},
		{"cluster IP, local, none here", noneHere(internalLocal), tPacket(other, tCluster, 80), "drop"},
		{"cluster IP, external policy does not matter", noneHere(externalLocal), tPacket(other, tCluster, 80), "forward to 10.244.2.2:8080"},
		{"cluster IP, none", none, tPacket(other, tCluster, 80), "reject"},
		{"cluster IP, other port", plain, tPacket(other, tCluster, 81), "pass"},
		{"cluster IP, other protocol", plain, Packet{Src: other, Dst: tCluster, Protocol: UDP, DstPort: 80}, "pass"},

		{"external IP, outside", plain, tPacket(tClient, tExt, 80), bothMasq},
		{"external IP, pod", plain, tPacket(other, tExt, 80), bothMasq},
		{"external IP, local, outside", externalLocal, tPacket(tClient, tExt, 80), here},
		{"external IP, local, pod", externalLocal, tPacket(other, tExt, 80), both},
		{"external IP, local, own endpoint", externalLocal, tPacket(tPod, tExt, 80), hairpin},
		{"external IP, local, node", externalLocal, tPacket(tNode, tExt, 80), bothMasq},
		{"external IP, local, pod, no detection", func(sp *ServicePort, s *Settings) { externalLocal(sp, s); noDetection(sp, s) },
			tPacket(other, tExt, 80), here},
		{"external IP, local, outside, none here", noneHere(externalLocal), tPacket(tClient, tExt, 80), "drop"},
		{"external IP, local, pod, none here", noneHere(externalLocal), tPacket(other, tExt, 80), "forward to 10.244.2.2:8080"},
		{"external IP, local, node, none here", noneHere(externalLocal), tPacket(tNode, tExt, 80), "forward to 10.244.2.2:8080 masqueraded"},
		{"external IP, internal policy does not matter", noneHere(internalLocal), tPacket(tClient, tExt, 80), "forward to 10.244.2.2:8080 masqueraded"},
		{"external IP, none", none, tPacket(tClient, tExt, 80), "reject"},
		{"external IP, none, node", none, tPacket(tNode, tExt, 80), "reject"},
		{"external IP, source ranges do not matter", ranges("10.0.0.0/8"), tPacket(tClient, tExt, 80), bothMasq},

		{"load balancer IP, within", ranges("203.0.113.0/24"), tPacket(tClient, tLB, 80), bothMasq},
		{"load balancer IP, outside of ranges", ranges("203.0.114.0/24", "198.51.100.0/24"), tPacket(tClient, tLB, 80), "drop"},
		{"load balancer IP, pod outside of ranges", ranges("203.0.113.0/24"), tPacket(other, tLB, 80), "drop"},
		{"load balancer IP, node outside of ranges", ranges("203.0.113.0/24"), tPacket(tNode, tLB, 80), "drop"},
		{"load balancer IP, from itself", ranges("192.168.1.0/24"), Packet{Src: tLB, Dst: tLB, Protocol: TCP, DstPort: 80, SrcLocal: true, DstLocal: true,
			Output: true}, bothMasq},
		{"load balancer IP, from itself, node outside", ranges("203.0.113.0/24"), Packet{Src: tLB, Dst: tLB, Protocol: TCP, DstPort: 80, SrcLocal: true,
			DstLocal: true, Output: true}, "drop"},
		{"load balancer IP, outside of ranges, none", func(sp *ServicePort, s *Settings) { ranges("10.0.0.0/8")(sp, s); none(sp, s) },
			tPacket(tClient, tLB, 80), "reject"},
		{"load balancer IP, local, within, none here", noneHere(func(sp *ServicePort, s *Settings) {
			ranges("203.0.113.0/24")(sp, s)
			externalLocal(sp, s)
		}), tPacket(tClient, tLB, 80), "drop"},

		{"node port, outside", plain, tPacket(tClient, tNode, 30080), bothMasq},
		{"node port, source ranges do not matter", ranges("10.0.0.0/8"), tPacket(tClient, tNode, 30080), bothMasq},
		{"node port, local", externalLocal, tPacket(tClient, tNode, 30080), here},
		{"node port, local, none here", noneHere(bothLocal), tPacket(tClient, tNode, 30080), "drop"},
		{"node port, none", none, tPacket(tClient, tNode, 30080), "reject"},
		{"node port, another host", plain, tPacket(tClient, netip.MustParseAddr("192.168.1.11"), 30080), "pass"},
		{"node port, at a service address", plain, tPacket(tClient, tExt, 30080), "pass"},
		{"service port at the node", plain, tPacket(tClient, tNode, 80), "pass"},
		{"node port, not at this address", func(_ *ServicePort, s *Settings) {
			s.NodePortAddresses.CIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
		}, tPacket(tClient, tNode, 30080), "pass"},
		{"node port, none, not at this address", func(sp *ServicePort, s *Settings) {
			none(sp, s)
			s.NodePortAddresses.CIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
		}, tPacket(tClient, tNode, 30080), "pass"},
		{"node port, primary", func(_ *ServicePort, s *Settings) { s.NodePortAddresses.Primary = true }, tPacket(tClient, tNode, 30080), bothMasq},
		{"node port, health check", plain, tPacket(tClient, tNode, 32000), "pass"},
		{"external IP of the node before a node port", func(sp *ServicePort, _ *Settings) {
			sp.ExternalPolicy = Local
			sp.Endpoints.Local = nil
			sp.Frontends[2] = Frontend{ExternalIP, tNode, TCP, 30080}
		}, tPacket(tClient, tNode, 30080), "drop"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			v := tPlan(tc.change).Verdict(tc.packet)
			if v.String() != tc.want {
				t.Errorf("verdict on %s is %s, want %s; reasons:\n%s", tc.packet, v, tc.want, strings.Join(v.Reasons, "\n"))
			}
			if len(v.Reasons) == 0 {
				t.Error("there are no reasons")
			}
		})
	}
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
		{name: "node port, other addresses", enabled: true, src: localhost, port: 30080, cidrs: []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")}},
		{name: "node port, its address", enabled: true, src: localhost, port: 30080, cidrs: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}, forwards: true},
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
				t.Errorf("verdict is %s, want %s: %v", v, want, v.Reasons)
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
		Frontends: []Frontend{{NodePort, netip.Addr{}, UDP, 30053}}})
	e := NewEvaluator(p)
	for dst, want := range map[string]Action{"2001:db8::1": Forward, "fe80::1%eth0": Forward, "::1": Pass, "192.168.1.10": Pass} {
		pkt := Packet{Src: netip.MustParseAddr("2001:db8::9"), Dst: netip.MustParseAddr(dst), Protocol: UDP, DstPort: 30053, DstLocal: true}
		if v := e.Verdict(pkt); v.Action != want {
			t.Errorf("verdict on %s is %s, want %s", pkt, v, want)
		}
	}
}

// TestVerdictByInterface tells pods by the interface that they send by.
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

func TestVerdictTellsWhatItIsFor(t *testing.T) {
	t.Parallel()
	p := tPlan(func(sp *ServicePort, _ *Settings) { sp.ExternalPolicy = Local })
	v := p.Verdict(tPacket(tNode, tExt, 80))
	if want := (Key{Service: Service{"ns", "svc"}, Protocol: TCP, Family: IPv4}); v.ServicePort != want {
		t.Errorf("it is for %s, want %s", v.ServicePort, want)
	}
	if want := (Frontend{ExternalIP, tExt, TCP, 80}); v.Frontend != want {
		t.Errorf("it is for %s, want %s", v.Frontend, want)
	}
	want := []string{
		"it is for external IP 198.18.0.1:80/TCP of ns/svc/TCP/IPv4",
		"the external traffic policy is Local, but the node itself reaches every endpoint, masqueraded",
	}
	if !slices.Equal(v.Reasons, want) {
		t.Errorf("reasons are %q, want %q", v.Reasons, want)
	}
	if v := p.Verdict(tPacket(tClient, tNode, 32000)); v.Frontend.Kind != HealthCheckNodePort {
		t.Errorf("the health check node port is told as %s", v.Frontend)
	}
	if v := p.Verdict(tPacket(tClient, tNode, 22)); v.ServicePort != (Key{}) || v.Frontend != (Frontend{}) {
		t.Errorf("a packet for nothing is told as for %s", v.Frontend)
	}
}
