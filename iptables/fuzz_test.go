package iptables_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
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

// Every line that a render may consist of. No text of an object gets anywhere but between the quotes of a comment, and
// there only as a name; and from a built-in chain, rules lead to ours and nowhere else.
var (
	ownChain = `KUBE-[A-Za-z0-9:./-]{1,23}`
	matches  = strings.Join([]string{
		` (! )?-s [0-9a-f.:]+/[0-9]+`, ` (! )?-d [0-9a-f.:]+/[0-9]+`, ` (! )?-i [a-z0-9]+[+]?`, ` -p (tcp|udp|sctp)`,
		` -m comment --comment ([a-zA-Z0-9_-]+|"[a-zA-Z0-9 .:/>_\[\];-]*")`,
		` -m (tcp|udp|sctp)( --dport [0-9]+(:[0-9]+)?)?`,
		` -m conntrack (! )?--ctstate [A-Z,]+`,
		` -m mark (! )?--mark 0x[0-9a-f]+/0x[0-9a-f]+`,
		` -m addrtype --(src|dst)-type LOCAL`,
		` -m statistic --mode random --probability 0[.][0-9]{11}`,
		` -m recent (--set|--rcheck --seconds [0-9]+ --reap) --name KUBE-SEP-[A-Z2-7]{16} --mask [0-9a-f.:]+ --rsource`,
		` -m bpf --bytecode "[0-9, ]+"`,
	}, "|")
	targets = strings.Join([]string{
		`-[jg] ` + ownChain, `-j ACCEPT`, `-j DROP`, `-j RETURN`, `-j REJECT --reject-with icmp6?-port-unreachable`,
		`-j MASQUERADE( --random-fully)?`, `-j MARK --set-xmark 0x[0-9a-f]+/0x[0-9a-f]+`,
		`-j DNAT --to-destination [0-9a-f.:\[\]]+`,
	}, "|")
	line = regexp.MustCompile(`^([*](filter|nat)|COMMIT|:` + ownChain + ` - \[0:0\]` +
		`|-A ` + ownChain + `(` + matches + `)* (` + targets + `)` +
		`|-A (PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING)(` + matches + `)* -j ` + ownChain + `)$`)
)

// hostile are texts that an API server or a manifest may hold where an address, a range or a name belongs.
var hostile = []string{
	"", "web", "a\n-A INPUT -j DROP", "a\nCOMMIT\n*filter", `"; -j ACCEPT`, `a" -j ACCEPT`, "x' y", "a\\", "ü",
	strings.Repeat("a", 300),
	strings.Repeat("a", 63), "10.96.0.1", "fd00::1", "010.096.000.001", "::ffff:10.0.0.1", "10.0.0.0/8", "::/0", "0.0.0.0/0",
	"1.2.3.4/33", "::ffff:10.0.0.0/104", "::ffff:0:0/95", "%eth0", "fe80::1%eth0", "255.255.255.255", "0.0.0.0", "::", "127.0.0.1",
	"ff02::1", "1.1.1.1", "$(id)", "-j", "--", "Local", "ClientIP", "None",
}

// render draws objects and settings, and returns the rules of each family, having looked at every line.
func render(t *rapid.T, word *rapid.Generator[string]) (v4, v6 string) {
	settings := plan.Settings{LocalhostNodePorts: rapid.Bool().Draw(t, "localhost"), MasqueradeAll: rapid.Bool().Draw(t, "masquerade all")}
	settings.NodePortAddresses.Primary = rapid.Bool().Draw(t, "primary")
	settings.DetectLocal = rapid.SampledFrom([]plan.DetectLocal{{}, {Mode: plan.DetectNodeCIDR},
		{Mode: plan.DetectBridgeInterface, Interface: "cni0"}, {Mode: plan.DetectInterfaceNamePrefix, Interface: "veth"},
	}).Draw(t, "detect local")
	state := proxier.NewState("node", settings, plan.Families[:], nil)
	state.Apply(drawObjects(t, word))
	p, _ := state.Update()
	o := iptables.Options{MasqueradeBit: rapid.IntRange(0, 31).Draw(t, "bit"), RandomFully: true,
		CompactAbove: rapid.IntRange(0, 3).Draw(t, "compact above")}
	v4, v6 = iptables.Render(p, plan.IPv4, o), iptables.Render(p, plan.IPv6, o)
	for _, l := range strings.Split(v4+strings.TrimSuffix(v6, "\n"), "\n") {
		if !line.MatchString(l) {
			t.Fatalf("not a line of ours: %q", l)
		}
	}
	return v4, v6
}

// restoreTest asks the programs of a variant whether they accept the rules. Nothing is changed.
func restoreTest(variant, v4, v6 string) error {
	for program, text := range map[string]string{"iptables": v4, "ip6tables": v6} {
		cmd := exec.Command("/usr/sbin/"+program+"-"+variant+"-restore", "--test")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s\n%s", cmd.Path, err, bytes.TrimSpace(out), text)
		}
	}
	return nil
}

// FuzzRulesAccepted: whatever an API server or a manifest says, what is rendered of it is only what rules consist of, and
// iptables-restore accepts it.
func FuzzRulesAccepted(f *testing.F) {
	seeds := rand.New(rand.NewPCG(1, 2))
	for range 8 {
		seed := make([]byte, 8<<10)
		for i := range seed {
			seed[i] = byte(seeds.Uint32())
		}
		f.Add(seed)
	}
	word := rapid.OneOf(rapid.SampledFrom(hostile), rapid.String())
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) {
		v4, v6 := render(t, word)
		if err := restoreTest("nft", v4, v6); err != nil {
			t.Fatal(err)
		}
	}))
}

// TestRulesAccepted is the same on random objects, in every run of the tests. The rules of all draws are tried at once, and
// draw by draw if that fails.
func TestRulesAccepted(t *testing.T) {
	t.Parallel()
	var draws [][2]string
	proxied := 0
	rapid.Check(t, func(t *rapid.T) {
		v4, v6 := render(t, rapid.SampledFrom(hostile))
		draws = append(draws, [2]string{v4, v6})
		if strings.Contains(v4+v6, "DNAT --to") {
			proxied++
		}
	})
	if proxied < len(draws)/3 {
		t.Errorf("only %d of %d draws have rules that send anything anywhere", proxied, len(draws))
	}
	var all4, all6 strings.Builder
	for _, d := range draws {
		all4.WriteString(d[0])
		all6.WriteString(d[1])
	}
	for _, variant := range []string{"nft", "legacy"} {
		if restoreTest(variant, all4.String(), all6.String()) == nil {
			continue
		}
		found := false
		for _, d := range draws {
			if err := restoreTest(variant, d[0], d[1]); err != nil {
				t.Error(err)
				found = true
				break
			}
		}
		if !found {
			t.Errorf("%s: all draws are accepted one by one, but not in one text", variant)
		}
	}
}

// drawObjects makes a few Services with slices, in which every text may be any word. Names are good now and then, so that
// the rest gets a chance.
func drawObjects(t *rapid.T, word *rapid.Generator[string]) source.Batch {
	b := source.Batch{Services: map[types.NamespacedName]*v1.Service{},
		EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{}}
	for i := range rapid.IntRange(1, 3).Draw(t, "services") {
		pick := func(label string, good ...string) string {
			return often(good, word).Draw(t, label)
		}
		number := func(label string) int32 {
			usual := rapid.SampledFrom([]int32{80, 8080, 30080})
			return rapid.OneOf(usual, usual, usual, usual, usual, usual, usual, rapid.Int32()).Draw(t, label)
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
		endpoints := []string{"10.244.0.1", "10.244.0.2"}
		if slice.AddressType == discovery.AddressTypeIPv6 {
			endpoints = []string{"fd01::1", "fd01::2"}
		}
		for range rapid.IntRange(0, 3).Draw(t, "endpoints") {
			slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
				Addresses: []string{pick("endpoint", endpoints...)}, NodeName: new(pick("node", "node"))})
		}
		b.EndpointSlices[name] = slice
	}
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}
	node.Spec.PodCIDRs = []string{often([]string{"10.244.1.0/24", "fd01::/64"}, word).Draw(t, "pod CIDR")}
	node.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP,
		Address: often([]string{"192.168.0.1", "10.0.0.1"}, word).Draw(t, "node IP")}}
	b.Nodes = map[string]*v1.Node{"node": node}
	return b
}

// often is something good most of the time: a Service has many fields, and most draws are to get as far as the rules.
func often(good []string, word *rapid.Generator[string]) *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		if rapid.IntRange(0, 15).Draw(t, "hostile") == 7 { // not at an end of the range, where draws gather
			return word.Draw(t, "word")
		}
		return rapid.SampledFrom(good).Draw(t, "good")
	})
}

// TestTextIsData: even a name that should never have got into a plan stays within its comment. There are as many rules as
// with a plain name, of the same kinds, and they are accepted.
func TestTextIsData(t *testing.T) {
	t.Parallel()
	rulesFor := func(name string) string {
		p := plan.New(plan.Node{}, plan.Settings{})
		p.Set(&plan.ServicePort{
			Key:       plan.Key{Service: plan.Service{Namespace: "ns", Name: name}, Protocol: plan.TCP, Family: plan.IPv4},
			Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: netip.MustParseAddr("10.96.0.1"), Protocol: plan.TCP, Port: 80}},
			Endpoints: plan.Endpoints{Any: true, Cluster: []plan.Endpoint{{Addr: netip.MustParseAddrPort("10.244.0.1:80")}}},
		})
		return iptables.Render(p, plan.IPv4, iptables.Options{MasqueradeBit: 14})
	}
	plain := strings.Count(rulesFor("web"), "\n")
	for _, name := range []string{"a\n-A INPUT -j DROP", "a\r\nb", `" -j ACCEPT`, `\" -j ACCEPT`, `a\`, "it's", "a\x00b", "\x7f", "ü", "-A", "a b"} {
		text := rulesFor(name)
		if n := strings.Count(text, "\n"); n != plain || strings.ContainsAny(text, "\r\x00\x7f") {
			t.Errorf("%q makes %d lines, a plain name %d:\n%s", name, n, plain, text)
		}
		for _, variant := range []string{"nft", "legacy"} {
			if err := restoreTest(variant, text, "*nat\nCOMMIT\n"); err != nil {
				t.Errorf("%q: %v", name, err)
			}
		}
	}
}
