package ipvs_test

import (
	"fmt"
	"net/netip"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/internal/set"
	"nodeproxy/ipvs"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source/sourcetest"
)

// Every line that a render may consist of, by section. No text of an object is among them, but for addresses that have been
// read as such, and names of schedulers that the kernel has.
var hostileLines = map[string]*regexp.Regexp{
	"ipset restore": regexp.MustCompile(`^(create KUBE-[A-Z0-9-]+ [a-z0-9:, -]+|add KUBE-[A-Z0-9-]+ [0-9a-fx:.,/a-z]+( skbmark 0x[0-9a-f/x]+)?)$`),
	"ipvsadm --restore": regexp.MustCompile(`^(-A|-a) (-[tu]|-f|--sctp-service) [0-9a-f:.\[\]]+( -6)?` +
		`( -s (rr|wrr|lc|wlc|lblc|lblcr|sh|dh|sed|nq|fo|ovf|mh)( -p [0-9]+)?( -b [a-z,-]+)?| -r [0-9a-f:.\[\]]+ -m -w [0-9]+)$`),
	"ip -batch": regexp.MustCompile(`^(link add kube-ipvs0 type dummy|link set kube-ipvs0 (up|addrgenmode none)|route add local [0-9a-f:./]+ dev kube-ipvs0 table local( src [0-9a-f:.]+)?` +
		`|address add [0-9a-f:.]+/[0-9]+ dev kube-ipvs0 (scope host|nodad preferred_lft 0)|route del local [0-9.]+ dev kube-ipvs0 table local` +
		`|route add local [0-9a-f:.]+ dev kube-ipvs0 table 2496)$`),
	"nftables by netlink": regexp.MustCompile(`^(table ip6? nodeproxy-ipvs-(marks|ports)` +
		`|chain [a-z-]+ type (filter|route) hook (prerouting|input|forward|output) priority -?[0-9]+` +
		`|rule [a-z-]+ [a-z0-9 =&|".@]+|set ports type ipv[46]_addr [.] inet_proto [.] inet_service` +
		`|add element ip6? nodeproxy-ipvs-ports ports [{] [0-9a-f:.]+ [.] (tcp|udp|sctp) [.] [0-9]+ [}]|ip -[46] rule add pref 90 fwmark 0x28030000 lookup 2496)$`),
	"restore": regexp.MustCompile(`^([*](mangle|filter|nat)|COMMIT|:KUBE-[A-Z0-9-]+ - \[0:0\]` +
		`|-A (KUBE-[A-Z0-9-]+|PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING)( [A-Za-z0-9:./,!_+-]+| "[A-Za-z0-9 :;.-]*")+)$`),
}

// renderHostile draws objects, and returns the rules of a family, having looked at every line that is rendered.
func renderHostile(t *rapid.T, word *rapid.Generator[string], f plan.Family) (rules string) {
	settings := plan.Settings{MasqueradeAll: rapid.Bool().Draw(t, "masquerade all")}
	settings.DetectLocal = rapid.SampledFrom([]plan.DetectLocal{{}, {Mode: plan.DetectNodeCIDR},
		{Mode: plan.DetectBridgeInterface, Interface: "cni0"}}).Draw(t, "detect local")
	state := proxier.NewState("node", settings, plan.Families[:], nil)
	state.Apply(sourcetest.Objects(t, word))
	p, _ := state.Update()
	vips := rapid.SampledFrom([]ipvs.VIPs{ipvs.Addresses, ipvs.Routes}).Draw(t, "VIPs")
	text := ipvs.Render(p, f, ipvs.Options{MasqueradeBit: 14, RandomFully: true, VIPs: vips, Host: set.Set[netip.Addr]{}})
	var allowed *regexp.Regexp
	for _, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		if name, heading := strings.CutPrefix(line, "# "); heading {
			if strings.HasSuffix(name, "tables-restore") {
				name = "restore"
				_, rules, _ = strings.Cut(text, line+"\n")
			}
			if allowed = hostileLines[name]; allowed == nil {
				t.Fatalf("unknown section: %q", line)
			}
			continue
		}
		if allowed == nil || !allowed.MatchString(line) {
			t.Fatalf("not a line of ours: %q", line)
		}
	}
	return rules
}

// acceptRules asks iptables-restore whether it accepts rules, but for those that ask sets, which must be there for that. Nothing
// is changed.
func acceptRules(f plan.Family, rules string) error {
	program := map[plan.Family]string{plan.IPv4: "iptables", plan.IPv6: "ip6tables"}[f]
	var kept strings.Builder
	for line := range strings.Lines(rules) {
		if !strings.Contains(line, "-set KUBE-") && !strings.Contains(line, "-m ipvs ") {
			kept.WriteString(line)
		}
	}
	cmd := exec.Command("/usr/sbin/"+program+"-nft-restore", "--test")
	cmd.Stdin = strings.NewReader(kept.String())
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s\n%s", cmd.Path, err, out, kept.String())
	}
	return nil
}

// FuzzRender: whatever an API server or a manifest says, what is rendered of it is only what mode ipvs consists of.
func FuzzRender(f *testing.F) {
	nstest.NeedKernel(f)
	f.Add([]byte(strings.Repeat("seed of objects ", 512)))
	word := rapid.OneOf(rapid.SampledFrom(sourcetest.Words), rapid.String())
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) {
		for _, family := range plan.Families {
			require.NoError(t, acceptRules(family, renderHostile(t, word, family)))
		}
	}))
}

// TestHostileObjects is the same on random objects, in every run of the tests.
func TestHostileObjects(t *testing.T) {
	t.Parallel()
	different := map[plan.Family]map[string]bool{plan.IPv4: {}, plan.IPv6: {}}
	rapid.Check(t, func(t *rapid.T) {
		for _, family := range plan.Families {
			different[family][renderHostile(t, rapid.SampledFrom(sourcetest.Words), family)] = true
		}
	})
	nstest.NeedKernel(t)
	for family, all := range different {
		for rules := range all {
			assert.NoError(t, acceptRules(family, rules))
		}
	}
}

// TestNamesAreNotRendered: names of Services and ports get nowhere at all in this mode.
func TestNamesAreNotRendered(t *testing.T) {
	t.Parallel()
	render := func(word string) string {
		p := plan.New(plan.Node{}, plan.Settings{})
		p.Set(&plan.ServicePort{
			Key: plan.Key{Service: plan.Service{Namespace: word, Name: word}, Port: word, Protocol: plan.TCP, Family: plan.IPv4},
			Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: netip.MustParseAddr("10.96.0.1"), Protocol: plan.TCP, Port: 80},
				{Kind: plan.NodePort, Protocol: plan.TCP, Port: 30080}},
			Endpoints: plan.Endpoints{Any: true, Cluster: []plan.Endpoint{{Addr: netip.MustParseAddrPort("10.244.0.1:80")}}},
		})
		text := ipvs.Render(p, plan.IPv4, ipvs.Options{MasqueradeBit: 14, VIPs: ipvs.Addresses})
		// The mark of a node port is made of the Service's name, by a hash.
		return regexp.MustCompile(`(skbmark 0x|-f )[0-9a-f/x]+`).ReplaceAllString(text, "$1")
	}
	plain := render("web")
	for _, word := range sourcetest.Words {
		if got := render(word); got != plain {
			t.Errorf("%q makes\n%s\na plain name\n%s", word, got, plain)
		}
	}
}
