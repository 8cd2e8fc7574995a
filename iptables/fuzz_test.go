package iptables_test

import (
	"bytes"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"nodeproxy/iptables"
	"nodeproxy/proxier"
	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/source"
)

// line is every line that a render may consist of. No text of an object gets anywhere but between the quotes of a comment.
var line = regexp.MustCompile(`^(\*(filter|nat)|COMMIT|:[A-Z0-9a-z:./-]{1,28} - \[0:0\]|` +
	`-A [A-Z0-9a-z:./-]{1,28} ([-!a-zA-Z0-9.,:/+_ \[\]]|--comment "[a-zA-Z0-9 .:/>_\[\];-]*"|--bytecode "[0-9, ]+")+)$`)

// FuzzRulesAccepted: whatever an API server or a manifest says, what is rendered of it is only what rules consist of, and
// iptables-restore accepts it.
func FuzzRulesAccepted(f *testing.F) {
	hostile := []string{"", "web", "a\n-A INPUT -j DROP", `"; -j ACCEPT`, "x' y", "ü", strings.Repeat("a", 300), "10.96.0.1", "fd00::1",
		"010.096.000.001", "::ffff:10.0.0.1", "10.0.0.0/8", "::/0", "0.0.0.0/0", "1.2.3.4/33", "%eth0", "fe80::1%eth0", "255.255.255.255", "$(id)", "-j"}
	word := rapid.OneOf(rapid.SampledFrom(hostile), rapid.String())
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) {
		state := proxier.NewState("node", plan.Settings{LocalhostNodePorts: true}, plan.Families[:], nil)
		state.Apply(drawObjects(t, word))
		p, _ := state.Update()
		o := iptables.Options{MasqueradeBit: 14, RandomFully: true, CompactAbove: rapid.IntRange(0, 3).Draw(t, "compact above")}
		for family, program := range map[plan.Family]string{plan.IPv4: "iptables-nft-restore", plan.IPv6: "ip6tables-nft-restore"} {
			text := iptables.Render(p, family, o)
			for _, l := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
				if !line.MatchString(l) {
					t.Fatalf("not a line of ours: %q", l)
				}
			}
			cmd := exec.Command("/usr/sbin/"+program, "--test")
			cmd.Stdin = strings.NewReader(text)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s\n%s", program, err, bytes.TrimSpace(out), text)
			}
		}
	}))
}

// TestRulesAccepted is the same on random objects, in every run of the tests.
func TestRulesAccepted(t *testing.T) {
	word := rapid.SampledFrom([]string{"web", "a\n-A INPUT -j DROP", `"; -j ACCEPT`, "10.96.0.1", "fd00::1", "010.096.000.001", "10.0.0.0/8",
		"fe80::1%eth0", "::ffff:10.0.0.1", "1.1.1.1"})
	rapid.Check(t, func(t *rapid.T) {
		state := proxier.NewState("node", plan.Settings{}, plan.Families[:], nil)
		state.Apply(drawObjects(t, word))
		p, _ := state.Update()
		text := iptables.RenderAll(p, iptables.Options{MasqueradeBit: 14})
		for _, program := range []string{"iptables-nft-restore", "ip6tables-nft-restore"} {
			cmd := exec.Command("/usr/sbin/"+program, "--test")
			cmd.Stdin = strings.NewReader(text)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s\n%s", program, err, bytes.TrimSpace(out), text)
			}
		}
	})
}

// drawObjects makes a few Services with slices, in which every text may be any word. Names are good now and then, so that
// the rest gets a chance.
func drawObjects(t *rapid.T, word *rapid.Generator[string]) source.Batch {
	b := source.Batch{Services: map[types.NamespacedName]*v1.Service{},
		EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{}}
	for i := range rapid.IntRange(1, 3).Draw(t, "services") {
		pick := func(label string, good ...string) string {
			return rapid.OneOf(rapid.SampledFrom(good), word).Draw(t, label)
		}
		number := func(label string) int32 {
			return rapid.OneOf(rapid.SampledFrom([]int32{80, 8080, 30080}), rapid.Int32()).Draw(t, label)
		}
		name := types.NamespacedName{Namespace: pick("namespace", "ns"), Name: pick("name", "a", "b")}
		svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
		s := &svc.Spec
		s.Type = v1.ServiceType(pick("type", "ClusterIP", "NodePort", "LoadBalancer"))
		s.ClusterIP = pick("cluster IP", fmt.Sprintf("10.96.0.%d", i), "fd00::9")
		s.ClusterIPs = []string{s.ClusterIP, pick("second cluster IP", "fd00::8", "10.96.0.77")}
		s.ExternalIPs = []string{pick("external IP", "1.1.1.1", "2001:db8::1")}
		s.LoadBalancerSourceRanges = []string{pick("range", "10.0.0.0/8"), pick("range", "2001:db8::/32")}
		s.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicy(pick("policy", "Cluster", "Local"))
		s.SessionAffinity = v1.ServiceAffinity(pick("affinity", "None", "ClientIP"))
		s.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: new(number("timeout"))}}
		s.HealthCheckNodePort = number("health check port")
		svc.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: pick("ingress", "2.2.2.2", "2001:db8::2")}}
		port := v1.ServicePort{Name: pick("port name", "http"), Protocol: v1.Protocol(pick("protocol", "TCP", "UDP", "SCTP")),
			Port: number("port"), NodePort: number("node port")}
		s.Ports = []v1.ServicePort{port}
		b.Services[name] = svc
		slice := &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name,
			Labels: map[string]string{discovery.LabelServiceName: name.Name}}}
		slice.AddressType = discovery.AddressType(pick("address type", "IPv4", "IPv6"))
		slice.Ports = []discovery.EndpointPort{{Name: &port.Name, Protocol: &port.Protocol, Port: new(number("target port"))}}
		for range rapid.IntRange(0, 3).Draw(t, "endpoints") {
			slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
				Addresses: []string{pick("endpoint", "10.244.0.1", "10.244.0.2", "fd01::1")}, NodeName: new(pick("node", "node"))})
		}
		b.EndpointSlices[name] = slice
	}
	return b
}
