package plan

import (
	"go/ast"
	"go/parser"
	"go/token"
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDecisions: every code, and the text that goes with it.
func TestDecisions(t *testing.T) {
	t.Parallel()
	localhost := netip.MustParseAddr("127.0.0.1")
	const clusterIP, external = "it is for cluster IP 10.96.0.1:80/TCP of ns/svc/TCP/IPv4", "it is for external IP 198.18.0.1:80/TCP of ns/svc/TCP/IPv4"
	const lb = "it is for load balancer IP 172.20.0.1:80/TCP of ns/svc/TCP/IPv4"
	const internal = "the internal traffic policy is Cluster"
	const masquerade = "the external traffic policy is Cluster: masqueraded, since the endpoint may be on another node"
	seen := map[Code]bool{}
	for _, tc := range []struct {
		name   string
		change tChange
		packet Packet
		want   []Decision
	}{
		{"nothing", plain, tPacket(tClient, tNode, 22), []Decision{{ForNoService, "no Service has a frontend at 192.168.1.10:22/TCP"}}},
		{"health check", plain, tPacket(tClient, tNode, 32000), []Decision{{ForHealthCheck,
			"health check node port 32000/TCP of ns/svc/TCP/IPv4: the node itself answers, and these rules let the packet in"}}},
		{"node port on localhost", plain, tPacket(localhost, localhost, 30080), []Decision{{NoNodePortsOnLoopback,
			"node port 30080/TCP of ns/svc/TCP/IPv4, but node ports do not answer on the loopback address 127.0.0.1"}}},
		{"node port elsewhere", nodePortsAt("192.0.2.0/24"), tPacket(tClient, tNode, 30080), []Decision{{NoNodePortsAtAddress,
			"node port 30080/TCP of ns/svc/TCP/IPv4, but 192.168.1.10 is not among the addresses that node ports answer at (nodePortAddresses)"}}},
		{"guarded", func(_ *ServicePort, s *Settings) { s.LocalhostNodePorts = true }, tPacket(tClient, localhost, 22), []Decision{
			{ForNoService, "no Service has a frontend at 127.0.0.1:22/TCP"},
			{LoopbackGuard, "127.0.0.1 may be reached from loopback addresses only, and 203.0.113.1 is none: " +
				"localhost node ports make the kernel route such packets, so they are dropped"}}},
		{"without endpoints", none, tPacket(tPod, tCluster, 80), []Decision{{ForFrontend, clusterIP}, {NoEndpoint, "no node has a usable endpoint"}}},
		{"cluster IP, from another pod", plain, tPacket(tPod3, tCluster, 80), []Decision{{ForFrontend, clusterIP}, {InternalPolicy, internal}}},
		{"cluster IP, from an endpoint", plain, tPacket(tPod, tCluster, 80), []Decision{{ForFrontend, clusterIP}, {InternalPolicy, internal},
			{MasqueradeHairpin, "endpoint 10.244.1.2:8080 would get its own packet: masqueraded, so that the answer comes back"}}},
		{"cluster IP, from outside", plain, tPacket(tClient, tCluster, 80), []Decision{{ForFrontend, clusterIP},
			{MasqueradeNotFromPod, "it does not come from a pod: masqueraded"}, {InternalPolicy, internal}}},
		{"cluster IP, all masqueraded", masqueradeAll, tPacket(tPod3, tCluster, 80), []Decision{{ForFrontend, clusterIP},
			{MasqueradeAll, "all traffic to cluster IPs is masqueraded"}, {InternalPolicy, internal}}},
		{"external IP", plain, tPacket(tClient, tExt, 80), []Decision{{ForFrontend, external}, {ExternalPolicyCluster, masquerade}}},
		{"policy Local", externalLocal, tPacket(tClient, tExt, 80), []Decision{{ForFrontend, external},
			{ExternalPolicyLocal, "the external traffic policy is Local"}}},
		{"policy Local, from a pod", externalLocal, tPacket(tPod3, tExt, 80), []Decision{{ForFrontend, external},
			{ExternalPolicyFromPod, "the external traffic policy is Local, but pods reach every endpoint"}}},
		{"policy Local, from the node", externalLocal, tPacket(tNode, tExt, 80), []Decision{{ForFrontend, external},
			{ExternalPolicyFromNode, "the external traffic policy is Local, but the node itself reaches every endpoint, masqueraded"}}},
		{"policy Local, no endpoint here", all(externalLocal, noneHere), tPacket(tClient, tExt, 80), []Decision{{ForFrontend, external},
			{ExternalPolicyLocal, "the external traffic policy is Local"},
			{NoEndpointForPolicy, "there are endpoints, but none that policy Local allows on this node"}}},
		{"in a source range", ranges("203.0.113.0/24"), tPacket(tClient, tLB, 80), []Decision{{ForFrontend, lb},
			{InSourceRange, "source 203.0.113.1 is within source range 203.0.113.0/24"}, {ExternalPolicyCluster, masquerade}}},
		{"from the load balancer IP", ranges("192.168.1.0/24"), tPacket(tLB, tLB, 80), []Decision{{ForFrontend, lb}, {OwnLoadBalancerIP,
			"source 172.20.0.1 is the load balancer IP itself, and the node's 192.168.1.10 is within the source ranges"},
			{ExternalPolicyCluster, masquerade}}},
		{"outside of the source ranges", ranges("192.0.2.0/24"), tPacket(tClient, tLB, 80), []Decision{{ForFrontend, lb},
			{OutsideSourceRanges, "source 203.0.113.1 is outside of the source ranges 192.0.2.0/24"}}},
	} {
		v := tPlan(tc.change).Verdict(tc.packet)
		if !slices.Equal(v.Decisions, tc.want) {
			t.Errorf("%s: decisions %q, want %q", tc.name, v.Decisions, tc.want)
		}
		for _, d := range v.Decisions {
			seen[d.Code] = true
		}
	}
	for _, code := range declaredCodes(t) {
		if !seen[code] {
			t.Errorf("no case has code %s", code)
		}
	}
}

// declaredCodes are the values of all constants of type Code.
func declaredCodes(t *testing.T) []Code {
	file, err := parser.ParseFile(token.NewFileSet(), "decision.go", nil, 0)
	require.NoError(t, err)
	var out []Code
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		if err != nil || value != spec.Names[0].Name || slices.Contains(out, Code(value)) {
			t.Errorf("code %s is %q: %v", spec.Names[0], value, err)
		}
		out = append(out, Code(value))
		return true
	})
	if len(out) < 19 {
		t.Errorf("there are %d codes", len(out))
	}
	return out
}
